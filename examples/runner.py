"""The queue of runs: a process each, some of them side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from stable_baselines3.common.utils import get_system_info

from runs import Run
from sb3_nstep.checkpoint import written_whole
from training import Finish, record_game, run_process

# Idle OpenMP threads of torch spin for milliseconds otherwise, on the cores that the environments need. Not to spin at
# all slows the network down: GNU's OpenMP, which torch brings on Linux, takes a number instead.
SHORT_SPIN = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
CORES = len(os.sched_getaffinity(0))
LINE_SECONDS = 30.0  # between two lines of a run where there is no terminal for a progress bar


def provenance() -> dict[str, Any]:
    """Recorded with each start of a run, but no settings: a run may be resumed with others."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **get_system_info(print_info=False)[0],
        "ale-py": version("ale-py"),
        "cores": CORES,
        "commit": commit,
    }


def note_start(run: Run, out: Path, made_with: dict[str, Any]) -> Path:
    """Note in the ``config.json`` of a run that it is started, and return its folder."""
    folder = out / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    starts = json.loads(config.read_text())["starts"] if config.exists() else []
    with written_whole(config) as temporary:
        content = {"settings": run.settings, "starts": [*starts, made_with]}
        temporary.write_text(json.dumps(content, indent=2) + "\n")
    return folder


@dataclass
class Child:
    run: Run
    process: BaseProcess
    task: TaskID
    next_line: float
    text: str = "trained before"


class Runner:
    """
    The queue of runs: ``jobs`` processes side by side, and what they say on the terminal.

    :param finish: what a run's process does behind training, to end with the run's ``last_file``
    """

    def __init__(
        self, runs: list[Run], out: Path, jobs: int, checkpoint_seconds: float, finish: Finish = record_game
    ) -> None:
        for variable, value in SHORT_SPIN.items():
            os.environ.setdefault(variable, value)
        self.out = out
        self.jobs = jobs
        self.checkpoint_seconds = checkpoint_seconds
        self.finish = finish
        self.provenance = provenance() | {"jobs": jobs, "processes": 1}
        self.waiting = deque(run for run in runs if not (out / run.folder / run.last_file).exists())
        self.children: dict[Connection, Child] = {}
        self.failed: list[str] = []
        self.stopping = 0  # the signal that asked for it
        self.timesteps = {run.folder: 0 if run in self.waiting else run.total_timesteps for run in runs}
        self.console = Console()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.overall = self.progress.add_task("all runs", total=sum(run.total_timesteps for run in runs), text="")
        self.show_overall()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, run: Run) -> None:
        folder = note_start(run, self.out, self.provenance)
        context = multiprocessing.get_context("spawn")
        connection, remote = context.Pipe()
        num_threads = max(1, CORES // self.jobs)
        process = context.Process(
            target=run_process,
            args=(run, folder, remote, num_threads, self.checkpoint_seconds, self.finish),
            name=str(run),
        )
        # A terminal sends Ctrl-C to all its processes. A child inherits that it is ignored, and so do its workers: it
        # reaches this process alone, which asks the children to save first.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        remote.close()
        task = self.progress.add_task(str(run), total=run.total_timesteps, text="starting")
        self.children[connection] = Child(run, process, task, time.monotonic() + LINE_SECONDS)
        signal.signal(signal.SIGINT, handler)
        if self.stopping:  # since it was asked for, all others have been told
            connection.send("stop")

    def receive(self, connection: Connection) -> None:
        child = self.children[connection]
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            self.end(connection, child)
            return
        if isinstance(message, str):
            self.say(message)
            return
        child.text = message.text
        self.timesteps[child.run.folder] = message.timesteps
        self.progress.update(child.task, completed=message.timesteps, text=child.text)
        self.show_overall()
        if not self.console.is_terminal and time.monotonic() >= child.next_line:
            child.next_line += LINE_SECONDS
            seconds_left = (child.run.total_timesteps - message.timesteps) / message.steps_per_second
            self.say(f"{child.run}: step {message.timesteps:,}, {child.text}, {seconds_left:.0f} s left")

    def show_overall(self) -> None:
        done = len(self.timesteps) - len(self.waiting) - len(self.children) - len(self.failed)
        text = f"{done} of {len(self.timesteps)} runs finished"
        self.progress.update(self.overall, completed=sum(self.timesteps.values()), text=text)

    def end(self, connection: Connection, child: Child) -> None:
        child.process.join()
        self.progress.remove_task(child.task)
        del self.children[connection]
        if child.process.exitcode:
            self.failed.append(str(child.run))
            self.say(f"{child.run}: its process ended with {describe(child.process.exitcode)}")
        elif not self.stopping:
            self.timesteps[child.run.folder] = child.run.total_timesteps
            self.say(f"{child.run}: finished, {child.text}")
        self.show_overall()

    def run(self) -> None:
        handler = signal.signal(signal.SIGTERM, self.stop)
        with self.progress:
            try:
                while self.children or (self.waiting and not self.stopping):
                    try:
                        while self.waiting and len(self.children) < self.jobs and not self.stopping:
                            self.start(self.waiting.popleft())
                        for connection in wait(list(self.children)):
                            self.receive(connection)
                    except KeyboardInterrupt:
                        if self.stopping:
                            raise
                        self.stop(signal.SIGINT)
            finally:
                signal.signal(signal.SIGTERM, handler)
                for child in self.children.values():
                    child.process.kill()

    def stop(self, number: int, _: Any = None) -> None:
        self.stopping = number
        self.say("Stopping: the runs save a checkpoint. Once more ends them at once.")
        for connection in self.children:
            with suppress(ConnectionError):
                connection.send("stop")


def describe(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode > 0 else f"signal {signal.Signals(-exitcode).name}"


def say_how_it_ended(runner: Any) -> int:
    """Last words of a :class:`Runner`, or of all processes :class:`~together.Together`, and the exit code."""
    if runner.stopping:
        runner.say("Stopped. Start again with the same arguments to go on.")
        return 128 + runner.stopping
    if runner.failed:
        runner.say(f"Not finished: {', '.join(runner.failed)}. Start again with the same arguments to resume.")
        return 1
    return 0
