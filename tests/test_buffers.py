"""The buffers, driven as SB3's ``collect_rollouts`` drives them, against the definition on whole streams."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer

import reference
from reference import CONTINUES, TERMINATED, TIME_LIMIT, Row
from sb3_nstep import NStepDictRolloutBuffer, NStepRolloutBuffer
from sb3_nstep.buffers import NStepMixin

GAMMA = 0.9
NUMBERS = st.integers(-8, 8).map(float)
ENDS = st.sampled_from([CONTINUES] * 5 + [TERMINATED, TIME_LIMIT])


@dataclass
class Streams:
    """
    Environments that live random rows, and what each row is expected to become. A row is known by its number, which is
    its observation, action and log-probability, counted through all environments.
    """

    n_envs: int
    draw: Callable[[st.SearchStrategy[Any]], Any]
    rows: list[list[Row]] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)
    starts: np.ndarray = field(default_factory=lambda: np.ones(0))
    count: int = 0

    def __post_init__(self) -> None:
        self.forget()
        self.starts = np.ones(self.n_envs)

    def forget(self) -> None:
        """What was lived so far has nothing to do with what comes."""
        self.rows, self.numbers = [[] for _ in range(self.n_envs)], [[] for _ in range(self.n_envs)]

    def step(self, buffer: NStepMixin) -> None:
        new = [
            Row(self.draw(NUMBERS), self.values[env], self.draw(ENDS), self.draw(NUMBERS)) for env in range(self.n_envs)
        ]
        ids = np.arange(self.count, self.count + self.n_envs)
        self.count += self.n_envs
        rewards = [row.reward + GAMMA * row.final_value * (row.end == TIME_LIMIT) for row in new]
        buffer.add(
            observation(buffer, ids),
            ids[:, None],
            np.array(rewards, dtype=np.float32),
            self.starts,
            th.tensor(self.values),
            th.tensor(ids, dtype=th.float32),
        )
        for env in range(self.n_envs):
            self.rows[env].append(new[env])
            self.numbers[env].append(int(ids[env]))
        self.starts = np.array([row.end != CONTINUES for row in new])
        self.values = [self.draw(NUMBERS) for _ in new]

    def rollout(self, buffer: NStepMixin, n_steps: int) -> None:
        for _ in range(n_steps):
            self.step(buffer)

    def finish(self, buffer: Any) -> None:
        # V of the observation after a row that ended its episode belongs to the next one: nothing may depend on it
        # (of NaN, what is SB3's own computation does)
        horizon = getattr(buffer, "return_horizon", None) or 99
        is_sb3 = not getattr(buffer, "carry_over", False) and np.min(horizon) >= buffer.buffer_size
        last_values = np.where(self.starts, 99.0 if is_sb3 else np.nan, self.values)
        buffer.compute_returns_and_advantage(th.tensor(last_values, dtype=th.float32)[:, None], self.starts)

    def reset_from_outside(self, envs: list[int]) -> None:
        """Their last row, if it ended no episode, bootstraps from the value recorded when the rollout ended."""
        for env in envs:
            if self.rows[env] and self.rows[env][-1].end == CONTINUES:
                self.rows[env][-1].end, self.rows[env][-1].final_value = TIME_LIMIT, self.values[env]
            self.starts[env] = True
            self.values[env] = self.draw(NUMBERS)

    values: list[float] = field(default_factory=list)

    def expected(self, horizon: Any, lam: float) -> dict[int, float]:
        per_env = np.broadcast_to(horizon, self.n_envs).tolist()
        result: dict[int, float] = {}
        for env, n in enumerate(per_env):
            targets = reference.targets(self.rows[env], self.values[env], GAMMA, n, lam)
            result |= dict(zip(self.numbers[env], targets, strict=True))
        return result


def make(buffer_size: int, n_envs: int, *, is_dict: bool = False, **kwargs: Any) -> NStepMixin:
    box = spaces.Box(0, 2**30, (1,), dtype=np.int32)
    if is_dict:
        space = spaces.Dict(number=box, image=spaces.Box(0, 255, (2, 3), dtype=np.uint8))
        return NStepDictRolloutBuffer(buffer_size, space, box, n_envs=n_envs, gamma=GAMMA, device="cpu", **kwargs)
    return NStepRolloutBuffer(buffer_size, box, box, n_envs=n_envs, gamma=GAMMA, device="cpu", **kwargs)


def observation(buffer: NStepMixin, ids: np.ndarray) -> Any:
    if isinstance(buffer.observation_space, spaces.Dict):
        image = np.broadcast_to(ids[:, None, None] % 251, (len(ids), 2, 3)).astype(np.uint8)
        return {"number": ids[:, None], "image": image}
    return ids[:, None]


def handed_out(buffer: NStepMixin, batch_size: int | None = None) -> dict[int, float]:
    """Number → target of the rows that the buffer hands out, having checked that their columns agree."""
    result: dict[int, float] = {}
    for batch in buffer.get(batch_size):
        observations = batch.observations
        if isinstance(observations, dict):
            assert observations["image"].dtype == th.uint8
            assert (observations["image"][:, 1, 2] == observations["number"][:, 0] % 251).all()
            observations = observations["number"]
        ids = observations[:, 0].tolist()
        assert ids == batch.actions[:, 0].tolist() == batch.old_log_prob.tolist()
        th.testing.assert_close(batch.advantages, batch.returns - batch.old_values, rtol=1e-4, atol=1e-4)
        assert not result.keys() & set(ids)
        result |= dict(zip(ids, batch.returns.tolist(), strict=True))
    # What A2C reads behind the batch is the same rows, and in the same order where SB3 does not shuffle it
    assert set(buffer.returns.flatten()) == set(np.float32(list(result.values())))
    if batch_size is None and buffer.carry_over:
        np.testing.assert_array_equal(buffer.returns.flatten(), batch.returns.numpy())
        np.testing.assert_array_equal(buffer.values.flatten(), batch.old_values.numpy())
    assert len(result) == buffer.n_ready
    return result


def assert_targets(actual: dict[int, float], expected: dict[int, float]) -> None:
    for number, target in actual.items():
        assert target == pytest.approx(expected[number], rel=1e-4, abs=1e-4), number


@st.composite
def horizon_for(draw: Any, n_envs: int) -> Any:
    return draw(st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=n_envs, max_size=n_envs))


def start(draw: Any, n_envs: int) -> Streams:
    streams = Streams(n_envs, draw)
    streams.values = [draw(NUMBERS) for _ in range(n_envs)]
    return streams


@given(st.data(), st.booleans(), st.sampled_from([0.0, 0.9, 1.0]))
def test_shortened_windows(data: Any, is_dict: bool, lam: float) -> None:
    n_steps, n_envs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    horizon = data.draw(st.integers(1, n_steps) | st.lists(st.integers(1, n_steps), min_size=n_envs, max_size=n_envs))
    buffer = make(n_steps, n_envs, is_dict=is_dict, return_horizon=horizon, gae_lambda=lam)
    streams = start(data.draw, n_envs)
    for _ in range(2):
        streams.forget()
        buffer.reset()
        streams.rollout(buffer, n_steps)
        streams.finish(buffer)
        actual = handed_out(buffer, data.draw(st.none() | st.integers(1, 5)))
        assert buffer.n_ready == n_steps * n_envs
        assert_targets(actual, streams.expected(horizon, lam))


@given(st.data(), st.booleans(), st.sampled_from([0.0, 0.9, 1.0]))
def test_carried_windows(data: Any, is_dict: bool, lam: float) -> None:
    """
    Chunks of a stream give the targets of the stream, each row once, with a fixed lag: through changes of N, resets
    from outside, exchanged environments, rollouts that were stopped, and rollouts whose rows nobody asked for.
    """
    n_steps, n_envs = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    horizon = data.draw(horizon_for(n_envs))
    buffer = make(n_steps, n_envs, is_dict=is_dict, return_horizon=horizon, carry_over=True, gae_lambda=lam)
    streams = start(data.draw, n_envs)
    lived: list[list[int]] = []  # the numbers of each step since the last loss, oldest first
    pending: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        event = data.draw(st.sampled_from(["nothing"] * 4 + ["reset", "set_env", "stop", "new horizon"]))
        if event == "reset":
            streams.reset_from_outside(data.draw(st.lists(st.integers(0, n_envs - 1), unique=True)))
        elif event == "set_env":
            buffer.end_streams()
            starts = streams.starts.copy()
            streams.reset_from_outside(list(range(n_envs)))
            streams.starts = starts  # SB3 goes on as if nothing had happened
        elif event == "new horizon":
            horizon = data.draw(horizon_for(n_envs))
            buffer.return_horizon = horizon
        buffer.reset()
        if event == "stop":
            streams.rollout(buffer, data.draw(st.integers(0, n_steps - 1)))
            assert buffer.n_ready == 0
            streams.forget()
            lived, pending = [], []
            streams.starts = np.array([data.draw(st.booleans()) for _ in range(n_envs)])
            buffer.reset()
        before = len(lived)
        streams.rollout(buffer, n_steps)
        lived += list(zip(*(numbers[-n_steps:] for numbers in streams.numbers), strict=True))
        pending += lived[before:]
        streams.finish(buffer)
        lag = int(np.max(horizon)) - 1
        due, pending = pending[: max(0, len(pending) - lag)], pending[max(0, len(pending) - lag) :]
        assert buffer.n_ready == len(due) * n_envs
        assert buffer.n_stale == max(0, min(len(due), len(due) + len(pending) - n_steps)) * n_envs
        # a row is kept as it came, with room for T + max(N) of them and for those that a smaller N has set free
        n_room = n_steps + max(lag, len(due) + len(pending) - n_steps)
        assert all(len(s) == n_room for s in _arrays(buffer._storage["observations"]))
        if not due:
            with pytest.raises(RuntimeError, match="NStepA2C"):
                buffer.get()
        elif data.draw(st.booleans()):
            actual = handed_out(buffer, data.draw(st.none() | st.integers(1, 5)))
            assert sorted(actual) == sorted(number for step in due for number in step)
            assert_targets(actual, streams.expected(horizon, lam))


def _arrays(column: Any) -> list[np.ndarray]:
    return list(column.values()) if isinstance(column, dict) else [column]


def seeded(seed: int = 0) -> Callable[[st.SearchStrategy[Any]], Any]:
    """The same kind of numbers without hypothesis: for tests that are about something else."""
    rng = np.random.default_rng(seed)
    return lambda strategy: float(rng.integers(-8, 9)) if strategy is NUMBERS else CONTINUES


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("horizon", [None, 4, 7])
@pytest.mark.filterwarnings("ignore:return_horizon=7")
def test_exact_mode_is_sb3_to_the_bit(lam: float, horizon: int | None) -> None:
    ours = make(4, 2, return_horizon=horizon, gae_lambda=lam)
    sb3 = RolloutBuffer(4, ours.observation_space, ours.action_space, "cpu", gae_lambda=lam, gamma=GAMMA, n_envs=2)
    samples = []
    for buffer in (ours, sb3):
        streams = start(seeded(), 2)
        buffer.reset()
        streams.rollout(buffer, 4)
        streams.finish(buffer)
        np.random.seed(0)
        samples.append(list(buffer.get(3)))
    for a, b in zip(*samples, strict=True):
        assert all(th.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("rebinds", [True, False])
def test_edited_rewards_count_once(carry_over: bool, rebinds: bool) -> None:
    """A callback adds 1 to each reward, in place or as a new array, and computes anew: it counts once per row."""
    buffer = make(3, 1, return_horizon=3, carry_over=carry_over)
    plain, streams = make(3, 1, return_horizon=3, carry_over=carry_over), start(seeded(), 1)
    for _ in range(4):
        twin = copy.deepcopy(streams)
        twin.draw = streams.draw = seeded(streams.count)
        buffer.reset()
        streams.rollout(buffer, 3)
        streams.finish(buffer)
        if rebinds:
            buffer.rewards = (buffer.rewards + 1.0).astype(np.float64)
        else:
            buffer.rewards += 1.0
        streams.finish(buffer)
        plain.reset()
        twin.draw = seeded(twin.count)
        twin.rollout(plain, 3)
        twin.finish(plain)
        for number, target in handed_out(plain).items():
            in_rollout = 3 - number % 3
            n_rewards = 3 if carry_over else in_rollout
            more = sum(GAMMA**i for i in range(n_rewards))
            assert handed_out(buffer)[number] == pytest.approx(target + more, rel=1e-4)


@pytest.mark.parametrize("order", [[2, 1, 0], slice(None, None, -1)])
def test_reordered_rewards(order: Any) -> None:
    """As a new array, or as the same memory read backwards."""
    buffer, streams = make(3, 1, return_horizon=1, carry_over=True), start(seeded(), 1)
    buffer.gamma = 0.0
    buffer.reset()
    streams.rollout(buffer, 3)
    expected = buffer.rewards[order].copy()
    buffer.rewards = buffer.rewards[order]
    streams.finish(buffer)
    np.testing.assert_array_equal(buffer.returns, expected)


def test_arrays_that_a_callback_keeps_stay_as_they_are() -> None:
    buffer, streams = make(3, 1, return_horizon=3, carry_over=True), start(seeded(), 1)
    kept, copies = [], []
    for _ in range(4):
        buffer.reset()
        assert not buffer.rewards.any()
        streams.rollout(buffer, 3)
        streams.finish(buffer)
        arrays = [buffer.rewards, buffer.values, buffer.returns, buffer.actions]
        list(buffer.get())
        arrays += [buffer.values, buffer.returns]
        kept += arrays
        copies += [array.copy() for array in arrays]
    for array, copied in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, copied)


def test_get_within_a_rollout() -> None:
    buffer, streams = make(3, 1, return_horizon=1, carry_over=True), start(seeded(), 1)
    streams.rollout(buffer, 2)
    with pytest.raises(RuntimeError, match="not finished: it holds 2 of 3 steps"):
        buffer.get()


def test_an_edit_without_computing_anew_reaches_the_waiting_rows() -> None:
    buffer, streams = make(2, 1, return_horizon=3, carry_over=True), start(seeded(), 1)
    for is_edited in (True, False):
        buffer.reset()
        streams.rollout(buffer, 2)
        streams.finish(buffer)
        if is_edited:
            buffer.rewards = buffer.rewards + 100.0
    expected = streams.expected(3, 1.0)
    # rows 0 and 1 wait and were edited: target 0 holds both rewards, target 1 its own
    assert handed_out(buffer) == pytest.approx({0: expected[0] + 190.0, 1: expected[1] + 100.0}, rel=1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("when", ["after reset", "after the rollout", "after get"])
def test_copies_go_on_by_themselves(duplicate: Callable[[Any], Any], when: str) -> None:
    results = []
    for is_copied in (False, True):
        buffer, streams = make(3, 2, return_horizon=5, carry_over=True), start(seeded(), 2)
        for _ in range(4):
            buffer.reset()
            if is_copied and when == "after reset":
                buffer = duplicate(buffer)
            streams.rollout(buffer, 3)
            streams.finish(buffer)
            if is_copied and when == "after the rollout":
                buffer = duplicate(buffer)
            if buffer.n_ready:
                last = handed_out(buffer)
            if is_copied and when == "after get":
                buffer = duplicate(buffer)
        results.append(last)
    assert results[0] == results[1]


def test_full_by_hand_and_get_before_targets() -> None:
    """SB3's own tests do both."""
    for carry_over in (False, True):
        buffer = make(3, 2, return_horizon=2, carry_over=carry_over)
        buffer.full = True
        assert sum(len(batch.actions) for batch in buffer.get()) == buffer.n_ready == (4 if carry_over else 6)


def test_mean_window() -> None:
    buffer, streams = make(3, 1, return_horizon=2), start(seeded(), 1)
    streams.rollout(buffer, 3)
    streams.finish(buffer)
    assert buffer.mean_window == pytest.approx((2 + 2 + 1) / 3)


def test_memory_is_kept_in_the_observations_type() -> None:
    space = spaces.Box(0, 255, (4, 84, 84), dtype=np.uint8)
    buffer = NStepRolloutBuffer(5, space, spaces.Discrete(4), n_envs=3, return_horizon=8, carry_over=True)
    for _ in range(3):
        buffer.reset()
        for _ in range(5):
            buffer.add(
                np.ones((3, 4, 84, 84), dtype=np.uint8), np.zeros(3), np.zeros(3), np.zeros(3), th.zeros(3), th.zeros(3)
            )
        buffer.compute_returns_and_advantage(th.zeros(3), np.zeros(3))
        if buffer.n_ready:
            list(buffer.get())
    owners = {
        id(array if array.base is None else array.base): array if array.base is None else array.base
        for array in [*vars(buffer).values(), *buffer._storage.values()]
        if isinstance(array, np.ndarray)
    }
    n_bytes = sum(array.nbytes for array in owners.values() if array.dtype == np.uint8)
    assert n_bytes <= (5 + 8) * 3 * 4 * 84 * 84


def test_longer_than_the_rollout_warns_where_windows_are_shortened() -> None:
    with pytest.warns(UserWarning, match="return_horizon=9.*carry_over=False.*4 steps"):
        make(4, 1, return_horizon=9)
    with pytest.warns(UserWarning, match=r"return_horizon=\[2, 9\]"):
        make(4, 2, return_horizon=[2, 9])


@pytest.mark.parametrize("horizon", [0, -1, 2.5, 3.0, True, "3", [1, 0], [1, 2, 3], [], np.zeros(2)])
@pytest.mark.parametrize("carry_over", [True, False])
def test_bad_horizons(horizon: Any, carry_over: bool) -> None:
    with pytest.raises(ValueError, match="return_horizon: expected"):
        make(4, 2, return_horizon=horizon, carry_over=carry_over)
