"""RL Zoo with ``nstep_a2c``, as processes: as a user starts it, and because importing the Zoo patches Gymnasium."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from stable_baselines3 import A2C

from sb3_nstep import NStepA2C

ROOT = Path(__file__).parents[1]
CARTPOLE = ["--algo", "nstep_a2c", "--env", "CartPole-v1"]
STUDY = ["--storage", "study.log", "--study-name", "study"]


def zoo(folder: Path, *arguments: str) -> str:
    """What ``python -m sb3_nstep.zoo`` prints."""
    return python(folder, "-m", "sb3_nstep.zoo", *arguments)


def python(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def saved_hyperparams(folder: Path, run: int) -> dict[str, Any]:
    path = folder / f"logs/nstep_a2c/CartPole-v1_{run}/CartPole-v1/config.yml"
    return dict(yaml.load(path.read_text(), Loader=yaml.UnsafeLoader))


def trials(folder: Path) -> list[Any]:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.log")))
    return optuna.load_study(storage=storage, study_name="study").trials


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model was trained with the hyperparameters that come with the package, and two trials were made."""
    folder = tmp_path_factory.mktemp("zoo")
    zoo(folder, "train", *CARTPOLE, "-n", "400", "--eval-freq", "200", "--seed", "0", "-params", "n_steps:2")
    zoo(folder, "train", *CARTPOLE, *STUDY, "-optimize", "-n", "400", "--n-trials", "2", "--seed", "0")
    return folder


def test_train(folder: Path) -> None:
    settings = saved_hyperparams(folder, run=1)
    # n_envs is the Zoo's, N its T, and does not go with the T that was given
    assert (settings["n_envs"], settings["return_horizon"], settings["n_steps"]) == (8, 5, 2)
    path = folder / "logs/nstep_a2c/CartPole-v1_1/CartPole-v1.zip"
    model = NStepA2C.load(path)
    # 25 rollouts of T = 2 by 8 environments, of which the first ⌈5/2⌉ − 1 make no update
    assert (model.n_envs, model.num_timesteps, model._n_updates) == (8, 400, 23)
    assert type(A2C.load(path)) is A2C


def test_enjoy(folder: Path) -> None:
    printed = zoo(folder, "enjoy", *CARTPOLE, "-f", "logs", "--exp-id", "1", "--no-render", "-n", "600")
    assert "Mean reward: " in printed  # CartPole-v1 ends an episode after 500 steps


def test_record_video(folder: Path) -> None:
    zoo(folder, "record_video", *CARTPOLE, "-f", "logs", "--exp-id", "1", "-n", "20", "-o", "videos")
    assert [path.suffix for path in (folder / "videos").iterdir()] == [".mp4"]


def test_plots(folder: Path) -> None:
    printed = zoo(folder, "all_plots", "-a", "nstep_a2c", "-e", "CartPole-v1", "-f", "logs", "--no-display")
    assert re.search(r"CartPole-v1 *\| *\d+ \+/- 0", printed)  # one run with evaluations


def test_trial_and_what_continues_with_it(folder: Path) -> None:
    params = trials(folder)[1].params
    a2c = {"learning_rate", "ent_coef", "max_grad_norm", "one_minus_gamma", "one_minus_gae_lambda"}
    assert {"return_horizon", "carry_over", "n_steps"} | a2c <= set(params)
    model = "logs/nstep_a2c/CartPole-v1_1/CartPole-v1.zip"
    zoo(folder, "train", *CARTPOLE, *STUDY, "--trial-id", "1", "-i", model, "-n", "1", "--eval-freq", "-1")
    settings = saved_hyperparams(folder, run=3)  # the study took number 2
    assert settings["gamma"] == 1.0 - params["one_minus_gamma"]
    same = ("n_steps", "carry_over", "learning_rate", "ent_coef", "max_grad_norm")
    assert [settings[name] for name in same] == [params[name] for name in same]
    continued = NStepA2C.load(folder / "logs/nstep_a2c/CartPole-v1_3/CartPole-v1.zip")
    for name in ("return_horizon", "carry_over", "n_steps", "gamma", "gae_lambda"):
        assert getattr(continued, name) == settings[name], name
    assert continued._n_updates >= 23  # those of the model that it continues


def test_what_is_continued_keeps_its_horizon(folder: Path) -> None:
    """Not the one that comes with the package: it is asked for where a run begins."""
    settings = ["return_horizon:7", "n_steps:3", "correction:'vtrace'"]
    zoo(folder, "train", *CARTPOLE, "-f", "first", "-n", "48", "--eval-freq", "-1", "-params", *settings)
    model = "first/nstep_a2c/CartPole-v1_1/CartPole-v1.zip"
    zoo(folder, "train", *CARTPOLE, "-f", "second", "-n", "24", "--eval-freq", "-1", "-i", model)
    continued = NStepA2C.load(folder / "second/nstep_a2c/CartPole-v1_1/CartPole-v1.zip")
    assert (continued.return_horizon, continued.n_steps, continued.correction) == (7, 3, "vtrace")


def test_several_runs_in_one_script(tmp_path: Path) -> None:
    """The Zoo writes into the hyperparameters that it is given, and takes keys out."""
    script = """
import sys, rl_zoo3.train, sb3_nstep.zoo
sb3_nstep.zoo.register()
arguments = "x --algo nstep_a2c --env CartPole-v1 -n 40 --eval-freq -1 --conf-file sb3_nstep.zoo".split()
for more in (["-params", "return_horizon:2"], []):
    sys.argv = [*arguments, *more]
    rl_zoo3.train.train()
"""
    python(tmp_path, "-c", script)
    assert [saved_hyperparams(tmp_path, run)["return_horizon"] for run in (1, 2)] == [2, 5]


def test_hyperparameters_that_end_in_nan_end_the_trial_and_not_the_study(folder: Path) -> None:
    nan = ["-params", "vf_coef:float('inf')"]  # the constructor takes it
    zoo(folder, "train", *CARTPOLE, *STUDY, *nan, "-optimize", "-n", "4000", "--n-trials", "2")
    assert [trial.state.name for trial in trials(folder)] == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]


def test_what_is_sampled_is_accepted(tmp_path: Path) -> None:
    """What the constructor refuses would end the study: the Zoo catches what ``learn`` raises."""
    script = """
import warnings, optuna, sb3_nstep, sb3_nstep.zoo as zoo
zoo.register()
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

def objective(trial):
    arguments = HYPERPARAMS_SAMPLER["nstep_a2c"](trial, 2, 1, {"using_her_replay_buffer": False, "her_kwargs": {}})
    assert arguments == HYPERPARAMS_CONVERTER["nstep_a2c"](trial.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # windows longer than the rollout, which carry_over=False cannot have
        sb3_nstep.NStepA2C("MlpPolicy", "CartPole-v1", **arguments)
    return 0.0

study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
study.optimize(objective, n_trials=60)
assert {trial.params["return_horizon"] for trial in study.trials} == {2, 4, 8, 16, 32, 64}
assert {trial.params["n_steps"] for trial in study.trials} == {1, 2, 4, 8, 16, 32, 64}
assert {trial.params["carry_over"] for trial in study.trials} == {False, True}
for env_id, settings in zoo.hyperparams.items():
    print(env_id, settings.get("n_steps", 5), settings["return_horizon"])
"""
    table = dict(line.split(maxsplit=1) for line in python(tmp_path, "-c", script).splitlines())
    expected = {"atari": "1 5", "CartPole-v1": "5 5", "LunarLander-v3": "5 5", "Pendulum-v1": "8 8"}
    expected |= {"MountainCarContinuous-v0": "100 100"}
    assert {env_id: table[env_id] for env_id in expected} == expected
