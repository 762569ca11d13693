import pytest
import torch as th
from hypothesis import HealthCheck, settings

import reference

# The first example of a test pays for imports and caches: a deadline would measure the machine
settings.register_profile("ours", deadline=None)
# `make fuzz`: hypothesis prints its seed on a failure, and the smallest case that fails
settings.register_profile("fuzz", deadline=None, max_examples=15_000, suppress_health_check=list(HealthCheck))
settings.load_profile("ours")

# Small networks; threads would only wait for each other, and for the other tests
th.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") == "fuzz":
        terminalreporter.write_line(f"fuzz: {reference.n_streams:,} random streams against their definition")
