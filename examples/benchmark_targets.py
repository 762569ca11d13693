"""
How long the targets of a rollout take, beside SB3's: ``compute_returns_and_advantage`` of the buffers, as A2C calls it,
in turns in one process. Prints microseconds (medians) and how many times faster ours is (median over the turns).
"""

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_nstep import NStepRolloutBuffer

SHAPES = [(5, 16), (128, 64), (2048, 64)]  # T, E
HORIZONS = [5, 64, 512]


def filled(buffer: RolloutBuffer) -> Callable[[], None]:
    """Random rewards and values, an episode's end in fifty rows; returns the call to be timed."""
    rng = np.random.default_rng(0)
    shape = (buffer.buffer_size, buffer.n_envs)
    for _ in range(1 + 512 // buffer.buffer_size if getattr(buffer, "carry_over", False) else 1):
        buffer.reset()
        buffer.rewards[:], buffer.values[:] = rng.normal(size=(2, *shape))
        buffer.episode_starts[:] = rng.random(shape) < 0.02
        buffer.full = True
        last_values, dones = th.zeros(buffer.n_envs, 1), np.zeros(buffer.n_envs, dtype=bool)
        buffer.compute_returns_and_advantage(last_values, dones)
    return lambda: buffer.compute_returns_and_advantage(last_values, dones)


def seconds(call: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns of each (default: 30)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="return_horizon=")  # N > T is a row of the table

    spaces_ = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
    print(
        "|    T |  E |   N | windows   |   SB3 µs |  ours µs | times faster |\n"
        + "|-----:" * 3
        + "|---"
        + "|---:" * 3
        + "|"
    )
    for n_steps, n_envs in SHAPES:
        sb3 = filled(RolloutBuffer(n_steps, *spaces_, n_envs=n_envs))
        repeats = max(2, 2_000 // n_steps)
        for horizon in HORIZONS:
            for carry_over in (False, True):
                ours = filled(
                    NStepRolloutBuffer(n_steps, *spaces_, n_envs=n_envs, return_horizon=horizon, carry_over=carry_over)
                )
                turns = np.array([[seconds(sb3, repeats), seconds(ours, repeats)] for _ in range(args.turns)])
                a, b = np.median(turns, axis=0) * 1e6
                windows = "carried" if carry_over else "shortened"
                ratio = np.median(turns[:, 0] / turns[:, 1])
                print(f"| {n_steps:4} | {n_envs:2} | {horizon:3} | {windows:9} | {a:8.1f} | {b:8.1f} | {ratio:12.2f} |")


if __name__ == "__main__":
    main()
