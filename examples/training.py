"""One run of the comparison, in a process of its own: train, checkpoint, resume, play one game."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import set_forkserver_preload
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch as th
from PIL import Image
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecFrameStack

from minatar_games import make_minatar_env
from runs import Run, Status, lock
from sb3_nstep import NStepA2C
from sb3_nstep.atari import make_atari_vec_env
from sb3_nstep.checkpoint import load_checkpoint, save_checkpoint, written_whole

gym.register_envs(ale_py)
# The workers of SubprocVecEnv import this file too: without this each of them prints a banner.
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)

ALGOS: dict[str, type[A2C]] = {"a2c": A2C, "nstep_a2c": NStepA2C}

# Does what is to be done behind training, for a model, its run and the run's folder; returns what there is to say of it
Finish = Callable[[A2C, Run, Path], str]

CHECKPOINTS = ("checkpoint.zip", "checkpoint_before.zip")
REPORT_SECONDS = 0.5
LOG_TIMESTEPS = 8_000  # SB3's default of every 100 updates, at 5 x 16 rows an update
ORPHAN_SECONDS = 20.0  # a run whose parent was killed ends with its next report

GAME_FRAMES = 20_000  # emulator frames: an untrained agent can wait for ever before it serves the ball
GIF_FRAMES = 600
GIF_BYTES = 3_000_000


def make_env(run: Run, n_processes: int = 1) -> VecEnv:
    """The environments to train in: all of them, or the share of one of the processes that train together."""
    n_envs = run.n_envs // n_processes
    if run.env_backend == "native":
        return make_atari_vec_env(run.env_id, n_envs, seed=run.seed)
    if run.env_backend == "minatar":
        return make_minatar_env(run.env_id, n_envs, seed=run.seed)
    # Otherwise each worker imports torch for itself, and 16 of them take longer to start than to train for a while.
    set_forkserver_preload(["stable_baselines3", "ale_py"])
    return make_sb3_env(run, n_envs=n_envs, vec_env_cls=SubprocVecEnv)


def make_sb3_env(run: Run, **kwargs: Any) -> VecEnv:
    return VecFrameStack(make_atari_env(run.env_id, seed=run.seed, **kwargs), n_stack=4)


class RunCallback(BaseCallback):
    """Write ``monitor.csv`` and checkpoints, report to the parent, stop when it says so."""

    def __init__(self, run: Run, folder: Path, connection: Any, checkpoint_seconds: float) -> None:
        super().__init__()
        self.run = run
        self.folder = folder
        self.connection = connection
        self.checkpoint_seconds = checkpoint_seconds
        self.stopped = False

    def _on_training_start(self) -> None:
        now = time.perf_counter()
        self.started = now - self.model.training_seconds
        self.next_report = now + REPORT_SECONDS
        self.next_checkpoint = now + self.checkpoint_seconds
        self.writer = open_monitor(self.run, self.folder, self.num_timesteps)

    def _on_rollout_start(self) -> None:
        # Here every step counted so far has been trained on: the one moment at which a checkpoint loses nothing.
        now = time.perf_counter()
        if now < self.next_report:
            return
        self.next_report = now + REPORT_SECONDS
        self.report(now)
        self.stopped = self.connection.poll()
        if self.stopped or now >= self.next_checkpoint:
            self.next_checkpoint = now + self.checkpoint_seconds
            save(self.model, self.folder)

    def _on_step(self) -> bool:
        if self.stopped:
            return False
        # Monitor sits inside AtariWrapper: unclipped returns of full games, whatever the agent takes for an episode
        self.write([info["episode"] for info in self.locals["infos"] if "episode" in info])
        return True

    def _on_training_end(self) -> None:
        self.writer.close()
        if not self.stopped:
            self.report(time.perf_counter())

    def write(self, games: list[dict[str, Any]]) -> None:
        for game in games:
            seconds = round(time.perf_counter() - self.started, 6)
            self.writer.write_row(game | {"t": seconds, "timesteps": self.model.num_timesteps})

    def report(self, now: float) -> None:
        self.model.training_seconds = now - self.started
        mean_return = safe_mean([episode["r"] for episode in self.model.ep_info_buffer])
        self.connection.send(Status(self.num_timesteps, self.num_timesteps / self.model.training_seconds, mean_return))


def save(model: A2C, folder: Path) -> None:
    """Checkpoints are two, the last one and the one before it, should the last one be damaged."""
    checkpoint, before = folder / CHECKPOINTS[0], folder / CHECKPOINTS[1]
    if checkpoint.exists():
        before.unlink(missing_ok=True)
        os.link(checkpoint, before)
    save_checkpoint(model, checkpoint)


def open_monitor(run: Run, folder: Path, num_timesteps: int) -> ResultsWriter:
    """Go on with ``monitor.csv`` at a checkpoint: games that ended after it are dropped and played anew."""
    path = folder / "monitor.csv"
    if num_timesteps > 0:
        lines = path.read_text().splitlines(keepends=True)
        rows = [line for line in lines[2:] if line.endswith("\n") and int(line.rsplit(",", 1)[1]) <= num_timesteps]
        with written_whole(path) as temporary:
            temporary.write_text("".join(lines[:2] + rows))
    return ResultsWriter(
        str(path),
        header={"t_start": 0.0, "env_id": run.env_id},  # t counts the seconds of training, over all interruptions
        extra_keys=("timesteps",),
        override_existing=num_timesteps == 0,
    )


def load_or_create(run: Run, folder: Path, env: VecEnv, callback: RunCallback) -> A2C:
    for name in CHECKPOINTS:
        if (folder / name).exists():
            try:
                model = load_checkpoint(
                    ALGOS[run.algo], folder / name, env, force_reset=True, tensorboard_log=str(folder)
                )
            except ValueError as error:
                callback.connection.send(f"{run}: {error}")
                continue
            # load() has set the seed of the first start again, which would play the same games once more
            model.set_random_seed(seed_at(run, model.num_timesteps))
            callback.connection.send(f"{run}: resumed at step {model.num_timesteps:,}")
            return model
    model = ALGOS[run.algo](env=env, seed=run.seed, tensorboard_log=str(folder), **run.hyperparams)
    model.training_seconds = 0.0  # an attribute, so that it is saved with the parameters or not at all
    return model


def seed_at(run: Run, timesteps: int) -> int:
    """What to go on with after a stop, a seed for each point of time."""
    return int(np.random.SeedSequence([run.seed, timesteps]).generate_state(1)[0]) // 2 if timesteps else run.seed


def train(run: Run, folder: Path, callback: RunCallback, n_processes: int = 1) -> A2C | None:
    """Train to the end, or return None where the callback's parent asked to stop."""
    env = make_env(run, n_processes)
    model = load_or_create(run, folder, env, callback)
    model.learn(
        max(0, run.total_timesteps - model.num_timesteps),
        callback,
        log_interval=max(1, LOG_TIMESTEPS // (model.n_steps * run.n_envs)),
        tb_log_name="tensorboard",
        reset_num_timesteps=False,
    )
    env.close()
    if callback.stopped:
        return None
    with written_whole(folder / "model.zip") as temporary:
        model.save(temporary)
    for checkpoint in folder.glob("*checkpoint*.zip"):  # half a one of a killed process, too
        checkpoint.unlink()
    return model


def record_game(model: A2C, run: Run, folder: Path) -> str:
    """Play one game, write it as a GIF of less than ``GIF_BYTES`` and return what there is to say of it."""
    env = make_sb3_env(  # which renders in colours
        run,
        n_envs=1,
        wrapper_kwargs={"terminal_on_life_loss": False},
        env_kwargs={"max_episode_steps": GAME_FRAMES},
    )
    frames, stride = [], 1

    def record(local_variables: dict[str, Any], _: dict[str, Any]) -> None:
        nonlocal stride
        if local_variables["current_lengths"][0] % stride == 0:
            frames.append(Image.fromarray(env.get_images()[0]).quantize())  # exact: Atari has 128 colours
        if len(frames) == 2 * GIF_FRAMES:
            del frames[::2]
            stride *= 2

    model.set_random_seed(run.seed)
    # Stochastic actions, as RL Zoo evaluates Atari agents.
    (score,), (length,) = evaluate_policy(
        model, env, n_eval_episodes=1, deterministic=False, callback=record, return_episode_rewards=True
    )
    env.close()
    comment = f"one game: return {score:g}, {length:,} frames" + (", cut off there" if length >= GAME_FRAMES else "")
    with written_whole(folder / run.last_file) as temporary:
        while True:
            frames[0].save(temporary, save_all=True, append_images=frames[1:], duration=60, loop=0, comment=comment)
            if temporary.stat().st_size < GIF_BYTES:
                break
            del frames[1::2]
    return comment


def run_process(
    run: Run, folder: Path, connection: Connection, num_threads: int, checkpoint_seconds: float, finish: Finish
) -> None:
    """The whole life of the process of one run."""
    try:
        with lock(folder, timeout=ORPHAN_SECONDS):
            th.set_num_threads(num_threads)
            if (folder / "model.zip").exists():
                model = ALGOS[run.algo].load(folder / "model.zip")
            else:
                model = train(run, folder, RunCallback(run, folder, connection, checkpoint_seconds))
            if model is not None:
                connection.send(f"{run}: {finish(model, run, folder)}")
    except Exception:
        with suppress(ConnectionError):  # the parent is gone: there is nobody to tell
            connection.send(f"{run}: {traceback.format_exc()}")
        sys.exit(1)
