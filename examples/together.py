"""The queue of runs under ``torchrun``: one after another, each trained by all processes together."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runner import LINE_SECONDS, note_start, provenance
from runs import Run, Status, lock
from sb3_nstep import NStepA2C
from sb3_nstep.distributed import process_group
from training import ALGOS, ORPHAN_SECONDS, RunCallback, make_env, record_game, seed_at, train


class Together:
    """What :class:`~runner.Runner` is without ``torchrun``, in the process of rank 0: it alone writes and talks."""

    def __init__(self, runs: list[Run], out: Path, checkpoint_seconds: float) -> None:
        self.out = out
        self.checkpoint_seconds = checkpoint_seconds
        self.provenance = provenance() | {"jobs": 1}
        self.runs = [run for run in runs if ALGOS[run.algo] is NStepA2C]
        self.failed: list[str] = []  # none: an error in a run ends all processes
        self.stopping = 0  # the signal that asked for it
        self.next_line = time.monotonic() + LINE_SECONDS
        for arm in sorted({run.arm for run in runs} - {run.arm for run in self.runs}):
            self.say(f"{arm}: left out. Stock A2C cannot be trained by several processes")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def run(self) -> None:
        handlers = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        with process_group():
            for run in self.runs:
                if not (self.out / run.folder / "model.zip").exists() and not self.stopping:
                    self.train(run)
            from_rank_0(None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for run in self.runs:
            folder = self.out / run.folder
            if not self.stopping and not (folder / run.last_file).exists():
                self.say(f"{run}: {record_game(ALGOS[run.algo].load(folder / 'model.zip'), run, folder)}")

    def train(self, run: Run) -> None:
        from report import read_run  # matplotlib is for this process alone

        n_processes = dist.get_world_size()
        folder = note_start(run, self.out, self.provenance | {"processes": n_processes})
        with lock(folder, timeout=ORPHAN_SECONDS):
            from_rank_0((run, read_run(folder)["timesteps"]))
            self.run_under_way = run
            train(run, folder, CallbackOfAll(run, folder, self, self.checkpoint_seconds), n_processes)

    def stop(self, number: int, _: Any) -> None:
        self.stopping = number

    # What a run's callback asks of the pipe to its parent
    def send(self, message: str | Status) -> None:
        if isinstance(message, str):
            self.say(message)
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + LINE_SECONDS
            self.say(f"{self.run_under_way}: step {message.timesteps:,}, {message.text}")

    def poll(self) -> bool:
        return bool(self.stopping)


class CallbackOfAll(RunCallback):
    """Its ``monitor.csv`` has the games of all processes, which SB3's buffer of episodes has after each rollout."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self.written = {id(game): game for game in self.model.ep_info_buffer}

    def _on_rollout_start(self) -> None:
        self.write_new()
        super()._on_rollout_start()

    def _on_step(self) -> bool:
        return not self.stopped

    def _on_training_end(self) -> None:
        if not self.stopped:
            self.write_new()
        super()._on_training_end()

    def write_new(self) -> None:
        self.write([game for game in self.model.ep_info_buffer if id(game) not in self.written])
        self.written = {id(game): game for game in self.model.ep_info_buffer}


def follow() -> None:
    """What the other processes do: train as rank 0 does, and write nothing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # torchrun sends it to all; rank 0 saves, and the others stop with it
    with process_group():
        while (task := from_rank_0(None)) is not None:
            run, timesteps = task
            env = make_env(run, dist.get_world_size())
            model = ALGOS[run.algo](env=env, seed=run.seed, **run.hyperparams)
            if timesteps:
                model.set_random_seed(seed_at(run, timesteps))
            model.learn(run.total_timesteps, reset_num_timesteps=False)
            env.close()


def from_rank_0(message: Any) -> Any:
    messages = [message]
    dist.broadcast_object_list(messages, src=0)
    return messages[0]
