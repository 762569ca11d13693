"""sb3-contrib's algorithms with N-step targets, against the definition, SB3's A2C and sb3-contrib itself."""

import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

import reference
from reference import CONTINUES, TERMINATED, TIME_LIMIT, Row
from sb3_nstep import NStepDictRolloutBuffer, NStepRolloutBuffer
from sb3_nstep.contrib import (
    NStepMaskableA2C,
    NStepMaskableDictRolloutBuffer,
    NStepMaskableRolloutBuffer,
    NStepRecurrentA2C,
    NStepRecurrentDictRolloutBuffer,
    NStepRecurrentPPO,
    NStepRecurrentRolloutBuffer,
)
from scripted import vec_env

MASKABLE = [NStepMaskableRolloutBuffer, NStepMaskableDictRolloutBuffer]
RECURRENT = [NStepRecurrentRolloutBuffer, NStepRecurrentDictRolloutBuffer]
N_ACTIONS = 4
SMALL_LSTM = {"lstm_hidden_size": 8, "net_arch": [8]}


# The buffers


def stock_class(buffer_class: Any) -> Any:
    """The class of sb3-contrib that stands behind one of ours."""
    return next(base for base in buffer_class.__mro__ if base.__module__.startswith("sb3_contrib."))


def make(buffer_class: Any, n_steps: int, n_envs: int, **kwargs: Any) -> Any:
    observation_space: spaces.Space = spaces.Box(0, 99, (1,), dtype=np.float32)
    if "Dict" in buffer_class.__name__:
        observation_space = spaces.Dict(a=observation_space, b=observation_space)
    if "Recurrent" in buffer_class.__name__:
        kwargs["hidden_state_shape"] = (n_steps, 1, n_envs, 2)
    arguments = {"device": "cpu", "gamma": 0.9, "n_envs": n_envs, **kwargs}
    return buffer_class(n_steps, observation_space, spaces.Discrete(N_ACTIONS), **arguments)


def fill(buffer: Any, seed: int) -> tuple[list[list[Row]], list[float]]:
    """
    A rollout of random rows. Row t of environment e has the number E t + e, which is its observation, action,
    log-probability, mask and LSTM state. Returns the streams, and V of what comes after them.
    """
    rng = np.random.default_rng(seed)
    streams: list[list[Row]] = [[] for _ in range(buffer.n_envs)]
    starts = np.ones(buffer.n_envs)
    buffer.reset()
    for t in range(buffer.buffer_size):
        ends = rng.choice([CONTINUES, CONTINUES, CONTINUES, TERMINATED, TIME_LIMIT], size=buffer.n_envs)
        rows = [Row(*rng.normal(size=2), end, rng.normal()) for end in ends]
        ids = t * buffer.n_envs + np.arange(buffer.n_envs)
        observations: Any = ids[:, None].astype(np.float32)
        if isinstance(buffer.observation_space, spaces.Dict):
            observations = {"a": observations, "b": observations}
        extra: dict[str, Any] = {"action_masks": (ids[:, None] >> np.arange(N_ACTIONS)) & 1}
        if hasattr(buffer, "hidden_state_shape"):
            state = th.tensor(ids, dtype=th.float32).reshape(1, -1, 1).expand(1, -1, 2)
            extra = {"lstm_states": RNNStates((state, state), (state, state))}
        buffer.add(
            observations,
            ids[:, None],
            np.array([row.reward + 0.9 * row.final_value * (row.end == TIME_LIMIT) for row in rows]),
            starts,
            th.tensor([row.value for row in rows]),
            th.tensor(ids, dtype=th.float32),
            **extra,
        )
        starts = np.array([row.end != CONTINUES for row in rows], dtype=np.float32)
        for stream, row in zip(streams, rows, strict=True):
            stream.append(row)
    last_values = rng.normal(size=buffer.n_envs)
    buffer.compute_returns_and_advantage(th.tensor(last_values), starts.astype(bool))
    return streams, last_values.tolist()


def tensors(batch: Any) -> dict[str, th.Tensor]:
    """All that a batch holds, by name."""
    found: dict[str, th.Tensor] = {}
    pending: list[tuple[str, Any]] = [("", batch)]
    while pending:
        name, part = pending.pop()
        if isinstance(part, th.Tensor):
            found[name] = part
        elif isinstance(part, dict):
            pending += [(f"{name}.{key}", value) for key, value in part.items()]
        else:
            fields = getattr(part, "_fields", range(len(part)))
            pending += [(f"{name}.{field}", value) for field, value in zip(fields, part, strict=True)]
    return found


@pytest.mark.parametrize("buffer_class", [*MASKABLE, *RECURRENT])
@pytest.mark.parametrize("horizon", [None, 6, 9, 1, 2, 3, [2, 4, 9]])
@pytest.mark.parametrize("lam", [1.0, 0.9])
@pytest.mark.filterwarnings("ignore:return_horizon=")
def test_targets_are_the_definition_and_all_else_is_the_parent(buffer_class: Any, horizon: Any, lam: float) -> None:
    ours = make(buffer_class, 6, 3, return_horizon=horizon, gae_lambda=lam)
    stock = make(stock_class(buffer_class), 6, 3, gae_lambda=lam)
    horizons = np.broadcast_to(6 if horizon is None else horizon, 3).tolist()
    for rollout in range(2):
        streams, last_values = fill(ours, rollout)
        fill(stock, rollout)
        expected = np.array(
            [
                reference.targets(stream, v, 0.9, n, lam)
                for stream, v, n in zip(streams, last_values, horizons, strict=True)
            ]
        ).T.flatten()  # by the number of the row
        for batch_size in (None, 5, None):  # epochs
            np.random.seed(rollout)
            batches = list(ours.get(batch_size))
            np.random.seed(rollout)
            ids: list[int] = []
            for batch, stock_batch in zip(batches, stock.get(batch_size), strict=True):
                parts, stock_parts = tensors(batch), tensors(stock_batch)
                own = [] if min(horizons) >= 6 else [".returns", ".advantages"]
                assert all(th.equal(parts[name], stock_parts[name]) for name in parts.keys() - own)
                assert parts.keys() == stock_parts.keys()
                is_row = batch.mask > 0 if hasattr(batch, "mask") else slice(None)  # sequences are padded
                numbers = batch.old_log_prob[is_row].int().tolist()
                ids += numbers
                np.testing.assert_allclose(batch.returns[is_row], expected[numbers], rtol=1e-4, atol=1e-5)
                th.testing.assert_close(
                    batch.advantages[is_row], (batch.returns - batch.old_values)[is_row], rtol=1e-4, atol=1e-5
                )
            assert sorted(ids) == list(range(18))


@pytest.mark.parametrize("buffer_class", [*MASKABLE, *RECURRENT])
def test_carrying_over_is_refused(buffer_class: Any) -> None:
    with pytest.raises(ValueError, match=r"carry_over: expected False .* got True.* No row can wait"):
        make(buffer_class, 4, 2, carry_over=True)
    buffer = make(buffer_class, 4, 2, return_horizon=2)
    buffer.carry_over = True
    with pytest.raises(ValueError, match="carry_over: expected False"):
        buffer.reset()


@pytest.mark.parametrize("buffer_class", [*MASKABLE, *RECURRENT])
def test_arguments_are_checked(buffer_class: Any) -> None:
    for horizon in (0, 2.5, True, [1, 2, 3]):
        with pytest.raises(ValueError, match="return_horizon: expected"):
            make(buffer_class, 4, 2, return_horizon=horizon)
    with pytest.warns(UserWarning, match="return_horizon=9, but carry_over=False shortens"):
        make(buffer_class, 4, 2, return_horizon=9)


@pytest.mark.parametrize("buffer_class", [*MASKABLE, *RECURRENT])
def test_mean_window(buffer_class: Any) -> None:
    """Before and after get(), which flattens the recurrent buffers' episode starts."""
    buffer = make(buffer_class, 6, 3, return_horizon=[2, 3, 4])
    streams, _ = fill(buffer, 1)
    lengths = [
        next((k for k in range(1, n + 1) if t + k == 6 or stream[t + k - 1].end != CONTINUES), n)
        for stream, n in zip(streams, [2, 3, 4], strict=True)
        for t in range(6)
    ]
    assert len(set(lengths)) > 2
    assert buffer.mean_window == pytest.approx(np.mean(lengths))
    list(buffer.get())
    assert buffer.mean_window == pytest.approx(np.mean(lengths))


# In the algorithms


class Masks(gym.Env):
    """
    Random observations and rewards, an action pays; episodes terminate at random. ``action_masks`` allows some actions,
    at random, or all of them.
    """

    def __init__(self, action_space: spaces.Space | None = None, masks: bool = True):
        self.observation_space = spaces.Box(-9, 9, (3,), dtype=np.float32)
        self.action_space = action_space or spaces.Discrete(N_ACTIONS)
        self.masks = masks

    def action_masks(self) -> np.ndarray:
        mask = np.ones(N_ACTIONS, dtype=bool)
        if self.masks:
            allowed = self.np_random.integers(N_ACTIONS)
            mask = self.np_random.random(N_ACTIONS) < 0.5
            mask[allowed] = True
            self.mask = mask
        return mask

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        assert not self.masks or self.mask[action]
        reward = self.np_random.normal() + 0.5 * np.sum(action)
        return self.np_random.normal(size=3).astype(np.float32), float(reward), self.np_random.random() < 0.2, False, {}


def masks(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: Masks(**kwargs) for _ in range(n_envs)])


def parameters(model: Any) -> th.Tensor:
    return th.cat([p.detach().flatten() for p in model.policy.parameters()])


BUFFERS = {PPO: NStepRolloutBuffer, TRPO: NStepRolloutBuffer, MaskablePPO: NStepMaskableRolloutBuffer}


def build(algorithm: Any, env: Any, horizon: Any, **kwargs: Any) -> Any:
    if algorithm in BUFFERS:
        kwargs |= {"rollout_buffer_class": BUFFERS[algorithm], "rollout_buffer_kwargs": {"return_horizon": horizon}}
    else:
        kwargs["return_horizon"] = horizon
    policy = "MlpLstmPolicy" if issubclass(algorithm, RecurrentPPO) else "MlpPolicy"
    return algorithm(policy, env, device="cpu", seed=0, **kwargs)


@pytest.mark.parametrize("algorithm", [PPO, TRPO, MaskablePPO, NStepRecurrentPPO])
def test_the_whole_rollout_as_horizon_is_the_algorithm_to_the_last_bit(algorithm: Any) -> None:
    stock, policy, kwargs = algorithm, "MlpPolicy", {"n_steps": 16, "batch_size": 16}
    if algorithm is NStepRecurrentPPO:
        stock, policy, kwargs["policy_kwargs"] = RecurrentPPO, "MlpLstmPolicy", SMALL_LSTM
    if algorithm is not TRPO:
        kwargs["n_epochs"] = 2
    is_masked = algorithm is MaskablePPO
    expected = parameters(stock(policy, masks(masks=is_masked), device="cpu", seed=0, **kwargs).learn(64))
    for horizon in (None, 16, 3):
        ours = parameters(build(algorithm, masks(masks=is_masked), horizon, **kwargs).learn(64))
        assert th.equal(ours, expected) == (horizon != 3)


@contextmanager
def reading_values(model: Any) -> Iterator[None]:
    """V is the second number of an observation."""
    forward = model.policy.forward

    def reading_forward(obs: th.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        actions, _, *more = forward(obs, *args, **kwargs)
        return (actions, obs[:, 1:2], *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.policy, "forward", reading_forward)
        patched.setattr(model.policy, "predict_values", lambda obs, *args: obs[:, 1:2])
        patched.setattr(model, "train", lambda: None)
        yield


# γ = .5, N = 2, r = 1, V = 8; V = 100 of observations that begin an episode; behind a colon, V of a final observation
BOUNDARIES = {
    "1 1 1 1": [3.5, 3.5, 3.5, 5],  # 1 + .5 + .25 · 8; the last row has one reward and then .5 · 8
    "1 1T 1 1": [1.5, 1, 3.5, 5],  # nothing behind a termination
    "1 1L:4 1 1": [2.5, 3, 3.5, 5],  # 1 + .5 + .25 · 4, 1 + .5 · 4
    "1 1TL:4 1 1": [1.5, 1, 3.5, 5],  # both at once: a termination
    "1 1 1 1T": [3.5, 3.5, 1.5, 1],
    "1 1 1 1L:4": [3.5, 3.5, 2.5, 3],
    "1T 1T 1L:4 1L:4": [1, 1, 3, 3],
}


@pytest.mark.parametrize("algorithm", [PPO, TRPO, MaskablePPO, NStepRecurrentPPO, NStepMaskableA2C, NStepRecurrentA2C])
def test_boundaries(algorithm: Any) -> None:
    """All of them side by side, in an environment each: none reaches into another, and none into the next rollout."""
    kwargs = {} if algorithm in (NStepMaskableA2C, NStepRecurrentA2C) else {"batch_size": 28}
    env = vec_env(*BOUNDARIES, value=8, reset_value=100)
    model = build(algorithm, env, 2, n_steps=4, gamma=0.5, gae_lambda=1.0, **kwargs)
    no_masks = {"use_masking": False} if isinstance(model, MaskablePPO) else {}
    with reading_values(model):
        for _ in range(2):
            model.learn(4 * len(BOUNDARIES), reset_num_timesteps=False, **no_masks)
            np.testing.assert_array_equal(model.rollout_buffer.returns.T, list(BOUNDARIES.values()))


def test_dictionary_observations() -> None:
    class Dict(gym.ObservationWrapper):
        def __init__(self, env: gym.Env):
            super().__init__(env)
            self.observation_space = spaces.Dict(a=env.observation_space, b=env.observation_space)

        def observation(self, observation: Any) -> Any:
            return {"a": observation, "b": -observation}

        def action_masks(self) -> np.ndarray:
            return self.unwrapped.action_masks()

    venv = DummyVecEnv([lambda: Dict(Masks())] * 2)
    for model, expected in (
        (NStepMaskableA2C("MultiInputPolicy", venv, return_horizon=2), NStepMaskableDictRolloutBuffer),
        (
            MaskablePPO("MultiInputPolicy", venv, n_steps=5, rollout_buffer_class=NStepMaskableDictRolloutBuffer),
            NStepMaskableDictRolloutBuffer,
        ),
    ):
        assert type(model.learn(20).rollout_buffer) is expected
    venv = DummyVecEnv([lambda: Dict(Masks(masks=False))] * 2)
    for algorithm in (NStepRecurrentA2C, NStepRecurrentPPO):
        model = algorithm("MultiInputLstmPolicy", venv, n_steps=5, return_horizon=2, policy_kwargs=SMALL_LSTM)
        assert type(model.learn(20).rollout_buffer) is NStepRecurrentDictRolloutBuffer
    kwargs = {"n_steps": 8, "batch_size": 16, "rollout_buffer_kwargs": {"return_horizon": 2}}
    for algorithm in (PPO, TRPO):
        model = algorithm("MultiInputPolicy", venv, rollout_buffer_class=NStepDictRolloutBuffer, **kwargs).learn(20)
        assert model.rollout_buffer.mean_window < 2


# A2C


@pytest.mark.parametrize("use_masking", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"use_rms_prop": False},
        {"n_steps": 1, "gae_lambda": 0.9, "vf_coef": 0.25, "max_grad_norm": 0.1, "gamma": 0.9},
        {"normalize_advantage": True, "rms_prop_eps": 1e-3},
        {"ent_coef": 0.01, "learning_rate": lambda progress: 1e-3 * progress},
        {"policy_kwargs": {"optimizer_class": th.optim.SGD, "net_arch": [4]}},
    ],
)
def test_without_a_masked_action_it_is_a2c(kwargs: dict[str, Any], use_masking: bool) -> None:
    """Not to the last bit: a row's part of the gradient is multiplied by a ratio of 1, give or take a rounding."""
    arguments = {"seed": 3, "device": "cpu", **kwargs}
    a2c = A2C("MlpPolicy", masks(3, masks=False), **arguments).learn(450)
    ours = NStepMaskableA2C("MlpPolicy", masks(3, masks=False), **arguments).learn(450, use_masking=use_masking)
    assert ours._n_updates == a2c._n_updates
    th.testing.assert_close(parameters(ours), parameters(a2c), rtol=1e-4, atol=1e-5)


def test_without_a_masked_action_it_is_a2c_with_n_step_targets() -> None:
    action_space = spaces.MultiDiscrete([2, 2])
    arguments = {"n_steps": 8, "seed": 3, "device": "cpu"}
    buffer = {"rollout_buffer_class": NStepRolloutBuffer, "rollout_buffer_kwargs": {"return_horizon": [2, 3, 4]}}
    a2c = A2C("MlpPolicy", masks(3, masks=False, action_space=action_space), **arguments, **buffer).learn(450)
    ours = NStepMaskableA2C(
        "MlpPolicy", masks(3, masks=False, action_space=action_space), return_horizon=[2, 3, 4], **arguments
    ).learn(450)
    th.testing.assert_close(parameters(ours), parameters(a2c), rtol=1e-4, atol=1e-5)


class Definition(BaseCallback):
    """Writes down what is lived, and says what the gradient of the coming update has to be, from the definition."""

    def _on_rollout_start(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        now = self.locals
        names = ("obs_tensor", "actions", "rewards", "dones", "values", "action_masks")
        step = {name: th.as_tensor(now[name]).clone() for name in names if now.get(name) is not None}
        step["starts"] = np.array(self.model._last_episode_starts, dtype=np.float32)
        step["states"] = getattr(self.model, "_last_lstm_states", None)
        self.steps.append(step)
        return True

    def _on_rollout_end(self) -> None:
        observations = th.as_tensor(self.model._last_obs)
        state: tuple[Any, ...] = ()
        if isinstance(self.model, RecurrentPPO):
            state = self.model._last_lstm_states.vf, th.as_tensor(self.model._last_episode_starts, dtype=th.float32)
        with th.no_grad():
            self.last_values = self.model.policy.predict_values(observations, *state).flatten().tolist()

    def column(self, name: str, env: int) -> th.Tensor:
        return th.as_tensor(np.array([step[name][env] for step in self.steps]))

    def gradient(self, horizon: int, split: int) -> th.Tensor:
        model, losses = self.model, []
        for env in range(model.n_envs):
            rewards, values, dones = (
                self.column(name, env).flatten().tolist() for name in ("rewards", "values", "dones")
            )
            ends = [TERMINATED if done else CONTINUES for done in dones]
            rows = list(map(Row, rewards, values, ends))
            targets = reference.targets(rows, self.last_values[env], model.gamma, horizon, model.gae_lambda)
            latents = self.column("obs_tensor", env)
            pi = vf = latents
            if isinstance(model, RecurrentPPO):
                cut = split % len(rows) if split // len(rows) == env else 0
                pi = self.through_time(model.policy.lstm_actor, "pi", env, cut)
                vf = self.through_time(model.policy.lstm_critic, "vf", env, cut)
            logits = model.policy.action_net(model.policy.mlp_extractor.forward_actor(pi))
            new_values = model.policy.value_net(model.policy.mlp_extractor.forward_critic(vf)).flatten()
            for t, action in enumerate(self.column("actions", env).flatten().tolist()):
                allowed = list(range(N_ACTIONS))
                if isinstance(model, MaskablePPO):
                    allowed = np.flatnonzero(self.steps[t]["action_masks"][env]).tolist()
                log_probs = dict(zip(allowed, logits[t, allowed].log_softmax(dim=0), strict=True))
                entropy = -sum(log_prob.exp() * log_prob for log_prob in log_probs.values())
                losses.append(
                    -(targets[t] - values[t]) * log_probs[action]
                    - model.ent_coef * entropy
                    + model.vf_coef * (targets[t] - new_values[t]) ** 2
                )
        parts = th.autograd.grad(th.stack(losses).mean(), list(model.policy.parameters()))
        return th.cat([part.flatten() for part in parts])

    def through_time(self, lstm: th.nn.LSTM, which: str, env: int, cut: int) -> th.Tensor:
        """One row after another, from the state that the rollout began with, without gradient through row ``cut``."""
        outputs = []
        for t, step in enumerate(self.steps):
            if t in (0, cut):
                state = tuple(part[:, env : env + 1] for part in getattr(step["states"], which))
            if step["starts"][env]:
                state = tuple(th.zeros_like(part) for part in state)
            output, state = lstm(th.as_tensor(step["obs_tensor"][env]).reshape(1, 1, -1), state)
            outputs.append(output.flatten())
        return th.stack(outputs)


@pytest.mark.parametrize("algorithm", [NStepMaskableA2C, NStepRecurrentA2C])
@pytest.mark.parametrize(
    ("n_steps", "horizon", "lam"), [(1, 1, 1.0), (7, 3, 1.0), (7, 1, 1.0), (7, 3, 0.9), (5, 5, 1.0)]
)
def test_gradient_of_each_update(algorithm: Any, n_steps: int, horizon: int, lam: float) -> None:
    is_recurrent = algorithm is NStepRecurrentA2C
    model = algorithm(
        "MlpLstmPolicy" if is_recurrent else "MlpPolicy",
        masks(masks=not is_recurrent),
        n_steps=n_steps,
        return_horizon=horizon,
        gae_lambda=lam,
        gamma=0.9,
        ent_coef=0.01,
        learning_rate=0.02,
        max_grad_norm=1e9,
        policy_kwargs=SMALL_LSTM if is_recurrent else {"net_arch": [8]},
        seed=1,
        device="cpu",
    )
    definition = Definition()
    train, splits = model.train, set()

    def checked_train() -> None:
        random_state = np.random.get_state()
        split = np.random.randint(n_steps * 2)  # as the recurrent buffer is about to draw it
        np.random.set_state(random_state)
        expected = definition.gradient(horizon, split)
        train()
        actual = th.cat([p.grad.flatten() for p in model.policy.parameters()])
        th.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-5)
        splits.add(split)

    model.train = checked_train
    model.learn(10 * n_steps * 2, callback=definition)
    assert model._n_updates == 10
    assert len(splits) > 1  # the gradient was cut at one row and at another


@pytest.mark.parametrize("algorithm", [NStepMaskableA2C, NStepRecurrentA2C])
def test_arguments_are_those_of_a2c(algorithm: Any) -> None:
    ours, a2c = inspect.signature(algorithm).parameters, inspect.signature(A2C).parameters
    shared = [name for name in ours if name in a2c and name != "kwargs"]
    assert shared[:11] == list(a2c)[:11]
    assert all(ours[name].default == a2c[name].default for name in shared)
    learn = [inspect.signature(cls.learn).parameters for cls in (algorithm, A2C)]
    for name in ("total_timesteps", "callback", "log_interval", "tb_log_name"):
        assert learn[0][name].default == learn[1][name].default
    policy = "MlpLstmPolicy" if algorithm is NStepRecurrentA2C else "MlpPolicy"
    for argument in ("batch_size", "n_epochs", "clip_range", "clip_range_vf", "target_kl", "carry_over", "correction"):
        with pytest.raises(ValueError, match=f"{argument}: {algorithm.__name__} has no such argument"):
            algorithm(policy, masks(), **{argument: 2})
    for horizon in (0, 1.5, [1]):
        with pytest.raises(ValueError, match="return_horizon: expected"):
            algorithm(policy, masks(), return_horizon=horizon)
    with pytest.raises(ValueError, match="normalize_advantage: expected"):
        algorithm(policy, masks(1), n_steps=1, normalize_advantage=True)
    algorithm(policy, masks(2), n_steps=1, normalize_advantage=True)  # two rows have a spread


def test_a_buffer_class_is_refused() -> None:
    class Other(MaskableRolloutBuffer):
        pass

    with pytest.raises(ValueError, match=r"rollout_buffer_class: expected None, got .*Other"):
        NStepMaskableA2C("MlpPolicy", masks(), rollout_buffer_class=Other)


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(NStepMaskableA2C, MaskablePPO), (NStepRecurrentA2C, RecurrentPPO), (NStepRecurrentPPO, RecurrentPPO)],
)
def test_zips(tmp_path: Path, ours: Any, stock: Any) -> None:
    """sb3-contrib opens ours, and ours opens sb3-contrib's, with another number of environments too."""
    policy = "MlpPolicy" if stock is MaskablePPO else "MlpLstmPolicy"
    model = ours(policy, masks(2, masks=False), n_steps=5, return_horizon=2, device="cpu").learn(20)
    model.save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert b"sb3_nstep" not in archive.read("data")
    opened = stock.load(tmp_path / "model.zip", device="cpu")
    assert th.equal(parameters(opened), parameters(model))
    again = ours.load(tmp_path / "model.zip", masks(3, masks=False), device="cpu", return_horizon=[1, 2, 3]).learn(30)
    assert again.rollout_buffer.mean_window < 3
    assert again.rollout_buffer.return_horizon == [1, 2, 3]
    with pytest.raises(ValueError, match="return_horizon: expected"):
        ours.load(tmp_path / "model.zip", return_horizon=0)
    with pytest.raises(ValueError, match=r"rollout_buffer_kwargs: expected none, got .*N is return_horizon"):
        ours.load(tmp_path / "model.zip", rollout_buffer_kwargs={"return_horizon": 7})
    with pytest.raises(ValueError, match="rollout_buffer_class: expected None"):
        ours.load(tmp_path / "model.zip", rollout_buffer_class=RolloutBuffer)

    stock(policy, masks(2, masks=False), n_steps=5, n_epochs=7, batch_size=2, device="cpu").save(tmp_path / "stock.zip")
    model = ours.load(tmp_path / "stock.zip", masks(2, masks=False), device="cpu", return_horizon=2).learn(20)
    assert model._n_updates == (2 if ours is not NStepRecurrentPPO else 14)


def test_logged_values() -> None:
    model = NStepMaskableA2C("MlpPolicy", masks(), n_steps=5, return_horizon=4, device="cpu").learn(40)
    lengths = []
    for starts in model.rollout_buffer.episode_starts.T:
        for t in range(5):
            to_end = next((i for i in range(1, 5 - t) if starts[t + i]), 5 - t)
            lengths.append(min(4, to_end))
    assert model.logger.name_to_value["train/n_step_mean"] == np.mean(lengths)
    assert model.logger.name_to_value["train/n_updates"] == 4


def test_only_this_module_imports_sb3_contrib() -> None:
    code = "import sys, sb3_nstep, sb3_nstep.buffers, sb3_nstep.targets; sys.exit('sb3_contrib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
