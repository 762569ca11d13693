"""
The study behind docs/results.md: arms x seeds, a process of one thread for each run, ``--jobs`` of them side by side.

Stopped (Ctrl-C, kill) and started again with the same arguments, it goes on where it was, and runs that the folder
holds already are not made again: ``--out examples/results/minatar`` adds to those of this repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from stable_baselines3 import A2C

import runs
from breakout import HYPERPARAMS, whole_number
from minatar_games import MinAtarCNN
from runner import Runner, say_how_it_ended
from runs import Run, lock
from sb3_nstep.checkpoint import written_whole

N_ENVS = 16
GAMES = {
    "minatar": ["MinAtar/Breakout-v1", "MinAtar/SpaceInvaders-v1", "MinAtar/Asterix-v1"],
    "breakout": ["BreakoutNoFrameskip-v4"],
}
MINATAR_POLICY = {"features_extractor_class": MinAtarCNN, "net_arch": []} | HYPERPARAMS["policy_kwargs"]


def falling(progress_remaining: float) -> int:
    """N from 20 to 3."""
    return round(3 + 17 * progress_remaining)


def stock(n_steps: int, **hyperparams: Any) -> tuple[str, dict[str, Any]]:
    return "a2c", {"n_steps": n_steps} | hyperparams


def nstep(n_steps: int, return_horizon: Any, **hyperparams: Any) -> tuple[str, dict[str, Any]]:
    """NStepA2C's defaults are named too, so that they stay what they were."""
    defaults = {"carry_over": True, "correction": "importance"}
    return "nstep_a2c", {"n_steps": n_steps, "return_horizon": return_horizon} | defaults | hyperparams


# T is `n_steps`, N is `return_horizon`
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    # cadence alone: short rollouts have short targets
    "a2c": stock(5),
    "a2c_t1": stock(1),
    "a2c_t2": stock(2),
    "a2c_t20": stock(20),
    # cadence and windows
    **{f"t{t}_n{n}": nstep(t, n) for t in (1, 2, 5) for n in (3, 5, 10, 20)},
    # windows alone: shortened at the rollout's end
    "t20_n5_shortened": nstep(20, 5, carry_over=False),
    # what is made of the rows that waited
    **{f"t{t}_n5_{c}": nstep(t, 5, correction=c) for t in (1, 2, 5) for c in ("none", "vtrace")},
    "t1_n20_none": nstep(1, 20, correction="none"),
    "t1_n20_vtrace": nstep(1, 20, correction="vtrace"),
    # inside the window
    "t1_n5_lambda95": nstep(1, 5, gae_lambda=0.95),
    "t1_n20_lambda95": nstep(1, 20, gae_lambda=0.95),
    "t1_n1to16": nstep(1, list(range(1, N_ENVS + 1))),
    "t1_n20to3": nstep(1, falling),
    # the arm of study B on Breakout: best of ours in the coarse pass on MinAtar, before Breakout was played
    "nstep_a2c_best": nstep(1, 5),
    # the learning rate, as much for stock A2C as for ours
    "a2c_lr_half": stock(5, learning_rate=3.5e-4),
    "a2c_lr_double": stock(5, learning_rate=1.4e-3),
    "a2c_t1_lr_half": stock(1, learning_rate=3.5e-4),
    "t1_n5_lr_half": nstep(1, 5, learning_rate=3.5e-4),
    "t1_n20_lr_half": nstep(1, 20, learning_rate=3.5e-4),
    "t2_n5_lr_half": nstep(2, 5, learning_rate=3.5e-4),
}


class StudyRun(Run):
    last_file: ClassVar[str] = "curve.csv"


class MinAtarRun(StudyRun):
    @property
    def folder(self) -> str:
        return f"{self.env_id.split('/')[1].removesuffix('-v1')}/{super().folder}"

    def __str__(self) -> str:
        return self.folder


def make_run(args: argparse.Namespace, env_id: str, arm: str, seed: int) -> Run:
    algo, hyperparams = ARMS[arm]
    hyperparams = HYPERPARAMS | hyperparams
    if args.study == "breakout":
        return StudyRun(arm, seed, algo, env_id, args.steps, N_ENVS, "native", hyperparams)
    hyperparams["policy_kwargs"] = MINATAR_POLICY
    return MinAtarRun(arm, seed, algo, env_id, args.steps, N_ENVS, "minatar", hyperparams)


def keep_curve(model: A2C, run: Run, folder: Path) -> str:
    """The last of a run: its curve, and in ``config.json`` how it ended."""
    from study_report import final_mean_return, read_curve

    config = folder / "config.json"
    content = json.loads(config.read_text())
    content["finished"] = {
        "timesteps": model.num_timesteps,
        "updates": model._n_updates,
        "seconds": round(model.training_seconds, 1),
    }
    with written_whole(config) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
    curve = read_curve(folder)
    with written_whole(folder / run.last_file) as temporary:
        curve.to_csv(temporary, index=False)
    return f"final mean return {final_mean_return(curve):.2f}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count = whole_number(1)
    parser.add_argument("study", choices=GAMES, help="minatar: three small games; breakout: the real one")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="out of %(choices)s")
    parser.add_argument("--seeds", type=whole_number(0), nargs="+", default=list(range(8)), help="of each arm and game")
    parser.add_argument("--steps", type=count, default=1_000_000, help="environment steps of each run")
    parser.add_argument("--jobs", type=count, default=1, help="runs side by side; torch's threads are shared out")
    parser.add_argument("--checkpoint-seconds", type=count, default=60, help="between two checkpoints of a run")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/ and the study's name)")
    return parser


def main(argv: list[str] | None = None) -> int:
    from study_report import write_report  # not at the top: the runs' processes import this file

    parser = make_parser()
    args = parser.parse_args(argv)
    out = args.out or Path("runs") / args.study
    try:
        runs.check(args, out, lambda got: make_run(args, got["env_id"], got["arm"], got["seed"]))
        out.mkdir(parents=True, exist_ok=True)
        out_lock = lock(out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with out_lock:
        # A seed of all arms before the next one: stopped half-way, it can be compared
        queue = [
            make_run(args, env_id, arm, seed)
            for seed in args.seeds
            for arm in args.arms
            for env_id in GAMES[args.study]
        ]
        runner = Runner(queue, out, args.jobs, args.checkpoint_seconds, keep_curve)
        with suppress(KeyboardInterrupt):  # the second one: the runs have been killed
            runner.run()
        write_report(out)
    runner.say((out / "summary.md").read_text())
    return say_how_it_ended(runner)


if __name__ == "__main__":
    sys.exit(main())
