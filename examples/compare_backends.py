"""
Play full games with one saved model in the native environments and in SB3's, and compare the returns: one policy, so
all that may differ are the environments. ``python examples/compare_backends.py runs/breakout/a2c/seed_0/model.zip``.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from scipy import stats
from stable_baselines3 import A2C

from runs import Run
from training import make_env


def play(model_path: Path, env_id: str, backend: str, n_games: int, n_envs: int, progress: Progress) -> np.ndarray:
    """Unclipped returns of full games, actions drawn. As many of each environment, for short games end sooner."""
    env = make_env(Run("", 0, "", env_id, 0, n_envs, backend, {}))
    model = A2C.load(model_path, env=env)
    env = model.get_env()
    model.set_random_seed(0)
    returns: list[list[float]] = [[] for _ in range(n_envs)]
    per_env = -(-n_games // n_envs)
    task = progress.add_task(backend, total=per_env * n_envs)
    observations = env.reset()
    while min(map(len, returns)) < per_env:
        actions, _ = model.predict(observations, deterministic=False)
        observations, _, _, infos = env.step(actions)
        for games, info in zip(returns, infos, strict=True):
            if "episode" in info and len(games) < per_env:
                games.append(info["episode"]["r"])
                progress.advance(task)
    env.close()
    return np.concatenate(returns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a zip of A2C or NStepA2C")
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4", help="Atari game (default: %(default)s)")
    parser.add_argument("--games", type=int, default=640, help="games in each (default: %(default)s)")
    parser.add_argument("--n-envs", type=int, default=16, help="environments (default: %(default)s)")
    args = parser.parse_args()

    with Progress(console=Console(stderr=True)) as progress:
        returns = {
            backend: play(args.model, args.env_id, backend, args.games, args.n_envs, progress)
            for backend in ("native", "subproc")
        }
    print("| environments | games | mean return | standard error |\n|---|---:|---:|---:|")
    for backend, of_games in returns.items():
        print(f"| {backend} | {len(of_games)} | {of_games.mean():.2f} | {stats.sem(of_games):.2f} |")
    print(f"\nMann-Whitney test of no difference: p = {stats.mannwhitneyu(*returns.values()).pvalue:.2f}")


if __name__ == "__main__":
    main()
