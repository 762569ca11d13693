"""The comparison as a user meets it: started, interrupted, killed, resumed, read."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch as th
from PIL import Image
from stable_baselines3 import A2C
from stable_baselines3.common.monitor import ResultsWriter, load_results

import breakout
import report
import training
from runs import Run, lock
from sb3_nstep import NStepA2C
from sb3_nstep.checkpoint import written_whole

STEPS, N_ENVS = 1_000, 2
ARMS = ["a2c", "nstep_a2c"]
MARK = {"SB3_NSTEP_TEST_BREAKOUT": str(os.getpid())}  # in the environment of all processes that the test starts


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, breakout.__file__, "--steps", str(STEPS), "--n-envs", str(N_ENVS)]
    command += ["--seeds", "0", "--arms", *ARMS, "--jobs", "2", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | MARK)


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> None:  # a busy machine starts processes slowly
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def wait_for_rows(process: subprocess.Popen[str], out: Path, more_than: int = 0) -> None:
    """Until the N-step arm has finished games, all of it while the process runs."""
    wait_until(lambda: len(rows(out, "nstep_a2c")) > more_than or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]


def processes() -> list[int]:
    """All living processes that the test has started, whoever their parent is by now."""
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if MARK.items() <= (process.info["environ"] or {}).items()
    ]


def rows(out: Path, arm: str) -> list[str]:
    path = out / arm / "seed_0" / "monitor.csv"
    return path.read_text().splitlines()[2:] if path.exists() else []


class Story:
    """Five starts of the same command, of which four end badly."""

    def __init__(self, out: Path) -> None:
        self.out = out
        checkpoint = out / "nstep_a2c/seed_0/checkpoint.zip"

        process = start(out)
        wait_for_rows(process, out)
        os.kill(int((out / "nstep_a2c/seed_0/.lock").read_text()), signal.SIGKILL)
        self.child_killed = process.communicate(timeout=300)[0], process.returncode
        self.left_by_child = processes()
        self.first_model = (out / "a2c/seed_0/model.zip").stat().st_mtime_ns

        (out / "nstep_a2c/seed_0/monitor.csv").unlink()  # to see when the next start has come as far
        process = start(out)
        wait_for_rows(process, out)
        process.send_signal(signal.SIGINT)
        self.interrupted = process.communicate(timeout=300)[0], process.returncode
        self.left_by_interrupt = processes()
        self.summary_of_partial = (out / "summary.md").read_text()
        self.checkpoint_saved = checkpoint.exists()
        self.kept = rows(out, "nstep_a2c")

        # Of two checkpoints one is left
        with open(checkpoint, "r+b") as file:
            file.truncate(1000)
        process = start(out)
        wait_for_rows(process, out, more_than=len(self.kept))
        process.terminate()
        self.terminated = process.communicate(timeout=300)[0], process.returncode
        self.kept = rows(out, "nstep_a2c")

        process, second = start(out), start(out)
        wait_until(lambda: process.poll() is not None or second.poll() is not None)
        if second.poll() is None:
            process, second = second, process
        self.refused = second.communicate()[0], second.returncode, process.pid
        wait_for_rows(process, out, more_than=len(self.kept))
        process.kill()
        process.communicate()
        wait_until(lambda: not processes(), 60)

        process = start(out)
        self.finished = process.communicate(timeout=300)[0], process.returncode
        self.left_at_end = processes()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    try:
        yield Story(tmp_path_factory.mktemp("breakout") / "out")
    finally:
        for pid in processes():
            os.kill(pid, signal.SIGKILL)


def test_dead_child_is_named_and_the_others_go_on(story: Story) -> None:
    output, returncode = story.child_killed
    assert returncode == 1
    assert "nstep_a2c seed 0: its process ended with signal SIGKILL" in output
    assert "Start again with the same arguments" in output
    assert story.left_by_child == []
    assert "a2c seed 0: one game" in output


def test_ctrl_c_saves_and_says_how_to_go_on(story: Story) -> None:
    output, returncode = story.interrupted
    assert returncode == 130
    assert "Start again with the same arguments" in output
    assert "Traceback" not in output
    assert story.left_by_interrupt == []
    assert story.checkpoint_saved
    assert "| nstep_a2c | 0 of 1 |" in story.summary_of_partial


def test_sigterm_does_the_same_and_a_damaged_checkpoint_costs_no_more_than_itself(story: Story) -> None:
    output, returncode = story.terminated
    assert returncode == 128 + signal.SIGTERM
    assert "Start again with the same arguments" in output
    assert "Traceback" not in output
    assert re.search(r"checkpoint\.zip: expected a checkpoint, got a file that is damaged", output)


def test_second_process_is_refused(story: Story) -> None:
    output, returncode, holder = story.refused
    assert returncode == 2
    assert f"in use by process {holder}" in output


def test_all_files_are_there_at_the_end(story: Story) -> None:
    output, returncode = story.finished
    assert returncode == 0, output
    assert "Traceback" not in output
    assert "nstep_a2c seed 0: resumed at step" in output
    assert story.left_at_end == []
    assert {path.name for path in story.out.iterdir() if path.is_file()} == {
        *(".lock", "results.csv", "curves.csv", "summary.md", "learning_curves.png")
    }
    for arm in ARMS:
        folder = story.out / arm / "seed_0"
        files = {path.name for path in folder.iterdir()}
        assert files == {".lock", "config.json", "monitor.csv", "model.zip", "game.gif", "tensorboard_0"}
        assert (folder / "game.gif").stat().st_size < 3_000_000
        config = json.loads((folder / "config.json").read_text())
        assert config["settings"]["total_timesteps"] == STEPS
        assert len(config["starts"]) == {"a2c": 1, "nstep_a2c": 5}[arm]
        assert config["starts"][0]["Stable-Baselines3"]
    assert "| n/a |" in (story.out / "summary.md").read_text()  # one seed: no interval


def test_finished_run_is_kept(story: Story) -> None:
    assert (story.out / "a2c/seed_0/model.zip").stat().st_mtime_ns == story.first_model


def test_resumed_run_loses_and_repeats_nothing(story: Story) -> None:
    lines = rows(story.out, "nstep_a2c")
    assert lines[: len(story.kept)] == story.kept
    assert len(set(lines)) == len(lines)
    for arm in ARMS:
        games = load_results(str(story.out / arm / "seed_0"))
        assert games["timesteps"].is_monotonic_increasing
        assert games["timesteps"].between(1, STEPS).all()
        assert games["t"].is_monotonic_increasing
    results = pd.read_csv(story.out / "results.csv").set_index("arm")
    assert (results["timesteps"] == STEPS).all() and results["finished"].all()
    assert results["updates"].to_dict() == dict.fromkeys(ARMS, STEPS / (5 * N_ENVS))
    for path, algo in (("a2c", A2C), ("nstep_a2c", NStepA2C)):
        assert algo.load(story.out / path / "seed_0/model.zip").num_timesteps == STEPS


def test_gif_has_the_colours_of_the_game(story: Story) -> None:
    with Image.open(story.out / "a2c/seed_0/game.gif") as game:
        assert game.size == (160, 210)
        assert game.n_frames > 50
        colours = {colour for _, colour in game.convert("RGB").getcolors()}
    # walls, background and the six rows of bricks
    assert {(142, 142, 142), (0, 0, 0), (200, 72, 72), (198, 108, 58), (180, 122, 48), (162, 162, 42)} <= colours
    assert {(72, 160, 72), (66, 72, 200)} <= colours


def test_gif_is_small_and_says_where_the_game_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "GAME_FRAMES", 400)
    monkeypatch.setattr(training, "GIF_FRAMES", 40)
    monkeypatch.setattr(training, "GIF_BYTES", 10_000)
    run = Run("a2c", 0, "a2c", "BreakoutNoFrameskip-v4", 1, 1, "subproc", {})
    env = training.make_sb3_env(run, n_envs=1)
    A2C("CnnPolicy", env).save(tmp_path / "model.zip")
    env.close()
    # as after a kill between model.zip and game.gif
    connection, remote = multiprocessing.Pipe()
    training.run_process(run, tmp_path, remote, th.get_num_threads(), 30, training.record_game)
    _, comment = connection.recv().split(": ", 1)
    assert comment.endswith("400 frames, cut off there")
    assert (tmp_path / "game.gif").stat().st_size < 10_000
    with Image.open(tmp_path / "game.gif") as game:
        assert game.info["comment"].decode() == comment
        assert 5 < game.n_frames < 80


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``breakout.py`` prints when it refuses its arguments."""
    parser = breakout.make_parser()
    with pytest.raises(SystemExit) as error:
        breakout.main([*arguments])
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(parser.format_usage()[:10])
    return printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--env-id ALE/Breakout-v5",
            "expected an id like BreakoutNoFrameskip-v4, got ALE/Breakout-v5, which skips frames",
        ),
        ("--env-id CartPole-v1", "no Atari game"),
        ("--env-id NoSuchGame-v4", "NoSuchGame"),
        ("--arms a2c ppo", "'ppo'"),
        ("--arms a2c ppo", "nstep_a2c_t1"),
        ("--arms a2c a2c", "expected each one once, got a2c a2c"),
        ("--seeds 1 2 1", "expected each one once, got 1 2 1"),
        ("--seeds -1", "--seeds"),
        ("--steps 0", "expected a whole number of at least 1, got '0'"),
        ("--n-envs 1.5", "expected a whole number of at least 1, got '1.5'"),
        ("--return-horizon -3", "--return-horizon"),
        ("--jobs none", "expected a whole number of at least 1, got 'none'"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, message: str) -> None:
    assert message in call(capsys, "--out", str(tmp_path / "out"), *arguments.split())
    assert not (tmp_path / "out").exists()


def test_folder_of_someone_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert "holds other files" in call(capsys, "--out", str(tmp_path))
    assert "expected a folder" in call(capsys, "--out", str(tmp_path / "thesis.tex"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_other_settings(capsys: pytest.CaptureFixture[str], story: Story) -> None:
    same = ["--n-envs", str(N_ENVS), "--out", str(story.out)]
    assert f"total_timesteps: expected 5000, got {STEPS}" in call(capsys, *same, "--steps", "5000")
    assert "n_steps: expected 7, got 5" in call(capsys, *same, "--steps", str(STEPS), "--n-steps", "7")
    # more arms and seeds are welcome
    breakout.check(breakout.make_parser().parse_args([*same, "--steps", str(STEPS), "--seeds", "0", "7"]))


def write_run(folder: Path, seed: int, games: list[tuple[float, int]], timesteps: int, seconds: float) -> None:
    """A finished run with given (return, timesteps) of its games, without training anything."""
    folder.mkdir(parents=True)
    run = Run(
        "nstep_a2c",
        seed,
        "nstep_a2c",
        "BreakoutNoFrameskip-v4",
        1_000,
        4,
        "native",
        {"n_steps": 5, "return_horizon": 5},
    )
    (folder / "config.json").write_text(json.dumps({"settings": run.settings, "starts": []}))
    writer = ResultsWriter(str(folder / "monitor.csv"), {"t_start": 0.0, "env_id": "x"}, ("timesteps",))
    for score, step in games:
        writer.write_row({"r": score, "l": 100, "t": step / 10, "timesteps": step})
    writer.close()
    model = A2C("MlpPolicy", "CartPole-v1")
    model.num_timesteps, model.training_seconds, model._n_updates = timesteps, seconds, 49
    model.save(folder / "model.zip")


def test_report_by_hand(tmp_path: Path) -> None:
    # 120 games: the last 100 are 20, …, 119 with a mean of (20 + 119) / 2 = 69.5
    write_run(tmp_path / "nstep_a2c/seed_0", 0, [(k, 8 * (k + 1)) for k in range(120)], 1_000, 4.0)
    write_run(tmp_path / "nstep_a2c/seed_1", 1, [(10, 500), (20, 1_000)], 1_000, 2.0)
    report.write_report(tmp_path)

    results = pd.read_csv(tmp_path / "results.csv").set_index("seed")
    assert results["final_mean_return"].tolist() == [69.5, 15.0]
    assert results["steps_per_second"].tolist() == [250, 500]
    assert results["games"].tolist() == [120, 2]
    assert results["rows_per_update"].tolist() == [20, 20]

    curves = pd.read_csv(tmp_path / "curves.csv").set_index(["seed", "timesteps"])
    assert curves.loc[(1, 480), "games"] == 0 and np.isnan(curves.loc[(1, 480), "mean_return"])
    assert curves.loc[(1, 500), "mean_return"] == 10
    assert curves.loc[(1, 1_000), "mean_return"] == 15
    assert curves.loc[(0, 400), "mean_return"] == 24.5  # games 0, …, 49
    assert curves.loc[(0, 1_000), "mean_return"] == 69.5

    # two seeds: a resampled mean is 15, 42.25 or 69.5, the outer two with a chance of 1/4 each
    row = "| nstep_a2c | 2 of 2 | 375 | 49 | 20 | 42.25 | 15.00 to 69.50 | 42.25 |"
    assert row in (tmp_path / "summary.md").read_text()


def test_report_without_a_finished_game(tmp_path: Path) -> None:
    write_run(tmp_path / "nstep_a2c/seed_0", 0, [], 1_000, 4.0)
    report.write_report(tmp_path)
    row = "| nstep_a2c | 1 of 1 | 250 | 49 | 20 | n/a | n/a | n/a |"
    assert row in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "learning_curves.png").stat().st_size > 0


def test_report_before_the_first_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "nstep_a2c/seed_0", 0, [(4, 300)], 1_000, 4.0)
    (tmp_path / "nstep_a2c/seed_0/model.zip").unlink()
    report.write_report(tmp_path)
    assert "| nstep_a2c | 0 of 1 | n/a | n/a | 20 | n/a | n/a | n/a |" in (tmp_path / "summary.md").read_text()
    assert pd.read_csv(tmp_path / "curves.csv")["timesteps"].max() == 300


def test_monitor_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    run = Run("a2c", 0, "a2c", "BreakoutNoFrameskip-v4", 1_000, 4, "native", {})
    training.open_monitor(run, tmp_path, 0).close()
    with open(tmp_path / "monitor.csv", "a") as file:
        file.write("1.0,100,1.5,200\n2.0,100,2.5,240\n3.0,100,3.5,244\n4.0,100,4.5,2")  # killed while it wrote 248
    writer = training.open_monitor(run, tmp_path, 240)
    writer.write_row({"r": 5.0, "l": 90, "t": 3.0, "timesteps": 260})
    writer.close()
    assert load_results(str(tmp_path))[["r", "timesteps"]].to_numpy().tolist() == [[1, 200], [2, 240], [5, 260]]


def test_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"


def test_lock_dies_with_its_holder(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
        lock(tmp_path)
    lock(tmp_path).close()


def test_lock_names_a_holder_that_has_only_just_begun(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        late = threading.Timer(0.3, lambda: (held.write("4321"), held.flush()))
        late.start()
        with pytest.raises(BlockingIOError, match="in use by process 4321"):
            lock(tmp_path)
        late.join()


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    """At random moments, of the whole or of the run alone. Each costs a checkpoint interval at most."""
    rng = np.random.default_rng(0)
    out, interval, folder = tmp_path / "out", 1, tmp_path / "out/nstep_a2c/seed_0"
    arguments = ["--arms", "nstep_a2c", "--steps", "16000", "--checkpoint-seconds", str(interval)]
    n_kills, n_lost = 0, 0.0
    while n_kills < 20:
        process = start(out, *arguments)
        if rng.random() < 0.8:  # while it trains; otherwise at any moment
            wait_for_rows(process, out, more_than=len(rows(out, "nstep_a2c")))
        time.sleep(rng.uniform(0, 3))
        if process.poll() is not None:
            break
        lock_file = folder / ".lock"
        pid = int(lock_file.read_text() or 0) if rng.random() < 0.5 and lock_file.exists() else process.pid
        try:
            os.kill(pid or process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        n_kills += 1
        process.communicate(timeout=300)
        wait_until(lambda: not processes(), 60)
        lived = [float(line.split(",")[2]) for line in rows(out, "nstep_a2c") if line.count(",") == 3]
        saved = report.read_run(folder)["seconds"] if folder.exists() else np.nan
        if lived and saved == saved:
            n_lost = max(n_lost, lived[-1] - saved)
    output, _ = start(out, *arguments).communicate(timeout=300)
    assert n_kills == 20, f"it was finished after {n_kills} kills"
    assert n_lost < interval + training.REPORT_SECONDS + 1.0  # which is how often a run looks at the clock, and a save
    results = pd.read_csv(out / "results.csv").iloc[0]
    assert results.finished and results.timesteps == 16_000, output
    games = load_results(str(folder))
    assert games["timesteps"].is_monotonic_increasing and len(games) == results.games
    assert (folder / "game.gif").exists() and not list(folder.glob("*checkpoint*"))
