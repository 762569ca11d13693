"""The study: its games, its statistics against scipy's and plain Python, its queue as a user meets it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from minatar import Environment
from scipy import stats
from stable_baselines3.common.monitor import ResultsWriter

import study
import study_report
from minatar_games import make_minatar_env

TOTAL = 2_000


def write_run(folder: Path, games: list[tuple[float, int]], **finished: float) -> Path:
    """The files of a run of ``TOTAL`` steps with given (return, timesteps) of its games, without training anything."""
    folder.mkdir(parents=True)
    args = study.make_parser().parse_args(["minatar", "--steps", str(TOTAL)])
    run = study.make_run(args, "MinAtar/Breakout-v1", folder.parent.name, int(folder.name.removeprefix("seed_")))
    config = {"settings": run.settings, "starts": [], "finished": finished}
    (folder / "config.json").write_text(json.dumps(config))
    writer = ResultsWriter(str(folder / "monitor.csv"), {"t_start": 0.0, "env_id": "x"}, ("timesteps",))
    for score, step in games:
        writer.write_row({"r": score, "l": 100, "t": step / 10, "timesteps": step})
    writer.close()
    return folder


def test_curve_by_hand(tmp_path: Path) -> None:
    # 20 steps a line; the last rollout goes beyond the total
    games = [(1, 20), (3, 21), (5, 40), (7, 41), (2, 1_805), (4, 1_990), (9, 2_004)]
    curve = study_report.read_curve(write_run(tmp_path / "a2c/seed_0", games))
    assert curve["env_steps"].tolist() == list(range(20, 2_001, 20))
    assert curve["games"].tolist() == [1, 2, 1, *[0] * 87, 1, *[0] * 8, 2]
    assert curve["mean_return"].dropna().tolist() == [1, 4, 7, 2, 6.5]
    assert curve["seconds"].dropna().tolist() == [2.0, 4.0, 4.1, 180.5, 200.4]
    assert study_report.final_mean_return(curve) == (2 + 4 + 9) / 3
    # twenty parts of 100 steps, three of them with games: four games, one, two
    assert study_report.area_under_curve(curve) == pytest.approx(np.mean([16 / 4, 2, 13 / 2]))


def test_summary_has_the_columns_that_tools_read(tmp_path: Path) -> None:
    for arm, seed in product(("a2c", "t1_n5", "t1_n1to16", "t1_n20to3"), (0, 1)):
        folder = write_run(
            tmp_path / f"Breakout/{arm}/seed_{seed}", [(seed, 1_900)], timesteps=2_000, updates=9, seconds=4
        )
        study_report.read_curve(folder).to_csv(folder / "curve.csv", index=False)
    write_run(tmp_path / "Breakout/t2_n5/seed_0", [(1, 10)])  # still runs
    study_report.write_report(tmp_path)
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert ",".join(summary.columns) == (
        "game,arm,n_steps,return_horizon,carry_over,correction,seed,env_steps,updates,steps_per_second,"
        "final_mean_return,auc"
    )
    rows = summary[summary["seed"] == 1].set_index("arm").T.to_dict("list")
    same = [1, 2_000, 9, 500, 1.0, 1.0]
    assert rows["a2c"] == ["Breakout", 5, "5", False, "none", *same]
    assert rows["t1_n5"] == ["Breakout", 1, "5", True, "importance", *same]
    assert rows["t1_n20to3"][2] == "falling"
    assert set(rows) == {"a2c", "t1_n5", "t1_n1to16", "t1_n20to3"}
    for picture in ("arms.png", "learning_curves.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


def test_report_before_the_first_run_has_finished(tmp_path: Path) -> None:
    write_run(tmp_path / "Breakout/a2c/seed_0", [])
    study_report.write_report(tmp_path)
    assert (tmp_path / "summary.md").read_text() == "No run has finished yet.\n"


def test_report_without_stock_a2c_compares_nothing_and_draws_what_there_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "Breakout/t1_n5/seed_3", [(4, 1_900)], timesteps=2_000, updates=9, seconds=4)
    study_report.read_curve(folder).to_csv(folder / "curve.csv", index=False)
    study_report.write_report(tmp_path)
    assert "as parts of a2c" not in (tmp_path / "summary.md").read_text()
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        *("summary.csv", "summary.md", "learning_curves.png")
    }
    drawn = plt.imread(tmp_path / "learning_curves.png")
    assert np.isclose(drawn[..., :3], to_rgb("tab:blue"), atol=0.01).all(axis=-1).any()


def test_probability_of_improvement_is_mann_whitney() -> None:
    rng = np.random.default_rng(0)
    arm, other = rng.integers(0, 6, 8).astype(float), rng.integers(0, 6, 5).astype(float)  # with ties
    expected = stats.mannwhitneyu(arm, other).statistic / (8 * 5)
    assert study_report.probability_of_improvement(arm, other) == pytest.approx(expected)
    # as scipy's bootstrap calls it: resamples in front, runs behind
    resamples = np.stack([arm, arm[::-1]]), np.stack([other, other + 1])
    several = study_report.probability_of_improvement(*resamples, axis=-1)
    assert several == pytest.approx(
        [study_report.probability_of_improvement(*pair) for pair in zip(*resamples, strict=True)]
    )


def test_interval_resamples_each_game_by_itself() -> None:
    """Two games of two runs: resampled in one pot, the mean could be 0 or 10."""
    strata = [np.array([0.0, 1.0]), np.array([9.0, 10.0])]
    mean = study_report.mean_of_strata(np.mean)
    assert mean(*strata) == 5
    assert study_report.interval(strata, mean) == (4.5, 5.5)
    assert np.isnan(study_report.interval([np.array([1.0]), np.array([1.0, 2.0])], mean)).all()


def test_iqm_leaves_out_a_quarter_at_each_end() -> None:
    assert study_report.iqm(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == (2 + 3 + 4 + 5) / 4


def test_comparison_by_hand(tmp_path: Path) -> None:
    """Stock's mean final return is the unit of each game; an arm that lacks a game is left out."""
    rows = [("X", "a2c", [1, 3]), ("Y", "a2c", [10, 10]), ("X", "t1_n5", [4, 4]), ("Y", "t1_n5", [5, 15])]
    rows.append(("X", "t2_n5", [9, 9]))
    summary = pd.DataFrame(
        {"game": game, "arm": arm, "seed": seed, "final_mean_return": value, "auc": value / 2}
        for game, arm, values in rows
        for seed, value in enumerate(values)
    )
    comparison = study_report.compare(summary).set_index("arm")
    assert set(comparison.index) == {"a2c", "t1_n5"}
    assert comparison.loc["a2c", ["mean", "auc"]].tolist() == [1, 0.5]
    assert comparison.loc["t1_n5", "mean"] == (4 / 2 + 10 / 10) / 2
    assert comparison.loc["t1_n5", "improvement"] == (1 + 0.5) / 2
    assert comparison.loc["a2c", "improvement"] == 0.5


@pytest.mark.parametrize("env_id", study.GAMES["minatar"])
def test_games_are_minatars(env_id: str) -> None:
    """Same seed, same game as MinAtar's own class, its channels first, its reward and episode as they are."""
    env = make_minatar_env(env_id, n_envs=2, seed=3)
    name = {"Breakout": "breakout", "SpaceInvaders": "space_invaders", "Asterix": "asterix"}[env_id[8:-3]]
    own = Environment(name)
    own.seed(4)  # of the second environment
    own.reset()
    actions = own.minimal_action_set()
    np.testing.assert_array_equal(env.reset()[1], own.state().transpose(2, 0, 1))
    rng = np.random.default_rng(0)
    score = 0.0
    for _ in range(300):
        choice = rng.integers(len(actions))
        observations, rewards, dones, infos = env.step(np.array([0, choice]))
        reward, terminal = own.act(actions[choice])
        score += reward
        assert (rewards[1], dones[1]) == (reward, terminal)
        if terminal:
            assert infos[1]["episode"]["r"] == score
            assert not infos[1]["TimeLimit.truncated"]
            score = 0.0
            own.reset()
        np.testing.assert_array_equal(observations[1], own.state().transpose(2, 0, 1))


def test_study_as_a_user_starts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["minatar", "--arms", "t1_n20to3", "--seeds", "0", "--steps", "960", "--jobs", "2", "--out", str(out)]
    assert study.main(arguments) == 0
    summary = pd.read_csv(out / "summary.csv")
    assert summary["game"].tolist() == ["Asterix", "Breakout", "SpaceInvaders"]
    # 60 rollouts of a step. In the sixteenth, N has fallen to round(20 - 17 * 15 / 60) = 16: the first whole windows
    assert summary["updates"].tolist() == [45, 45, 45]
    assert "SpaceInvaders/t1_n20to3/seed_0: final mean return" in capsys.readouterr().out

    # what is finished is kept, also by what git keeps of it
    for path in out.glob("**/*"):
        if path.suffix in (".zip", ".lock") or path.name in ("monitor.csv", ".lock"):
            path.unlink()
    before = {path: path.stat().st_mtime_ns for path in out.glob("**/seed_*/*.*")}
    assert study.main(arguments) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("**/seed_*/*.*")}

    with pytest.raises(SystemExit):
        study.main([*arguments, "--steps", "970"])
    assert "total_timesteps: expected 970, got 960" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["atari"], "invalid choice: 'atari'"),
        (["minatar", "--arms", "ppo"], "invalid choice: 'ppo'"),
        (["minatar", "--arms", "a2c", "a2c"], "--arms: expected each one once, got a2c a2c"),
        (["minatar", "--seeds", "-1"], "expected a whole number of at least 0, got '-1'"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        study.main([*arguments, "--out", str(tmp_path / "out")])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
