"""
RL Baselines3 Zoo with ``nstep_a2c`` among its algorithms: ``python -m sb3_nstep.zoo train --algo nstep_a2c --env …``.

The Zoo finds algorithms, samplers and converters in dictionaries: :func:`register` adds to them. It takes a module with
a dictionary ``hyperparams`` for ``--conf-file``: this one, where none is given and no run is continued.
"""

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sb3_nstep import NStepA2C

try:
    import optuna
    import rl_zoo3
    import yaml  # type: ignore[import-untyped]
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
except ImportError as error:
    raise ImportError(f'sb3_nstep.zoo: {error}. It comes with the extra: pip install "sb3-nstep[zoo]"') from error

ALGO = "nstep_a2c"

# Scripts of the Zoo, and the module that has each as a function; None: it is a function nowhere, only a program
SCRIPTS = {
    "train": "rl_zoo3.train",
    "enjoy": "rl_zoo3.enjoy",
    "record_video": None,
    "plot_train": "rl_zoo3.plots",
    "all_plots": "rl_zoo3.plots",
    "plot_from_file": "rl_zoo3.plots",
}

# The Zoo's own settings for A2C, as installed
A2C_CONF_FILE = Path(rl_zoo3.__file__).parent / "hyperparams" / "a2c.yml"

SAMPLED_N_STEPS = (1, 2, 4, 8, 16, 32, 64)
SAMPLED_RETURN_HORIZON = (2, 4, 8, 16, 32, 64)


def __getattr__(name: str) -> dict[str, dict[str, Any]]:
    """
    ``hyperparams``, which the Zoo empties as it reads: new ones each time. N is written out, so that T (n_steps)
    changes without it: the furthest that the Zoo's targets look, which is their n_steps, or A2C's default.
    """
    if name != "hyperparams":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hyperparams = {
        env_id: {"return_horizon": settings.get("n_steps", 5), **settings}
        for env_id, settings in yaml.safe_load(A2C_CONF_FILE.read_text(encoding="utf-8")).items()
    }
    # Elsewhere T stays the Zoo's: on Breakout alone did we compare (README.md: T = 1, N = 5)
    hyperparams["atari"]["n_steps"] = 1
    return hyperparams


class _ShortRollouts:
    """A trial that draws T from ``SAMPLED_N_STEPS``, whatever is asked for: the Zoo's begin at 32."""

    def __init__(self, trial: optuna.Trial):
        self.trial = trial

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trial, name)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self.trial.suggest_categorical(name, SAMPLED_N_STEPS if name == "n_steps" else choices)


def sample_nstep_a2c_params(
    trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]
) -> dict[str, Any]:
    """``return_horizon``, ``carry_over`` and ``n_steps`` for a trial, and the rest of A2C's as the Zoo samples it."""
    HYPERPARAMS_SAMPLER["a2c"](_ShortRollouts(trial), n_actions, n_envs, additional_args)  # type: ignore[arg-type]
    trial.suggest_categorical("return_horizon", SAMPLED_RETURN_HORIZON)
    trial.suggest_categorical("carry_over", [True, False])
    return convert_nstep_a2c_params(trial.params)


def convert_nstep_a2c_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``NStepA2C`` that the parameters of a trial stand for."""
    arguments = HYPERPARAMS_CONVERTER["a2c"](sampled_params)
    if not arguments["carry_over"]:  # no window is longer than the rollout then
        arguments["return_horizon"] = min(arguments["return_horizon"], arguments["n_steps"])
    return arguments


def register() -> None:
    """Make ``nstep_a2c`` known to the Zoo, in this process."""
    rl_zoo3.ALGOS[ALGO] = NStepA2C
    HYPERPARAMS_SAMPLER[ALGO] = sample_nstep_a2c_params
    HYPERPARAMS_CONVERTER[ALGO] = convert_nstep_a2c_params


def main() -> None:
    """Run a script of the Zoo with the arguments of the command line."""
    parser = argparse.ArgumentParser("python -m sb3_nstep.zoo", usage="%(prog)s SCRIPT …")
    parser.add_argument("script", choices=SCRIPTS, help="the script of RL Zoo to run, SCRIPT -h: its arguments")
    script = parser.parse_args(sys.argv[1:2]).script
    register()
    sys.argv[:2] = [f"{parser.prog} {script}"]
    if script == "train":
        sys.argv += _default_conf_file()
    module = SCRIPTS[script]
    if module is None:
        runpy.run_module(f"rl_zoo3.{script}", run_name="__main__")
    else:
        getattr(importlib.import_module(module), script)()


def _default_conf_file() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algo")
    parser.add_argument("-conf", "--conf-file")
    parser.add_argument("-i", "--trained-agent")
    given, _ = parser.parse_known_args()
    if given.algo != ALGO or given.conf_file is not None:
        return []
    # What is continued brings its T and N with it
    return ["--conf-file", str(A2C_CONF_FILE) if given.trained_agent else "sb3_nstep.zoo"]


if __name__ == "__main__":
    main()
