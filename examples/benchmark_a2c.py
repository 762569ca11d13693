"""
Environment steps per second of NStepA2C beside stock A2C: two models in one process, trained in turns on environments
of their own, with the settings of the comparison. Prints medians over the turns and the median of their ratio.
"""

import argparse
import time

import numpy as np
import torch as th
from stable_baselines3 import A2C

from breakout import HYPERPARAMS, make_parser, make_run
from sb3_nstep import NStepA2C
from training import make_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-steps", type=int, default=5, help="T of both (default: 5)")
    parser.add_argument("--return-horizon", type=int, default=5, help="N of NStepA2C (default: 5)")
    parser.add_argument("--turns", type=int, default=12, help="turns of each (default: 12, about 3 minutes)")
    parser.add_argument("--steps", type=int, default=4_000, help="environment steps of a turn (default: 4,000)")
    parser.add_argument("--env-backend", choices=["native", "subproc"], default="native", help="as in breakout.py")
    args = parser.parse_args()

    run = make_run(make_parser().parse_args(["--env-backend", args.env_backend]), "a2c", seed=0)
    arms: dict[str, tuple[type[A2C], dict]] = {
        "A2C": (A2C, {}),
        "NStepA2C, carry_over=False": (NStepA2C, {"carry_over": False}),
        **{
            f"NStepA2C, {correction}": (
                NStepA2C,
                {"return_horizon": args.return_horizon, "correction": correction},
            )
            for correction in ("none", "importance", "vtrace")
        },
    }
    models = [
        algo(
            env=make_env(run),
            n_steps=args.n_steps,
            **HYPERPARAMS,
            **settings,
        )
        for algo, settings in arms.values()
    ]
    for model in models:  # the first steps pay for caches and memory
        model.learn(1_000)

    speeds = np.zeros((args.turns, len(models)))
    for turn in range(args.turns):
        for index, model in enumerate(models):
            start = time.perf_counter()
            before = model.num_timesteps
            model.learn(args.steps, reset_num_timesteps=False)
            speeds[turn, index] = (model.num_timesteps - before) / (time.perf_counter() - start)

    print(f"T = {args.n_steps}, N = {args.return_horizon}, {run.n_envs} environments, {th.get_num_threads()} threads\n")
    print("| algorithm | steps/s | of A2C's |\n|---|---:|---:|")
    for name, speed, ratio in zip(
        arms, np.median(speeds, axis=0), np.median(speeds / speeds[:, :1], axis=0), strict=True
    ):
        print(f"| {name} | {speed:.0f} | {ratio:.3f} |")
    for model in models:
        model.get_env().close()


if __name__ == "__main__":
    main()
