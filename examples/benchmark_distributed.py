"""
Environment steps per second of one model in two processes with half the environments each, beside one process with all
of them, in turns, with the settings of the comparison (native environments, T = N = 5). Prints medians over the turns
and the median of their ratio.
"""

import argparse
import os
import subprocess
import sys
import time

import numpy as np
import torch as th

from breakout import make_parser, make_run
from runner import CORES, SHORT_SPIN
from sb3_nstep import NStepA2C
from sb3_nstep.distributed import process_group
from training import make_env

N_PROCESSES = (1, 2)


def measure(n_processes: int, args: argparse.Namespace) -> float:
    """Steps per second, in processes of their own, that share the cores."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_processes}"]
    command += [__file__, "--steps", str(args.steps), "--n-envs", str(args.n_envs), "--worker"]
    environment = SHORT_SPIN | os.environ | {"OMP_NUM_THREADS": str(max(1, CORES // n_processes))}
    return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def work(args: argparse.Namespace) -> None:
    run = make_run(make_parser().parse_args(["--n-envs", str(args.n_envs)]), "nstep_a2c", seed=0)
    with process_group() as rank:
        n_processes = int(os.environ["WORLD_SIZE"])
        model = NStepA2C(env=make_env(run, n_processes), seed=run.seed, **run.hyperparams)
        model.learn(500)  # the first steps pay for caches and memory
        before, start = model.num_timesteps, time.perf_counter()
        model.learn(args.steps, reset_num_timesteps=False)
        if rank == 0:
            print((model.num_timesteps - before) / (time.perf_counter() - start))
        model.get_env().close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-envs", type=int, default=16, help="environments in all (default: 16)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each (default: 5, about 3 minutes)")
    parser.add_argument("--steps", type=int, default=4_000, help="environment steps of a turn (default: 4,000)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    speeds = np.array([[measure(n_processes, args) for n_processes in N_PROCESSES] for _ in range(args.turns)])
    print(f"{CORES} cores, PyTorch {th.__version__}, {args.turns} turns\n")
    print("| processes × environments | threads of torch in each | steps/s | of one process's |\n|---|---:|---:|---:|")
    for n_processes, speed, ratio in zip(
        N_PROCESSES, np.median(speeds, axis=0), np.median(speeds / speeds[:, :1], axis=0), strict=True
    ):
        n_threads = max(1, CORES // n_processes)
        print(f"| {n_processes} × {args.n_envs // n_processes} | {n_threads} | {speed:.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
