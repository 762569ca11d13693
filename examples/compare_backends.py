"""
Play full games with one saved model in the native environments and in SB3's, and compare the returns: one policy, so
all that may differ are the environments. ``python examples/compare_backends.py runs/breakout/a2c/seed_0/model.zip``.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from scipy import stats
from stable_baselines3 import A2C
from stable_baselines3.common.evaluation import evaluate_policy

from runs import Run
from training import make_env


def play(
    model_path: Path, env_id: str, backend: str, n_games: int, n_envs: int, progress: Progress
) -> tuple[list[float], list[int]]:
    """Unclipped returns of full games, actions drawn, and their lengths in emulator frames."""
    env = make_env(Run("", 0, "", env_id, 0, n_envs, backend, {}))
    model = A2C.load(model_path, env=env)
    model.set_random_seed(0)
    task = progress.add_task(backend, total=n_games)

    def advance(local_variables: dict[str, Any], _: dict[str, Any]) -> None:
        progress.advance(task, "episode" in local_variables["info"])

    games = evaluate_policy(
        model, model.get_env(), n_games, deterministic=False, callback=advance, return_episode_rewards=True
    )
    env.close()
    return games


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a zip of A2C or NStepA2C")
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4", help="Atari game (default: %(default)s)")
    parser.add_argument("--games", type=int, default=640, help="games in each (default: %(default)s)")
    parser.add_argument("--n-envs", type=int, default=16, help="environments (default: %(default)s)")
    args = parser.parse_args()

    with Progress(console=Console(stderr=True)) as progress:
        games = {
            backend: play(args.model, args.env_id, backend, args.games, args.n_envs, progress)
            for backend in ("native", "subproc")
        }
    print("| environments | games | emulator frames | mean return | standard deviation | standard error |")
    print("|---|---:|---:|---:|---:|---:|")
    for backend, (returns, lengths) in games.items():
        row = [f"{len(returns)}", f"{sum(lengths):,}"]
        row += [f"{statistic(returns):.2f}" for statistic in (np.mean, np.std, stats.sem)]
        print(f"| {backend} | {' | '.join(row)} |")
    returns = [returns for returns, _ in games.values()]
    print(f"\nMann-Whitney test of no difference: p = {stats.mannwhitneyu(*returns).pvalue:.2f}")


if __name__ == "__main__":
    main()
