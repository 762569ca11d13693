"""What ``plot_windows`` draws, beside what the scripts of the environments say by hand."""

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from gymnasium import spaces
from matplotlib.axes import Axes
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_nstep.contrib import NStepMaskableA2C, NStepRecurrentA2C
from sb3_nstep.plotting import plot_windows
from scripted import build, vec_env

# An episode of three steps, then one of two, cut by a time limit; and an endless one. γ is 0.5
ENDING, ENDLESS = "1:3 0:.5 2T 0:1 0L:4", "0:1 1:2 0:3 1:4 0:5 1:6 0:7 1:8 0:9 1:10 0:11 1:12"


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    yield
    plt.close("all")


def draw(row: int, n_rollouts: int = 1, **kwargs: Any) -> Axes:
    model = build(vec_env(ENDING, ENDLESS), **kwargs)
    model.learn(2 * model.n_steps * n_rollouts)
    return plot_windows(model.rollout_buffer, row)


def windows(axes: Axes) -> list[list[int]]:
    """The rows under the thick lines, environment by environment."""
    lines = sorted((line for line in axes.lines if line.get_linewidth() == 5), key=lambda line: line.get_ydata()[0])
    return [line.get_xdata().tolist() for line in lines]


def texts(axes: Axes, sign: str) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text().startswith(sign)]


def ends(axes: Axes) -> list[float]:
    return sorted(x for lines in axes.collections for ((x, _), _) in lines.get_segments())


@pytest.mark.parametrize(
    ("kwargs", "lengths", "values", "targets"),
    [
        # Environment 0: 0 + 2/2, and the episode ends. Environment 1: 1 + 0 + 3/4; 1 + 0 + 1/4 + 0 + 5/16
        ({"n_steps": 5, "return_horizon": 2, "carry_over": False}, (2, 2), ["V = 3"], ["G = 1", "G = 1.75"]),
        ({"n_steps": 5, "carry_over": False}, (2, 4), ["V = 5"], ["G = 1", "G = 1.56"]),
        (
            {"n_steps": 5, "return_horizon": [1, 3], "carry_over": False},
            (1, 3),
            ["V = 0.5", "V = 4"],
            ["G = 0.25", "G = 1.75"],
        ),
    ],
    ids=["shortened", "as in SB3", "a window for each environment"],
)
def test_window_of_a_row(
    kwargs: dict[str, Any], lengths: tuple[int, int], values: list[str], targets: list[str]
) -> None:
    axes = draw(row=1, **kwargs)
    assert windows(axes) == [list(range(1, 1 + length)) for length in lengths]
    assert texts(axes, "V") == values
    assert texts(axes, "G") == targets
    assert ends(axes) == [2.5, 4.5]
    # Rewards that are not 0; to that of the time limit SB3 has added 4/2
    assert [text.get_text() for text in axes.texts if "=" not in text.get_text() and text.get_text()] == list("12211")


def test_rows_that_waited_and_that_wait() -> None:
    carried = {"n_steps": 3, "return_horizon": 3}
    axes = draw(row=-2, n_rollouts=2, **carried)
    # The window of step 1: steps 1 and 2, which waited, and 3
    assert windows(axes) == [[-2, -1], [-2, -1, 0]]
    assert texts(axes, "V") == ["V = 4"]
    assert texts(axes, "waits") == []
    assert ends(axes) == [-0.5, 1.5]

    axes = draw(row=1, n_rollouts=2, **carried)
    assert texts(axes, "waits") == ["waits"]  # the episode of the other has ended
    assert texts(axes, "G") == ["G = 2"]  # 0 and a time limit that V = 4 follows


@pytest.mark.parametrize(
    ("algorithm", "policy"), [(NStepRecurrentA2C, "MlpLstmPolicy"), (NStepMaskableA2C, "MlpPolicy")]
)
def test_buffers_of_sb3_contrib(algorithm: type[Any], policy: str) -> None:
    """They flatten one environment after another, and the LSTM's the episode starts as well."""
    model = algorithm(policy, vec_env(ENDING, ENDLESS), n_steps=5, return_horizon=2, seed=0)
    model.learn(10, **({"use_masking": False} if algorithm is NStepMaskableA2C else {}))
    axes = plot_windows(model.rollout_buffer, 1)
    assert windows(axes) == [[1, 2], [1, 2]]
    assert ends(axes) == [2.5, 4.5]
    assert texts(axes, "G")[0] == "G = 1.98"  # 0 and 2, of which γ is 0.99 here


def test_draws_where_it_is_told() -> None:
    model = build(vec_env(ENDLESS))
    model.learn(4)
    _, axes = plt.subplots()
    assert plot_windows(model.rollout_buffer, axes=axes) is axes


@pytest.mark.parametrize("row", [-3, 3])
def test_row_that_is_not_there(row: int) -> None:
    with pytest.raises(ValueError, match=rf"row: expected a number from -2 to 2, got {row}"):
        draw(row, n_rollouts=2, n_steps=3, return_horizon=3)


@pytest.mark.parametrize("row", [1.5, None, True, "1"])
def test_row_that_is_no_number(row: Any) -> None:
    with pytest.raises(ValueError, match=f"row: expected a whole number, got {row!r}"):
        draw(row)


def test_what_is_no_n_step_buffer() -> None:
    for wrong in (RolloutBuffer(4, spaces.Box(-1, 1), spaces.Discrete(2)), build(vec_env(ENDLESS))):
        with pytest.raises(ValueError, match="buffer: expected an N-step buffer, as"):
            plot_windows(wrong)


def test_all_that_is_drawn_is_in_sight() -> None:
    axes = draw(row=1, n_steps=5, return_horizon=2, carry_over=False)
    dots = [line for line in axes.lines if line.get_color() == "0.6"]
    assert [line.get_xdata().tolist() for line in dots] == [[0, 1, 2, 3, 4]] * 2
    (left, right), (bottom, top) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    points = [(x, line.get_ydata()[0]) for line in axes.lines for x in line.get_xdata()]
    assert all(left < x < right and bottom < y < top for x, y in points)
    # each reward above the dot of its row
    rewards = {text.xy: text.get_text() for text in axes.texts if "=" not in text.get_text() and text.get_text()}
    assert {(x, round(y)): text for (x, y), text in rewards.items()} == {
        (0, 0): "1", (2, 0): "2", (4, 0): "2", (1, 1): "1", (3, 1): "1"
    }  # fmt: skip


def test_long_rollout_is_no_wider_than_a_wall() -> None:
    axes = draw(row=0, n_steps=2048, return_horizon=5, carry_over=False)
    assert axes.figure.get_size_inches()[0] <= 30


def test_buffer_without_targets() -> None:
    model = build(vec_env(ENDLESS))
    model.learn(4)
    model.rollout_buffer.reset()
    with pytest.raises(ValueError, match="buffer: expected one whose targets are computed"):
        plot_windows(model.rollout_buffer)


def test_before_and_after_the_rows_are_handed_out() -> None:
    model = build(vec_env(ENDING, ENDLESS), n_steps=5, return_horizon=2, carry_over=False)
    model.learn(10)
    after = plot_windows(model.rollout_buffer)
    for name in ("values", "returns"):
        column = getattr(model.rollout_buffer, name)
        setattr(model.rollout_buffer, name, np.array(column).reshape(5, 2))
    before = plot_windows(model.rollout_buffer)
    assert [text.get_text() for text in before.texts] == [text.get_text() for text in after.texts]
