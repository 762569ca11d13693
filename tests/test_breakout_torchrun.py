"""The comparison under ``torchrun`` as a user meets it: a process killed, interrupted, resumed, read."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
from stable_baselines3.common.monitor import load_results

import breakout
from sb3_nstep import NStepA2C

STEPS = 1_000
ROOT = Path(__file__).parents[1]


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", breakout.__file__]
    command += ["--steps", str(STEPS), "--n-envs", "4", "--seeds", "0", "--out", str(out), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def rows(out: Path) -> list[str]:
    path = out / "nstep_a2c/seed_0/monitor.csv"
    return path.read_text().splitlines()[2:] if path.exists() else []


@pytest.mark.slow
def test_killed_interrupted_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arms = ["--arms", "a2c", "nstep_a2c"]

    process = start(out, *arms)
    children = []
    try:
        wait_until(lambda: bool(rows(out)) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        children = psutil.Process(process.pid).children()
        (second,) = [child for child in children if child.environ().get("RANK") == "1"]
        second.kill()
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 1, output
        assert not any(child.is_running() for child in children)

        (out / "nstep_a2c/seed_0/monitor.csv").unlink()
        process = start(out, *arms)
        wait_until(lambda: bool(rows(out)) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        assert "Start again with the same arguments" in output
        kept = rows(out)
        assert (out / "nstep_a2c/seed_0/checkpoint.zip").exists()

        process = start(out, *arms)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    finally:
        process.kill()
        for child in children:
            if child.is_running():
                child.kill()
    assert "a2c: left out" in output and "nstep_a2c seed 0: resumed at step" in output
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"nstep_a2c"}
    games = load_results(str(out / "nstep_a2c/seed_0"))
    assert kept and rows(out)[: len(kept)] == kept
    assert games["timesteps"].is_monotonic_increasing and games["timesteps"].between(1, STEPS).all()
    assert NStepA2C.load(out / "nstep_a2c/seed_0/model.zip").num_timesteps == STEPS
    (result,) = pd.read_csv(out / "results.csv").to_dict("records")
    assert (result["updates"], result["rows_per_update"]) == (STEPS / 20, 20)
    starts = json.loads((out / "nstep_a2c/seed_0/config.json").read_text())["starts"]
    assert [each["processes"] for each in starts] == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--jobs 2", "--jobs: expected 1 under torchrun"),
        ("--n-envs 15", "--n-envs: expected a multiple of 2, the processes, got 15"),
        ("--arms a2c", "--arms: expected an arm of NStepA2C under torchrun, got a2c"),
    ],
)
def test_wrong_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, message: str
) -> None:
    for variable, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        breakout.main(["--out", str(tmp_path / "out"), *arguments.split()])
    assert message in capsys.readouterr().err
