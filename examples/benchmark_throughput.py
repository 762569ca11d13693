"""
Environment steps per second of A2C and NStepA2C on Atari, from SB3's environments to native ones, option by option.

Each arm is a process of its own, for its environment variables; they take turns, one at work at a time. Prints a
table: medians over the turns, the median of the ratio to stock A2C with SubprocVecEnv in the same turn, and where the
time goes, in milliseconds of a rollout with its update. The floor is what remains without a training loop:
the environments alone, and the network alone on fixed tensors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from runner import SHORT_SPIN

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
# name: algorithm, environments, arguments of the algorithm, environment variables
ARMS: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "A2C, DummyVecEnv": ("a2c", "dummy", {}, {}),
    "A2C, SubprocVecEnv": ("a2c", "subproc", {}, {}),
    "A2C, SubprocVecEnv, PASSIVE": ("a2c", "subproc", {}, PASSIVE),
    "NStepA2C, DummyVecEnv": ("nstep_a2c", "dummy", {}, {}),
    "NStepA2C, SubprocVecEnv": ("nstep_a2c", "subproc", {}, {}),
    "NStepA2C, native": ("nstep_a2c", "native", {}, {}),
    "NStepA2C, native, PASSIVE": ("nstep_a2c", "native", {}, PASSIVE),
    "NStepA2C, native, short spin": ("nstep_a2c", "native", {}, SHORT_SPIN),
    "NStepA2C, native, short spin, channels_last": ("nstep_a2c", "native", {"channels_last": True}, SHORT_SPIN),
    "NStepA2C, native, short spin, channels_last, bf16": (
        "nstep_a2c",
        "native",
        {"channels_last": True, "autocast": "bf16"},
        SHORT_SPIN,
    ),
}
BASELINE = "A2C, SubprocVecEnv"


class Stopwatch:
    """Adds up the seconds spent in methods of an object."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def seconds_per_call(call: Callable[[], Any], seconds: float) -> float:
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        call()
        calls += 1
    return elapsed / calls


def arm_process(name: str, args: argparse.Namespace, connection: Connection) -> None:
    """Build the arm, then train for a turn whenever asked: answers with milliseconds per rollout and update."""
    import torch as th
    from stable_baselines3.common.vec_env import DummyVecEnv

    from breakout import HYPERPARAMS, make_parser, make_run
    from training import ALGOS, make_env, make_sb3_env

    algo, backend, options, _ = ARMS[name]
    arguments = ["--env-id", args.env_id, "--n-envs", str(args.n_envs)]
    run = make_run(
        make_parser().parse_args([*arguments, "--env-backend", backend.replace("dummy", "subproc")]), algo, 0
    )
    env = make_sb3_env(run, n_envs=args.n_envs, vec_env_cls=DummyVecEnv) if backend == "dummy" else make_env(run)
    if algo == "nstep_a2c":
        options = {"return_horizon": args.return_horizon} | options
    model = ALGOS[algo](env=env, n_steps=args.n_steps, seed=0, **(HYPERPARAMS | options))
    env = model.env  # which hands out images with their channels first
    model.learn(10 * args.n_steps * args.n_envs)  # the first steps pay for caches and memory
    watches = {part: Stopwatch() for part in ("environments", "forward", "update")}
    watches["environments"].watch(env, "step_wait")
    watches["environments"].watch(env, "step_async")
    watches["forward"].watch(model.policy, "forward")
    watches["forward"].watch(model.policy, "predict_values")
    watches["update"].watch(model, "train")

    def turn() -> dict[str, float]:
        for watch in watches.values():
            watch.seconds = 0.0
        before, start = model.num_timesteps, time.perf_counter()
        model.learn(args.steps, reset_num_timesteps=False)
        seconds = time.perf_counter() - start
        n_rollouts = (model.num_timesteps - before) / (args.n_steps * args.n_envs)
        parts = {part: 1e3 * watch.seconds / n_rollouts for part, watch in watches.items()}
        return {"total": 1e3 * seconds / n_rollouts, **parts, **floor()}

    rng = np.random.default_rng(0)
    shape = (args.n_steps * args.n_envs, *model.observation_space.shape)
    batch = th.as_tensor(rng.integers(0, 256, shape, dtype=np.uint8), device=model.device)
    actions = th.zeros(len(batch), device=model.device)

    def step() -> None:
        env.step(rng.integers(0, env.action_space.n, args.n_envs))

    def forward() -> None:
        with th.no_grad():
            model.policy(batch[: args.n_envs])

    def update() -> None:
        values, log_prob, entropy = model.policy.evaluate_actions(batch, actions)
        loss = values.mean() + log_prob.mean() + entropy.mean()
        model.policy.optimizer.zero_grad()
        loss.backward()
        th.nn.utils.clip_grad_norm_(model.policy.parameters(), model.max_grad_norm)
        model.policy.optimizer.param_groups[0]["lr"] = 0.0  # the parameters stay
        model.policy.optimizer.step()

    def floor() -> dict[str, float]:
        seconds = args.n_steps * seconds_per_call(step, 1.0), (args.n_steps + 1) * seconds_per_call(forward, 0.5)
        model._last_obs = env.reset()  # the environments have gone on without the model
        model._last_episode_starts[:] = True
        return {
            "environments alone": 1e3 * seconds[0],
            "network alone": 1e3 * (seconds[1] + seconds_per_call(update, 0.5)),
        }

    connection.send("ready")
    with suppress(EOFError):
        while connection.recv():
            connection.send(turn())
    env.close()


def start(name: str, args: argparse.Namespace) -> Connection:
    context = multiprocessing.get_context("spawn")
    connection, remote = context.Pipe()
    variables = ARMS[name][-1]
    os.environ.update(variables)  # inherited
    # no daemon: SubprocVecEnv has children
    context.Process(target=arm_process, args=(name, args, remote), name=name).start()
    for variable in variables:
        del os.environ[variable]
    remote.close()
    connection.recv()
    return connection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4", help="Atari game (default: %(default)s)")
    parser.add_argument("--n-envs", type=int, default=16, help="environments (default: %(default)s)")
    parser.add_argument("--n-steps", type=int, default=5, help="T (default: %(default)s)")
    parser.add_argument("--return-horizon", type=int, default=5, help="N of NStepA2C (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="turns of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2_400, help="environment steps of a turn (default: %(default)s)")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="out of: %(choices)s"
    )
    args = parser.parse_args()
    if os.environ.get("OMP_WAIT_POLICY"):
        parser.error("OMP_WAIT_POLICY is set: this benchmark compares arms with and without it")
    if BASELINE not in args.arms:
        parser.error(f"--arms: expected {BASELINE!r} among them, to which the others are compared")

    show = partial(track, console=Console(stderr=True), transient=True)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in args.arms}
    with ExitStack() as stack:  # an arm ends when its connection does
        connections = {name: stack.enter_context(start(name, args)) for name in show(args.arms, "starting")}
        for _ in show(range(args.turns), "turns"):
            for name, connection in connections.items():
                connection.send(True)
                turns[name].append(connection.recv())

    rows = args.n_steps * args.n_envs
    print(
        f"{args.env_id}, {args.n_envs} environments, T = {args.n_steps}, N = {args.return_horizon}, "
        f"{os.cpu_count()} cores\n\n"
        f"| arm | steps/s | of {BASELINE} | environments ms | forward ms | update ms | rest ms | environments alone ms "
        "| network alone ms | floor in total |\n|---|" + "---:|" * 9
    )
    baseline = np.array([turn["total"] for turn in turns[BASELINE]])
    for name, measured in turns.items():
        median = {part: float(np.median([turn[part] for turn in measured])) for part in measured[0]}
        ratio = np.median(baseline / [turn["total"] for turn in measured])
        rest = np.median([2 * t["total"] - sum(t[part] for part in list(t)[:4]) for t in measured])
        floor = np.median([(t["environments alone"] + t["network alone"]) / t["total"] for t in measured])
        cells = [f"{1e3 * rows / median['total']:.0f}", f"{ratio:.2f}"]
        cells += [f"{ms:.1f}" for ms in (median["environments"], median["forward"], median["update"], rest)]
        cells += [f"{median[part]:.1f}" for part in ("environments alone", "network alone")] + [f"{floor:.0%}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
