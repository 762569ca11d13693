"""Run the tests of Stable-Baselines3 and of sb3-contrib with our classes in place of A2C and of the rollout buffers.

    python tests/conformance/run.py                              # both, in the modes below
    python tests/conformance/run.py --suite sb3_contrib          # one of them
    python tests/conformance/run.py --mode horizon -- -x -k gae  # one mode, with arguments for pytest
    python tests/conformance/run.py --mode exact --all           # does plugin.py's choice of tests miss one?

The tests come from the source distributions of the installed versions, kept in ``.conformance/``.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".conformance"

# The defaults of our classes
MODES: dict[str, dict[str, Any]] = {
    "exact": {"return_horizon": None, "carry_over": False},  # is A2C, to the last bit
    "horizon": {"return_horizon": 3, "carry_over": False},
    "carry-over": {"return_horizon": 3, "carry_over": True},
}

# Whose tests, and the modes that they run in
SUITES = {"stable_baselines3": tuple(MODES), "sb3_contrib": ("exact", "horizon")}


def source_distribution(suite: str) -> Path:
    """The source distribution of the installed version, downloaded unless it is here already."""
    name = f"{suite}-{version(suite)}.tar.gz"
    if not (CACHE / name).exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, "--no-deps"]
            # Its metadata are made with the setuptools installed here: isolation would download one more
            command += ["--no-binary", ":all:", "--no-build-isolation", f"{suite}=={version(suite)}"]
            subprocess.run(command, check=True)
            os.replace(Path(folder) / name, CACHE / name)
    return CACHE / name


def unpack_tests(archive: Path, folder: Path) -> Path:
    """The tests, and the file with their settings of pytest, but not the package: the installed one is imported."""
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.name == f"{top}/pyproject.toml" or member.name.startswith(f"{top}/tests/"):
                tar.extract(member, folder, filter="data")
    return folder / top


def run_mode(suite: str, mode: str, folder: Path, arguments: list[str]) -> bool:
    """Whether pytest, with the suite's own settings, is content. Its output is shown if it is not."""
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider"]
    command += ["-p", "plugin", "--suite", suite, "--mode", mode, "--no-header", "-q", "-rfEX", *arguments, "tests"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # neither plugins nor options that happen to be here
        "PYTEST_ADDOPTS": "",
        "OMP_NUM_THREADS": "1",  # small networks: threads cost more than they bring, where others keep the cores busy
    }
    run = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = run.stdout.splitlines() or [f"pytest said nothing and returned {run.returncode}"]
    shown = [line for line in lines if line.startswith("conformance: ")] if run.returncode == 0 else lines
    print("\n".join([*shown, f"{suite}, {mode}: {lines[-1]}"]), flush=True)
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated (default: each)")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated (default: each)")
    parser.add_argument("--all", action="store_true", help="run all of their tests, not ours alone")
    parser.add_argument("pytest_arguments", nargs="*", help="after --: arguments for pytest")
    args = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    arguments = [*args.pytest_arguments, *(["--all"] if args.all else [])]
    passed = []
    for suite in args.suite or SUITES:
        archive = source_distribution(suite)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            tests = unpack_tests(archive, Path(folder))
            modes = [mode for mode in SUITES[suite] if mode in (args.mode or MODES)]
            passed += [run_mode(suite, mode, tests, arguments) for mode in modes]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
