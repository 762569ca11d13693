"""The estimators against the definition, and the limits and invariances that hold whatever the numbers are."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer

import reference
from reference import CONTINUES, TERMINATED, TIME_LIMIT, Row
from sb3_nstep import n_step_targets
from sb3_nstep.targets import Rollout, fill_targets, vtrace_advantages, window_lengths, windowed_sum

GAMMAS = st.sampled_from([0.0, 1e-3, 0.5, 0.99, 1.0])
LAMBDAS = st.sampled_from([0.0, 0.3, 0.95, 1.0])
NUMBERS = st.integers(-8, 8).map(float)
ROWS = st.builds(Row, NUMBERS, NUMBERS, st.sampled_from([CONTINUES] * 4 + [TERMINATED, TIME_LIMIT]), NUMBERS)


@st.composite
def streams(draw: Any, max_rows: int = 14, max_envs: int = 3) -> tuple[list[list[Row]], list[float]]:
    """Rows of every environment, and V of the observation after the last one."""
    n_rows, n_envs = draw(st.integers(1, max_rows)), draw(st.integers(1, max_envs))
    rows = st.lists(ROWS, min_size=n_rows, max_size=n_rows)
    return (
        draw(st.lists(rows, min_size=n_envs, max_size=n_envs)),
        draw(st.lists(NUMBERS, min_size=n_envs, max_size=n_envs)),
    )


def horizons(n_envs: int) -> st.SearchStrategy[Any]:
    return st.integers(1, 17) | st.lists(st.integers(1, 17), min_size=n_envs, max_size=n_envs)


def as_arrays(columns: list[list[Row]], last_values: list[float]) -> dict[str, np.ndarray]:
    ended = np.array([[row.end != CONTINUES for row in column] for column in columns]).T
    return {
        "rewards": np.array([[row.reward for row in column] for column in columns]).T,
        "values": np.array([[row.value for row in column] for column in columns]).T,
        "episode_starts": np.concatenate([np.ones_like(ended[:1]), ended[:-1]]),
        "last_values": np.array(last_values),
        "last_dones": ended[-1],
        "bootstrap_values": np.array(
            [[row.final_value if row.end == TIME_LIMIT else 0.0 for row in column] for column in columns]
        ).T,
    }


def definition(
    columns: list[list[Row]], last_values: list[float], gamma: float, horizon: Any, lam: float
) -> np.ndarray:
    per_env = np.broadcast_to(horizon, len(columns)).tolist()
    return np.array(
        [reference.targets(c, v, gamma, n, lam) for c, v, n in zip(columns, last_values, per_env, strict=True)]
    ).T


def random_arrays(n_rows: int, n_envs: int, seed: int = 0, p_end: float = 0.1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "rewards": rng.normal(size=(n_rows, n_envs)),
        "values": rng.normal(size=(n_rows, n_envs)),
        "episode_starts": rng.random((n_rows, n_envs)) < p_end,
        "last_values": rng.normal(size=n_envs),
        "last_dones": rng.random(n_envs) < p_end,
    }


@given(st.data(), streams(), GAMMAS, LAMBDAS)
def test_equals_the_definition(data: Any, stream: Any, gamma: float, lam: float) -> None:
    columns, last_values = stream
    horizon = data.draw(horizons(len(columns)))
    targets = n_step_targets(**as_arrays(columns, last_values), gamma=gamma, horizon=horizon, gae_lambda=lam)
    assert targets.dtype == np.float32
    np.testing.assert_allclose(targets, definition(columns, last_values, gamma, horizon, lam), rtol=1e-6, atol=1e-5)


def test_one_example_by_hand() -> None:
    # γ = ½, N = 2; row 1 terminates, row 3 meets a time limit with V(final) = 6; V = 10, 20, …, 50, and 99 after them
    targets = n_step_targets(
        [[1.0], [2.0], [3.0], [4.0], [5.0]],
        [[10.0], [20.0], [30.0], [40.0], [50.0]],
        [[1], [0], [1], [0], [1]],
        [99.0],
        [False],
        gamma=0.5,
        horizon=2,
        bootstrap_values=[[0.0], [0.0], [0.0], [6.0], [0.0]],
    )
    # 1 + ½·2;  2;  3 + ½·(4 + ½·6);  4 + ½·6;  5 + ½·99
    np.testing.assert_array_equal(targets[:, 0], [2.0, 2.0, 6.5, 7.0, 54.5])


@given(st.data(), streams(max_envs=4), GAMMAS, LAMBDAS)
def test_environments_do_not_meet(data: Any, stream: Any, gamma: float, lam: float) -> None:
    columns, last_values = stream
    per_env = data.draw(st.lists(st.integers(1, 9), min_size=len(columns), max_size=len(columns)))
    arrays = as_arrays(columns, last_values)
    together = n_step_targets(**arrays, gamma=gamma, horizon=per_env, gae_lambda=lam)
    order = data.draw(st.permutations(range(len(columns))))
    permuted = {name: array[..., order] for name, array in arrays.items()}
    horizon = [per_env[env] for env in order]
    np.testing.assert_array_equal(
        n_step_targets(**permuted, gamma=gamma, horizon=horizon, gae_lambda=lam), together[:, order]
    )
    for env, n in enumerate(per_env):
        alone = {name: array[..., [env]] for name, array in arrays.items()}
        np.testing.assert_array_equal(
            n_step_targets(**alone, gamma=gamma, horizon=n, gae_lambda=lam), together[:, [env]]
        )


def test_columns_that_do_not_fit_into_one_block() -> None:
    arrays = random_arrays(3_000, 37)
    horizon = [1 + env % 7 for env in range(37)]
    for n in (horizon, range(1, 38), 7):
        together = n_step_targets(**arrays, gamma=0.9, horizon=n)
        for env in (0, 5, 36):
            alone = {name: array[..., [env]] for name, array in arrays.items()}
            n_alone = n if isinstance(n, int) else n[env]
            np.testing.assert_array_equal(n_step_targets(**alone, gamma=0.9, horizon=n_alone)[:, 0], together[:, env])


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_horizon_1_is_td_0(lam: float) -> None:
    arrays = random_arrays(20, 3)
    continues = 1.0 - np.concatenate([arrays["episode_starts"][1:], arrays["last_dones"][None]])
    next_values = np.concatenate([arrays["values"][1:], arrays["last_values"][None]])
    expected = arrays["rewards"] + 0.9 * continues * next_values
    np.testing.assert_allclose(n_step_targets(**arrays, gamma=0.9, horizon=1, gae_lambda=lam), expected, rtol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("horizon", [20, 21, 10_000])
def test_horizon_of_the_rollout_is_sb3(lam: float, horizon: int) -> None:
    import torch as th
    from gymnasium import spaces

    arrays = random_arrays(20, 3)
    buffer = RolloutBuffer(20, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), gae_lambda=lam, gamma=0.9, n_envs=3)
    for name in ("rewards", "values", "episode_starts"):
        getattr(buffer, name)[:] = arrays[name]
    buffer.compute_returns_and_advantage(th.as_tensor(arrays["last_values"]), arrays["last_dones"])
    targets = n_step_targets(**arrays, gamma=0.9, horizon=horizon, gae_lambda=lam)
    np.testing.assert_allclose(targets, buffer.returns, rtol=1e-5, atol=1e-6)


@given(st.data(), streams(), GAMMAS, LAMBDAS, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_nothing_behind_an_end_is_read(data: Any, stream: Any, gamma: float, lam: float, poison: float) -> None:
    """Spoil an environment from a row on: the rows of its earlier episodes, and other environments, do not change."""
    columns, last_values = stream
    horizon = data.draw(horizons(len(columns)))
    env = data.draw(st.integers(0, len(columns) - 1))
    spoilt = data.draw(st.integers(0, len(columns[env])))
    clean = n_step_targets(**as_arrays(columns, last_values), gamma=gamma, horizon=horizon, gae_lambda=lam)
    rows = [
        row if t < spoilt else replace(row, reward=poison, value=poison, final_value=poison)
        for t, row in enumerate(columns[env])
    ]
    arrays = as_arrays([*columns[:env], rows, *columns[env + 1 :]], last_values)
    arrays["last_values"][env] = poison
    targets = n_step_targets(**arrays, gamma=gamma, horizon=horizon, gae_lambda=lam)
    ends = [t for t, row in enumerate(rows[:spoilt]) if row.end != CONTINUES]
    own = max(ends, default=-1) + 1  # rows before this one belong to episodes that ended before the poison
    np.testing.assert_array_equal(targets[:own, env], clean[:own, env])
    others = [e for e in range(len(columns)) if e != env]
    np.testing.assert_array_equal(targets[:, others], clean[:, others])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_value_inside_the_window_is_not_read_at_lambda_1(poison: float) -> None:
    """Only the row that bootstraps from V(s_4), four rows before it, has anything to do with it."""
    arrays = random_arrays(9, 1, p_end=0.0)
    clean = n_step_targets(**arrays, gamma=0.9, horizon=4)
    arrays["values"][5] = poison
    targets = n_step_targets(**arrays, gamma=0.9, horizon=4)
    assert not np.isfinite(targets[1, 0])
    np.testing.assert_array_equal(np.delete(targets, 1, axis=0), np.delete(clean, 1, axis=0))


def test_zero_discount_stops_everything() -> None:
    targets = n_step_targets([[1.0], [np.inf]], [[0.0], [np.nan]], [[1], [0]], [np.nan], [False], gamma=0.0, horizon=5)
    np.testing.assert_array_equal(targets, [[1.0], [np.inf]])


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.999, 1.0])
def test_long_streams_are_stable(gamma: float) -> None:
    n_rows, horizon = 200_000, 1_000
    arrays = random_arrays(n_rows, 1, p_end=1e-3)
    targets = n_step_targets(**arrays, gamma=gamma, horizon=horizon)
    assert np.isfinite(targets).all()
    rewards, values = arrays["rewards"][:, 0].tolist(), [*arrays["values"][:, 0], arrays["last_values"][0]]
    ends = np.append(np.flatnonzero(arrays["episode_starts"][1:, 0]) + 1, n_rows).tolist()
    for t in [0, *np.random.default_rng(1).integers(0, n_rows, 60).tolist(), n_rows - 1]:
        end = next(end for end in ends if end > t)
        k = min(horizon, end - t)
        is_over = t + k == end and (end < n_rows or arrays["last_dones"][0])
        terms = [gamma**i * rewards[t + i] for i in range(k)] + [0.0 if is_over else gamma**k * values[t + k]]
        assert targets[t, 0] == pytest.approx(math.fsum(terms), rel=1e-6, abs=1e-5)
    # and of constant rewards, the geometric series
    ones = np.ones((n_rows, 1))
    sums = n_step_targets(ones, 0 * ones, 0 * ones, [0.0], [False], gamma=gamma, horizon=horizon)
    expected = horizon if gamma == 1 else (1 - gamma**horizon) / (1 - gamma)
    np.testing.assert_allclose(sums[: n_rows - horizon], expected, rtol=1e-6)


@given(streams(), GAMMAS, LAMBDAS, st.integers(1, 9), st.integers(1, 5))
def test_chunks_with_lookahead_give_what_one_piece_gives(
    stream: Any, gamma: float, lam: float, horizon: int, n_chunk: int
) -> None:
    columns, last_values = stream
    arrays = as_arrays(columns, last_values)
    whole = n_step_targets(**arrays, gamma=gamma, horizon=horizon, gae_lambda=lam)
    n_rows = len(whole)
    for start in range(0, n_rows, n_chunk):
        stop = min(start + n_chunk + horizon - 1, n_rows)
        chunk = {name: array[start:stop] for name, array in arrays.items() if array.ndim == 2}
        if stop < n_rows:
            chunk |= {"last_values": arrays["values"][stop], "last_dones": arrays["episode_starts"][stop]}
        else:
            chunk |= {"last_values": arrays["last_values"], "last_dones": arrays["last_dones"]}
        part = n_step_targets(**chunk, gamma=gamma, horizon=horizon, gae_lambda=lam)
        # Sums are formed in another order: equal, but not where they cancel out to the last bit
        np.testing.assert_allclose(part[:n_chunk], whole[start : start + n_chunk], rtol=1e-6, atol=1e-12)


@given(st.data(), streams(), GAMMAS, LAMBDAS)
def test_vtrace_equals_its_definition(data: Any, stream: Any, gamma: float, lam: float) -> None:
    columns, last_values = stream
    horizon = data.draw(horizons(len(columns)))
    arrays = as_arrays(columns, last_values)
    del arrays["bootstrap_values"]
    numbers = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    rho = np.array([[data.draw(numbers) for _ in columns] for _ in columns[0]])
    advantages = vtrace_advantages(Rollout(**arrays), rho, gamma=gamma, horizon=horizon, gae_lambda=lam)
    for env, (column, n) in enumerate(zip(columns, np.broadcast_to(horizon, len(columns)).tolist(), strict=True)):
        expected = reference.vtrace(
            [row.reward for row in column],
            [row.value for row in column],
            [row.end != CONTINUES for row in column],
            last_values[env],
            rho[:, env].tolist(),
            gamma,
            n,
            lam,
        )
        np.testing.assert_allclose(advantages[:, env], expected, rtol=1e-9, atol=1e-9)
    # on-policy, V-trace is the N-step advantage
    targets = np.empty(rho.shape)
    fill_targets(targets, Rollout(**arrays), gamma=gamma, horizon=horizon, gae_lambda=lam)
    on_policy = vtrace_advantages(Rollout(**arrays), np.ones_like(rho), gamma=gamma, horizon=horizon, gae_lambda=lam)
    np.testing.assert_allclose(on_policy, targets - arrays["values"], rtol=1e-9, atol=1e-9)


@given(streams(), st.integers(1, 17))
def test_window_lengths(stream: Any, horizon: int) -> None:
    columns, last_values = stream
    arrays = as_arrays(columns, last_values)
    lengths = window_lengths(arrays["episode_starts"], arrays["last_dones"], horizon)
    for env, column in enumerate(columns):
        for t in range(len(column)):
            to_end = next((i for i, row in enumerate(column[t:], 1) if row.end != CONTINUES), len(column) - t)
            assert lengths[t, env] == min(horizon, to_end)


def test_windowed_sum_of_growing_weights() -> None:
    """Weights above 1 overflow behind a zero: that is not the row's business."""
    x = np.ones((600, 1))
    w = np.full((600, 1), 1e3)
    w[2] = 0.0
    sums = windowed_sum(x, w, 500)
    np.testing.assert_allclose(sums[:3, 0], [1 + 1e3 + 1e6, 1 + 1e3, 1])
    assert np.isinf(sums[3, 0])


def test_inputs_are_left_alone_and_may_be_lists_or_ints() -> None:
    arrays = random_arrays(12, 2)
    before = {name: array.copy() for name, array in arrays.items()}
    for horizon in (1, 3, 4, 12):
        n_step_targets(**arrays, gamma=0.9, horizon=horizon, gae_lambda=0.9)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])
    targets = n_step_targets([[1], [2]], [[0], [0]], [[1], [0]], [8], [0], gamma=0.5, horizon=2)
    np.testing.assert_array_equal(targets, [[4.0], [6.0]])
    assert n_step_targets(
        np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(3), np.zeros(3), gamma=0.5, horizon=2
    ).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"horizon": 0}, "^horizon: expected an int ≥ 1.*got 0"),
        ({"horizon": 2.0}, "^horizon: expected an int ≥ 1.*got 2.0"),
        ({"horizon": True}, "^horizon: expected an int ≥ 1.*got True"),
        ({"horizon": "5"}, "^horizon: expected an int ≥ 1.*got '5'"),
        ({"horizon": None}, "^horizon: expected an int ≥ 1.*got None"),
        ({"horizon": [1, 2.5]}, "^horizon: expected an int ≥ 1"),
        ({"horizon": [[1, 2]]}, "^horizon: expected an int ≥ 1"),
        ({"horizon": [1, 2, 3]}, "^horizon: expected one int for each of 2 environments, got"),
        ({"horizon": range(3)}, "^horizon: expected an int ≥ 1.*got range"),
        ({"horizon": []}, "^horizon: expected one int for each of 2 environments, got"),
        ({"gamma": 1.5}, r"gamma: expected a number in \[0, 1\], got 1.5"),
        ({"gamma": float("nan")}, r"gamma: expected a number in \[0, 1\], got nan"),
        ({"gae_lambda": -0.1}, r"gae_lambda: expected a number in \[0, 1\], got -0.1"),
        ({"rewards": np.zeros(4)}, r"rewards: expected the shape \[T, E\], got \(4,\)"),
        ({"values": np.zeros((4, 1))}, r"values: expected the shape \(4, 2\).*got \(4, 1\)"),
        ({"last_values": np.zeros((2, 1))}, r"last_values: expected the shape \(2,\).*got \(2, 1\)"),
        ({"last_dones": False}, r"last_dones: expected the shape \(2,\).*got \(\)"),
        ({"bootstrap_values": np.zeros(2)}, r"bootstrap_values: expected the shape \(4, 2\), got \(2,\)"),
    ],
)
def test_bad_input_says_what_came(change: dict[str, Any], message: str) -> None:
    arguments = {**random_arrays(4, 2), "gamma": 0.9, "horizon": 3, **change}
    with pytest.raises(ValueError, match=message):
        n_step_targets(**arguments)
