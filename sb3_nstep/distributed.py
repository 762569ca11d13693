"""One model trained by several processes: :class:`~sb3_nstep.NStepA2C` within a torch.distributed process group."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch as th
import torch.distributed as dist
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
    ProgressBarCallback,
)
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize

from sb3_nstep.buffers import NStepMixin


@contextmanager
def process_group(timeout: float = 60.0) -> Iterator[int]:
    """
    Within the ``with`` block, the processes that ``torchrun`` started are one process group: gloo for tensors on the
    CPU, nccl for those on GPUs, of which each process gets its own. Without ``torchrun``, there is none.

    :param timeout: seconds that a process waits for another before it ends with an error
    :return: the rank of this process, 0 without ``torchrun``
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield 0
        return
    backend = "gloo"
    if th.cuda.is_available():
        th.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """The rank of this process in the process group, 0 where there is none."""
    return dist.get_rank() if _is_initialized() else 0


def n_ranks() -> int:
    """The number of processes in the process group, 1 where there is none."""
    return dist.get_world_size() if _is_initialized() else 1


class _Start(NamedTuple):
    """What rank 0 begins ``learn`` with, and all others with it."""

    parameters: bytes
    counts: dict[str, int]
    statistics: list[RunningMeanStd]
    arguments: tuple[int, bool]


class _Report(NamedTuple):
    """What a rank tells the others after a rollout."""

    n_steps: int
    is_stopped: bool
    n_ready: int
    infos: list[dict[str, Any]]  # of the episodes that ended, what SB3 logs of them
    dones: list[bool]
    statistics: list[RunningMeanStd]


class Ranks:
    """
    The processes that train one model, seen from one of them. Each has its own copy of the model and environments of
    its own; this keeps the copies equal. All ranks make the same calls in the same order.

    :param model: this process's
    :raises ValueError: on all ranks, if their models do not fit together
    """

    def __init__(self, model: A2C):
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._statistics = _statistics_of(model)
        self._statistics_before: list[RunningMeanStd] = []
        self._n_steps = 0
        self._ended: list[tuple[dict[str, Any], bool]] = []
        # Of other lengths, the means over ranks would not be means over rows
        settings = {name: getattr(model, name) for name in ("n_envs", "n_steps", "normalize_advantage")}
        settings["statistics of VecNormalize"] = [np.shape(each.mean) for each in self._statistics]
        self._expect_equal(settings)

    @classmethod
    def join(cls, model: A2C) -> "Ranks | None":
        """The ranks of the process group. ``None`` if there is none, or no other process in it."""
        return cls(model) if n_ranks() > 1 else None

    def start(self, total_timesteps: int, reset_num_timesteps: bool) -> tuple[int, bool]:
        """
        Begin as rank 0 does: parameters, buffers, state of the optimizer, counts, statistics of ``VecNormalize``.

        :param total_timesteps: of ``learn``
        :param reset_num_timesteps: of ``learn``
        :return: these two, as rank 0 has them
        """
        buffer: NStepMixin = self.model.rollout_buffer  # type: ignore[assignment]
        if buffer.is_loaded:
            buffer.drop()  # a checkpoint has those of one rank
        counts = ("num_timesteps", "_n_updates")
        file = io.BytesIO()
        if self.rank == 0:
            th.save(self.model.get_parameters(), file)
        start = _Start(
            file.getvalue(),
            {name: getattr(self.model, name) for name in counts},
            self._statistics,
            (total_timesteps, reset_num_timesteps),
        )
        message = [start]
        with _waiting():
            dist.broadcast_object_list(message, src=0)
        start = message[0]
        if self.rank > 0:
            parameters = th.load(io.BytesIO(start.parameters), map_location=self.model.device, weights_only=True)
            self.model.set_parameters(parameters, device=self.model.device)
            vars(self.model).update(start.counts)
        self._set_statistics(start.statistics)
        return start.arguments

    def quieten(self, callback: MaybeCallback, progress_bar: bool) -> tuple[MaybeCallback, bool]:
        """
        What is left of a callback here: rank 0 alone logs, evaluates, saves checkpoints and shows a progress bar.

        :param callback: of ``learn``
        :param progress_bar: of ``learn``
        """
        if self.rank > 0:
            self.model.set_logger(Logger(folder=None, output_formats=[]))
            return _on_all_ranks(callback), False
        if not progress_bar:
            return callback, False
        if not isinstance(callback, (list, BaseCallback)):
            callback = ConvertCallback(callback)
        return [*(callback if isinstance(callback, list) else [callback]), _ProgressBar()], False

    def count_step(self, infos: list[dict[str, Any]], dones: np.ndarray) -> None:
        """Count a step of the other ranks' environments too, for they make it as well."""
        self._n_steps += 1
        self.model.num_timesteps += (self.size - 1) * self.model.n_envs
        for info, done in zip(infos, dones, strict=True):
            if "episode" in info or (done and "is_success" in info):
                self._ended.append(({key: info[key] for key in ("episode", "is_success") if key in info}, bool(done)))

    def end_rollout(self, go_on: bool) -> bool:
        """
        Agree on what happened, and on what is next.

        :param go_on: whether this rank's callback lets it
        :return: whether all ranks' do
        :raises ValueError: on all ranks, if not all have as many rows for the update
        """
        buffer: NStepMixin = self.model.rollout_buffer  # type: ignore[assignment]
        infos, dones = [info for info, _ in self._ended], [done for _, done in self._ended]
        reports = self._all_told(_Report(self._n_steps, not go_on, buffer.n_ready, infos, dones, self._statistics))

        n_steps = [report.n_steps for report in reports]
        self.model.num_timesteps += (sum(n_steps) - self.size * self._n_steps) * self.model.n_envs
        for other in (report for index, report in enumerate(reports) if index != self.rank):
            self.model._update_info_buffer(other.infos, np.array(other.dones))
        self._n_steps, self._ended = 0, []
        ends = zip(*(report.statistics for report in reports), strict=True)
        self._set_statistics(list(map(merged, self._statistics_before, ends)))

        if any(report.is_stopped for report in reports):
            buffer.full = False  # where it was finished, too: its waiting rows are dropped on all ranks or on none
            return False
        if len({report.n_ready for report in reports}) > 1:
            raise ValueError(
                "return_horizon, carry_over: expected as many rows for an update on each rank, "
                f"got {[report.n_ready for report in reports]}"
            )
        return True

    def gather(self, rows: th.Tensor) -> th.Tensor:
        """The rows of all ranks, of which each has as many."""
        parts = [th.empty_like(rows) for _ in range(self.size)]
        with _waiting():
            dist.all_gather(parts, rows.contiguous())
        return th.cat(parts)

    def average_gradients(self) -> None:
        """Replace each gradient by its mean over the ranks, in one message."""
        gradients = [each.grad for each in self.model.policy.parameters() if each.grad is not None]
        flat = th.cat([gradient.reshape(-1) for gradient in gradients])
        with _waiting():
            dist.all_reduce(flat)
        flat /= self.size
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view(gradient.shape))
            start += gradient.numel()

    def _set_statistics(self, new: list[RunningMeanStd]) -> None:
        for mine, its in zip(self._statistics, new, strict=True):
            vars(mine).update(vars(its.copy()))
        self._statistics_before = [each.copy() for each in self._statistics]

    def _expect_equal(self, settings: dict[str, Any]) -> None:
        told = self._all_told(settings)
        for name in settings:
            if any(each[name] != told[0][name] for each in told):
                raise ValueError(f"{name}: expected the same on all ranks, got {[each[name] for each in told]}")

    def _all_told(self, mine: Any) -> list[Any]:
        told: list[Any] = [None] * self.size
        with _waiting():
            dist.all_gather_object(told, mine)
        return told


def merged(before: RunningMeanStd, after: Any) -> RunningMeanStd:
    """
    The statistics of all that several ranks have seen.

    :param before: what they had in common
    :param after: what each of them has now
    """
    # Moments about the earlier mean: of moments about 0 a small variance would not be left
    counts = np.array([each.count for each in after])
    shifts = np.stack([each.mean - before.mean for each in after])
    squares = np.stack([each.var for each in after]) + shifts**2
    result = before.copy()
    n_repeated = len(counts) - 1  # each rank's statistics hold the earlier ones
    result.count = counts.sum() - n_repeated * before.count
    shift = np.tensordot(counts, shifts, 1) / result.count
    square = (np.tensordot(counts, squares, 1) - n_repeated * before.count * before.var) / result.count
    result.mean = before.mean + shift
    result.var = np.maximum(square - shift**2, 0.0)
    return result


def _statistics_of(model: A2C) -> list[RunningMeanStd]:
    """Those of every ``VecNormalize`` around the training environments."""
    statistics: list[RunningMeanStd] = []
    env = model.get_env()
    while isinstance(env, VecEnvWrapper):
        if isinstance(env, VecNormalize):
            of_observations = vars(env).get("obs_rms", {})
            statistics += of_observations.values() if isinstance(of_observations, dict) else [of_observations]
            statistics.append(env.ret_rms)
        env = env.venv
    return statistics


def _on_all_ranks(callback: Any) -> Any:
    """The callback without those of SB3's that write, evaluate or show: they are rank 0's."""
    if isinstance(callback, list) or type(callback) is CallbackList:
        callbacks = callback if isinstance(callback, list) else callback.callbacks
        return CallbackList([left for each in callbacks if (left := _on_all_ranks(each)) is not None])
    if isinstance(callback, (CheckpointCallback, EvalCallback, ProgressBarCallback)):
        return None
    if isinstance(callback, EveryNTimesteps) and _on_all_ranks(callback.callback) is None:
        return None
    return callback


class _ProgressBar(ProgressBarCallback):
    """SB3's counts the environments of its own process."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._n_shown = self.num_timesteps

    def _on_step(self) -> bool:
        self.pbar.update(self.num_timesteps - self._n_shown)
        self._n_shown = self.num_timesteps
        return True


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _waiting() -> Iterator[None]:
    """Around what waits for the other ranks: torch's errors name an address and a port."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {dist.get_rank()}: another process of the group has ended, or kept this one waiting for longer than "
            "the group's timeout. The first error among the processes' outputs is the cause"
        ) from error
