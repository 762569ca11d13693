"""Draws the figures of these pages: ``python docs/figures.py``. Wide enough for a telephone, and no wider."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch as th
from gymnasium import spaces

from sb3_nstep import NStepRolloutBuffer
from sb3_nstep.plotting import plot_windows

STATIC = Path(__file__).parent / "_static"
REWARDS = np.array([[0, 0], [1, 0], [0, 0], [0, 1], [1, 0], [0, 0]])
VALUES = np.array([[0.6, 0.8], [0.7, 0.9], [0.4, 0.9], [0.5, 1.0], [0.6, 0.3], [0.2, 0.4]])
STARTS = np.array([[1, 1], [0, 0], [0, 0], [0, 0], [0, 1], [0, 0]])  # in environment 1, step 3 ends an episode


def draw(name: str, n_steps: int, row: int, carry_over: bool) -> None:
    buffer = NStepRolloutBuffer(
        n_steps,
        spaces.Discrete(2),
        spaces.Discrete(2),
        gamma=0.9,
        n_envs=2,
        return_horizon=3,
        carry_over=carry_over,
    )
    zeros = np.zeros(2)
    for t, (reward, value, start) in enumerate(zip(REWARDS, VALUES, STARTS, strict=True)):
        if buffer.full:
            buffer.compute_returns_and_advantage(th.as_tensor(value), start)
            buffer.reset()
        buffer.add(zeros, zeros, reward, start, th.as_tensor(value), th.zeros(2))
        assert buffer.full == ((t + 1) % n_steps == 0)
    buffer.compute_returns_and_advantage(th.as_tensor([0.3, 0.4]), zeros)
    plt.rcParams["font.size"] = 11
    _, axes = plt.subplots(figsize=(5, 2.4), layout="constrained")
    plot_windows(buffer, row, axes)
    axes.figure.savefig(STATIC / f"{name}.png", dpi=160)


if __name__ == "__main__":
    STATIC.mkdir(exist_ok=True)
    draw("streams", n_steps=6, row=2, carry_over=False)
    draw("waiting", n_steps=3, row=-1, carry_over=True)
