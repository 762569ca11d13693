"""What all processes of the comparison share: the settings of a run, and files that survive a kill."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO


@dataclass(frozen=True)
class Run:
    arm: str
    seed: int
    algo: str
    env_id: str
    total_timesteps: int
    n_envs: int
    env_backend: str  # "native", "subproc" or "minatar"
    hyperparams: dict[str, Any]  # arguments of the algorithm
    last_file: ClassVar[str] = "game.gif"  # there is nothing left to do where it is

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def folder(self) -> str:
        return f"{self.arm}/seed_{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What makes two runs comparable, as it reads back from ``config.json``."""
        settings = asdict(self)
        return json.loads(json.dumps(settings | settings.pop("hyperparams"), default=lambda cls: cls.__name__))


class Status(NamedTuple):
    timesteps: int
    steps_per_second: float
    mean_return: float  # of the last 100 games, nan before the first has ended

    @property
    def text(self) -> str:
        mean_return = "n/a" if math.isnan(self.mean_return) else f"{self.mean_return:.2f}"
        return f"{self.steps_per_second:.0f} steps/s, mean return {mean_return}"


def check(args: argparse.Namespace, out: Path, make_run: Callable[[dict[str, Any]], Run]) -> None:
    """
    :param make_run: the run that would be started now, for the arm, the seed and the environment of these settings
    :raises ValueError: an arm or a seed is asked for twice, or ``out`` holds something else than such runs
    """
    for name in ("seeds", "arms"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise ValueError(f"--{name}: expected each one once, got {' '.join(map(str, values))}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, got the file {out}")
    configs = sorted(out.glob("**/seed_*/config.json"))
    if out.is_dir() and any(out.iterdir()) and not configs and not (out / ".lock").exists():
        raise ValueError(f"--out: expected an empty folder or earlier results, got {out}, which holds other files")
    for path in configs:
        got = json.loads(path.read_text())["settings"]
        try:
            expected = make_run(got).settings
        except KeyError:
            raise ValueError(f"--out: {path.parent} is of an arm unknown here: {got['arm']}") from None
        for name in expected | got:
            if expected.get(name) != got.get(name):
                raise ValueError(
                    f"--out: {path.parent} has other settings: {name}: "
                    f"expected {expected.get(name)}, got {got.get(name)}"
                )


def lock(folder: Path, timeout: float = 0.0) -> TextIO:
    """
    Lock ``folder`` for as long as the returned file is open; the lock dies with this process.

    :raises BlockingIOError: another process holds it after ``timeout`` seconds
    """
    lock_file = open(folder / ".lock", "a+")  # noqa: SIM115  open for as long as the lock is held
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock_file.seek(0)
            holder = lock_file.read()  # nothing, where it has only just begun to hold it
            if holder and time.monotonic() >= deadline:
                lock_file.close()
                raise BlockingIOError(f"{folder} is in use by process {holder}") from None
            time.sleep(0.1)
    lock_file.truncate(0)
    lock_file.write(str(os.getpid()))
    lock_file.flush()
    return lock_file
