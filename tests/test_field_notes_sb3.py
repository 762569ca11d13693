"""Entries 19 to 26, 28 and 30 of the field notes: living inside Stable-Baselines3."""

import base64
import json
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.vec_env import (
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
    unwrap_vec_normalize,
)

from sb3_nstep import NStepA2C, NStepRolloutBuffer
from scripted import CARRYING, SURFACES, Lived, Run, build, observe, record, run, surface, vec_env

CORRECTIONS = ["none", "importance", "vtrace"]
POLICIES = {"vector": "MlpPolicy", "discrete": "MlpPolicy", "image": "CnnPolicy", "dict": "MultiInputPolicy"}


def geometric(k: int, gamma: float = 0.5) -> float:
    """The rewards of a window of k rows that pay 1 each."""
    return sum(gamma**i for i in range(k))


def parameters(model: Any) -> dict[str, th.Tensor]:
    return {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}


def check_learned(model: Any, before: dict[str, th.Tensor]) -> None:
    after = parameters(model)
    assert all(tensor.isfinite().all() for tensor in after.values())
    for name in ("action_net.weight", "value_net.weight"):
        assert not th.equal(before[name], after[name]), f"{name} has not moved"


# 19: arguments are forwarded or refused


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize(("n_steps", "gamma", "gae_lambda"), [(3, 0.5, 1.0), (7, 0.9, 1.0), (2, 0.25, 0.5)])
def test_19_arguments_reach_the_buffer(name: str, n_steps: int, gamma: float, gae_lambda: float):
    """r = 1, V = 2, N = 2: 1 + γ ((1 − λ) V + λ (1 + γ V)), and 1 + γ V for the last row of a shortened window."""
    kwargs = {"n_steps": n_steps, "gamma": gamma, "gae_lambda": gae_lambda}
    outcome = run(vec_env("1", "1", value=2), 3, **surface(name, 2), **kwargs)
    last = 1 + gamma * 2
    whole = 1 + gamma * ((1 - gae_lambda) * 2 + gae_lambda * last)
    assert len(outcome.targets) == 2 * (3 * n_steps - (1 if name == CARRYING else 0))
    for tag, target in outcome.targets.items():
        is_last = name != CARRYING and tag % 1000 % n_steps == n_steps - 1
        assert target == pytest.approx(last if is_last else whole)
    buffer = outcome.model.rollout_buffer
    assert (buffer.buffer_size, buffer.gamma, buffer.gae_lambda) == (n_steps, gamma, gae_lambda)


@pytest.mark.parametrize("name", ["A2C", "PPO", "NStepA2C"])
@pytest.mark.parametrize("argument", ["gamma", "gae_lambda", "n_envs"])
def test_19_arguments_are_not_given_twice(name: str, argument: str):
    kwargs = surface(name, 2)
    kwargs["rollout_buffer_kwargs"] = {**kwargs.get("rollout_buffer_kwargs", {}), argument: 1}
    with pytest.raises(TypeError, match=f"multiple values for keyword argument '{argument}'"):
        build(vec_env("1"), **kwargs)


@pytest.mark.parametrize("argument", [{"return_horizon": 3}, {"carry_over": False}])
def test_19_nor_beside_the_argument_of_the_same_name(argument: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(argument))} is an argument of NStepA2C"):
        build(vec_env("1"), rollout_buffer_kwargs=argument)


@pytest.mark.parametrize("buffer_class", [RolloutBuffer, DictRolloutBuffer, dict, lambda *_, **__: None])
def test_19_another_buffer_is_refused(buffer_class: Any):
    with pytest.raises(ValueError, match=r"rollout_buffer_class: expected .* got .*" + re.escape(repr(buffer_class))):
        build(vec_env("1"), rollout_buffer_class=buffer_class)


class LabelledBuffer(NStepRolloutBuffer):
    """A user's own."""

    def __init__(self, *args: Any, label: str, **kwargs: Any):
        self.label = label
        super().__init__(*args, **kwargs)


def test_19_a_buffer_of_ones_own_gets_its_arguments():
    kwargs = {"rollout_buffer_class": LabelledBuffer, "rollout_buffer_kwargs": {"label": "mine"}}
    buffer = build(vec_env("1"), return_horizon=3, **kwargs).rollout_buffer
    assert isinstance(buffer, LabelledBuffer)
    assert (buffer.label, buffer.return_horizon, buffer.carry_over, buffer.gamma) == ("mine", 3, True, 0.5)


# 20 and 21: saving and loading


@pytest.mark.parametrize(("n_saved", "n_loaded"), [(2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("carry_over", [True, False])
def test_20_another_number_of_environments_on_load(tmp_path: Path, n_saved: int, n_loaded: int, carry_over: bool):
    kwargs = {"n_steps": 3, "return_horizon": 2, "carry_over": carry_over, "correction": "vtrace", "gae_lambda": 0.5}
    saved = run(vec_env(*["1"] * n_saved, value=2), 4, **kwargs).model
    saved.save(tmp_path / "model")
    model = NStepA2C.load(tmp_path / "model", vec_env(*["1"] * n_loaded, value=2), device="cpu")
    for name, value in kwargs.items():
        assert getattr(model, name) == value
    assert (model.n_envs, model.rollout_buffer.n_envs) == (n_loaded, n_loaded)
    batches = record(model)
    model.learn(4 * 3 * n_loaded)
    # 1 + .5 (.5 · 2 + .5 (1 + .5 · 2)) = 2, and 1 + .5 · 2 = 2 for the last row of a shortened window
    targets = Run(model, batches, []).targets
    assert len(targets) == n_loaded * (4 * 3 - (1 if carry_over else 0))
    assert set(targets.values()) == {2}


def test_20_horizons_are_checked_against_the_environments_on_load(tmp_path: Path):
    run(vec_env("1", "1"), 2, return_horizon=[1, 3]).model.save(tmp_path / "model")
    model = NStepA2C.load(tmp_path / "model", vec_env("1", "1"), device="cpu")
    assert list(model.return_horizon) == [1, 3]
    three = vec_env("1", "1", "1")
    with pytest.raises(ValueError, match=r"each of 3 environments, got \[1, 3\]"):
        NStepA2C.load(tmp_path / "model", three, device="cpu")
    with pytest.raises(ValueError, match="got 0"):
        NStepA2C.load(tmp_path / "model", three, device="cpu", return_horizon=0)
    model = NStepA2C.load(tmp_path / "model", three, device="cpu", return_horizon=2, correction="none")
    assert (model.rollout_buffer.return_horizon, model.correction) == (2, "none")
    model.learn(3 * 4 * 3)


@pytest.mark.parametrize("kind", POLICIES)
def test_20_what_survives_a_save(tmp_path: Path, kind: str):
    kwargs = {"return_horizon": 3, "policy": POLICIES[kind], "learning_rate": 1e-3, "n_steps": 2}
    saved = run(vec_env("1 1L", "1", kind=kind), 4, **kwargs).model
    saved.save(tmp_path / "model")
    loaded = NStepA2C.load(tmp_path / "model", vec_env("1 1L", "1", kind=kind), device="cpu")
    before, after = parameters(saved), parameters(loaded)
    assert all(th.equal(before[name], after[name]) for name in before)
    assert (loaded.num_timesteps, loaded._n_updates) == (saved.num_timesteps, saved._n_updates)
    loaded.learn(4 * 2 * 2, reset_num_timesteps=False)
    check_learned(loaded, after)
    assert NStepA2C.load(tmp_path / "model", device="cpu").predict(observe(kind, 3))[0].shape == ()


def save_zips(folder: Path) -> None:
    """Zips of all kinds of models, saved at all kinds of moments."""
    buffer = {"rollout_buffer_class": LabelledBuffer, "rollout_buffer_kwargs": {"label": "mine"}}
    models: dict[str, dict[str, Any]] = {
        "plain": {},
        "horizons": {"return_horizon": [1, 6], "correction": "none", "normalize_advantage": True},
        "shortened": {"return_horizon": 2, "carry_over": False},
        "vtrace": {"correction": "vtrace", "return_horizon": 7, "use_rms_prop": False},
        "own_buffer": buffer,
        "image": {"policy": "CnnPolicy", "kind": "image"},
        "dict": {"policy": "MultiInputPolicy", "kind": "dict"},
    }
    for name, kwargs in models.items():
        kwargs = {"policy": "MlpPolicy", "return_horizon": 5, **kwargs}
        venv = vec_env("1 1L", "1", kind=kwargs.pop("kind", "vector"))
        model = build(venv, **kwargs)
        model.save(folder / f"{name}_new")
        # in the middle of a rollout, too: at step 10 of 16
        model.learn(4 * 8, callback=CheckpointCallback(save_freq=10, save_path=str(folder), name_prefix=name))
        model.save(folder / f"{name}_trained")
        again = {"rollout_buffer_class": LabelledBuffer} if name == "own_buffer" else {}
        NStepA2C.load(folder / f"{name}_trained", venv, device="cpu", **again).save(folder / f"{name}_again")


@pytest.fixture(scope="module")
def zips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zips")
    save_zips(folder)
    return folder


def test_21_no_class_or_closure_of_ours_in_a_zip(zips: Path):
    paths = sorted(zips.glob("*.zip"))
    assert len(paths) == 7 * 4
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            contents = [archive.read(name) for name in archive.namelist()]
            data = json.loads(archive.read("data"))
        items = {key: item for key, item in data.items() if isinstance(item, dict) and ":serialized:" in item}
        assert {"policy_class", "observation_space"} <= items.keys()
        for content in contents + [base64.b64decode(item[":serialized:"]) for item in items.values()]:
            # pickles name the modules of classes, and cloudpickle the files of closures
            assert b"sb3_nstep" not in content
            assert b"LabelledBuffer" not in content


OPEN_WITH_A2C = """
import sys
from pathlib import Path
sys.modules["sb3_nstep"] = None  # importing it raises ModuleNotFoundError
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.vec_env import DummyVecEnv

torch.set_num_threads(1)

class Env(gym.Env):
    def __init__(self, model):
        self.observation_space, self.action_space = model.observation_space, model.action_space
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 1.0, False, self.np_random.random() < 0.3, {}

for path in sorted(Path(sys.argv[1]).glob("*.zip")):
    custom_objects = {"rollout_buffer_kwargs": {}} if "own_buffer" in path.name else {}
    model = A2C.load(path, device="cpu", custom_objects=custom_objects)
    model.predict(model.observation_space.sample())
    model.set_env(DummyVecEnv([lambda model=model: Env(model)] * model.n_envs))
    model.learn(2 * model.n_steps * model.n_envs)
    print(path.name, len(model.rollout_buffer.returns))
"""


def test_20_stock_a2c_opens_our_zips_without_our_package(zips: Path, tmp_path: Path):
    command = [sys.executable, "-c", OPEN_WITH_A2C, str(zips)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{path.name} 8" for path in sorted(zips.glob("*.zip"))]


@pytest.mark.parametrize("return_horizon", [None, 3, 6])
@pytest.mark.parametrize("kind", ["vector", "dict"])
@pytest.mark.parametrize("names_its_buffer", [False, True])
def test_20_we_open_zips_of_stock_a2c(tmp_path: Path, kind: str, names_its_buffer: bool, return_horizon: int | None):
    """SB3 saves its own buffer class, whether it was named or not."""
    kwargs = {"policy": POLICIES[kind], "learning_rate": 1e-3}
    if names_its_buffer:
        kwargs["rollout_buffer_class"] = DictRolloutBuffer if kind == "dict" else RolloutBuffer
    stock = run(vec_env("1 1L", "1", kind=kind), 3, algorithm=A2C, **kwargs).model
    stock.save(tmp_path / "model")
    given = {} if return_horizon is None else {"return_horizon": return_horizon}
    model = NStepA2C.load(tmp_path / "model", vec_env("1 1L", "1", kind=kind), device="cpu", **given)
    before = parameters(stock)
    assert all(th.equal(tensor, before[name]) for name, tensor in parameters(model).items())
    batches = record(model)
    model.learn(4 * 2 * 4)
    check_learned(model, before)
    assert len(Run(model, batches, []).rows) == 2 * (4 * 4 - ((return_horizon or 4) - 1))


# 22: spaces

ACTION_SPACES = {
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(4),
    "Box(2, 3)": spaces.Box(-0.5, 0.5, (2, 3), np.float32),
}


def check_rows(outcome: Run, n_waiting: int, apart: int = 1000) -> None:
    """What train saw is what the environments did: each observation once, with the action taken on it."""
    space = outcome.model.action_space
    seen = {row.tag: row.action for row in outcome.rows}
    due = [step for steps in outcome.lived for step in steps[: len(steps) - n_waiting]]
    assert sorted(row.tag for row in outcome.rows) == sorted(step.tag for step in due)
    for step in due:
        action = seen[step.tag].reshape(step.action.shape)
        if isinstance(space, spaces.Box):  # the buffer keeps what the policy said, the environment is given it clipped
            action = np.clip(action, space.low, space.high)
        np.testing.assert_array_equal(action, step.action)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("action", ACTION_SPACES)
def test_22_spaces(action: str, kind: str, n_envs: int):
    """Carried over the seams between rollouts of 3, with truncations on the way."""
    scripts = ["1 0 1L 0 1", "1L 0", "1 1 1 1 1 1T"][:n_envs]
    venv = vec_env(*scripts, kind=kind, action_space=ACTION_SPACES[action])
    kwargs = {"policy": POLICIES[kind], "n_steps": 3, "return_horizon": 5, "learning_rate": 7e-4}
    model = build(venv, **kwargs)
    before, batches = parameters(model), record(model)
    model.learn(6 * 3 * n_envs)
    check_learned(model, before)
    check_rows(Run(model, batches, venv.get_attr("lived")), n_waiting=4)


@pytest.mark.parametrize("name", ["A2C", "PPO"])
@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("action", ACTION_SPACES)
def test_22_spaces_with_shortened_windows(action: str, kind: str, name: str):
    venv = vec_env("1 0 1L 0 1", "1L 0", kind=kind, action_space=ACTION_SPACES[action])
    model = build(venv, policy=POLICIES[kind], learning_rate=7e-4, **surface(name, 2))
    before, batches = parameters(model), record(model)
    model.learn(3 * 4 * 2)
    check_learned(model, before)
    check_rows(Run(model, batches, venv.get_attr("lived")), n_waiting=0)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("action", ACTION_SPACES)
def test_22_actions_under_each_correction(action: str, correction: str):
    venv = vec_env("1 0 1L 0 1", "1L 0", kind="dict", action_space=ACTION_SPACES[action])
    kwargs = {"policy": "MultiInputPolicy", "n_steps": 2, "return_horizon": 6, "learning_rate": 7e-4}
    model = build(venv, correction=correction, **kwargs)
    before, batches = parameters(model), record(model)
    model.learn(6 * 2 * 2)
    check_learned(model, before)
    check_rows(Run(model, batches, venv.get_attr("lived")), n_waiting=5)


def test_22_in_workers():
    venv = vec_env("1 0 1L", "1", kind="dict", action_space=ACTION_SPACES["Box(2, 3)"], vec_env_class=SubprocVecEnv)
    outcome = run(venv, 4, policy="MultiInputPolicy", n_steps=3, return_horizon=5)
    check_rows(outcome, n_waiting=4)


# 23: the final observation passes through every wrapper


def checksum(observations: Any) -> th.Tensor:
    """V of a batch, in which each place of each observation has a weight of its own."""
    if isinstance(observations, dict):
        return th.stack([checksum(observations[key]) for key in sorted(observations)]).sum(0)
    rows = observations.flatten(1).double()
    return (rows @ th.linspace(0.5, 1, rows.shape[1], dtype=th.float64))[:, None].float()


class Recording(ActorCriticPolicy):
    """Keeps what predict_values is asked about."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.asked: list[Any] = []

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        actions, _, log_prob = super().forward(obs, deterministic)
        return actions, checksum(obs), log_prob

    def evaluate_actions(self, obs: Any, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        return checksum(obs), *super().evaluate_actions(obs, actions)[1:]

    def predict_values(self, obs: Any) -> th.Tensor:
        self.asked.append(obs)
        return checksum(obs)


class RecordingCnn(Recording, ActorCriticCnnPolicy): ...


class RecordingMultiInput(Recording, MultiInputActorCriticPolicy): ...


RECORDING = {"vector": Recording, "image": RecordingCnn, "channels_first": RecordingCnn, "dict": RecordingMultiInput}
MEAN, VARIANCE = 5.0, 4.0


def normalize(venv: VecEnv, **kwargs: Any) -> VecNormalize:
    """With statistics of which the outcome is known: (x − 5) / √4. Rewards of 6 become 2."""
    venv = VecNormalize(venv, training=False, epsilon=0.0, clip_obs=1e4, **kwargs)
    for statistics in venv.obs_rms.values() if isinstance(venv.obs_rms, dict) else [venv.obs_rms]:
        statistics.mean[...], statistics.var[...] = MEAN, VARIANCE
    venv.ret_rms.var = np.float64(9.0)
    return venv


def last_frames(frames: list[np.ndarray], n_stack: int, axis: int) -> np.ndarray:
    """The stack by hand: zeros stand for what was before the episode."""
    padded = [np.zeros_like(frames[0])] * n_stack + frames
    return np.concatenate(padded[-n_stack:], axis=axis)


def channels_first(image: np.ndarray) -> np.ndarray:
    return np.moveaxis(image, -1, 0)


def normalized(vector: np.ndarray) -> np.ndarray:
    return (vector - MEAN) / np.sqrt(VARIANCE)


def by_key(image: Callable[..., np.ndarray], vector: Callable[..., np.ndarray]) -> Callable[[list[Any]], Any]:
    """Expectations of a dictionary, from those of its entries."""
    return lambda frames: {
        "image": image([f["image"] for f in frames]),
        "vector": vector([f["vector"] for f in frames]),
    }


class Wrapping(NamedTuple):
    kind: str
    wrap: Callable[[VecEnv], VecEnv]
    expected: Callable[[list[Any]], Any]  # of the frames of an episode, its final observation included


# A2C itself adds VecTransposeImage where an image has its channel last
STACKED = {"image": "last", "vector": None}
WRAPPINGS = {
    "stack, channels last": Wrapping(
        "image",
        lambda venv: VecFrameStack(venv, 3, channels_order="last"),
        lambda frames: channels_first(last_frames(frames, 3, axis=-1)),
    ),
    "stack, channels first": Wrapping(
        "channels_first",
        lambda venv: VecFrameStack(venv, 3, channels_order="first"),
        lambda frames: last_frames(frames, 3, axis=0),
    ),
    "stack, order detected": Wrapping(
        "image",
        lambda venv: VecFrameStack(venv, 4),
        lambda frames: channels_first(last_frames(frames, 4, axis=-1)),
    ),
    "stack, vectors": Wrapping(
        "vector", lambda venv: VecFrameStack(venv, 3), lambda frames: last_frames(frames, 3, axis=-1)
    ),
    "transpose": Wrapping("image", VecTransposeImage, lambda frames: channels_first(frames[-1])),
    "transpose by A2C": Wrapping("image", lambda venv: venv, lambda frames: channels_first(frames[-1])),
    "transpose, stack": Wrapping(
        "image",
        lambda venv: VecFrameStack(VecTransposeImage(venv), 2, channels_order="first"),
        lambda frames: last_frames([channels_first(frame) for frame in frames], 2, axis=0),
    ),
    "normalize": Wrapping("vector", normalize, lambda frames: normalized(frames[-1])),
    "stack, normalize": Wrapping(
        "vector",
        lambda venv: normalize(VecFrameStack(venv, 2)),
        lambda frames: normalized(last_frames(frames, 2, axis=-1)),
    ),
    "normalize, stack": Wrapping(
        "vector",
        lambda venv: VecFrameStack(normalize(venv), 2),
        lambda frames: last_frames([normalized(frame) for frame in frames], 2, axis=-1),
    ),
    "dict": Wrapping(
        "dict", lambda venv: venv, by_key(lambda frames: channels_first(frames[-1]), lambda frames: frames[-1])
    ),
    "dict, stack": Wrapping(
        "dict",
        lambda venv: VecFrameStack(venv, 3, channels_order=STACKED),
        by_key(
            lambda frames: channels_first(last_frames(frames, 3, axis=-1)),
            lambda frames: last_frames(frames, 3, axis=-1),
        ),
    ),
    "dict, normalize": Wrapping(
        "dict",
        lambda venv: normalize(venv, norm_obs_keys=["vector"]),
        by_key(lambda frames: channels_first(frames[-1]), lambda frames: normalized(frames[-1])),
    ),
    "dict, transpose, stack, normalize": Wrapping(
        "dict",
        lambda venv: normalize(
            VecFrameStack(VecTransposeImage(venv), 2, channels_order={"image": "first", "vector": "last"}),
            norm_obs_keys=["vector"],
        ),
        by_key(
            lambda frames: last_frames([channels_first(frame) for frame in frames], 2, axis=0),
            lambda frames: normalized(last_frames(frames, 2, axis=-1)),
        ),
    ),
}


class AtRolloutEnd(BaseCallback):
    """Calls a function with the buffer and itself when a rollout ends."""

    def __init__(self, function: Callable[..., None]):
        super().__init__()
        self.function = function

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.function(self.model.rollout_buffer, self)


def episode_so_far(steps: list[Lived], index: int) -> list[int]:
    """The numbers of the observations of the episode that step ``index`` ends, its final observation included."""
    first = index
    while first > 0 and not steps[first - 1].ended:
        first -= 1
    return [step.tag for step in steps[first : index + 1]] + [steps[index].final_tag]


@pytest.mark.parametrize("name", ["A2C", "NStepA2C", CARRYING])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_23_final_observations_come_through_the_wrappers(wrapping: str, name: str):
    kind, wrap, expect = WRAPPINGS[wrapping]
    venv = wrap(vec_env("6 6 6 6L", "6 6L 6L 6", kind=kind))
    model = build(venv, policy=RECORDING[kind], **surface(name, 3))
    returns: list[np.ndarray] = []
    model.learn(4 * 4 * 2, callback=AtRolloutEnd(lambda buffer, _: returns.extend(buffer.returns.copy())))

    def batch_of_one(observation: Any) -> Any:
        if isinstance(observation, dict):
            return {key: batch_of_one(value) for key, value in observation.items()}
        return th.as_tensor(observation[np.newaxis])

    reward = 2 if unwrap_vec_normalize(model.env) else 6
    expected, lived = [], model.env.get_attr("lived")
    for index, env in product(range(16), range(2)):
        if lived[env][index].ended:
            frames = [observe(kind, tag) for tag in episode_so_far(lived[env], index)]
            expected.append(batch_of_one(expect(frames)))
            # and it is this observation whose value is in the target
            target = reward + 0.5 * checksum(expected[-1]).item()
            assert returns[index][env] == pytest.approx(target, rel=1e-5), (index, env)
    # of the two environments at a rollout's end together, of the final observations one by one
    asked = [obs for obs in model.policy.asked if len(obs["vector"] if kind == "dict" else obs) == 1]
    assert len(asked) == len(expected) == 4 + 8
    th.testing.assert_close(asked, expected, check_dtype=False)


# 24: callbacks edit rewards at the end of a rollout


def add(buffer: Any, bonus: Any) -> None:
    buffer.rewards += bonus


def add_by_row(buffer: Any, bonus: Any) -> None:
    bonus = np.broadcast_to(bonus, buffer.rewards.shape)
    for row, env in np.ndindex(buffer.rewards.shape):
        buffer.rewards[row, env] += bonus[row, env]


def bind_another_array(buffer: Any, bonus: Any) -> None:
    buffer.rewards = buffer.rewards + bonus


def add_in_two_parts(buffer: Any, bonus: Any) -> None:
    buffer.rewards = buffer.rewards + 3 * np.asarray(bonus)
    buffer.rewards -= 2 * np.asarray(bonus, dtype=np.float32)


@pytest.mark.parametrize(
    ("edit", "n_computed"),
    [(add, 1), (add_by_row, 1), (bind_another_array, 1), (bind_another_array, 2), (add_in_two_parts, 2)],
)
@pytest.mark.parametrize(
    ("name", "n_steps"), [*product(["A2C", "PPO", "NStepA2C"], [3, 4]), *product([CARRYING], [1, 2, 3, 4])]
)
def test_24_edits_of_rewards_count_once(name: str, n_steps: int, n_computed: int, edit: Callable[[Any, Any], None]):
    """
    r = 0, V = 0, g = 1, N = 3; the callback pays row t its number t: t + (t + 1) + (t + 2), in its place and once.
    """

    def pay(buffer: Any, callback: BaseCallback) -> None:
        assert buffer.rewards.shape == (n_steps, 2), "the rows of this rollout, and no others"
        tags = buffer.observations[:, :, 0]
        assert tags[-1, 0] == callback.num_timesteps // 2 - 1
        edit(buffer, tags % 1000)
        for _ in range(n_computed):
            buffer.compute_returns_and_advantage(callback.locals["values"], callback.locals["dones"])

    model = build(vec_env("0", "0", value=0), n_steps=n_steps, gamma=1.0, **surface(name, 3))
    batches = record(model)
    model.learn(2 * 6 * n_steps, callback=AtRolloutEnd(pay))
    targets = Run(model, batches, []).targets
    assert len(targets) == 2 * (6 * n_steps - (2 if name == CARRYING else 0))
    for tag, target in targets.items():
        t = tag % 1000
        k = 3 if name == CARRYING else min(3, n_steps - t % n_steps)
        assert target == sum(range(t, t + k))


@pytest.mark.parametrize("name", SURFACES)
def test_24_edits_stop_at_the_end_of_an_episode(name: str):
    """Bonus 1, boot = 8, g = .5: 1 + .5 + .25 · 8 and 1 + .5 · 8; boot is not lost and not counted again."""

    def pay(buffer: Any, callback: BaseCallback) -> None:
        buffer.rewards += 1
        buffer.compute_returns_and_advantage(callback.locals["values"], callback.locals["dones"])

    model = build(vec_env("0 0L:8", "0 0T", value=100), **surface(name, 3))
    batches = record(model)
    model.learn(2 * 4 * 6, callback=AtRolloutEnd(pay))
    targets = Run(model, batches, []).targets
    assert targets == {tag: ([3.5, 5] if tag < 1000 else [1.5, 1])[tag % 1000 % 3] for tag in targets}


# 25: stops


def stop_after(n_steps: int, answer: Any, as_class: bool) -> Any:
    """A callback that answers so at the n-th step of this ``learn()``, and goes on before."""
    n_calls = 0

    def on_step(*_: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return answer if n_calls == n_steps else np.bool_(True)

    if not as_class:
        return on_step
    callback = AtRolloutEnd(lambda *_: None)
    callback._on_step = on_step
    return callback


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("as_class", [False, True])
@pytest.mark.parametrize(
    ("name", "horizon", "n_rollouts", "position"),
    [
        *product([CARRYING], [3, 5], [0, 2], [1, 2, 3]),
        *product(["A2C", "PPO", "NStepA2C"], [2], [1], [1, 2, 3]),
    ],
)
def test_25_no_window_bridges_a_stop(
    name: str, horizon: int, n_rollouts: int, position: int, as_class: bool, anew: bool
):
    """
    T = 3. Stopped at each position of the first or a later rollout: r = 1 up to there, then 1e6; V = 0, g = .5.
    A window that bridged the stop would hold some of both.
    """
    n_before = 3 * n_rollouts + position
    model = build(vec_env(*[["1"] * n_before + ["1e6"] * 100] * 2, value=0), n_steps=3, **surface(name, horizon))
    batches = record(model)
    model.learn(1000, callback=stop_after(n_before, np.bool_(False), as_class))
    assert model.num_timesteps == 2 * n_before
    n_batches = len(batches)
    model.learn(2 * 3 * 6, reset_num_timesteps=anew)

    n_waiting = horizon - 1 if name == CARRYING else 0
    n_emitted = max(0, 3 * n_rollouts - n_waiting)
    # without a reset SB3 goes on from the observation before the step that was lost
    first = n_before + 1 if anew else n_before - 1
    for env in range(2):
        before, after = (
            sorted(row for batch in part for row in batch if row.tag // 1000 == env)
            for part in (batches[:n_batches], batches[n_batches:])
        )
        assert [row.tag % 1000 for row in before] == list(range(n_emitted))
        assert (after[0].tag % 1000, len(after)) == (first, 3 * 6 - n_waiting)
        for rows, reward in ((before, 1), (after, 1e6)):
            for index, row in enumerate(rows):
                k = horizon if name == CARRYING else min(horizon, 3 - index % 3)
                assert row.target == reward * geometric(k)


@pytest.mark.parametrize("answer", [np.bool_(False), False])
def test_25_stops_in_a_row(answer: Any):
    model = build(vec_env("1", "1", value=0), n_steps=3, return_horizon=5)
    batches = record(model)
    for n_steps in (2, 7, 1, 3, 8):
        model.learn(1000, callback=stop_after(n_steps, answer, as_class=True), reset_num_timesteps=False)
    # 7 and 8 steps are two whole rollouts and some more: of each environment's 6 rows 6 − 4 have whole windows
    assert [len(batch) for batch in batches] == [2 * 2, 2 * 2]
    model.learn(2 * 3 * 4, reset_num_timesteps=False)
    assert [row.target for batch in batches for row in batch] == [geometric(5)] * (4 + 4 + 2 * (12 - 4))


# 26: normalising


@pytest.mark.parametrize(
    ("n_steps", "horizon", "n_envs", "carry_over"),
    [
        (1, 1, 1, False),  # one row each time
        (1, 1, 1, True),
        (1, 4, 1, True),
        (2, 2, 1, True),  # one row the first time, then two
        (5, 10, 1, True),  # none, then one, then five
        (1, 1, 2, True),
    ],
)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("script", ["1 0L 2", "0"])
def test_26_normalising_a_batch_of_one(
    n_steps: int, horizon: int, n_envs: int, carry_over: bool, correction: Any, script: str
):
    kwargs = {"n_steps": n_steps, "return_horizon": horizon, "carry_over": carry_over, "correction": correction}
    venv = vec_env(*[script] * n_envs)
    model = build(venv, policy="MlpPolicy", normalize_advantage=True, learning_rate=7e-4, **kwargs)
    before, batches = parameters(model), record(model)
    model.learn(6 * n_steps * n_envs)
    check_learned(model, before)
    if n_envs == 1:
        assert len(batches[0]) == 1


@pytest.mark.parametrize("name", SURFACES)
def test_26_normalising_constant_advantages(name: str):
    """r = 0, V = 0: advantages are 0, and their spread is 0."""
    model = build(vec_env("0", "0", value=0), learning_rate=0.1, normalize_advantage=True, **surface(name, 3))
    before, batches = parameters(model), record(model)
    model.learn(2 * 4 * 4)
    assert {row.advantage for batch in batches for row in batch} == {0}
    after = parameters(model)
    assert all(th.equal(before[name], after[name]) for name in before)


# 28: importing, and importing again in workers

IMPORT = """
import json, multiprocessing, os, random, sys, threading
import numpy, psutil, torch, stable_baselines3

def state():
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "python threads": [thread.name for thread in threading.enumerate()],
        "children": [child.name() for child in process.children(recursive=True)],
        "cuda": torch.cuda.is_initialized(),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch dtype": str(torch.get_default_dtype()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "environment": dict(os.environ),
        "random states": [str(random.getstate()), str(numpy.random.get_state()), torch.initial_seed()],
        "filters": str(__import__("warnings").filters),
    }

before = state()
import sb3_nstep
print(json.dumps([before, state(), sorted({name.split(".")[0] for name in sys.modules})]))
"""


def test_28_importing_changes_nothing(tmp_path: Path):
    root = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {root!r})\n" + IMPORT
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, modules = json.loads(done.stdout)
    assert after == before
    assert after["cuda"] is False
    assert after["children"] == []
    assert after["python threads"] == ["MainThread"]
    assert not {"ale_py", "sb3_contrib", "rl_zoo3"} & set(modules)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_28_workers_that_import_again(start_method: str):
    venv = vec_env("1 1L", vec_env_class=lambda env_fns: SubprocVecEnv(env_fns, start_method=start_method))
    workers = venv.processes
    outcome = run(venv, 3, return_horizon=5)
    check_rows(outcome, n_waiting=4)
    assert not any(worker.is_alive() for worker in workers)


# 30: environments that give no final observation


class WithoutFinalObservations(VecEnvWrapper):
    def __init__(self, venv: VecEnv, lacks: str):
        super().__init__(venv)
        self.lacks = lacks

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        for info in infos:
            if self.lacks == "is None" and "terminal_observation" in info:
                info["terminal_observation"] = None
            elif self.lacks != "is None":
                info.pop("terminal_observation", None)
            if self.lacks == "all keys":
                info.pop("TimeLimit.truncated", None)
        return observations, rewards, dones, infos


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("lacks", ["the key", "is None", "all keys"])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_30_no_final_observation(name: str, lacks: str, n_envs: int):
    """Time limits with boot = 7 that nobody hands on: as after a termination, 1 + .5 · 1 and 1. We say so once."""
    venv = WithoutFinalObservations(vec_env(*["1 1L:7"] * n_envs, value=100), lacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build(venv, **surface(name, 3))
        batches = record(model)
        for _ in range(2):
            model.learn(4 * 3 * n_envs)
    targets = Run(model, batches, []).targets
    assert len(targets) >= n_envs * 20
    # each learn() begins with a reset, and 12 steps are six whole episodes with a final observation each
    assert targets == {tag: [1.5, 1][(tag % 1000 - (tag % 1000 > 18)) % 3] for tag in targets}
    messages = [str(warning.message) for warning in caught]
    if name.startswith("NStepA2C") and lacks != "all keys":
        assert len(messages) == 1
        assert "terminal_observation" in messages[0]
        assert "0" in messages[0]
    else:
        assert messages == []
