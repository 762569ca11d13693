"""
Every table and figure of the study, out of the folders of its runs.

``python study_report.py examples/results/minatar`` writes them again at any time, also while the runs go on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

from report import made_with, number, read_games
from sb3_nstep.checkpoint import written_whole

CURVE_LINES = 100
AUC_PARTS = 20
STOCK = "a2c"
COLUMNS = [
    *("game", "arm", "n_steps", "return_horizon", "carry_over", "correction", "seed"),
    *("env_steps", "updates", "steps_per_second", "final_mean_return", "auc"),
]
N_RESAMPLES = 5_000


def read_settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def read_curve(folder: Path) -> pd.DataFrame:
    """
    A line for each hundredth of a run's environment steps: how many games (episodes) ended in it, their mean return
    (unclipped; nan where none did), and the seconds of training when the last one did.
    """
    if (folder / "curve.csv").exists():
        return pd.read_csv(folder / "curve.csv")
    total = read_settings(folder)["settings"]["total_timesteps"]
    ends = np.linspace(0, total, CURVE_LINES + 1)[1:]
    games = read_games(folder)
    part = np.searchsorted(ends, np.minimum(games["timesteps"], total))
    grouped = games.groupby(part)
    curve = grouped.agg(games=("r", "size"), mean_return=("r", "mean"), seconds=("t", "max"))
    curve = curve.reindex(range(CURVE_LINES)).fillna({"games": 0})
    curve.insert(0, "env_steps", ends.astype(int))
    return curve.astype({"games": int}).round({"mean_return": 4, "seconds": 1})


def mean_return(curve: pd.DataFrame) -> float:
    """Mean return of all games in these lines."""
    return (curve["mean_return"] * curve["games"]).sum() / curve["games"].sum() if curve["games"].any() else np.nan


def final_mean_return(curve: pd.DataFrame) -> float:
    """Of the games that ended in the last tenth."""
    return mean_return(curve.tail(CURVE_LINES // 10))


def area_under_curve(curve: pd.DataFrame) -> float:
    """Mean over twenty equal parts, those in which a game ended, of the mean return in each."""
    size = CURVE_LINES // AUC_PARTS
    return float(pd.Series(mean_return(curve[start : start + size]) for start in range(0, CURVE_LINES, size)).mean())


def read_run(folder: Path) -> dict[str, Any]:
    """A row of ``summary.csv``."""
    config = read_settings(folder)
    settings, finished = config["settings"], config["finished"]
    curve = read_curve(folder)
    is_stock = settings["algo"] == STOCK
    return {
        "game": settings["env_id"].removeprefix("MinAtar/").removesuffix("-v1").removesuffix("NoFrameskip-v4"),
        "arm": settings["arm"],
        "n_steps": settings["n_steps"],
        # Stock A2C: as far as the rollout goes, and no further
        "return_horizon": settings["n_steps"] if is_stock else settings["return_horizon"],
        "carry_over": settings.get("carry_over", False),
        "correction": settings.get("correction", "none"),
        "seed": settings["seed"],
        "env_steps": settings["total_timesteps"],
        "updates": finished["updates"],
        "steps_per_second": round(finished["timesteps"] / finished["seconds"]),
        "final_mean_return": round(final_mean_return(curve), 4),
        "auc": round(area_under_curve(curve), 4),
    }


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    return stats.trim_mean(values, 0.25, axis=axis)


def mean_of_strata(statistic: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *strata, axis=-1: np.mean([statistic(stratum, axis=axis) for stratum in strata], axis=0)


def interval(strata: Sequence[np.ndarray], statistic: Callable[..., np.ndarray]) -> tuple[float, float]:
    """95 % bootstrap interval, every stratum resampled by itself; nan where a stratum is a single run."""
    if min(map(len, strata)) < 2:
        return np.nan, np.nan
    # percentile: BCa gives nan where all values are equal
    result = stats.bootstrap(
        tuple(strata), statistic, method="percentile", n_resamples=N_RESAMPLES, rng=0, vectorized=True
    )
    return tuple(result.confidence_interval)


def probability_of_improvement(arm: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    """That a run of ``arm`` ends above one of ``other``; ties count half."""
    difference = np.expand_dims(np.moveaxis(arm, axis, -1), -1) - np.expand_dims(np.moveaxis(other, axis, -1), -2)
    return ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1))


def improvement_over_games(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean over games; the strata are the runs of an arm, game by game, then those of stock A2C."""
    pairs = zip(strata[: len(strata) // 2], strata[len(strata) // 2 :], strict=True)
    return np.mean([probability_of_improvement(arm, other, axis) for arm, other in pairs], axis=0)


def by_game(summary: pd.DataFrame, arm: str, column: str) -> list[np.ndarray]:
    """The runs of an arm, an array for each game."""
    rows = summary[summary["arm"] == arm]
    return [runs[column].to_numpy() for _, runs in rows.groupby("game", sort=True)]


def with_interval(value: float, bounds: tuple[float, float], digits: int = 2) -> str:
    text = number(value, digits)
    return text if np.isnan(bounds[0]) else f"{text} [{number(bounds[0], digits)}, {number(bounds[1], digits)}]"


def compare(summary: pd.DataFrame) -> pd.DataFrame:
    """
    A row for each arm that has finished runs in all games, none where stock A2C has not. Scores are returns as parts of
    the mean final return of stock A2C in the same game.
    """
    summary = summary.dropna(subset="final_mean_return")
    n_games = summary.groupby("arm")["game"].nunique()
    if STOCK not in n_games or n_games[STOCK] < n_games.max():
        return pd.DataFrame(columns=["arm"])
    summary = summary[summary["arm"].isin(n_games[n_games == n_games.max()].index)].copy()
    scale = summary[summary["arm"] == STOCK].groupby("game")["final_mean_return"].mean()
    for column in ("final_mean_return", "auc"):
        summary[f"{column}_score"] = summary[column] / summary["game"].map(scale)
    rows = []
    for arm, runs in summary.groupby("arm", sort=False):
        final, auc = (by_game(summary, arm, f"{column}_score") for column in ("final_mean_return", "auc"))
        pairs = [*by_game(summary, arm, "final_mean_return"), *by_game(summary, STOCK, "final_mean_return")]
        row = {"arm": arm, "runs": len(runs)}
        for name, strata, statistic in (
            ("mean", final, mean_of_strata(np.mean)),
            ("iqm", final, mean_of_strata(iqm)),
            ("auc", auc, mean_of_strata(np.mean)),
            ("improvement", pairs, improvement_over_games),
        ):
            low, high = interval(strata, statistic)
            row |= {name: float(statistic(*strata)), f"{name}_low": low, f"{name}_high": high}
        rows.append(row)
    return pd.DataFrame(rows).sort_values("auc", ascending=False, ignore_index=True)


def table(header: Sequence[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def overall_table(comparison: pd.DataFrame) -> list[str]:
    header = ["arm", "runs", "final, mean", "final, IQM", "area under the curve", "P(final above a2c)"]
    rows = [
        [row["arm"], str(row["runs"])]
        + [with_interval(row[n], (row[f"{n}_low"], row[f"{n}_high"])) for n in ("mean", "iqm", "auc", "improvement")]
        for row in comparison.to_dict("records")
    ]
    return table(header, rows)


def horizon_text(horizon: Any) -> str:
    return f"{min(horizon)} … {max(horizon)}" if isinstance(horizon, list) else str(horizon)


def game_table(runs: pd.DataFrame, order: Sequence[str]) -> list[str]:
    header = ["arm", "T", "N", "seeds", "updates", "rows per update", "steps/s", "final mean return", "IQM", "auc"]
    rows = []
    for arm, seeds in sorted(runs.groupby("arm"), key=lambda item: order.index(item[0])):
        first = seeds.iloc[0]
        final, auc = seeds["final_mean_return"].to_numpy(), seeds["auc"].to_numpy()
        rows.append(
            [
                arm,
                str(first["n_steps"]),
                horizon_text(first["return_horizon"]),
                str(len(seeds)),
                number(seeds["updates"].mean(), 0),
                number(first["env_steps"] / seeds["updates"].mean(), 0),
                number(seeds["steps_per_second"].median(), 0),
                with_interval(final.mean(), interval([final], np.mean)),
                with_interval(iqm(final), interval([final], iqm)),
                with_interval(auc.mean(), interval([auc], np.mean)),
            ]
        )
    return table(header, rows)


def write_summary(out: Path, summary: pd.DataFrame, comparison: pd.DataFrame) -> str:
    order = [*comparison["arm"], *sorted(set(summary["arm"]) - set(comparison["arm"]))]
    steps = f"{summary['env_steps'].iloc[0]:,}"
    lines = [f"# {', '.join(sorted(summary['game'].unique()))}: {steps} environment steps a run", ""]
    if len(comparison):
        lines += [
            f"Over all games, as parts of {STOCK}'s mean final return in the same game, by area under the curve:",
            "",
            *overall_table(comparison),
            "",
        ]
    for game, runs in summary.groupby("game"):
        lines += [f"## {game}", "", *game_table(runs, order), ""]
    lines += [
        "Final mean return: of the games that ended in the last tenth of the steps, unclipped. auc: mean over twenty "
        "equal parts of the run. IQM: interquartile mean. In brackets: 95 % bootstrap intervals over seeds, each game "
        "resampled by itself. Steps/s: median, of processes of one thread side by side, on a machine that did other "
        "work too: compare no two arms by it.",
        "",
        f"Made with: {made_with(out)}.",
    ]
    return "\n".join(lines) + "\n"


def plot_overall(comparison: pd.DataFrame, path: Path) -> None:
    comparison = comparison[::-1].reset_index(drop=True)
    figure, axes = plt.subplots(
        1, 2, figsize=(8, 1.2 + 0.24 * len(comparison)), sharey=True, layout="constrained", width_ratios=[3, 2]
    )
    for axis, name, reference in ((axes[0], "auc", None), (axes[1], "improvement", 0.5)):
        low, value, high = (comparison[column].to_numpy() for column in (f"{name}_low", name, f"{name}_high"))
        errors = np.nan_to_num(np.stack([value - low, high - value]))
        colors = ["tab:gray" if arm.startswith(STOCK) else "tab:blue" for arm in comparison["arm"]]
        axis.errorbar(value, comparison.index, xerr=errors, fmt="none", ecolor=colors, elinewidth=2)
        axis.scatter(value, comparison.index, c=colors, s=18, zorder=3)
        if reference is None:
            reference = comparison.loc[comparison["arm"] == STOCK, name].item()
        axis.axvline(reference, color="black", linewidth=0.8, linestyle=":")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(comparison.index, comparison["arm"], fontsize="small")
    axes[0].set_xlabel(f"area under the curve, {STOCK}'s final = 1")
    axes[1].set_xlabel(f"P(final above {STOCK})")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_curves(curves: pd.DataFrame, arms: Sequence[str], path: Path) -> None:
    games = sorted(curves["game"].unique())
    figure, axes = plt.subplots(
        2, len(games), figsize=(4.2 * len(games) + 1, 7), squeeze=False, layout="constrained", sharey="col"
    )
    size = CURVE_LINES // AUC_PARTS
    for column, game in enumerate(games):
        for arm in arms:
            runs = [run for _, run in curves[(curves["game"] == game) & (curves["arm"] == arm)].groupby("seed")]
            if not runs:
                continue
            parts = pd.DataFrame(
                [mean_return(run[start : start + size]) for start in range(0, CURVE_LINES, size)] for run in runs
            )
            steps = runs[0]["env_steps"].to_numpy()[size - 1 :: size]
            seconds = np.mean([run["seconds"].ffill().to_numpy()[size - 1 :: size] for run in runs], axis=0)
            for axis, x in ((axes[0, column], steps), (axes[1, column], seconds / 60)):
                (line,) = axis.plot(x, parts.mean(), label=f"{arm} (seeds: {len(runs)})")
                axis.fill_between(x, parts.min(), parts.max(), color=line.get_color(), alpha=0.15)
                axis.grid(alpha=0.3)
        axes[0, column].set(title=game, xlabel="environment steps")
        axes[0, column].xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}k")
        axes[1, column].set(xlabel="minutes of training, mean over seeds")
    axes[0, 0].set_ylabel("return, mean and range over seeds")
    axes[1, 0].set_ylabel("return, mean and range over seeds")
    axes[0, 0].legend(loc="upper left", fontsize="x-small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_report(out: Path, arms: Sequence[str] | None = None) -> None:
    """
    Write ``summary.csv``, ``summary.md`` and ``learning_curves.png`` for the finished runs below ``out``, and where
    stock A2C is among them, ``arms.png``.

    :param arms: those whose curves are drawn (default: the first four by area under the curve, and stock A2C; the first
        four by name where there is nothing to compare them with)
    """
    folders = [path.parent for path in sorted(out.glob("**/seed_*/curve.csv"))]
    if not folders:
        with written_whole(out / "summary.md") as path:
            path.write_text("No run has finished yet.\n")
        return
    summary = pd.DataFrame([read_run(folder) for folder in folders])[COLUMNS]
    with written_whole(out / "summary.csv") as path:
        summary.sort_values(["game", "arm", "seed"]).to_csv(path, index=False)
    comparison = compare(summary)
    with written_whole(out / "summary.md") as path:
        path.write_text(write_summary(out, summary, comparison))
    if len(comparison):
        with written_whole(out / "arms.png") as path:
            plot_overall(comparison, path)
    curves = pd.concat(
        read_curve(folder).assign(game=row.game, arm=row.arm, seed=row.seed)
        for folder, row in zip(folders, summary.itertuples(), strict=True)
    )
    best = comparison if len(comparison) else summary.drop_duplicates("arm")
    with written_whole(out / "learning_curves.png") as path:
        plot_curves(curves, arms or list(dict.fromkeys([STOCK, *best["arm"].head(4)])), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder that was --out of study.py")
    parser.add_argument("--arms", nargs="+", help="those whose curves are drawn")
    arguments = parser.parse_args()
    write_report(arguments.out, arguments.arms)
