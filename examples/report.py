"""
Tables and curves out of the folders of runs, finished or not.

``python report.py runs/breakout`` writes them again at any time, also while the runs go on.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image
from scipy import stats
from stable_baselines3.common.monitor import load_results

from sb3_nstep.checkpoint import written_whole

SETTINGS = ("n_envs", "env_backend", "n_steps", "return_horizon", "channels_last", "autocast")
LAST_GAMES = 100
CURVE_POINTS = 50


def read_games(folder: Path) -> pd.DataFrame:
    """One row per full game: ``r`` (unclipped return), ``l``, ``t`` (seconds of training) and ``timesteps``."""
    games = load_results(str(folder)) if (folder / "monitor.csv").exists() else pd.DataFrame()
    return games.reindex(columns=["r", "l", "t", "timesteps"])  # SB3 leaves columns out where no game has ended


def read_run(folder: Path) -> dict[str, Any]:
    """A row of ``results.csv``: the settings, how far the run has come, and its result."""
    settings = json.loads((folder / "config.json").read_text())["settings"]
    model = {}
    for name in ("checkpoint_before.zip", "checkpoint.zip", "model.zip"):
        with suppress(FileNotFoundError, KeyError, zipfile.BadZipFile):  # a damaged checkpoint: the one before it
            # The plain attributes of a saved model are JSON: no need to load it.
            model = json.loads(zipfile.ZipFile(folder / name).read("data"))
    timesteps, seconds = model.get("num_timesteps", 0), model.get("training_seconds", np.nan)
    games = read_games(folder)
    return {
        **{name: settings.get(name) for name in ("arm", "seed", "env_id", *SETTINGS)},
        "rows_per_update": settings["n_steps"] * settings["n_envs"],
        "total_timesteps": settings["total_timesteps"],
        "timesteps": timesteps,
        "finished": (folder / "model.zip").exists(),
        "seconds": seconds,
        "steps_per_second": timesteps / seconds,
        "updates": model.get("_n_updates", 0),
        "games": len(games),
        "final_mean_return": games["r"].tail(LAST_GAMES).mean(),
    }


def learning_curve(games: pd.DataFrame, grid: np.ndarray) -> pd.DataFrame:
    """Mean return of the last games at each number of timesteps in ``grid``; nan before the first game has ended."""
    count = np.searchsorted(games["timesteps"], grid, side="right")
    means = games["r"].rolling(LAST_GAMES, min_periods=1).mean().to_numpy()
    return pd.DataFrame({"timesteps": grid, "mean_return": np.r_[np.nan, means][count], "games": count})


def read_curves(out: Path, results: pd.DataFrame) -> pd.DataFrame:
    curves = []
    for run in results.itertuples():
        games = read_games(out / run.arm / f"seed_{run.seed}")
        grid = np.linspace(0, run.total_timesteps, CURVE_POINTS + 1)[1:].astype(int)
        reached = run.timesteps if run.finished else games["timesteps"].max()  # nan: nothing reached
        curve = learning_curve(games, grid[grid <= reached])
        curves.append(curve.assign(arm=run.arm, seed=run.seed))
    return pd.concat(curves)[["arm", "seed", "timesteps", "mean_return", "games"]]


def bootstrap_interval(values: np.ndarray) -> tuple[float, float] | None:
    """95 % interval of the mean over seeds, None where one seed says nothing of the spread."""
    if len(values) < 2:
        return None
    # percentile: BCa gives nan where all values are equal
    result = stats.bootstrap((values,), np.mean, confidence_level=0.95, method="percentile", rng=0)
    return tuple(result.confidence_interval)


def number(value: float, digits: int = 2) -> str:
    return "n/a" if np.isnan(value) else f"{value:,.{digits}f}"


def summary_row(arm: str, runs: pd.DataFrame) -> list[str]:
    """A row of the table of ``summary.md``, over the finished runs of an arm."""
    finished = runs[runs["finished"]]
    returns = finished["final_mean_return"].dropna().to_numpy()
    interval = bootstrap_interval(returns)
    return [
        arm,
        f"{len(finished)} of {len(runs)}",
        number(finished["steps_per_second"].mean(), 0),
        number(finished["updates"].mean(), 0),
        str(runs["rows_per_update"].iloc[0]),
        number(returns.mean() if len(returns) else np.nan),
        f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "n/a",
        number(stats.trim_mean(returns, 0.25) if len(returns) else np.nan),
    ]


def made_with(out: Path) -> str:
    """Versions, machine and commit of the runs; several, where they differ."""
    configs = [json.loads(path.read_text()) for path in sorted(out.glob("**/seed_*/config.json"))]
    starts = pd.DataFrame([start for config in configs for start in config["starts"]])
    names = ["commit", "Python", "Stable-Baselines3", "PyTorch", "Gymnasium", "ale-py", "cores", "jobs", "processes"]
    columns = starts.reindex(columns=names).dropna(axis="columns", how="all")
    return ", ".join(f"{name} {' and '.join(map(str, column.unique()))}" for name, column in columns.items())


def precision(results: pd.DataFrame) -> str:
    nstep = results.dropna(subset="return_horizon")
    if nstep.empty:
        return "All in float32."
    first = nstep.iloc[0]
    features = "float32" if pd.isna(first.autocast) else "bfloat16 features"
    return f"A2C in float32, NStepA2C in {features}{', channels last' if first.channels_last else ''}."


def summary(out: Path, results: pd.DataFrame) -> str:
    header = ["arm", "finished runs", "steps/s", "updates", "rows per update", "final mean return", "95 %", "IQM"]
    rows = [summary_row(arm, runs) for arm, runs in results.groupby("arm")]
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    first = results.iloc[0]
    lines[:0] = [
        f"# {first.env_id}, {first.total_timesteps:,} steps, {first.n_envs} environments ({first.env_backend})",
        "",
    ]
    lines += [
        "",
        f"Over the finished runs. Final mean return: unclipped return of full games, mean over the last {LAST_GAMES} "
        "games of each run, then over seeds. 95 %: bootstrap over seeds. IQM: interquartile mean over seeds, "
        "with fewer than four seeds it leaves none out. Steps/s: environment steps per second of training, updates "
        f"included. {precision(results)}",
        "",
        f"Made with: {made_with(out)}.",
        "",
    ]
    for path in sorted(out.glob("*/seed_*/game.gif")):
        with Image.open(path) as game:
            lines.append(
                f"- [{path.parent.relative_to(out)}]({path.relative_to(out)}): {game.info['comment'].decode()}"
            )
    return "\n".join(lines) + "\n"


def plot(curves: pd.DataFrame, results: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for arm, runs in results.groupby("arm"):
        band = curves[curves["arm"] == arm].groupby("timesteps")["mean_return"].agg(["mean", "min", "max"])
        first = runs.iloc[0]
        horizon = "" if pd.isna(first.return_horizon) else f", N={first.return_horizon:.0f}"
        label = (
            f"{arm} (T={first.n_steps}{horizon}): {first.n_envs} environments, "
            f"{first.rows_per_update} rows per update, {runs['updates'].mean():,.0f} updates, seeds: {len(runs)}"
        )
        (line,) = axes.plot(band.index, band["mean"], label=label)
        axes.fill_between(band.index, band["min"], band["max"], color=line.get_color(), alpha=0.2)
    axes.set(
        title=f"{results['env_id'].iloc[0]}: mean over seeds, band from the lowest to the highest seed",
        xlabel="environment steps (4 frames each)",
        ylabel=f"unclipped return of full games, mean of the last {LAST_GAMES}",
        xlim=(0, results["total_timesteps"].max()),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_report(out: Path) -> None:
    """Write ``results.csv``, ``curves.csv``, ``summary.md`` and ``learning_curves.png`` for the runs below ``out``."""
    results = pd.DataFrame([read_run(path.parent) for path in sorted(out.glob("*/seed_*/config.json"))])
    results = results.sort_values(["arm", "seed"], ignore_index=True)
    curves = read_curves(out, results)
    with written_whole(out / "results.csv") as path:
        results.round(3).to_csv(path, index=False)
    with written_whole(out / "curves.csv") as path:
        curves.round(3).to_csv(path, index=False)
    with written_whole(out / "summary.md") as path:
        path.write_text(summary(out, results))
    with written_whole(out / "learning_curves.png") as path:
        plot(curves, results, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder that was --out of breakout.py")
    write_report(parser.parse_args().out)
