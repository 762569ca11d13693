"""The estimators, as pure functions of arrays. numpy only.

One convention throughout: arrays are ``[T, E]``, T rows (one environment step each) of E environments, and N is the
horizon, the number of rows a target looks ahead before it bootstraps. As in Stable-Baselines3, ``episode_starts[t]``
is true where row t is the first of an episode, ``last_dones`` says whether the last row ended one, and ``last_values``
is V of the observation after the last row. m_t is 0 where row t ended its episode, else 1.

One primitive, :func:`windowed_sum`, carries every estimator; its weights carry the ends of the episodes into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float64]
Horizon: TypeAlias = int | Sequence[int] | NDArray[np.integer[Any]]
# multiply(weight, term, out=None): weights first, for a weight of exactly 0 has to win over any term
Multiply: TypeAlias = Callable[..., Floats]

# Elements worked on at a time: the five float64 arrays of this size that are in use stay in a core's second-level cache
_BLOCK_SIZE = 32768
_CACHE_LINE = 64  # bytes


class Rollout(NamedTuple):
    """What targets are made of."""

    rewards: Array  # r [T, E], with γ V(final observation) folded in at time limits, as SB3 does it
    values: Array  # V(s_t) [T, E]
    episode_starts: Array  # [T, E], true where row t is the first of an episode
    last_values: Array  # [E], V of the observation after the last row
    last_dones: Array  # [E], true where the last row ended an episode


def n_step_targets(
    rewards: ArrayLike,
    values: ArrayLike,
    episode_starts: ArrayLike,
    last_values: ArrayLike,
    last_dones: ArrayLike,
    *,
    gamma: float,
    horizon: Horizon,
    gae_lambda: float = 1.0,
    bootstrap_values: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """
    N-step bootstrapped targets of every row, each environment (column) on its own:

        G_t = r_t + γ r_{t+1} + … + γ^{k-1} r_{t+k-1} + γ^k B,      k = min(N, rows to the end of the episode or of T)

    with B = V(s_{t+k}) inside an episode, 0 after a termination, V(final observation) after a time limit. With
    ``gae_lambda`` < 1, the λ-return truncated to the same window. Computed in float64.
    Sutton & Barto, Reinforcement Learning: An Introduction (2018), sections 7.1 and 12.3.

    :param rewards: r ``[T, E]``
    :param values: V(s_t) ``[T, E]``
    :param episode_starts: ``[T, E]``, true where row t is the first of an episode
    :param last_values: V of the observation after the last row ``[E]``
    :param last_dones: ``[E]``, true where the last row ended an episode
    :param gamma: discount factor γ, in [0, 1]
    :param horizon: N ≥ 1 in environment steps, or one per environment
    :param gae_lambda: λ, in [0, 1]
    :param bootstrap_values: ``[T, E]``, V(final observation) at rows cut by a time limit, 0 elsewhere (not read at rows
        that end no episode). ``None``: γ V(final observation) is already part of the reward, as SB3 does it
    :return: targets ``[T, E]``
    :raises ValueError: where a shape or a parameter is off
    """
    rewards, values = np.asarray(rewards), np.asarray(values)
    episode_starts, last_dones = np.asarray(episode_starts, dtype=bool), np.asarray(last_dones, dtype=bool)
    last_values = np.asarray(last_values)
    if rewards.ndim != 2:
        raise ValueError(f"rewards: expected the shape [T, E], got {rewards.shape}")
    for name, array, shape in (
        ("values", values, rewards.shape),
        ("episode_starts", episode_starts, rewards.shape),
        ("last_values", last_values, rewards.shape[1:]),
        ("last_dones", last_dones, rewards.shape[1:]),
    ):
        if array.shape != shape:
            raise ValueError(f"{name}: expected the shape {shape} beside rewards {rewards.shape}, got {array.shape}")
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name}: expected a number in [0, 1], got {factor!r}")
    if bootstrap_values is not None:
        bootstrap_values = np.asarray(bootstrap_values, dtype=np.float64)
        if bootstrap_values.shape != rewards.shape:
            raise ValueError(f"bootstrap_values: expected the shape {rewards.shape}, got {bootstrap_values.shape}")
        ended = np.concatenate([episode_starts[1:], last_dones[np.newaxis]])
        with np.errstate(invalid="ignore"):
            rewards = rewards + _multiply(np.where(ended, gamma, 0.0), bootstrap_values)
    rollout = Rollout(rewards, values, episode_starts, last_values, last_dones)
    horizon = check_horizon(horizon, rewards.shape[1])
    targets = np.empty(rewards.shape, dtype=np.float32)
    fill_targets(targets, rollout, gamma=gamma, horizon=horizon, gae_lambda=gae_lambda)
    return targets


def fill_targets(out: Array, rollout: Rollout, *, gamma: float, horizon: Horizon, gae_lambda: float) -> None:
    """:func:`n_step_targets` of arguments that need no checks, written to ``out`` ``[T, E]``."""
    _blockwise(partial(_targets, gamma=gamma, gae_lambda=gae_lambda), horizon, out, *rollout)


def vtrace_advantages(rollout: Rollout, rho: Array, *, gamma: float, horizon: Horizon, gae_lambda: float) -> Floats:
    """
    V-trace inside the window: x_t = ρ_t (r_t + γ m_t V(s_{t+1}) − V(s_t)), w_t = γ λ m_t c_t with c_t = ρ_t.

    The sum is the advantage that multiplies ∇ log π (it holds ρ_t already), and V(s_t) plus the sum is the target.
    Espeholt et al., IMPALA, https://arxiv.org/abs/1802.01561, equation 1.

    :param rollout: its ``values`` are one V per row, wherever the row occurs
    :param rho: ρ_t = min(1, π(a_t | s_t) / μ(a_t | s_t)) ``[T, E]``
    :param gamma: γ
    :param horizon: N, or one per environment
    :param gae_lambda: λ
    :return: advantages ``[T, E]``
    """
    out = np.empty(rho.shape)
    _blockwise(partial(_vtrace, gamma=gamma, gae_lambda=gae_lambda), horizon, out, *rollout, rho)
    return out


def window_lengths(episode_starts: Array, last_dones: Array, horizon: Horizon) -> Array:
    """How many rows each row's window holds: ``[T, E]``, min(N, rows to the end of the episode or of T)."""
    rows = np.arange(len(episode_starts))[:, np.newaxis]
    ends = np.concatenate([episode_starts[1:], [last_dones]]).astype(bool)
    ends[-1] = True
    last = np.minimum.accumulate(np.where(ends, rows, len(rows))[::-1])[::-1]
    return np.minimum(last - rows + 1, horizon)


def windowed_sum(x: Floats, w: Floats, horizon: Horizon) -> Floats:
    """
    Σ_{i<N} (Π_{j<i} w_{t+j}) x_{t+i} for every row t, where rows past the end count as x = 0.

    Computed by doubling, as in exponentiation by squaring: the window of a + b rows is the window of a rows and then,
    weighted by the product of its weights, the window of the b rows that follow. That is log₂ N passes over the arrays
    with neither a division nor a difference. A weight of exactly 0 ends the sum: nothing behind it, NaN and infinity
    included, reaches the row.

    :param x: terms ``[T, E]``
    :param w: weights ``[T, E]``
    :param horizon: N ≥ 1, or one per environment
    :return: ``[T, E]``
    """
    out = np.empty(x.shape)
    _blockwise(_windowed_sum, check_horizon(horizon, x.shape[1]), out, x, w)
    return out


def check_horizon(horizon: Any, n_envs: int, name: str = "horizon") -> int | NDArray[np.int64]:
    """
    Validate a horizon.

    :param horizon: an int, or one int per environment
    :param n_envs: number of environments E
    :param name: what the argument is called where it was given
    :return: an int where all environments agree, else an array ``[E]``
    :raises ValueError: if it is neither, has another length than E, or is below 1 somewhere
    """
    if _is_length(horizon):
        return int(horizon)
    is_listing = isinstance(horizon, (Sequence, np.ndarray)) and np.ndim(horizon) == 1
    if not is_listing or not all(map(_is_length, horizon)):
        raise ValueError(f"{name}: expected an int ≥ 1, or one such int per environment, got {horizon!r}")
    if len(horizon) != n_envs:
        raise ValueError(f"{name}: expected one int for each of {n_envs} environments, got {horizon!r}")
    horizons = np.array(horizon, dtype=np.int64)
    return int(horizons[0]) if (horizons == horizons[0]).all() else horizons


def _is_length(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def _fill_discounts(out: Floats, episode_starts: Array, last_dones: Array, gamma: float) -> None:
    """γ m_t ``[T, E]``: what the value after row t is worth at row t."""
    out[:-1] = episode_starts[1:]
    out[-1] = last_dones
    out *= -gamma
    out += gamma


def _targets(horizon: int, multiply: Multiply, *rollout: Array, gamma: float, gae_lambda: float) -> Floats:
    """
    Inside a window, 1 − λ of a row's discount bootstraps and λ of it looks on. Behind the window's last row all of it
    bootstraps: from the last values where that is row T − 1, and from what follows the window elsewhere.
    """
    rewards, values, episode_starts, last_values, last_dones = rollout
    scratch = x, w, following, *_ = _scratch(rewards.shape)
    _fill_discounts(w, episode_starts, last_dones, gamma)
    x[:] = rewards
    if gae_lambda != 1.0:
        x[:-1] += multiply((1.0 - gae_lambda) * w[:-1], values[1:])
        x[-1] += multiply((1.0 - gae_lambda) * w[-1], last_values)
        w *= gae_lambda
    x[-1] += multiply(w[-1], last_values)
    following[:] = values
    return _extended(horizon, multiply, scratch)


def _vtrace(horizon: int, multiply: Multiply, *rollout_and_rho: Array, gamma: float, gae_lambda: float) -> Floats:
    rewards, values, episode_starts, last_values, last_dones, rho = rollout_and_rho
    discounts = np.empty(rho.shape)
    _fill_discounts(discounts, episode_starts, last_dones, gamma)
    next_values = np.concatenate([values[1:], last_values[np.newaxis]])
    deltas = rewards + multiply(discounts, next_values) - values
    return _windowed_sum(horizon, multiply, rho * deltas, multiply(gae_lambda * discounts, rho))


def _windowed_sum(horizon: int, multiply: Multiply, x: Floats, w: Floats) -> Floats:
    scratch = _scratch(x.shape)
    scratch[0][:], scratch[1][:], scratch[2][:] = x, w, x
    return _extended(horizon - 1, multiply, scratch)


def _extended(n_more: int, multiply: Multiply, scratch: list[Floats]) -> Floats:
    """
    Σ_{i<n} (Π_{j<i} w_{t+j}) x_{t+i} + (Π_{j<n} w_{t+j}) following_{t+n}, with n = ``n_more``, where rows past the end
    count as 0. Of the five arrays ``scratch`` the first three come as x, w and what follows, and all are overwritten.
    """
    # total: sums over windows of n = 1, 2, 4, … rows; weight: products over those of them that a row follows
    total, weight, result, product, spare = scratch
    n_rows = len(result)
    n, n_left, weight = 1, min(n_more, n_rows), weight[:-1]  # n_left windows of n rows are to be put before the result
    while n_left:
        followed = n_rows - n
        product, ahead = product[:followed], total[:followed]
        # The window that is not one of a pair; both of the last pair, which takes less than to make one of the two
        for _ in range(n_left if n_left <= 3 else n_left % 2):
            np.add(ahead, multiply(weight, result[n:], out=product), out=result[:followed])
            result[followed:] = total[followed:]
        if n_left <= 3:
            break
        np.add(ahead, multiply(weight, total[n:], out=product), out=ahead)
        weight, spare = multiply(weight[:-n], weight[n:], out=spare[: followed - n]), weight
        n, n_left = 2 * n, n_left // 2
    return result


def _scratch(shape: tuple[int, ...]) -> list[Floats]:
    """Five arrays that begin on a cache line where their size allows it: a product takes a third less time there."""
    memory = np.empty(5 * math.prod(shape) + _CACHE_LINE // 8)
    start = -memory.ctypes.data % _CACHE_LINE // 8
    return list(memory[start : start + 5 * math.prod(shape)].reshape(5, *shape))


def _blockwise(estimate: Callable[..., Floats], horizon: Horizon, out: Array, *arrays: Array) -> None:
    """``out[:] = estimate(N, multiply, *arrays)``, for sets of columns that share one N and fit into the cache."""
    n_rows, n_envs = out.shape
    if n_rows == 0:
        return
    width = max(1, _BLOCK_SIZE // n_rows)
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(horizon, int) and n_envs <= width:
            out[:] = _minding_zeros(partial(estimate, horizon), *arrays)
            return
        for n, columns in _column_sets(horizon, n_envs, width):
            out[:, columns] = _minding_zeros(partial(estimate, n), *(array[..., columns] for array in arrays))


def _column_sets(horizon: Horizon, n_envs: int, width: int) -> Iterator[tuple[int, slice | Array]]:
    if isinstance(horizon, int):
        yield from ((horizon, slice(start, start + width)) for start in range(0, n_envs, width))
    else:
        for n in np.unique(horizon).tolist():
            members = np.flatnonzero(np.equal(horizon, n))
            yield from ((n, members[start : start + width]) for start in range(0, len(members), width))


def _minding_zeros(estimate: Callable[..., Floats], *arrays: Array) -> Floats:
    """
    0 · ∞ is NaN: the plain product would carry what stands behind an episode's end into a row before it. Such a NaN
    stays where it arrives: the plain product is tried, and the slower one only if some of the outcome is not finite.
    """
    result = estimate(np.multiply, *arrays)
    # The sum of squares is the fastest pass over an array that NaN and infinity do not survive
    return result if math.isfinite(np.vdot(result, result)) else estimate(_multiply, *arrays)


def _multiply(weight: Floats, term: Array, out: Floats | None = None) -> Floats:
    """The product in which 0 times anything is 0."""
    product: Floats = np.multiply(weight, term, out=out)
    product[weight == 0.0] = 0.0
    return product
