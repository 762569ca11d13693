"""A picture of the rows and the windows of a rollout buffer. The only module that imports matplotlib."""

from numbers import Integral

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sb3_nstep.buffers import NStepMixin
from sb3_nstep.targets import Array, window_lengths


def plot_windows(buffer: NStepMixin, row: int = 0, axes: Axes | None = None) -> Axes:
    """
    Draw a rollout, each environment on a line of its own: its rows, their rewards where they are not 0, a bar where an
    episode ends, and the window of one row with what it bootstraps from and the target G.

    For a buffer whose targets are computed: ``model.rollout_buffer`` after ``learn()``, or in ``_on_rollout_end`` of a
    callback. To the reward of a row cut by a time limit SB3 has added γ V(final observation), and a new ``learn()`` in
    the middle of an episode ends it likewise. V-trace's G is drawn with the rewards and V that were recorded, of which
    it is not the sum.

    :param buffer: an N-step buffer, of any algorithm. A rollout of more than 80 rows is drawn small: narrow the limits
        of the axes then
    :param row: whose window is drawn, counted from the rollout's first row; rows that waited for it are negative
    :param axes: where to draw; ``None``: on a figure of its own
    :return: the axes
    :raises ValueError: if it is no such buffer, holds no targets, or not this row
    """
    if not isinstance(buffer, NStepMixin):
        raise ValueError(f"buffer: expected an N-step buffer, as model.rollout_buffer, got {buffer!r}")
    if not isinstance(row, Integral) or isinstance(row, bool):
        raise ValueError(f"row: expected a whole number, got {row!r}")
    if not buffer._has_targets:
        raise ValueError("buffer: expected one whose targets are computed, got one in the middle of a rollout")
    rewards, values, returns, episode_starts = (
        _in_time(buffer, name) for name in ("rewards", "values", "returns", "episode_starts")
    )
    n_rows, n_envs = rewards.shape
    n_waiting = n_rows - buffer.buffer_size
    if not -n_waiting <= row < buffer.buffer_size:
        raise ValueError(f"row: expected a number from {-n_waiting} to {buffer.buffer_size - 1}, got {row!r}")
    ended = np.concatenate([episode_starts[1:], buffer._last_dones[np.newaxis]]).astype(bool)
    values = np.concatenate([values, buffer._last_values[np.newaxis]])
    lengths = window_lengths(episode_starts, buffer._last_dones, buffer._horizon)[row + n_waiting]
    horizons = np.broadcast_to(buffer._horizon, n_envs)

    if axes is None:
        _, axes = plt.subplots(
            figsize=(np.clip(2.5 + 0.35 * n_rows, 5.0, 30.0), 1.2 + 0.55 * n_envs), layout="constrained"
        )
    numbers = np.arange(n_rows) - n_waiting
    for env in range(n_envs):
        axes.plot(numbers, np.full(n_rows, env), "o", color="0.6", markersize=4)
        axes.vlines(numbers[ended[:, env]] + 0.5, env - 0.3, env + 0.3, color="black", linewidth=2)
        for t in np.flatnonzero(rewards[:, env]):
            axes.annotate(
                f"{rewards[t, env]:.3g}", (numbers[t], env - 0.15), ha="center", va="bottom", fontsize="small"
            )

        start, behind = row + n_waiting, row + n_waiting + lengths[env]
        (line,) = axes.plot(numbers[start:behind], np.full(lengths[env], env), "o-", linewidth=5, alpha=0.6)
        target = f"G = {returns[start, env]:.3g}"
        if not ended[behind - 1, env]:
            text = f"V = {values[behind, env]:.3g}"
            if buffer.carry_over and lengths[env] < horizons[env]:
                text, target = "waits", ""
            position = row + lengths[env]
            axes.plot(position, env, "o", color=line.get_color(), markerfacecolor="white")
            axes.annotate(text, (position, env + 0.12), ha="center", va="top", color=line.get_color(), fontsize="small")
        axes.annotate(target, (1.02, env), xycoords=("axes fraction", "data"), va="center", color=line.get_color())
    if n_waiting:
        axes.axvline(-0.5, color="0.6", linestyle="dotted")
    axes.set(
        title=f"window of row {row}, N = {', '.join(map(str, horizons if np.ptp(horizons) else horizons[:1]))}",
        xlabel="environment step of the rollout",
        xlim=(-n_waiting - 0.7, buffer.buffer_size + 0.5),
        ylim=(n_envs - 0.4, -0.6),
        yticks=range(n_envs),
        yticklabels=[f"environment {env}" for env in range(n_envs)],
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _in_time(buffer: NStepMixin, name: str) -> Array:
    """The rows of a column ``[rows, E]``, also after ``get()`` has flattened them."""
    shape: tuple[int, int] = buffer._all_rows("rewards").shape
    rows: Array = buffer._all_rows(name)
    if buffer._is_env_major and rows.shape != shape:
        rows = rows.reshape(shape[::-1]).T
    rows = rows.reshape(shape)
    return rows
