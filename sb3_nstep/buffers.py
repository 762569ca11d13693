"""Rollout buffers whose targets look N environment steps ahead, whatever the length T of the rollout."""

import warnings
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from sb3_nstep.targets import (
    Array,
    Horizon,
    Rollout,
    check_horizon,
    fill_targets,
    vtrace_advantages,
    window_lengths,
)

# What RolloutBuffer.get() flattens, and what it leaves as it is
_HANDED_OUT = ("observations", "actions", "values", "log_probs", "advantages", "returns")
_COLUMNS = (*_HANDED_OUT, "rewards", "episode_starts")


class NStepMixin(RolloutBuffer):
    """
    Gives a rollout buffer N-step targets. Takes all of the buffer's arguments and, by keyword:

    :param return_horizon: N, the environment steps that a target looks ahead before it bootstraps: an int, or one per
        environment. ``None``: the length T of the rollout. Read at each ``reset()``: set the attribute to change N from
        the next rollout on, for the rows that wait by then too
    :param carry_over: ``False``: windows are shortened at the rollout's end, and every row is handed out with its
        rollout. ``True``: the last max(N) − 1 rows of a rollout wait until their windows are whole and are handed out
        with a later one, T rows per environment each time, fewer at first (see ``n_ready``)
    :raises ValueError: if ``return_horizon`` is neither an int ≥ 1 nor a list of one for each environment

    From ``reset()`` until ``get()``, the arrays are the T rows of the rollout under way, as in SB3, and the waiting
    rows live apart. From ``get()`` on, those that SB3 flattens are the rows handed out, oldest first. T = N = 3::

        row          … -2 -1 |  0  1  2
        this rollout         |  ├─────┤    self.rewards, self.values, … until get()
        handed out     ├────────┤          self.values, self.returns, … from get() on
        wait                       ├──┤    for the next rollout
    """

    def __init__(self, *args: Any, return_horizon: Horizon | None = None, carry_over: bool = False, **kwargs: Any):
        # Before the parent's constructor, which calls reset(). Counts with an underscore are rows per environment
        self.return_horizon = return_horizon
        self.carry_over = carry_over
        self._n_waiting = 0
        self._storage: dict[str, Any] = {}  # with carry_over, [lead + T, E, …]: waiting rows, then the rollout's
        self._has_targets = False  # and with them the next two, of the rollout's end
        self._last_values: Array = np.empty(0)
        self._last_dones: Array = np.empty(0, dtype=bool)
        self._seam: tuple[Array, Array] | None = None  # the same, of the rollout that the waiting rows belong to
        self._n_loaded = 0  # rows that load_state_dict() has left for the next reset()
        self._has_warned = False
        super().__init__(*args, **kwargs)

    @property
    def n_ready(self) -> int:
        """How many rows ``get()`` hands out, over all environments: those with whole windows. 0 during a rollout."""
        return self._n_complete * self.n_envs if self.full else 0

    @property
    def n_stale(self) -> int:
        """How many of these rows waited since an earlier rollout. They come first."""
        return min(self._n_waiting * self.n_envs, self.n_ready)

    @property
    def mean_window(self) -> float:
        """Mean number of rows in the windows of the rows handed out."""
        lengths = window_lengths(self._all_rows("episode_starts"), self._last_dones, self._horizon)
        return float(lengths[: self._n_complete].mean())

    def reset(self) -> None:
        """
        Begin a rollout. Rows without a whole window wait on, unless the last rollout was not finished (a callback
        stopped it): then a step is missing behind them, and they are dropped.
        """
        n_kept, self._n_loaded = self._n_loaded, 0
        if not n_kept:
            n_kept, self._seam = self._n_kept, None
            if n_kept:
                self._gather()
                self._seam = self._last_values, self._last_dones
        super().reset()
        self._has_targets = False
        self._n_waiting = n_kept
        horizon = self.buffer_size if self.return_horizon is None else self.return_horizon
        self._horizon = check_horizon(horizon, self.n_envs, name="return_horizon")
        self._longest = int(np.max(self._horizon))
        self._is_stock = not self.carry_over and int(np.min(self._horizon)) >= self.buffer_size
        if self.carry_over:
            self._lead = max(n_kept, self._longest - 1)
            for name in _COLUMNS:
                column = self.__dict__[name]
                self._storage[name] = _each(self._with_lead, column, self._storage.get(name, column))
                self.__dict__[name] = _each(self._rollout_part, self._storage[name])
        elif self._longest > self.buffer_size and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"return_horizon={self.return_horizon!r}, but carry_over=False shortens all windows at the end of the "
                f"rollout, which is {self.buffer_size} steps long: no target looks further ahead than that"
            )

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: Array) -> None:
        """
        Compute the targets, ``returns``, and targets − V, ``advantages``. May be called again after an edit of rewards.

        :param last_values: V of the observations after the last row, one per environment
        :param dones: whether the last row ended an episode ``[E]``
        """
        self._last_dones = np.array(dones, dtype=bool)
        self._last_values = last_values.numpy(force=True).flatten()
        self._has_targets = True
        if self._is_stock:
            super().compute_returns_and_advantage(last_values, dones)
            return
        self._gather()
        self._join()
        rollout, returns = self._rollout(), self._all_rows("returns")
        fill_targets(returns, rollout, **self._estimator())
        np.subtract(returns, rollout.values, out=self._all_rows("advantages"))

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        """
        Hand out the rows with whole windows.

        :param batch_size: rows per minibatch, shuffled. ``None``: all rows at once, oldest first, in tensors that share
            the buffer's memory, which the next rollout leaves alone. Where no window is shorter than the rollout, and
            none is carried over, SB3 hands them out: shuffled, and copied
        :raises RuntimeError: with ``carry_over``, if there is none yet
        """
        if self._is_stock:
            return super().get(batch_size)
        if not self.full:
            raise RuntimeError(f"The rollout is not finished: it holds {self.pos} of {self.buffer_size} steps")
        if self.n_ready == 0:
            raise RuntimeError(
                f"No row has its whole window yet: carry_over=True with return_horizon={self.return_horizon} completes "
                f"none in the first rollouts of {self.buffer_size} steps. NStepA2C makes no update then; another "
                "algorithm needs carry_over=False, or n_steps ≥ return_horizon"
            )
        if not self.generator_ready:
            self._gather()
            for name in _HANDED_OUT:
                self.__dict__[name] = _each(lambda rows: _flatten(rows[: self._n_complete]), self._all_rows(name))
            self.generator_ready = True
        return self._batches(batch_size)

    def to_torch(self, array: Array, copy: bool = False) -> th.Tensor:
        """As in SB3, but without a copy where none is asked for: what ``get()`` selects is new, or all there is."""
        return super().to_torch(array, copy)

    def drop(self) -> None:
        """Forget all rows, of this rollout and of those before it."""
        self._has_targets = False
        self._n_loaded = 0

    @property
    def is_loaded(self) -> bool:
        """Whether the rows that wait for the next rollout are those of :meth:`load_state_dict`."""
        return self._n_loaded > 0

    def end_streams(self) -> None:
        """
        Let no window span this moment: the next rollout does not follow on the last. For a change of environments that
        does not show as an episode's start; the others (a new ``learn()``) are seen without it.
        """
        self._n_loaded = 0
        if self.carry_over and self.full and self._has_targets:
            self._gather()
            self._bootstrap(-1, ~self._last_dones, self._last_values)
            self._last_dones[:] = True

    def unfinished(self) -> tuple[th.Tensor | dict[str, th.Tensor], th.Tensor]:
        """Observations and actions of the rows that wait for longer than this rollout, ``[rows · E, …]``."""
        rows = slice(self._n_complete, self._n_waiting)
        observations = _each(lambda column: self.to_torch(_flatten(column[rows])), self._all_rows("observations"))
        return observations, self.to_torch(_flatten(self._all_rows("actions")[rows]).astype(np.float32, copy=False))

    def vtrace(self, values: Array, log_probs: Array) -> None:
        """
        Replace ``advantages`` and ``returns`` by V-trace's, once ``get()`` was called.

        :param values: V under the current policy of all rows acted before this rollout, those handed out and then those
            of ``unfinished()``, ``[rows · E]``
        :param log_probs: log π of their actions, likewise
        """
        rollout, stale = self._rollout(), slice(0, self._n_waiting)
        rollout = rollout._replace(values=rollout.values.copy())
        rollout.values[stale] = values.reshape(-1, self.n_envs)
        log_ratio = log_probs.reshape(-1, self.n_envs) - self._all_rows("log_probs")[stale]
        rho = np.ones(rollout.values.shape)
        rho[stale] = np.exp(np.minimum(log_ratio, 0.0))
        advantages = vtrace_advantages(rollout, rho, **self._estimator())[: self._n_complete]
        self.advantages[:] = _flatten(advantages)
        self.returns[:] = _flatten(rollout.values[: self._n_complete] + advantages)

    def state_dict(self) -> dict[str, Array]:
        """
        The rows that wait for the next rollout, ``[rows, E, …]``, and V and dones ``[E]`` where theirs ended: what a
        checkpoint keeps. Nothing in the middle of a rollout, whose steps would be missing behind them.
        """
        has_just_begun = self.is_loaded or (self.pos == 0 and not self.full)
        n_kept = self._n_loaded or (self._n_waiting if has_just_begun else self._n_kept)
        if n_kept == 0:
            return {}
        if not has_just_begun:
            self._gather()
        last_values, last_dones = self._seam if has_just_begun and self._seam else (self._last_values, self._last_dones)
        state = {"last_values": last_values, "last_dones": last_dones}
        for name in _COLUMNS:
            rows = self._storage[name] if self.is_loaded else self._all_rows(name)
            for key, array in rows.items() if isinstance(rows, dict) else [(None, rows)]:
                kept = array[:n_kept] if has_just_begun else array[len(array) - n_kept :]
                state[name if key is None else f"{name}.{key}"] = kept.copy()
        return state

    def load_state_dict(self, state: dict[str, Array]) -> None:
        """
        Let the next rollout follow on rows that :meth:`state_dict` gave.

        :raises ValueError: if they are of other environments than this buffer's
        """
        if not state or not self.carry_over:
            return
        for name in _COLUMNS:
            column = self.__dict__[name]
            rows = {key: state[f"{name}.{key}"] for key in column} if isinstance(column, dict) else state[name]
            for array, expected in zip(_arrays(rows), _arrays(column), strict=True):
                if array.shape[1:] != expected.shape[1:] or array.dtype != expected.dtype:
                    raise ValueError(
                        f"state: expected {name} of the shape (rows, {', '.join(map(str, expected.shape[1:]))}) and of "
                        f"{expected.dtype}, got {array.shape} of {array.dtype}"
                    )
            self._storage[name] = rows
        self._seam = state["last_values"], state["last_dones"]
        self._n_loaded = len(state["rewards"])

    @property
    def _n_kept(self) -> int:
        """How many rows wait on when this rollout is over."""
        if not (self.carry_over and self.full and self._has_targets):
            return 0
        return self._n_waiting + self.buffer_size - self._n_complete

    @property
    def _n_complete(self) -> int:
        lag = self._longest - 1 if self.carry_over else 0
        return max(0, self._n_waiting + self.buffer_size - lag)

    @property
    def _is_env_major(self) -> bool:
        """Whether ``get()`` flattens one environment after another, as SB3 does."""
        return self._is_stock

    def _all_rows(self, name: str) -> Any:
        """The waiting rows and then the rollout's."""
        if not self.carry_over:
            return self.__dict__[name]
        return _each(lambda storage: storage[self._lead - self._n_waiting :], self._storage[name])

    def _rollout(self) -> Rollout:
        rewards, values, episode_starts = map(self._all_rows, ("rewards", "values", "episode_starts"))
        return Rollout(rewards, values, episode_starts, self._last_values, self._last_dones)

    def _estimator(self) -> dict[str, Any]:
        return {"gamma": self.gamma, "horizon": self._horizon, "gae_lambda": self.gae_lambda}

    def _with_lead(self, rollout: Array, storage: Array) -> Array:
        """
        An array for the waiting rows, which are taken from the end of ``storage``, and behind them for those to come.
        A new one, as SB3's are: a batch, or what a callback has kept, may share the memory of the old.
        """
        new = np.zeros((self._lead + self.buffer_size, *rollout.shape[1:]), dtype=rollout.dtype)
        new[self._lead - self._n_waiting : self._lead] = storage[len(storage) - self._n_waiting :]
        return new

    def _rollout_part(self, storage: Array) -> Array:
        return storage[self._lead :]

    def _gather(self) -> None:
        """Callbacks may have bound an array of their own to ``rewards`` or another column: take over what it says."""
        if self.carry_over and not self.generator_ready:
            for name, storage in self._storage.items():
                self.__dict__[name] = _each(self._taken_over, self.__dict__[name], storage)

    def _taken_over(self, column: Array, storage: Array) -> Array:
        rollout = self._rollout_part(storage)
        if column.base is not storage or column.strides != rollout.strides:  # other memory, or read in another order
            rollout[:] = column
        return rollout

    def _join(self) -> None:
        """
        A stream that restarts although its last row ended no episode was reset from outside, by a new ``learn()`` or
        ``set_env``: its waiting rows bootstrap from the value recorded there.
        """
        if self._seam is not None:
            last_values, last_dones = self._seam
            first = self._all_rows("episode_starts")[self._n_waiting]
            first[last_dones] = 1.0
            self._bootstrap(self._n_waiting - 1, first.astype(bool) & ~last_dones, last_values)
            self._seam = None

    def _bootstrap(self, row: int, ended: Array, next_values: Array) -> None:
        """Fold γ V into the rewards of the row, as SB3 does at time limits."""
        self._all_rows("rewards")[row, ended] += self.gamma * next_values[ended]

    def _batches(self, batch_size: int | None) -> Generator[RolloutBufferSamples, None, None]:
        if batch_size is None:
            everything: Any = slice(None)
            yield self._get_samples(everything)
        else:
            indices = np.random.permutation(self.n_ready)
            for start in range(0, self.n_ready, batch_size):
                yield self._get_samples(indices[start : start + batch_size])


class NStepRolloutBuffer(NStepMixin):
    """
    :class:`~stable_baselines3.common.buffers.RolloutBuffer` with N-step targets, for ``rollout_buffer_class=`` of any
    on-policy algorithm and for :class:`~sb3_nstep.NStepA2C`. Arguments: those of ``RolloutBuffer``, in its order, then
    ``return_horizon`` and ``carry_over`` (:class:`NStepMixin`).
    """


class NStepDictRolloutBuffer(NStepMixin, DictRolloutBuffer):  # type: ignore[misc]
    """:class:`NStepRolloutBuffer` for dictionary observations."""


def _each(function: Callable[..., Any], column: Any, *others: Any) -> Any:
    """Apply to an array, or key by key where observations are a dictionary."""
    if isinstance(column, dict):
        return {key: function(array, *(other[key] for other in others)) for key, array in column.items()}
    return function(column, *others)


def _arrays(column: Any) -> list[Array]:
    return list(column.values()) if isinstance(column, dict) else [column]


def _flatten(rows: Array) -> Array:
    """``[rows, E, …]`` → ``[rows · E, …]`` in the order of time, ``[rows, E]`` → ``[rows · E, 1]`` as SB3 has it."""
    n_rows, n_envs, *shape = rows.shape
    return rows.reshape(n_rows * n_envs, *(shape or (1,)))
