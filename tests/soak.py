"""
Train for long on a cheap environment, check on the way what must hold for every row, and say what memory is left over.

``make soak``, or with fewer steps ``make soak ARGS=--steps=100000``.
"""

import argparse
import gc
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch as th
from gymnasium import spaces
from rich.progress import track
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_nstep import NStepA2C

N_ENVS, N_STEPS, HORIZON = 64, 5, 12
MOST_GROWTH = 0.02


class Numbered(VecEnv):
    """Short episodes, some cut by a time limit. An observation is its own number, counted in each environment."""

    def __init__(self) -> None:
        super().__init__(N_ENVS, spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Discrete(2))
        self.rng = np.random.default_rng(0)
        self.tags = np.zeros(N_ENVS)
        self.actions = np.zeros(N_ENVS, dtype=int)

    def observe(self) -> np.ndarray:
        # A bounded number for the network, and the tag, which float32 holds exactly up to 2**24
        return np.stack([np.cos(self.tags), self.tags], axis=1)

    def reset(self) -> VecEnvObs:
        self.tags += 1
        return self.observe()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        self.tags += 1
        terminated, truncated = self.rng.random((2, N_ENVS)) < 0.04
        dones = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(N_ENVS)]
        final = self.observe()
        for env in np.flatnonzero(dones):
            infos[env]["terminal_observation"] = final[env]
            infos[env]["TimeLimit.truncated"] = bool(truncated[env] and not terminated[env])
            infos[env]["episode"] = {"r": 1.0, "l": 25, "t": 0.0}
        self.tags[dones] += 1
        return self.observe(), self.actions.astype(np.float32), dones, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * N_ENVS

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        return [False] * N_ENVS


class FirstOnly(th.nn.Module):
    """The network does not see the tag."""

    features_dim = 1

    def __init__(self, observation_space: spaces.Space) -> None:
        super().__init__()

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return observations[:, :1]


class Checking(BaseCallback):
    """Every row acted is handed out once, in order, with a finite target from a window within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.acted: list[np.ndarray] = []
        self.n_rows = 0

    def _on_training_start(self) -> None:
        buffer, get = self.model.rollout_buffer, type(self.model.rollout_buffer).get

        def checked_get(batch_size: int | None = None) -> Any:
            for batch in get(buffer, batch_size):
                tags = batch.observations[:, 1].numpy().reshape(-1, N_ENVS)
                expected, self.acted = self.acted[: len(tags)], self.acted[len(tags) :]
                np.testing.assert_array_equal(tags, expected)
                assert len(self.acted) == HORIZON - 1
                assert batch.returns.isfinite().all() and batch.advantages.isfinite().all()
                assert 1.0 <= buffer.mean_window <= HORIZON
                self.n_rows += tags.size
                yield batch

        buffer.get = checked_get

    def _on_step(self) -> bool:
        self.acted.append(self.model._last_obs[:, 1].copy())
        return True


def resident_megabytes() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def make() -> NStepA2C:
    kwargs = {"features_extractor_class": FirstOnly, "net_arch": [8]}
    return NStepA2C(
        "MlpPolicy", Numbered(), n_steps=N_STEPS, return_horizon=HORIZON, policy_kwargs=kwargs, device="cpu", seed=0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000_000, help="environment steps (default: %(default)s)")
    args = parser.parse_args()
    th.set_num_threads(1)

    for _ in range(3):  # what torch and the allocator keep for themselves is there by now
        make().learn(20_000)
    models = resident_megabytes()
    for _ in range(10):
        make().learn(20_000)
    models_after = resident_megabytes()

    model, checking = make(), Checking()
    chunk = args.steps // 20
    model.learn(chunk, checking)
    start = resident_megabytes()
    for i in track(range(19), f"{args.steps:,} steps"):
        # The same streams, or, every second time, new ones: the waiting rows end where they were, and are still due
        model.learn(chunk, checking, reset_num_timesteps=i % 2 == 1)
    end = resident_megabytes()
    growth, growth_of_models = end / start - 1.0, models_after / models - 1.0
    print(f"{checking.n_rows:,} rows, each handed out once; {model._n_updates:,} updates")
    print(f"resident memory: {start:.1f} MB after a twentieth, {end:.1f} MB at the end ({growth:+.2%})")
    print(
        f"ten models made and dropped: {models:.1f} MB before, {models_after:.1f} MB behind ({growth_of_models:+.2%})"
    )
    return int(max(growth, growth_of_models) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
