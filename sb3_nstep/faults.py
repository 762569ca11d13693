"""What may go wrong in a rollout, and how it ends: with an error that says where, and nothing left running."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_nstep.targets import Array

_CLOSING_SECONDS = 5.0  # for workers to close their environments; whoever takes longer is killed


class WorkerError(RuntimeError):
    """The worker of an environment has died, or does not answer."""


class NotFiniteError(FloatingPointError, ValueError):
    """A number in a rollout, or the norm of a gradient, is not finite. A ValueError too, as torch's would be."""


@contextmanager
def watched_workers(env: VecEnv | None, timeout: float | None) -> Iterator[None]:
    """
    Watch over the workers of a ``SubprocVecEnv``, below any wrappers; nothing is done for other environments. When one
    dies, SB3 shows EOFError, or waits for ever, as does the ``close()`` that follows. Here, all are closed by then.

    :param env: the environments
    :param timeout: seconds that a worker may take for an answer; ``None``: as long as it likes
    :raises WorkerError: a worker has died, or took longer; or the environments are closed already
    """
    subproc = env and env.unwrapped
    if not isinstance(subproc, SubprocVecEnv):
        yield
        return
    if subproc.closed:
        raise WorkerError("The environments are closed: expected open ones, which set_env() takes")
    remotes = subproc.remotes
    subproc.remotes = workers = tuple(
        _Worker(index, remote, process, timeout)
        for index, (remote, process) in enumerate(zip(remotes, subproc.processes, strict=True))
    )
    try:
        yield
    except WorkerError:
        _close(workers)
        for remote in remotes:
            remote.close()
        subproc.waiting, subproc.closed = False, True
        raise
    finally:
        subproc.remotes = remotes


class _Pipe(Connection):
    """
    Our end of the pipe to a worker. The other end may be open in its siblings (``fork``) and its children too, and does
    not close with its death then: neither an answer nor the rest of one is waited for longer than the worker lives.
    """

    def __init__(self, connection: Connection, process: BaseProcess):
        super().__init__(os.dup(connection.fileno()))
        self.deadline: float | None = None  # by time.monotonic()
        self._ready = select.poll()
        for handle in (self.fileno(), process.sentinel):
            self._ready.register(handle, select.POLLIN)

    def _recv(self, size: int, *_: Any) -> Any:
        """Of Connection: so many bytes, which may come in pieces."""
        return super()._recv(size, self._read_in_time)  # type: ignore[misc]

    def _read_in_time(self, handle: int, size: int) -> bytes:
        seconds = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        ready = self._ready.poll(seconds and float(1000 * seconds))
        if not ready:
            raise TimeoutError
        if handle not in dict(ready):  # the worker has ended, and all that it sent is read
            raise EOFError
        return os.read(handle, size)


class _Worker:
    """The pipe to the worker of an environment, whose errors say which one it is and how it has ended."""

    def __init__(self, index: int, connection: Connection, process: BaseProcess, timeout: float | None):
        self.process = process
        self._index = index
        # Windows has pipes of whole messages, which no sibling holds, and no poll
        self._connection = connection if sys.platform == "win32" else _Pipe(connection, process)
        self._timeout = timeout

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._died() from error

    def recv(self) -> Any:
        try:
            return self.recv_until(None if self._timeout is None else time.monotonic() + self._timeout)
        except TimeoutError as error:
            self.process.kill()
            raise WorkerError(
                f"Environment {self._index} hangs: its worker did not answer within {self._timeout} seconds "
                "(worker_timeout) and was killed. Give the model new environments, with set_env()"
            ) from error
        except (EOFError, OSError) as error:  # OSError: in the middle of an answer
            raise self._died() from error

    def recv_until(self, deadline: float | None) -> Any:
        if isinstance(self._connection, _Pipe):
            self._connection.deadline = deadline
        elif not wait([self._connection, self.process.sentinel], deadline and max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        return self._connection.recv()

    def _died(self) -> WorkerError:
        self.process.join(_CLOSING_SECONDS)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            how = "closed its pipe"
        elif code < 0:
            known = {int(known) for known in signal.Signals}  # those between SIGRTMIN and SIGRTMAX have no name
            how = f"was ended by {signal.Signals(-code).name if -code in known else f'signal {-code}'}"
            if -code == signal.SIGKILL:
                how += " (if nobody did that, the system was out of memory: try fewer environments)"
        else:
            how = f"ended with exit code {code}" + (", and has printed its traceback" if code == 1 else "")
        return WorkerError(
            f"Environment {self._index} has died: its worker {how}. Give the model new environments, with set_env(). "
            "To see an error where it happens, use DummyVecEnv"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _close(workers: tuple[_Worker, ...]) -> None:
    deadline = time.monotonic() + _CLOSING_SECONDS
    for worker in workers:
        with suppress(WorkerError):
            worker.send(("close", None))
    for worker in workers:
        with suppress(OSError, EOFError):
            while True:
                worker.recv_until(deadline)  # what it was asked for before: it could not send it otherwise
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()


def check_rollout(buffer: RolloutBuffer, next_observations: Any = None) -> None:
    """
    :param buffer: in the middle of a rollout or at its end, before its rows are handed out
    :param next_observations: of the row to come; ``None``: none is
    :raises NotFiniteError: a number is not finite: names the quantity, the environment and the row
    """
    for name, quantity in (
        ("observations", "the observation"),
        ("rewards", "the reward"),
        ("values", "V"),
        ("log_probs", "the log-probability of the action"),
    ):
        rows = getattr(buffer, name)
        for key, array in rows.items() if isinstance(rows, dict) else [(None, rows)]:
            _check(array[: buffer.pos], 0, quantity, key)
    if next_observations is not None:
        is_dict = isinstance(next_observations, dict)
        for key, array in next_observations.items() if is_dict else [(None, next_observations)]:
            _check(array[np.newaxis], buffer.pos, "the observation", key)


def check_terminal_observation(observation: Any, environment: int, row: int) -> None:
    """
    :param observation: V of which is in the target of this row
    :raises NotFiniteError: a number is not finite
    """
    for key, array in observation.items() if isinstance(observation, dict) else [(None, observation)]:
        _check(np.asarray(array)[np.newaxis, np.newaxis], row, "the terminal_observation", key, environment)


def _check(rows: Array, first_row: int, quantity: str, key: str | None, first_environment: int = 0) -> None:
    if np.issubdtype(rows.dtype, np.floating) and not (is_finite := np.isfinite(rows)).all():
        where = tuple(np.argwhere(~is_finite)[0].tolist())
        raise NotFiniteError(
            f"Environment {first_environment + where[1]}, row {first_row + where[0]} of the rollout: {quantity}"
            f"{'' if key is None else f' {key!r}'} is {rows[where]}. No update was made with it (check_finite)"
        )


def check_gradients(optimizer: th.optim.Optimizer, *_: Any) -> None:
    """
    A hook for ``register_step_pre_hook``.

    :raises NotFiniteError: the norm of the gradient is not finite
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = th.linalg.vector_norm(th.stack([th.linalg.vector_norm(gradient) for gradient in gradients]))
    if not th.isfinite(norm):
        raise NotFiniteError(
            f"The norm of the gradient is {norm.item()}, and the numbers in the rollout are finite. The step was not "
            "made: the parameters are those of the last update. Try a smaller learning rate (check_finite)"
        )
