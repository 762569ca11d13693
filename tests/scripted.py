"""
An environment that does what a script says, a critic that reads V off its observations, and a record of training.

A script is a string of steps, or a list of them: the reward, then how the step ends (nothing: the episode goes on,
``T``: terminated, ``L``: time limit, ``TL``: both), then, behind a colon, V of the observation that the step leads to.
``"1 0:5 2L:7"`` pays 1, 0 and 2, and cuts the episode there; V of its final observation is 7. It starts over for ever.
"""

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_nstep import NStepA2C, NStepDictRolloutBuffer, NStepRolloutBuffer

Script = str | Sequence[Any]
HEIGHT, WIDTH = 36, 40  # the smallest images that NatureCNN takes, not square


class Step(NamedTuple):
    reward: float
    terminated: bool
    truncated: bool
    value: float | None  # V of the observation that the step leads to; None: whatever observations carry by default

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


def parse(script: Script) -> list[Step]:
    tokens = script.split() if isinstance(script, str) else [str(token) for token in script]
    steps = []
    for token in tokens:
        match = re.fullmatch(r"([-+]?(?:[\d.e]+|inf)|nan)(T?)(L?)(?::(.+))?", token)
        assert match, f"not a step: {token!r}"
        reward, terminated, truncated, value = match.groups()
        steps.append(Step(float(reward), bool(terminated), bool(truncated), None if value is None else float(value)))
    return steps


class Arrays(NamedTuple):
    """The arguments of ``n_step_targets``, one column per script."""

    rewards: np.ndarray
    values: np.ndarray
    episode_starts: np.ndarray
    last_values: np.ndarray
    last_dones: np.ndarray
    bootstrap_values: np.ndarray


def arrays(*scripts: Script, value: float = 0.0, reset_value: float | None = None) -> Arrays:
    """
    What a rollout of these scripts holds.

    :param value: V of the observations for which a script names none
    :param reset_value: V of the observations that begin an episode; ``None``: ``value``
    """
    reset_value = value if reset_value is None else reset_value
    columns = []
    for script in scripts:
        steps = parse(script)
        led_to = [value if step.value is None else step.value for step in steps]
        values = [reset_value] + [reset_value if step.ended else v for step, v in zip(steps, led_to, strict=True)]
        cut = [v if step.truncated and not step.terminated else 0.0 for step, v in zip(steps, led_to, strict=True)]
        ended = [step.ended for step in steps]
        columns.append(([step.reward for step in steps], values[:-1], [True, *ended[:-1]], values[-1], ended[-1], cut))
    return Arrays(*(np.array(column).T for column in zip(*columns, strict=True)))


class Lived(NamedTuple):
    """One step of an environment, as it tells it itself."""

    tag: int  # of the observation acted on; each observation of an environment has its own
    action: np.ndarray
    reward: float
    ended: bool
    final_tag: int  # of the observation it led to, before any reset


class ScriptedEnv(gym.Env):
    """
    :param script: see the head of this file
    :param first_tag: number of the first observation; the next has the next number, and so on over all episodes
    :param value: V of the observations for which the script names none; ``None``: their number
    :param reset_value: V of the observations that begin an episode; ``None``: as ``value`` says
    :param kind: ``"vector"``: [number, V]; ``"dict"``: a vector, and beside it an image; ``"image"`` with its channel
        last and ``"channels_first"``; ``"discrete"``: the last three carry the number only
    :param reward_type: type of the rewards handed out
    :param same_array: hand out one array again and again, overwritten at each step
    """

    def __init__(
        self,
        script: Script,
        *,
        first_tag: int = 0,
        value: float | None = None,
        reset_value: float | None = None,
        kind: str = "vector",
        action_space: spaces.Space | None = None,
        reward_type: Callable[[float], Any] = float,
        same_array: bool = False,
    ):
        self.script = parse(script)
        self.value, self.reset_value = value, value if reset_value is None else reset_value
        self.kind, self.reward_type, self.same_array = kind, reward_type, same_array
        self.observation_space = OBSERVATION_SPACES[kind]
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.tag = first_tag - 1
        self.n_steps = 0
        self.running = False
        self.lived: list[Lived] = []
        self._array: np.ndarray | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.running = True
        return self._next_observation(self.reset_value), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.running, "stepped before a reset"
        step = self.script[self.n_steps % len(self.script)]
        self.n_steps += 1
        acted_on = self.tag
        observation = self._next_observation(self.value if step.value is None else step.value)
        self.running = not step.ended
        self.lived.append(Lived(acted_on, np.array(action), step.reward, step.ended, self.tag))
        return observation, self.reward_type(step.reward), step.terminated, step.truncated, {}

    def _next_observation(self, value: float | None) -> Any:
        self.tag += 1
        observation = observe(self.kind, self.tag, value)
        if not self.same_array:
            return observation
        if self._array is None:
            self._array = observation
        self._array[...] = observation
        return self._array


OBSERVATION_SPACES: dict[str, spaces.Space] = {
    "vector": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "image": spaces.Box(0, 255, (HEIGHT, WIDTH, 1), np.uint8),
    "channels_first": spaces.Box(0, 255, (1, HEIGHT, WIDTH), np.uint8),
    "discrete": spaces.Discrete(1024),
}
OBSERVATION_SPACES["dict"] = spaces.Dict({key: OBSERVATION_SPACES[key] for key in ("image", "vector")})


def observe(kind: str, tag: int, value: float | None = None) -> Any:
    """The observation with this number. The first two pixels of an image are its digits to the base 256."""
    if kind == "discrete":
        return np.int64(tag)
    if kind == "dict":
        return {key: observe(key, tag, value) for key in ("image", "vector")}
    if kind == "vector":
        return np.array([tag, tag if value is None else value], dtype=np.float32)
    image = np.zeros(OBSERVATION_SPACES[kind].shape, dtype=np.uint8)
    image.flat[:2] = divmod(tag, 256)
    return image


def tags_of(observations: Any) -> np.ndarray:
    """The numbers of a batch of observations, of any kind; images may have been transposed."""
    if isinstance(observations, dict):
        tags = tags_of(observations["vector"])
        np.testing.assert_array_equal(tags_of(observations["image"]), tags)
        return tags
    rows = np.asarray(observations).reshape(len(observations), -1).astype(np.int64)
    return rows[:, 0] if rows.shape[1] <= 2 else 256 * rows[:, 0] + rows[:, 1]


class ReadingPolicy(ActorCriticPolicy):
    """Acts from its two logits, and reads V off the second number of a ``"vector"`` observation."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"net_arch": [], **kwargs})

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        actions, _, log_prob = super().forward(obs * 0.0, deterministic)
        return actions, self.predict_values(obs), log_prob

    def evaluate_actions(self, obs: Any, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        _, log_prob, entropy = super().evaluate_actions(obs * 0.0, actions)
        return self.predict_values(obs), log_prob, entropy

    def predict_values(self, obs: Any) -> th.Tensor:
        return obs[:, 1:2]


class Row(NamedTuple):
    """One row of a batch that ``train`` was given."""

    tag: int
    action: np.ndarray
    target: float
    advantage: float


def record(model: BaseAlgorithm) -> list[list[Row]]:
    """The batches that ``train`` takes from the buffer, appended to while the model learns."""
    get = model.rollout_buffer.get
    batches: list[list[Row]] = []

    def recording_get(batch_size: int | None = None) -> Iterator[Any]:
        for batch in get(batch_size):
            observations = batch.observations
            if isinstance(observations, dict):
                observations = {key: column.numpy() for key, column in observations.items()}
            columns = (batch.actions.numpy(), batch.returns.tolist(), batch.advantages.tolist())
            batches.append(list(map(Row, tags_of(observations).tolist(), *columns)))
            yield batch
            if getattr(model, "correction", None) == "vtrace":  # replaces them while the batch is in use
                columns = (batches[-1], model.rollout_buffer.returns.flat, model.rollout_buffer.advantages.flat)
                batches[-1] = [row._replace(target=g, advantage=a) for row, g, a in zip(*columns, strict=True)]

    model.rollout_buffer.get = recording_get
    return batches


def vec_env(
    *scripts: Script, vec_env_class: type[VecEnv] = DummyVecEnv, kind: str = "vector", first_tag: int = 0, **kwargs: Any
) -> VecEnv:
    """One environment per script. Their observations are numbered from 0, 1000, 2000 … on (discrete: 256 apart)."""
    if vec_env_class is SubprocVecEnv:
        # torch is imported once, by the server from which SB3 forks its workers, and not by each of them
        multiprocessing.set_forkserver_preload(["stable_baselines3.common.vec_env.subproc_vec_env"])
    apart = 256 if kind == "discrete" else 1000
    return vec_env_class(
        [
            partial(ScriptedEnv, script, first_tag=first_tag + apart * index, kind=kind, **kwargs)
            for index, script in enumerate(scripts)
        ]
    )


SHORTENING = ["A2C", "PPO", "NStepA2C"]  # windows are shortened at the rollout's end
CARRYING = "NStepA2C, carrying over"
SURFACES = [*SHORTENING, CARRYING]


def surface(name: str, horizon: Any) -> dict[str, Any]:
    """The arguments of :func:`build` for one of the places where users meet the N-step targets."""
    if name.startswith("NStepA2C"):
        return {"algorithm": NStepA2C, "return_horizon": horizon, "carry_over": name == CARRYING}
    return {
        "algorithm": {"A2C": A2C, "PPO": PPO}[name],
        "rollout_buffer_class": NStepRolloutBuffer,
        "rollout_buffer_kwargs": {"return_horizon": horizon},
    }


def build(venv: VecEnv, algorithm: type[BaseAlgorithm] = NStepA2C, **kwargs: Any) -> Any:
    """A model that acts at random and never changes, whose V is read off the observations, unless told otherwise."""
    defaults = {"policy": ReadingPolicy, "n_steps": 4, "gamma": 0.5, "learning_rate": 0.0, "device": "cpu", "seed": 0}
    kwargs = {**defaults, **kwargs}
    if isinstance(venv.observation_space, spaces.Dict) and kwargs.get("rollout_buffer_class") is NStepRolloutBuffer:
        kwargs["rollout_buffer_class"] = NStepDictRolloutBuffer
    if algorithm is PPO:
        n_rows = kwargs["n_steps"] * venv.num_envs
        kwargs = {"gae_lambda": 1.0, "n_epochs": 1, "batch_size": n_rows, "normalize_advantage": False, **kwargs}
    return algorithm(kwargs.pop("policy"), venv, **kwargs)


class Run(NamedTuple):
    model: Any
    batches: list[list[Row]]
    lived: list[list[Lived]]  # of each environment

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    @property
    def targets(self) -> dict[int, float]:
        """By the number of the observation."""
        assert len({row.tag for row in self.rows}) == len(self.rows), "a row was trained on twice"
        return {row.tag: row.target for row in sorted(self.rows)}

    @property
    def advantages(self) -> dict[int, float]:
        return {row.tag: row.advantage for row in sorted(self.rows)}


def run(venv: VecEnv, n_rollouts: int, **kwargs: Any) -> Run:
    """Learn for some rollouts, and close the environments. Arguments: those of :func:`build`."""
    with closing(venv):
        model = build(venv, **kwargs)
        batches = record(model)
        model.learn(n_rollouts * model.n_steps * venv.num_envs)
        return Run(model, batches, model.env.get_attr("lived"))
