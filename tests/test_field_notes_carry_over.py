"""Entries 15 to 18 of the field notes: rows that wait for the rest of their windows."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_nstep import NStepA2C
from scripted import SHORTENING, Lived, Run, build, record, run, surface, vec_env

CORRECTIONS = ["none", "importance", "vtrace"]


def check_conservation(outcome: Run, n_waiting: int) -> None:
    """Each step lived was trained on once, with its action, in the order lived; the last rows of a stream wait."""
    for env, steps in enumerate(outcome.lived):
        emitted = [row for row in outcome.rows if row.tag // 1000 == env]
        due = steps[: max(0, len(steps) - n_waiting)]
        assert [(row.tag, row.action.item()) for row in emitted] == [(step.tag, step.action.item()) for step in due]


def steps_left(steps: list[Lived]) -> dict[int, int]:
    """To the end of the episode, by the number of the observation; a stream's last episode counts as endless."""
    left, result = 10**6, {}
    for step in reversed(steps):
        left = 1 if step.ended else left + 1
        result[step.tag] = left
    return result


def geometric(k: int) -> float:
    """1 + .5 + … : the rewards of a window of k rows that pay 1 each, g = .5."""
    return 2 - 0.5 ** (k - 1)


def episode(length: int | None, end: str) -> list[str]:
    return ["1"] if length is None else ["1"] * (length - 1) + [f"1{end}"]


@pytest.mark.parametrize("end", ["T", "L:0"])
@pytest.mark.parametrize(
    ("n_steps", "horizon", "lengths"),
    [
        *[(n_steps, n, [n_steps]) for n_steps, n in product([1, 2, 5], [1, 2, 5, 8])],  # T
        *[(n_steps, n, [n_steps - 1]) for n_steps, n in product([2, 5], [1, 2, 5, 8])],  # T − 1
        *[(n_steps, n, [2 * n_steps]) for n_steps, n in product([1, 2, 5], [1, 2, 5, 8])],  # 2T
        *[(n_steps, n, [None]) for n_steps, n in product([1, 3], [1, 3, 11])],  # no end
        *[(n_steps, n, [4, 3, 8, 1]) for n_steps, n in product([1, 4], [1, 4, 5, 9])],  # side by side
    ],
)
def test_15_each_transition_is_trained_on_once(n_steps: int, horizon: int, lengths: list[int | None], end: str):
    """And with a whole window: with g = 1, r = 1, V = 0 the target counts its steps."""
    n_envs, n_rollouts = len(lengths), 12
    venv = vec_env(*(episode(length, end) for length in lengths), value=0)
    outcome = run(venv, n_rollouts, n_steps=n_steps, gamma=1.0, return_horizon=horizon)
    check_conservation(outcome, horizon - 1)
    left = {tag: k for steps in outcome.lived for tag, k in steps_left(steps).items()}
    assert outcome.targets == {tag: min(horizon, left[tag]) for tag in outcome.targets}

    # no update before the ⌈N/T⌉th rollout, whose batch is the only one of another size
    assert len(outcome.batches) == n_rollouts - (-(-horizon // n_steps) - 1)
    first, *others = (len(batch) for batch in outcome.batches)
    assert first == n_envs * (-(horizon - 1) % n_steps or n_steps)
    assert set(others) == {n_envs * n_steps}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("n_steps", "horizon"), [(4, 3), (2, 5), (1, 4)])
def test_15_with_each_correction_and_a_policy_that_changes(correction: str, n_steps: int, horizon: int):
    kwargs = {"correction": correction, "learning_rate": 0.1, "n_steps": n_steps, "return_horizon": horizon}
    check_conservation(run(vec_env(["1"] * 3 + ["1T"], "1 0L", "-1"), 10, **kwargs), horizon - 1)


@pytest.mark.parametrize("horizons", [[1, 4], [4, 1], [6, 2]])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_15_with_a_horizon_per_environment(horizons: list[int], n_steps: int):
    """All wait for as long as the one that looks furthest."""
    venv = vec_env("1 1 1T", "1", value=0)
    outcome = run(venv, 12, n_steps=n_steps, gamma=1.0, return_horizon=horizons)
    check_conservation(outcome, max(horizons) - 1)
    left = {tag: k for steps in outcome.lived for tag, k in steps_left(steps).items()}
    assert outcome.targets == {tag: min(horizons[tag // 1000], left[tag]) for tag in outcome.targets}


@pytest.mark.parametrize(("early", "late"), [(2, 5), (5, 2), (1, 4), (4, 1), (3, 3)])
@pytest.mark.parametrize("n_steps", [1, 3, 4])
def test_15_with_a_schedule(early: int, late: int, n_steps: int):
    """A waiting row uses the N in force when it is emitted; a batch grows or shrinks by the change."""

    def schedule(progress_remaining: float) -> int:
        return early if progress_remaining > 0.5 else late

    outcome = run(vec_env("1", "1", value=0), 20, n_steps=n_steps, gamma=1.0, return_horizon=schedule)
    check_conservation(outcome, late - 1)
    n_early = 2 * (10 * n_steps - (early - 1))  # rows emitted by the first ten rollouts
    assert [row.target for row in outcome.rows] == [early] * n_early + [late] * (len(outcome.rows) - n_early)
    sizes = [len(batch) for batch in outcome.batches]
    assert sum(sizes) == 2 * (20 * n_steps - (late - 1))
    if n_steps > 3:  # larger than any change, so that each of the last ten rollouts has its batch
        assert sizes[-10] == 2 * (n_steps + early - late)


def test_15_in_workers():
    venv = vec_env("1 1T", ["1"] * 4 + ["1L"], "1", vec_env_class=SubprocVecEnv)
    check_conservation(run(venv, 8, n_steps=2, return_horizon=4), 3)


@pytest.mark.parametrize("name", SHORTENING)
@pytest.mark.parametrize("horizon", [1, 3, 5])
@pytest.mark.parametrize("length", [4, 5, 10, 1])
def test_15_without_carry_over_no_row_is_left_out_either(name: str, horizon: int, length: int):
    outcome = run(vec_env(episode(length, "T"), "1"), 4, n_steps=5, **surface(name, horizon))
    outcome = outcome._replace(batches=[sorted(outcome.rows)])  # handed out in any order
    check_conservation(outcome, 0)
    assert len(outcome.rows) == 4 * 5 * 2


# How people leave a stream behind and begin another


def learn_anew(model: NStepA2C, total: int) -> None:
    model.learn(total)


def set_env(model: NStepA2C, total: int) -> None:
    model.set_env(other_env())
    model.learn(total, reset_num_timesteps=False)


def set_env_without_reset(model: NStepA2C, total: int) -> None:
    other = other_env()
    other.reset()
    model.set_env(other, force_reset=False)
    model.learn(total, reset_num_timesteps=False)


def set_same_env(model: NStepA2C, total: int) -> None:
    model.set_env(model.get_env())
    model.learn(total, reset_num_timesteps=False)


def evaluate_on_it_and_learn_anew(model: NStepA2C, total: int) -> None:
    model.env.reset()
    model.env.step(np.zeros(model.n_envs, dtype=np.int64))
    model.learn(total)


def other_env() -> VecEnv:
    return vec_env("1e6", "1e6", "1e6", first_tag=500, value=3, reset_value=1e5)


LEAVING = [learn_anew, set_env, set_env_without_reset, set_same_env, evaluate_on_it_and_learn_anew]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("n_steps", "horizon", "n_rollouts"), [(4, 3, 1), (4, 4, 2), (2, 7, 2), (1, 4, 3), (1, 2, 1)])
def test_16_no_window_spans_two_sessions(
    leave: Callable[[NStepA2C, int], None], correction: Any, n_steps: int, horizon: int, n_rollouts: int
):
    """
    First session: r = 1, V = 3, g = .5; its last row ends no episode, or terminates (0), or is cut (boot = 7). Then
    r = 1e6, V(reset) = 1e5. The value at the seam is the one recorded when the rollout ended.
    """
    n_rows = n_rollouts * n_steps
    scripts = [["1"] * (n_rows - 1) + [last] + ["1e6"] * 100 for last in ("1", "1T", "1L:7")]
    venv = vec_env(*scripts, value=3, reset_value=1e5)
    model = build(venv, n_steps=n_steps, return_horizon=horizon, correction=correction)
    batches = record(model)
    model.learn(3 * n_rows)
    leave(model, 3 * (n_steps * 3 + horizon))
    outcome = Run(model, batches, [])

    for env, at_the_seam in enumerate([3, 0, 7]):
        first_session = {tag % 1000: target for tag, target in outcome.targets.items() if tag // 1000 == env}
        second_session = [first_session.pop(tag) for tag in list(first_session) if tag >= n_rows]
        assert sorted(first_session) == list(range(n_rows))
        for tag, target in first_session.items():
            left = n_rows - tag
            bootstrap = at_the_seam if left <= horizon else 3
            assert target == geometric(min(horizon, left)) + 0.5 ** min(horizon, left) * bootstrap
        assert len(second_session) >= 2 * n_steps
        assert second_session == pytest.approx([1e6 * geometric(horizon) + 0.5**horizon * 3] * len(second_session))


@pytest.mark.parametrize("leave", [learn_anew, set_same_env])
@pytest.mark.parametrize(("n_steps", "horizon", "n_rollouts"), [(1, 4, 1), (1, 9, 2), (2, 5, 1), (3, 3, 1)])
def test_16_rows_that_wait_over_several_sessions(
    leave: Callable[[NStepA2C, int], None], n_steps: int, horizon: int, n_rollouts: int
):
    """Session s pays s. Each of its rows sees the rest of it, then V = 3; g = .5."""
    n_rows, n_sessions = n_steps * n_rollouts, 12
    script = [str(session) for session in range(n_sessions) for _ in range(n_rows)]
    model = build(vec_env(script, script, value=3, reset_value=1e5), n_steps=n_steps, return_horizon=horizon)
    batches = record(model)
    for _ in range(n_sessions):
        leave(model, 2 * n_rows)
    outcome = Run(model, batches, [])
    assert len(outcome.targets) == 2 * (n_rows * n_sessions - (horizon - 1))
    for tag, target in outcome.targets.items():
        session, row = divmod(tag % 1000, n_rows + 1)  # a reset has a number of its own
        k = min(horizon, n_rows - row)
        assert target == session * geometric(k) + 0.5**k * 3


def test_16_a_stream_goes_on_where_learning_is_resumed():
    """The counterpart: no reset, no seam. g = 1, r = 1, V = 0: targets count the steps of the window."""
    model = build(vec_env("1", "1", value=0), n_steps=2, gamma=1.0, return_horizon=5)
    batches = record(model)
    for _ in range(6):
        model.learn(4, reset_num_timesteps=False)
    outcome = Run(model, batches, model.env.get_attr("lived"))
    check_conservation(outcome, 4)
    assert set(outcome.targets.values()) == {5}


@pytest.mark.parametrize("force_reset", [True, False])
@pytest.mark.parametrize(("n_steps", "horizon"), [(4, 3), (2, 7), (1, 4)])
def test_16_no_window_spans_a_load(tmp_path: Path, n_steps: int, horizon: int, force_reset: bool):
    """Waiting rows stay behind; the loaded model starts like a new one."""
    saved = run(vec_env("1e6", "1e6", value=1e6), 8, n_steps=n_steps, return_horizon=horizon).model
    saved.save(tmp_path / "model.zip")
    venv = vec_env("1", "1", first_tag=500, value=3)
    venv.reset()
    model = NStepA2C.load(tmp_path / "model.zip", venv, device="cpu", force_reset=force_reset)
    batches = record(model)
    model.learn(2 * n_steps * 8, reset_num_timesteps=False)
    outcome = Run(model, batches, [])
    assert len(outcome.targets) == 2 * (8 * n_steps - (horizon - 1))
    assert set(outcome.targets.values()) == {geometric(horizon) + 0.5**horizon * 3}
    if force_reset:
        assert min(outcome.targets) == 501  # the second reset's


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("n_steps", "horizon", "n_rollouts"), [(4, 3, 1), (4, 3, 3), (2, 5, 2), (1, 2, 1), (6, 7, 1)])
def test_17_actions_of_an_older_policy_are_corrected(
    correction: Any, n_steps: int, horizon: int, n_rollouts: int, n_envs: int
):
    """
    μ acts with probability 1/2 and 1/2; then π has 1/5 and 4/5: min(1, π/μ) is .4 for action 0 and 1 for action 1. Rows
    of the rollout just collected, and so by π, have 1. r = 1, V = 0, g = .5.
    """
    kwargs = {"correction": correction, "ent_coef": 0.0, "max_grad_norm": 1e9, "seed": 3}
    model = build(vec_env(*["1"] * n_envs, value=0), n_steps=n_steps, return_horizon=horizon, **kwargs)
    model.learn(n_rollouts * n_steps * n_envs)
    bias = model.policy.action_net.bias
    bias.data[:] = th.log(th.tensor([0.2, 0.8]))
    batches = record(model)
    model.learn(n_steps * n_envs, reset_num_timesteps=False)
    (batch,) = batches

    rho = {
        step.tag: 0.4 if step.tag % 1000 < n_rollouts * n_steps and step.action == 0 else 1.0
        for steps in model.env.get_attr("lived")
        for step in steps
    }
    stale = [row for row in batch if row.tag % 1000 < n_rollouts * n_steps]
    logged = model.logger.name_to_value
    assert logged["train/stale_fraction"] == len(stale) / len(batch)
    if len(batch) == n_steps * n_envs:
        assert len(stale) / len(batch) == min(horizon - 1, n_steps) / n_steps
    assert logged["train/n_step_mean"] == horizon
    assert logged["train/rho_mean"] == pytest.approx(np.mean([rho[row.tag] for row in batch]))

    def advantage(tag: int) -> float:
        if correction == "none":
            return geometric(horizon)
        if correction == "importance":
            return rho[tag] * geometric(horizon)
        return sum(0.5**i * np.prod([rho[tag + j] for j in range(i + 1)]) for i in range(horizon))

    # ∂ log π(a) / ∂ logits = (1 [a = 0] − .2, 1 [a = 1] − .8), and the loss is −mean(advantage · log π)
    gradient = -np.mean(
        [advantage(row.tag) * (np.eye(2)[int(row.action.item())] - [0.2, 0.8]) for row in batch], axis=0
    )
    np.testing.assert_allclose(bias.grad, gradient, rtol=1e-4, atol=1e-6)
    if n_envs > 1:
        assert {int(row.action.item()) for row in stale} == {0, 1}, "the seed shows one action only"


def test_17_nothing_is_stale_without_carry_over():
    venv = vec_env("1 1 1T", "1", value=0)
    model = run(venv, 4, learning_rate=0.1, return_horizon=3, carry_over=False).model
    logged = model.logger.name_to_value
    assert (logged["train/stale_fraction"], logged["train/rho_mean"]) == (0.0, 1.0)
    # 16 rows, 4 rollouts of 4. The last holds rows 12 to 15: windows of 3, 2, 1, 1 and of 3, 3, 2, 1
    assert logged["train/n_step_mean"] == (3 + 2 + 1 + 1 + 3 + 3 + 2 + 1) / 8


@pytest.mark.parametrize("end", ["T", "L:0", "TL:1e6"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("n_steps", "horizon"), [(1, 3), (1, 8), (2, 5), (3, 3), (4, 4), (5, 7)])
def test_18_carried_windows_mind_the_ends(n_steps: int, horizon: int, correction: Any, end: str):
    """Episode A pays 1 three times, B pays 1e6 twice, and V(reset) = 1e6: A has 1.75, 1.5, 1 whatever follows."""
    script = f"1 1 1{end} 1e6 1e6{end}"
    kwargs = {"n_steps": n_steps, "return_horizon": horizon, "correction": correction}
    outcome = run(vec_env(script, "1e6", value=0, reset_value=1e6), 1 + 30 // n_steps, **kwargs)
    # A has three rows and a final observation, B two rows and one
    expected = {0: 1.75, 1: 1.5, 2: 1, 4: 1.5e6, 5: 1e6}
    for tag, target in outcome.targets.items():
        assert target == (expected[tag % 7] if tag < 1000 else pytest.approx(1e6 * geometric(horizon)))


@pytest.mark.parametrize("end", ["T", "L:0"])
@pytest.mark.parametrize(("n_steps", "horizon"), [(1, 3), (1, 8), (2, 5), (4, 4)])
def test_18_also_where_v_trace_weighs_the_rows(n_steps: int, horizon: int, end: str):
    """The policy changes, so ρ ≤ 1 differs from 1; V = 0: 0 ≤ target ≤ 1.75 in A."""
    kwargs = {"n_steps": n_steps, "return_horizon": horizon, "correction": "vtrace", "learning_rate": 0.1}
    outcome = run(vec_env(f"1 1 1{end} 1e6 1e6{end}", value=0), 24, **kwargs)
    in_a = np.array([target for tag, target in outcome.targets.items() if tag % 7 < 4])
    assert len(in_a) > 6
    assert ((in_a >= 0) & (in_a <= 1.75)).all()
    assert not np.isin(in_a, [1.75, 1.5, 1]).all(), "ρ was 1 throughout"
