"""A run that is interrupted and goes on from a checkpoint is, to the last bit, the run that was not."""

import copy
import errno
import random
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_nstep import NStepA2C
from sb3_nstep.checkpoint import load_checkpoint, save_checkpoint

TOTAL = 240  # steps of three environments


class AsDict(gym.ObservationWrapper):
    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict(state=env.observation_space, sign=spaces.MultiBinary(4))

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": observation, "sign": (observation > 0).astype(np.int8)}


def make_env(is_dict: bool = False) -> VecEnv:
    """Episodes end by the fall of the pole and by a time limit; all randomness of theirs is copied with them."""

    def make() -> gym.Env:
        env = Monitor(gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 15))
        return AsDict(env) if is_dict else env

    return DummyVecEnv([make] * 3)


class SaveOnce(BaseCallback):
    """Save at the first rollout behind ``at`` steps, with the environments as they are, and stop."""

    def __init__(self, at: int, path: Path) -> None:
        super().__init__()
        self.at, self.path = at, path
        self.env: VecEnv | None = None

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.at and self.env is None:
            save_checkpoint(self.model, self.path)
            self.env = copy.deepcopy(self.training_env)

    def _on_step(self) -> bool:
        return self.env is None


def scatter_random_states() -> None:
    """What another process would have."""
    th.manual_seed(99)
    np.random.seed(99)
    random.seed(99)


def everything(model: NStepA2C) -> dict[str, Any]:
    """All that a run consists of, but for what a clock says."""
    return {
        "parameters": model.get_parameters(),
        "counts": (model.num_timesteps, model._n_updates, model._episode_num),
        "episodes": [(episode["r"], episode["l"]) for episode in model.ep_info_buffer],
        "progress": model._current_progress_remaining,
        "rows": model.rollout_buffer.state_dict(),
        "observations": model._last_obs,
        "torch": th.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, (np.ndarray, th.Tensor)):
        assert (np.asarray(a) == np.asarray(b)).all()
    else:
        assert a == b


@pytest.mark.parametrize("at", [0, 3, 60, 123], ids="at step {}".format)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"n_steps": 1, "return_horizon": 5},
        {"n_steps": 4, "return_horizon": [1, 3, 9], "correction": "vtrace", "gae_lambda": 0.9},
        {"n_steps": 5, "correction": "none", "learning_rate": lambda progress: 1e-2 * progress},
        {"n_steps": 2, "return_horizon": lambda progress: 3 if progress > 0.5 else 6},
        {"n_steps": 5, "carry_over": False},
        {"policy": "MultiInputPolicy", "n_steps": 2, "return_horizon": 4},
    ],
    ids=["T 1", "vtrace", "schedule", "schedule of N", "exact mode", "dict"],
)
def test_interrupted_is_as_if_it_was_not(kwargs: dict[str, Any], at: int, tmp_path: Path) -> None:
    kwargs = {"policy": "MlpPolicy", "device": "cpu", "seed": 0, **kwargs}
    env = make_env(is_dict=kwargs["policy"] == "MultiInputPolicy")
    whole = NStepA2C(env=copy.deepcopy(env), **kwargs)
    random.seed(1)
    whole.learn(TOTAL)
    expected = everything(whole)
    assert len(expected["episodes"]) > 10

    first, callback = NStepA2C(env=env, **kwargs), SaveOnce(at, tmp_path / "checkpoint")
    random.seed(1)
    first.learn(TOTAL, callback)
    scatter_random_states()
    # A schedule in the test's own file is saved by reference, and found again; a lambda by value
    second = load_checkpoint(NStepA2C, tmp_path / "checkpoint", callback.env, device="cpu")
    assert second.num_timesteps < TOTAL
    second.learn(TOTAL - second.num_timesteps, reset_num_timesteps=False)
    assert_same(everything(second), expected)


def test_saved_between_two_calls_of_learn(tmp_path: Path) -> None:
    env = make_env()
    model = NStepA2C("MlpPolicy", env, n_steps=2, return_horizon=5, device="cpu", seed=0)
    model.learn(120)
    save_checkpoint(model, tmp_path / "model.zip")
    copied = copy.deepcopy(env)
    model.learn(60, reset_num_timesteps=False)
    expected = everything(model)
    scatter_random_states()
    other = load_checkpoint(NStepA2C, tmp_path / "model.zip", copied, device="cpu")
    other.learn(60, reset_num_timesteps=False)
    expected["python"] = random.getstate()  # nothing of ours draws from it
    assert_same(everything(other), expected)


def test_environments_that_begin_anew(tmp_path: Path) -> None:
    """The rows that waited are trained on, with windows that end where the environments were left."""
    model = NStepA2C("MlpPolicy", make_env(), n_steps=2, return_horizon=5, device="cpu", seed=0)
    model.learn(60)
    save_checkpoint(model, tmp_path / "model.zip")
    waiting = model.rollout_buffer.state_dict()
    assert len(waiting["rewards"]) == 4
    model = load_checkpoint(NStepA2C, tmp_path / "model.zip", make_env(), force_reset=True, device="cpu")

    class Look(BaseCallback):
        n_looks = 0

        def _on_rollout_end(self) -> None:
            if self.n_looks == 0:
                buffer = self.model.rollout_buffer
                last = waiting["rewards"][-1] + 0.99 * waiting["last_values"] * ~waiting["last_dones"]
                np.testing.assert_allclose(buffer._all_rows("returns")[3], last, rtol=1e-6)
            self.n_looks += 1

        def _on_step(self) -> bool:
            return True

    look = Look()
    model.learn(12, look, reset_num_timesteps=False)
    assert look.n_looks == 2 and model._n_updates == 8 + 2  # of the first ten rollouts, two completed nothing


@pytest.mark.parametrize("policy", ["MlpPolicy", "MultiInputPolicy"])
def test_saved_again_before_it_goes_on(policy: str, tmp_path: Path) -> None:
    """As by a run that is told to stop as soon as it has been resumed."""
    env = make_env(is_dict=policy == "MultiInputPolicy")
    model = NStepA2C(policy, env, n_steps=2, return_horizon=5, device="cpu")
    model.learn(60)
    rows = model.rollout_buffer.state_dict()
    assert len(rows["rewards"]) == 4
    for path in (tmp_path / "first.zip", tmp_path / "second.zip"):
        save_checkpoint(model, path)
        model = load_checkpoint(NStepA2C, path, env, device="cpu")
        assert_same(model.rollout_buffer.state_dict(), rows)


def test_in_the_middle_of_a_rollout_rows_are_dropped(tmp_path: Path) -> None:
    class Save(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 66:  # one row of two is in the buffer
                save_checkpoint(self.model, tmp_path / "model.zip")
            return True

    NStepA2C("MlpPolicy", make_env(), n_steps=2, return_horizon=5, device="cpu").learn(72, Save())
    model = load_checkpoint(NStepA2C, tmp_path / "model.zip", make_env(), device="cpu")
    assert model.rollout_buffer._n_loaded == 0


def test_other_ways_to_open_it(tmp_path: Path) -> None:
    model = NStepA2C("MlpPolicy", make_env(), n_steps=2, return_horizon=5, device="cpu")
    model.learn(60)
    save_checkpoint(model, tmp_path / "checkpoint.zip")
    model.save(tmp_path / "plain.zip")
    NStepA2C.load(tmp_path / "checkpoint.zip", make_env(), device="cpu").learn(12)
    A2C.load(tmp_path / "checkpoint.zip", make_env(), device="cpu").learn(12)
    load_checkpoint(NStepA2C, tmp_path / "plain.zip", make_env(), device="cpu").learn(12)

    stock = A2C("MlpPolicy", make_env(), device="cpu")
    stock.learn(30)
    save_checkpoint(stock, tmp_path / "stock.zip")
    expected = th.rand(3)
    load_checkpoint(A2C, tmp_path / "stock.zip", device="cpu")
    assert th.equal(th.rand(3), expected)


@pytest.mark.parametrize("n_envs", [2, 4])
def test_other_number_of_environments(n_envs: int, tmp_path: Path) -> None:
    model = NStepA2C("MlpPolicy", make_env(), n_steps=2, return_horizon=5, device="cpu")
    model.learn(60)
    save_checkpoint(model, tmp_path / "model.zip")
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")] * n_envs)
    with pytest.raises(ValueError, match=rf"expected observations of the shape \(rows, {n_envs}, 4\).*got \(4, 3, 4\)"):
        load_checkpoint(NStepA2C, tmp_path / "model.zip", env, force_reset=True, device="cpu")
    NStepA2C.load(tmp_path / "model.zip", env, device="cpu").learn(12)


@pytest.mark.parametrize("n_envs", [2, 4])
def test_other_number_of_environments_that_no_row_waits_for(n_envs: int, tmp_path: Path) -> None:
    model = NStepA2C("MlpPolicy", make_env(), n_steps=2, carry_over=False, device="cpu")
    model.learn(60)
    save_checkpoint(model, tmp_path / "model.zip")
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")] * n_envs)
    with pytest.raises(ValueError, match=f"env: expected 3 environments, .*got {n_envs}"):
        load_checkpoint(NStepA2C, tmp_path / "model.zip", env, device="cpu")
    load_checkpoint(NStepA2C, tmp_path / "model.zip", env, force_reset=True, device="cpu").learn(12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "model.zip"
    model = NStepA2C("MlpPolicy", make_env(), n_steps=2, return_horizon=5, device="cpu")
    model.learn(60)
    save_checkpoint(model, path)
    return path.read_bytes()


def test_damaged(saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    for length in (0, 100, len(saved) // 2, len(saved) - 1):
        path.write_bytes(saved[:length])
        with pytest.raises(ValueError, match=r"model\.zip: expected a checkpoint, got a file that is damaged"):
            load_checkpoint(NStepA2C, path)
    (tmp_path / "whole.zip").write_bytes(saved)
    with zipfile.ZipFile(tmp_path / "whole.zip") as archive:
        members = archive.infolist()
    for member in members:  # a byte of each
        spoilt = bytearray(saved)
        spoilt[member.header_offset + 30 + len(member.filename) + member.compress_size // 2] ^= 0xFF
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(NStepA2C, path)


def test_damaged_directory(saved: bytes, tmp_path: Path) -> None:
    """A byte of what the zip says of its members: an error of ours, or, of what nobody reads, none."""
    path = tmp_path / "model.zip"
    path.write_bytes(saved)
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    n_refused = 0
    for place in range(start, len(saved), 3):
        spoilt = bytearray(saved)
        spoilt[place] ^= 0xFF
        path.write_bytes(spoilt)
        try:
            load_checkpoint(NStepA2C, path, device="cpu")
        except ValueError as error:
            assert "damaged" in str(error)
            n_refused += 1
    assert n_refused > 50


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        load_checkpoint(NStepA2C, tmp_path / "checkpoint")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_cannot_be_written(code: int, saved: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.zip"
    path.write_bytes(saved)
    model = load_checkpoint(NStepA2C, path, device="cpu")

    def half(temporary: Path) -> None:
        temporary.write_bytes(saved[:1000])
        raise OSError(code, "of the disk")

    monkeypatch.setattr(model, "save", half)
    with pytest.raises(OSError, match=r"cannot be written, and is as it was: of the disk.*model\.zip") as error:
        save_checkpoint(model, path)
    assert error.value.errno == code
    assert path.read_bytes() == saved
    assert [file.name for file in tmp_path.iterdir()] == ["model.zip"]


def test_folder_that_is_not_there(saved: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_bytes(saved)
    model = load_checkpoint(NStepA2C, tmp_path / "model.zip", device="cpu")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"model\.zip"):
        save_checkpoint(model, tmp_path / "file" / "model.zip")
