"""
Compare stock A2C with NStepA2C on an Atari game: same environments, same settings, several seeds.

Stopped (Ctrl-C, kill) and started again with the same arguments, it goes on where it was. Started by torchrun, its
processes share the environments of each run, and train it together.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch.distributed as dist
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

import runs
from runner import Runner, say_how_it_ended
from runs import Run, lock
from together import Together, follow

# RL Zoo's A2C settings for Atari, the same for every arm
HYPERPARAMS = {
    "policy": "CnnPolicy",
    "learning_rate": 7e-4,
    "gamma": 0.99,
    "ent_coef": 0.01,
    "vf_coef": 0.25,
    "policy_kwargs": {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}},
}

# T is `n_steps`, N is `return_horizon`
ARMS = {
    "a2c": lambda args: ("a2c", {"n_steps": args.n_steps}),
    "a2c_t1": lambda args: ("a2c", {"n_steps": 1}),  # as many updates as nstep_a2c_t1, whose targets look further
    "nstep_a2c": lambda args: ("nstep_a2c", {"n_steps": args.n_steps} | nstep_hyperparams(args)),
    "nstep_a2c_t1": lambda args: ("nstep_a2c", {"n_steps": 1} | nstep_hyperparams(args)),
}

EPILOG = "The defaults (12 runs of 100,000 steps) with --jobs 2 took 36 minutes on two cores."


def nstep_hyperparams(args: argparse.Namespace) -> dict[str, Any]:
    """What A2C does not have. NStepA2C's defaults are named too, so that config.json tells them."""
    return {
        "return_horizon": args.return_horizon,
        "carry_over": True,
        "correction": "importance",
        "channels_last": args.channels_last,
        "autocast": None if args.precision == "fp32" else args.precision,
    }


def make_run(args: argparse.Namespace, arm: str, seed: int) -> Run:
    algo, hyperparams = ARMS[arm](args)
    return Run(arm, seed, algo, args.env_id, args.steps, args.n_envs, args.env_backend, HYPERPARAMS | hyperparams)


def whole_number(minimum: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, epilog=EPILOG
    )
    count = whole_number(1)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4", help="Atari game, an id without frame skip")
    parser.add_argument("--steps", type=count, default=100_000, help="environment steps of each run (4 frames each)")
    parser.add_argument(
        "--seeds", type=whole_number(0), nargs="+", default=[0, 1, 2], help="each arm runs once per seed"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="out of %(choices)s")
    parser.add_argument("--n-steps", type=count, default=5, help="T of a2c and nstep_a2c: rollout steps per update")
    parser.add_argument("--return-horizon", type=count, default=5, help="N of nstep_a2c and nstep_a2c_t1 (its T is 1)")
    parser.add_argument("--n-envs", type=count, default=16, help="environments of each run")
    parser.add_argument(
        "--env-backend",
        choices=["native", "subproc"],
        default="native",
        help="native: sb3_nstep's AtariVecEnv, threads; subproc: SB3's SubprocVecEnv, a process for each environment",
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="of NStepA2C's features extractor; A2C has fp32"
    )
    parser.add_argument(
        "--channels-last", action="store_true", help="channels-last memory format for NStepA2C, which A2C has not"
    )
    parser.add_argument("--jobs", type=count, default=1, help="runs side by side; torch's threads are shared out")
    parser.add_argument("--checkpoint-seconds", type=count, default=30, help="between two checkpoints of a run")
    parser.add_argument("--out", type=Path, default=Path("runs/breakout"), help="folder of the results")
    return parser


def check(args: argparse.Namespace) -> None:
    """:raises ValueError: the arguments do not go together, or not with what ``--out`` holds"""
    if dist.is_torchelastic_launched():
        n_processes = int(os.environ["WORLD_SIZE"])
        if args.jobs > 1:
            raise ValueError(f"--jobs: expected 1 under torchrun, where all processes share one run, got {args.jobs}")
        if args.n_envs % n_processes:
            raise ValueError(f"--n-envs: expected a multiple of {n_processes}, the processes, got {args.n_envs}")
        if not any(arm.startswith("nstep") for arm in args.arms):
            raise ValueError(f"--arms: expected an arm of NStepA2C under torchrun, got {' '.join(args.arms)} alone")
    try:
        frameskip = gym.spec(args.env_id).kwargs.get("frameskip")
    except gym.error.Error as error:
        raise ValueError(f"--env-id: {error}") from None
    if frameskip != 1:
        reason = "is no Atari game" if frameskip is None else f"skips frames itself (frameskip={frameskip})"
        raise ValueError(f"--env-id: expected an id like BreakoutNoFrameskip-v4, got {args.env_id}, which {reason}")
    runs.check(args, args.out, lambda got: make_run(args, got["arm"], got["seed"]))


def main(argv: list[str] | None = None) -> int:
    # Not at the top: the worker of each environment imports this file, and has no use for matplotlib.
    from report import write_report

    parser = make_parser()
    args = parser.parse_args(argv)
    launched = dist.is_torchelastic_launched()
    if launched and int(os.environ["RANK"]) > 0:
        follow()
        return 0
    try:
        check(args)
        args.out.mkdir(parents=True, exist_ok=True)
        out_lock = lock(args.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with out_lock:
        queue = [make_run(args, arm, seed) for seed in args.seeds for arm in args.arms]
        if launched:
            runner: Runner | Together = Together(queue, args.out, args.checkpoint_seconds)
        else:
            runner = Runner(queue, args.out, args.jobs, args.checkpoint_seconds)
        with suppress(KeyboardInterrupt):  # the second one: the runs have been killed
            runner.run()
        write_report(args.out)
    runner.say((args.out / "summary.md").read_text())
    return say_how_it_ended(runner)


if __name__ == "__main__":
    sys.exit(main())
