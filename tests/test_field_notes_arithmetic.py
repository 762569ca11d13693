"""Entries 1 to 14 of the field notes: the arithmetic. g = γ, V is the critic, boot = V(final observation)."""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from sb3_nstep import n_step_targets
from scripted import (
    CARRYING,
    SHORTENING,
    SURFACES,
    Run,
    Script,
    ScriptedEnv,
    arrays,
    build,
    run,
    surface,
    vec_env,
)


def targets(
    *scripts: Script,
    horizon: int | Sequence[int],
    gamma: float = 0.5,
    gae_lambda: float = 1.0,
    value: float = 0.0,
    reset_value: float | None = None,
) -> np.ndarray:
    """``[T, E]``, with boot given apart and then folded into the rewards, as SB3 does: one and the same."""
    rollout = arrays(*scripts, value=value, reset_value=reset_value)
    parameters: dict[str, Any] = {"gamma": gamma, "horizon": horizon, "gae_lambda": gae_lambda}
    apart = n_step_targets(**rollout._asdict(), **parameters)
    folded = rollout._replace(rewards=rollout.rewards + gamma * rollout.bootstrap_values, bootstrap_values=None)
    np.testing.assert_array_equal(n_step_targets(**folded._asdict(), **parameters), apart)
    assert apart.dtype == np.float32
    return apart


def geometric(gamma: float, k: int) -> float:
    """1 + γ + … + γ^{k−1}: the rewards of a window of k rows that pay 1 each."""
    return sum(gamma**i for i in range(k))


def learned(
    name: str, horizon: int | None, *scripts: Script, n_rollouts: int = 6, n_steps: int = 4, **kwargs: Any
) -> Run:
    """A run of one of the four surfaces, with all of its rows. ``kwargs`` are the environments', γ and λ excepted."""
    model_kwargs = {key: kwargs.pop(key) for key in ("gamma", "gae_lambda") if key in kwargs}
    outcome = run(vec_env(*scripts, **kwargs), n_rollouts, n_steps=n_steps, **surface(name, horizon), **model_kwargs)
    n_waiting = (horizon or n_steps) - 1 if name == CARRYING else 0
    assert len(outcome.targets) == len(scripts) * (n_rollouts * n_steps - n_waiting)
    return outcome


# N → targets of r0 = [1, 0, 0, 4] and r1 = [0, 10, 0, 0], g = .5, V = 0
APART = {
    1: ([1, 0, 0, 4], [0, 10, 0, 0]),
    2: ([1, 0, 2, 4], [5, 10, 0, 0]),  # .5 · 4 = 2, .5 · 10 = 5
    3: ([1, 1, 2, 4], [5, 10, 0, 0]),  # .25 · 4 = 1
    4: ([1.5, 1, 2, 4], [5, 10, 0, 0]),  # 1 + .125 · 4 = 1.5
}


@pytest.mark.parametrize(("n0", "n1"), list(product(APART, APART)))
def test_01_environments_do_not_mix(n0: int, n1: int):
    expected = np.transpose([APART[n0][0], APART[n1][1]])
    np.testing.assert_array_equal(targets("1 0 0 4", "0 10 0 0", horizon=[n0, n1]), expected)
    if n0 == n1:
        np.testing.assert_array_equal(targets("1 0 0 4", "0 10 0 0", horizon=n0), expected)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.9])
def test_01_alone_or_in_any_order_an_environment_has_the_same_targets(gae_lambda: float):
    streams = [("1 0:3 0 4:2 -1", 2), ("0 10T 0 7 1", 3), ("2:1 3L:9 5 6TL 8:4", 2), ("1 1 1 1 1L:5", 9)]
    alone = {script: targets(script, horizon=n, gae_lambda=gae_lambda)[:, 0] for script, n in streams}
    for order in permutations(streams):
        scripts, horizons = zip(*order, strict=True)
        together = targets(*scripts, horizon=horizons, gae_lambda=gae_lambda)
        np.testing.assert_array_equal(together.T, [alone[script] for script in scripts])


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_01_environments_do_not_mix_in_a_model(name: str, order: tuple[int, ...]):
    scripts = ["1 0 0 4", "0 10 0 0", "0 0 0 0"]
    expected = [[1, 0, 2, 4], [5, 10, 0, 0], [0, 0, 0, 0]]
    if name == CARRYING:
        expected[0][3] = 4.5  # 4 + .5 · 1: the script starts over
    seen = learned(name, 2, *(scripts[i] for i in order), n_rollouts=2, value=0).targets
    for env, i in enumerate(order):
        assert [seen[1000 * env + t] for t in range(4)] == expected[i]


@pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0, 0.0])
@pytest.mark.parametrize(("n_rows", "horizon"), [(5, 3), (5, 1), (5, 5), (5, 9), (1, 1), (1, 4), (7, 2), (16, 6)])
def test_02_bootstrap_is_discounted_by_the_length_of_the_window(n_rows: int, horizon: int, gamma: float):
    """r = 0, V = 1: the target is γ^k, k = min(N, rows left)."""
    expected = [gamma ** min(horizon, n_rows - t) for t in range(n_rows)]
    for n_envs in (1, 3):
        result = targets(*[["0"] * n_rows] * n_envs, gamma=gamma, value=1, horizon=horizon)
        np.testing.assert_allclose(result, np.transpose([expected] * n_envs), rtol=1e-6)
    if (n_rows, horizon, gamma) == (5, 3, 0.5):
        np.testing.assert_array_equal(result[:, 0], [0.125, 0.125, 0.125, 0.25, 0.5])


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("horizon", [1, 3, 4])
def test_02_in_a_model(name: str, horizon: int):
    for tag, target in learned(name, horizon, "0", "0", value=1).targets.items():
        k = horizon if name == CARRYING else min(horizon, 4 - tag % 1000 % 4)
        assert target == 0.5**k


@pytest.mark.parametrize("horizon", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("follows", ["100 100", "100T 100", "100L:1e6 -100", "100"])
def test_03_truncated_window_does_not_spill(horizon: int, length: int, follows: str):
    """Episode A pays 1 per step and is truncated, boot = 8, V = 0 inside. What follows pays 100."""
    script = " ".join(["1"] * (length - 1) + ["1L:8", follows])
    result = targets(script, horizon=horizon)[:length, 0]
    lefts = range(length, 0, -1)
    # the window of a row sees boot only if it reaches the end of A: left ≤ N
    expected = [geometric(0.5, min(horizon, left)) + (0.5**left * 8 if left <= horizon else 0) for left in lefts]
    np.testing.assert_array_equal(result, expected)
    if (length, horizon) == (2, 4):
        np.testing.assert_array_equal(result, [3.5, 5])  # 1 + .5 · 1 + .25 · 8, 1 + .5 · 8


@pytest.mark.parametrize("horizon", [2, 3, 8])
def test_03_nor_does_a_lambda_return(horizon: int):
    # G_1 = 1 + .5 · 8 = 5; G_0 = 1 + .5 · ((1 − .8) · V(s_1) + .8 · G_1) = 1 + .5 · (.2 · 10 + .8 · 5) = 4
    result = targets("1:10 1L:8 100 100", horizon=horizon, gae_lambda=0.8)
    np.testing.assert_allclose(result[:2, 0], [4, 5], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "n_steps", "horizon"),
    [*product(SHORTENING, [4], [2, 4]), *product(SHORTENING, [2], [2]), *product([CARRYING], [1, 2, 3, 4], [2, 4, 7])],
)
def test_03_in_a_model(name: str, n_steps: int, horizon: int):
    seen = learned(
        name, horizon, "1 1L:8 100 100T", "100 100T 1 1L:8", n_steps=n_steps, n_rollouts=4 + 16 // n_steps, value=0
    ).targets
    paid_1, paid_100 = {0: 3.5, 1: 5}, {0: 150, 1: 100}  # 100 + .5 · 100
    for tag, target in seen.items():
        n_th, row = divmod(tag % 1000, 3)  # an episode has two rows and a final observation
        assert target == (paid_1 if n_th % 2 == tag // 1000 else paid_100)[row]


@pytest.mark.parametrize("horizon", [1, 2, 4, 9])
@pytest.mark.parametrize(("n_rows", "position"), [(4, 1), (4, 2), (4, 3), (2, 1), (6, 5)])
def test_04_ends_are_not_shifted(n_rows: int, position: int, horizon: int):
    """r = 1, V(s) = 5, V(reset) = 100, g = .99: 1 − 5 = −4; shifted by a row 1 + .99 · 100 − 5 = 95. Last row too."""
    script = ["1"] * n_rows
    script[position] = "1T"
    result = targets(script, script[::-1], gamma=0.99, value=5, reset_value=100, horizon=horizon)
    assert result[position, 0] - 5 == -4
    # the row before sees it, unless it looks one step ahead only: 1 + .99 · 1, 1 + .99 · 5
    assert result[position - 1, 0] == pytest.approx(1.99 if horizon > 1 else 5.95)


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize(("n_steps", "horizon"), [(4, 1), (4, 3), (4, 4), (3, 2), (1, 1)])
def test_04_in_a_model(name: str, n_steps: int, horizon: int):
    """Episodes of two rows, so that rollouts of 4 end with one, and rollouts of 3 and 1 with and without."""
    outcome = learned(
        name, horizon, "1 1T", "1 1T", n_steps=n_steps, n_rollouts=8, gamma=0.99, value=5, reset_value=100
    )
    terminal = [advantage for tag, advantage in outcome.advantages.items() if tag % 1000 % 3 == 1]
    assert len(terminal) >= 6
    assert terminal == pytest.approx([-4] * len(terminal))


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize(("n_steps", "horizon"), [(4, 4), (4, 1), (4, 3), (1, 1), (5, 2)])
def test_05_last_bootstrap_is_of_the_observation_after_the_last_row(name: str, n_steps: int, horizon: int):
    """V(obs) = obs, which counts; r = 0. Row t looks at observation t + k: after 4 rows the last one looks at 4."""
    seen = learned(name, horizon, "0", "0", n_steps=n_steps).targets
    for tag, target in seen.items():
        k = horizon if name == CARRYING else min(horizon, n_steps - tag % 1000 % n_steps)
        assert target == 0.5**k * (tag + k)


def test_05_in_workers():
    seen = learned("NStepA2C", 1, "0", "0", n_rollouts=1, vec_env_class=SubprocVecEnv).targets
    assert seen == {first + t: 0.5 * (first + t + 1) for first in (0, 1000) for t in range(4)}


@pytest.mark.parametrize("horizon", [1, 2, 4, 7])
@pytest.mark.parametrize(("n_rows", "position"), [(4, 0), (4, 1), (4, 3), (1, 0)])
def test_06_time_limit_bootstraps_from_the_final_observation(n_rows: int, position: int, horizon: int):
    """V(s_t) = 1, V(reset) = 100, boot = 7, r = 0, g = .5: .5 · 7 = 3.5, not .5 · 1 and not .5 · 100."""
    script = ["0"] * n_rows
    script[position] = "0L:7"
    for scripts in ([script], [["0"] * n_rows, script, ["0T"] * n_rows]):
        column = len(scripts) // 2
        result = targets(*scripts, value=1, reset_value=100, horizon=horizon)[:, column]
        assert result[position] == 3.5
        if position > 0:
            assert result[position - 1] == (0.25 * 7 if horizon > 1 else 0.5 * 1)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    ("name", "n_steps", "horizon"),
    [*product(SHORTENING, [2, 4], [1, 2]), *product([CARRYING], [1, 2, 3], [1, 2, 5])],
)
def test_06_in_a_model(name: str, n_steps: int, horizon: int, n_envs: int):
    seen = learned(
        name, horizon, *["0 0L:7"] * n_envs, n_steps=n_steps, n_rollouts=3 + 8 // n_steps, value=1, reset_value=100
    ).targets
    first = 0.25 * 7 if horizon > 1 else 0.5 * 1
    assert seen == {tag: [first, 3.5][tag % 1000 % 3] for tag in seen}


def test_06_in_workers():
    env = {"value": 1, "reset_value": 100, "vec_env_class": SubprocVecEnv}
    seen = learned(CARRYING, 2, "0 0L:7", "0 0L:7", **env).targets
    assert seen == {tag: [1.75, 3.5][tag % 1000 % 3] for tag in seen}


@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_07_terminated_and_truncated_at_once_does_not_bootstrap(horizon: int):
    result = targets("2 2TL:7 2", "2 2L:7 2", value=1, reset_value=100, horizon=horizon)
    np.testing.assert_array_equal(result[1], [2, 2 + 0.5 * 7])


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("vec_env_class", [DummyVecEnv, SubprocVecEnv])
def test_07_in_a_model(name: str, vec_env_class: type):
    env = {"value": 1, "reset_value": 100, "vec_env_class": vec_env_class}
    seen = learned(name, 2, "2 2TL:7", "2 2L:7", n_rollouts=3, **env).targets
    # terminated: 2 + .5 · 2, 2. Time limit: 2 + .5 · 2 + .25 · 7, 2 + .5 · 7
    assert seen == {tag: ([3, 2] if tag < 1000 else [4.75, 5.5])[tag % 1000 % 3] for tag in seen}


class LosesLives(ScriptedEnv):
    """A life is lost with every second step."""

    @property
    def ale(self) -> "LosesLives":
        return self

    def lives(self) -> int:
        return 1000 - self.n_steps // 2


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # the time limit falls on the loss of a life: as terminated. 2 + .5 · 2, 2
        ("2 2L:7", [3, 2, 3, 2, 3, 2, 3, 2]),
        # lives alone: the first episode has two rows; each reset is a step that loses nothing, so the others have one
        ("2", [3, 2, 2, 2, 2, 2, 2, 2]),
        # the time limit falls before the loss, then with it: 2 + .5 · 7, the life of step 2, both at step 4
        ("2L:7 2 2", [5.5, 2, 2]),
    ],
)
def test_07_life_loss_and_time_limit(name: str, script: str, expected: list[float]):
    venv = DummyVecEnv([lambda: EpisodicLifeEnv(LosesLives(script, value=1, reset_value=100))])
    seen = list(run(venv, 3, **surface(name, 4)).targets.values())
    assert seen[: len(expected)] == expected


@pytest.mark.parametrize("filler", ["1e6", "inf", "-inf", "nan"])
@pytest.mark.parametrize("horizon", [1, 2, 3, 8])
@pytest.mark.parametrize("position", range(4))
def test_08_what_follows_a_truncation_changes_nothing(filler: str, horizon: int, position: int):
    """V(reset) and the next rewards are filled in. Rows that pay 1, V = 0 inside, boot = 3."""
    before = ["1"] * position + ["1L:3"]
    rollout = arrays(before + [f"{filler}:{filler}"] * (5 - position), value=0, reset_value=float(filler))
    result = n_step_targets(**rollout._asdict(), gamma=0.5, horizon=horizon)[: position + 1, 0]
    lefts = range(position + 1, 0, -1)
    expected = [geometric(0.5, min(horizon, left)) + (0.5**left * 3 if left <= horizon else 0) for left in lefts]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("name", "n_steps", "horizon"),
    [*product(SHORTENING, [4], [2, 3, 4]), *product([CARRYING], [1, 2, 3, 4], [2, 3, 6])],
)
def test_08_in_a_model(name: str, n_steps: int, horizon: int):
    env = {"value": 0, "reset_value": 1e6}
    seen = learned(name, horizon, "1 1L:3 1e6 1e6T", n_steps=n_steps, n_rollouts=4 + 12 // n_steps, **env).targets
    before = [target for tag, target in seen.items() if tag % 6 in (0, 1)]
    assert len(before) >= 4
    assert before == ([2.25, 2.5] * 100)[: len(before)]  # 1 + .5 + .25 · 3, 1 + .5 · 3


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize(
    ("horizon", "gae_lambda", "first"),
    [
        (1, 1.0, 0.5),  # .5 · V(s_1) = .5 · 1
        (2, 1.0, 1.75),  # .25 · 7
        (4, 1.0, 1.75),
        (None, 1.0, 1.75),
        (2, 0.5, 1.125),  # .5 · (.5 · V(s_1) + .5 · 3.5) = .5 · (.5 + 1.75)
        (None, 0.5, 1.125),
    ],
)
def test_09_boot_is_counted_once(name: str, horizon: int | None, gae_lambda: float, first: float, n_envs: int):
    """SB3 folds γ · boot = .5 · 7 into the reward that it stores. Twice would be 7."""
    scripts = ["0 0L:7"] * n_envs
    outcome = learned(name, horizon, *scripts, n_rollouts=4, value=1, reset_value=100, gae_lambda=gae_lambda)
    assert outcome.targets == {tag: [first, 3.5][tag % 1000 % 3] for tag in outcome.targets}
    np.testing.assert_array_equal(outcome.model.rollout_buffer.rewards[:, 0], [0, 3.5, 0, 3.5])


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("horizon", [1, 2, 3, 6])
@pytest.mark.parametrize("position", range(6))
def test_10_rows_before_a_terminal_one_do_not_bootstrap_past_it(position: int, horizon: int, n_envs: int):
    """V ≡ 100, g = .5, r = 1. N = 3, terminal at 3: rows 1, 2, 3 have 1.75, 1.5, 1."""
    script = ["1"] * 6
    script[position] = "1T"
    result = targets(*[script] * n_envs, value=100, horizon=horizon)[: position + 1]
    lefts = range(position + 1, 0, -1)
    expected = [geometric(0.5, min(horizon, left)) + (0.5**horizon * 100 if left > horizon else 0) for left in lefts]
    np.testing.assert_array_equal(result, np.transpose([expected] * n_envs))
    if (position, horizon) == (3, 3):
        assert expected == [1.75 + 12.5, 1.75, 1.5, 1]


@pytest.mark.parametrize("name", SURFACES)
def test_10_in_a_model(name: str):
    seen = learned(name, 3, "1 1 1 1T", "1 1 1 1T", value=100).targets
    assert seen == {tag: [14.25, 1.75, 1.5, 1][tag % 1000 % 5] for tag in seen}


@pytest.mark.parametrize("horizon", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SURFACES)
def test_11_a_window_of_a_vectorised_source_has_n_steps(name: str, horizon: int):
    """g = 1, r = 1, V = 0: the target counts the steps of the window, with one environment or with three."""
    one, three = (learned(name, horizon, *["1"] * n_envs, gamma=1.0, value=0).targets for n_envs in (1, 3))
    assert three == {first + tag: target for first in (0, 1000, 2000) for tag, target in one.items()}
    assert one == {tag: horizon if name == CARRYING else min(horizon, 4 - tag % 4) for tag in one}


@pytest.mark.parametrize("vec_env_class", [DummyVecEnv, SubprocVecEnv])
@pytest.mark.parametrize("name", SURFACES)
def test_11_no_transition_is_made_up_at_a_reset(name: str, vec_env_class: type):
    """No row leads from an end to a reset: rows are the steps lived, in number and in action."""
    outcome = learned(name, 2, "1 1L 1T", "1T", vec_env_class=vec_env_class)
    seen = {row.tag: row.action.item() for row in outcome.rows}
    for steps in outcome.lived:
        waiting = 1 if name == CARRYING else 0
        lived = {step.tag: step.action for step in steps[: len(steps) - waiting]}
        assert {tag: seen[tag] for tag in lived} == lived
        assert not any(step.final_tag in seen for step in steps if step.ended)


@pytest.mark.parametrize("horizon", [2, 3, 4, 9])
def test_12_short_windows_at_the_end_of_a_chunk(horizon: int):
    """Not γ^{k−1}: the last row's bootstrap is discounted once, the one before twice."""
    result = targets("0 0 0 0:1", value=0, horizon=horizon)
    np.testing.assert_array_equal(result[-2:, 0], [0.25, 0.5])


@pytest.mark.parametrize("end", ["T", "L", "TL"])
@pytest.mark.parametrize("position", range(5))
def test_12_one_environments_end_does_not_cut_the_others(end: str, position: int):
    """g = 1, r = 1, V = 0: targets count steps."""
    cut = ["1"] * 5
    cut[position] += end
    result = targets("1 1 1 1 1", cut, "1 1 1 1 1", gamma=1.0, horizon=4)
    np.testing.assert_array_equal(result[:, [0, 2]].T, [[4, 4, 3, 2, 1]] * 2)
    left = [position + 1 - t if t <= position else 5 - t for t in range(5)]
    np.testing.assert_array_equal(result[:, 1], np.minimum(4, left))


@pytest.mark.parametrize(
    ("name", "n_steps", "horizon"), [*product(SHORTENING, [6], [3, 6]), *product([CARRYING], [2, 5], [3, 6])]
)
def test_12_in_a_model(name: str, n_steps: int, horizon: int):
    """
    Environment 1 is cut while 0 goes on, a time limit hides what follows although nothing terminated, and the next
    observation of a truncated row is its final one, whatever fills that place elsewhere: 50 here, at resets.
    """
    env = {"value": 0, "reset_value": 50}
    outcome = learned(
        name, horizon, ["1"] * 6, "1 1L:4 9T 9 9 9T", n_steps=n_steps, n_rollouts=4 + 16 // n_steps, gamma=1.0, **env
    )
    for tag, target in outcome.targets.items():
        if tag < 1000:
            assert target == (horizon if name == CARRYING else min(horizon, 6 - tag % 6))
        else:  # episodes of 2, 1 and 3 rows, each with a final observation: 1 + 1 + 4, 1 + 4 | 9 | 27, 18, 9
            assert target == {0: 6, 1: 5, 3: 9, 5: 27, 6: 18, 7: 9}[tag % 1000 % 9]


@pytest.mark.parametrize("horizon", [1, 3, [1, 3], 8])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.9])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("folded", [False, True])
def test_13_inputs_are_left_as_they_are(horizon: Any, gae_lambda: float, order: str, dtype: type, folded: bool):
    rollout = arrays("1 2L:7 3 4T 5", "6 7 8:2 9 1L:3", value=1, reset_value=100)
    inputs = {name: np.array(array, dtype, order=order) for name, array in rollout._asdict().items()}
    if folded:
        inputs["bootstrap_values"] = None
    before = {name: array if array is None else array.tobytes() for name, array in inputs.items()}
    for array in inputs.values():
        if array is not None:
            array.flags.writeable = False
    first, second = (n_step_targets(**inputs, gamma=0.9, horizon=horizon, gae_lambda=gae_lambda) for _ in range(2))
    assert {name: array if array is None else array.tobytes() for name, array in inputs.items()} == before
    np.testing.assert_array_equal(first, second)
    assert not any(array is not None and np.shares_memory(first, array) for array in inputs.values())


@pytest.mark.parametrize("name", SURFACES)
def test_13_batches_are_left_as_they_are(name: str):
    """What a batch holds does not change with the rollouts that follow."""
    model = build(vec_env("1 2L 3T", "4 5 6"), **surface(name, 3))
    get, kept = model.rollout_buffer.get, []

    def keeping_get(batch_size: int | None = None) -> Any:
        for batch in get(batch_size):
            kept.append((batch, [column.numpy().tobytes() for column in batch]))
            yield batch

    model.rollout_buffer.get = keeping_get
    model.learn(6 * 8)
    assert len(kept) == 6
    for batch, before in kept:
        assert [column.numpy().tobytes() for column in batch] == before


# Terminations only: SB3 keeps the array itself as final observation of a time limit, and the reset overwrites it
@pytest.mark.parametrize("vec_env_class", [DummyVecEnv, SubprocVecEnv])
@pytest.mark.parametrize("name", SURFACES)
def test_13_one_observation_array_again_and_again(name: str, vec_env_class: type):
    same, copies = (
        learned(name, 3, "1 1T 1T", "1 1", same_array=same_array, vec_env_class=vec_env_class).targets
        for same_array in (True, False)
    )
    assert same == copies


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, bool])
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_14_integer_rewards_make_no_integer_targets(dtype: type, horizon: int):
    """r = 0, truncated, boot = .7, g = .99: .693. And the reward of a terminal row counts."""
    rollout = arrays("0L:.7 1 1T", "1T 0 0L:.7", value=0.5)
    result = n_step_targets(
        **rollout._replace(rewards=rollout.rewards.astype(dtype))._asdict(), gamma=0.99, horizon=horizon
    )
    assert result.dtype == np.float32
    second = [1.99, 0.99 * 0.693] if horizon > 1 else [1 + 0.99 * 0.5, 0.99 * 0.5]  # V(s) = .5 if it looks no further
    np.testing.assert_allclose(result, [[0.693, 1], second, [1, 0.693]], rtol=1e-6)


@pytest.mark.parametrize("reward_type", [int, np.int8, np.uint8, np.int64, bool, np.bool_])
@pytest.mark.parametrize("carry_over", [False, True])
def test_14_an_environment_that_returns_integers(reward_type: type, carry_over: bool):
    check_integer_rewards(DummyVecEnv, reward_type, carry_over)


@pytest.mark.parametrize(("reward_type", "carry_over"), [(int, False), (int, True), (np.uint8, True), (bool, False)])
def test_14_in_workers(reward_type: type, carry_over: bool):
    """There rewards keep the environment's type, and the fraction that SB3 adds at a time limit would be lost."""
    check_integer_rewards(SubprocVecEnv, reward_type, carry_over)


def check_integer_rewards(vec_env_class: type, reward_type: type, carry_over: bool) -> None:
    venv = vec_env("0L:.7 1 1T", "1T 0 0L:.7", value=0, vec_env_class=vec_env_class, reward_type=reward_type)
    outcome = run(venv, 3, n_steps=6, gamma=0.99, return_horizon=3, carry_over=carry_over)
    # episodes of one row and of two, each with a final observation
    expected = {0: 0.693, 2: 1.99, 3: 1, 1000: 1, 1002: 0.99 * 0.693, 1003: 0.693}
    assert len(outcome.targets) == 2 * (18 - (2 if carry_over else 0))
    for tag, target in outcome.targets.items():
        assert target == pytest.approx(expected[tag // 1000 * 1000 + tag % 1000 % 5])
