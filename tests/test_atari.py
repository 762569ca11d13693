"""AtariVecEnv against SB3's own stack of wrappers, on real games and on scripted ones; and the contract of a VecEnv."""

import csv
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3 import A2C
from stable_baselines3.common.atari_wrappers import AtariWrapper, EpisodicLifeEnv, NoopResetEnv, StickyActionEnv
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_atari_env, unwrap_wrapper
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

from sb3_nstep import NStepA2C, atari
from sb3_nstep.atari import GREY_IS_EXACT, AtariGame, AtariVecEnv, make_atari_vec_env

ID = "{}NoFrameskip-v4"


def sb3_stack(game: str, n_envs: int, **kwargs: Any) -> VecEnv:
    return VecTransposeImage(VecFrameStack(make_atari_env(ID.format(game), n_envs, **kwargs), n_stack=4))


class Pair:
    """Ours and SB3's, the second of which takes as many no-ops as the first has drawn."""

    def __init__(self, game: str, n_envs: int, seed: int = 0, **kwargs: Any) -> None:
        self.ours = make_atari_vec_env(ID.format(game), n_envs, seed=seed, **kwargs)
        self.sb3 = sb3_stack(game, n_envs, **{name: value for name, value in kwargs.items() if name != "native_grey"})
        self.noops: list[list[int]] = [[] for _ in range(n_envs)]  # of all games so far
        for env, (game_, sb3_env) in enumerate(zip(self.ours.games, self.sb3.unwrapped.envs, strict=True)):
            self.share_noops(game_, unwrap_wrapper(sb3_env, NoopResetEnv), self.noops[env])
        self.rng = np.random.default_rng(seed)
        self.before = self.ours.reset(), self.sb3.reset()
        np.testing.assert_array_equal(*self.before)

    def share_noops(self, game: AtariGame, wrapper: Any, drawn: list[int]) -> None:
        restart, queue = game._restart, deque[int]()

        def recording_restart(seed: int | None) -> Iterator[int]:
            yield from restart(seed)
            drawn.append(game._episode_frames - game._frames_before_noops)
            queue.append(drawn[-1])

        game._restart = recording_restart  # type: ignore[method-assign]
        if wrapper is not None:
            reset = wrapper.reset

            def reset_with_noops(**kwargs: Any) -> Any:
                wrapper.override_num_noops = queue.popleft()
                return reset(**kwargs)

            wrapper.reset = reset_with_noops

    def step(self) -> tuple[Any, Any]:
        actions = self.rng.integers(0, self.ours.action_space.n, self.ours.num_envs)
        return self.ours.step(actions), self.sb3.step(actions)

    def close(self) -> None:
        self.ours.close()
        self.sb3.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(*args: Any, **kwargs: Any) -> Pair:
        pairs.append(Pair(*args, **kwargs))
        return pairs[-1]

    yield make
    for made in pairs:
        made.close()


def check_steps(pair: Pair, n_games: int, frame_skip: int = 4, max_steps: int = 20_000) -> int:
    """
    Play until so many games are over and compare all that the two hand out. Returns how many observations of lost games
    differed: docs/atari.md, "the last frame of a lost game".
    """
    n_over = n_late = 0
    for _ in range(max_steps):
        ours, sb3 = pair.step()
        for name, a, b in zip(("observations", "rewards", "dones"), ours, sb3, strict=False):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b, err_msg=name)
        for env, (info, expected) in enumerate(zip(ours[3], sb3[3], strict=True)):
            assert info.keys() == expected.keys()
            for name in info.keys() - {"terminal_observation", "episode"}:
                assert info[name] == expected[name], name
            if "episode" in info:
                n_over += 1
                assert info["episode"].keys() == expected["episode"].keys()
                assert (info["episode"]["r"], info["episode"]["l"]) == (
                    expected["episode"]["r"],
                    expected["episode"]["l"],
                )
            if "terminal_observation" in info:
                differs = info["terminal_observation"] != expected["terminal_observation"]
                if differs.any():
                    n_late += 1
                    assert not differs[:-1].any()
                    # The frame of the step in which the game was over, out of frame_skip: all others are whole steps
                    noops = pair.noops[env][-2] if len(pair.noops[env]) > 1 else 0
                    assert "episode" in info and not info["TimeLimit.truncated"]
                    assert (info["episode"]["l"] - noops - 1) % frame_skip >= frame_skip - 2
        if n_over >= n_games:
            return n_late
    raise AssertionError(f"{n_over} games in {max_steps} steps")


@pytest.mark.parametrize("game", ["Breakout", "SpaceInvaders", "Freeway", "Pong", "Seaquest"])
def test_five_games_equal_sb3s(pair: Callable[..., Pair], game: str) -> None:
    check_steps(pair(game, n_envs=5), n_games=5)


@pytest.mark.parametrize(
    "wrapper_kwargs",
    [
        {"noop_max": 0},
        {"noop_max": 1},
        {"frame_skip": 1},
        {"frame_skip": 2},
        {"frame_skip": 3, "screen_size": 42},
        {"terminal_on_life_loss": False},
        {"clip_reward": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("native_grey", [True, False])
def test_arguments_of_the_wrapper(pair: Callable[..., Pair], wrapper_kwargs: dict[str, Any], native_grey: bool) -> None:
    made = pair("Breakout", n_envs=2, wrapper_kwargs=wrapper_kwargs, native_grey=native_grey)
    check_steps(made, n_games=2, frame_skip=wrapper_kwargs.get("frame_skip", 4))


@pytest.mark.parametrize("game", ["Seaquest", "Assault", "Tennis", "Freeway"])
def test_few_noops(pair: Callable[..., Pair], game: str) -> None:
    """The emulator draws none in one reset out of five here. Most games are not the same after one more reset."""
    made = pair(game, n_envs=12, wrapper_kwargs={"noop_max": 4})
    for _ in range(60):
        check_steps(made, n_games=0)
    assert {drawn[0] for drawn in made.noops} == {1, 2, 3, 4}


@pytest.mark.parametrize(("game", "frames_before"), [("NameThisGame", 134), ("Pooyan", 1)])
def test_games_that_want_a_switch_pressed(pair: Callable[..., Pair], game: str, frames_before: int) -> None:
    """The emulator counts the frames in which it does so, Monitor does not."""
    max_frames = frames_before + 4 + 64
    made = pair(
        game,
        n_envs=4,
        wrapper_kwargs={"noop_max": 4, "terminal_on_life_loss": False},
        env_kwargs={"max_num_frames_per_episode": max_frames},
    )
    lengths = set()
    for _ in range(17):
        for info, expected in zip(made.ours.step(np.zeros(4, int))[3], made.sb3.step(np.zeros(4, int))[3], strict=True):
            if "episode" in expected:
                lengths.add(expected["episode"]["l"])
                assert 0 <= info["episode"]["l"] - expected["episode"]["l"] <= 3  # the last step is played to its end
    assert lengths == {68}
    assert {drawn[0] for drawn in made.noops} <= {1, 2, 3, 4}


def test_all_actions(pair: Callable[..., Pair]) -> None:
    made = pair("Breakout", n_envs=2, env_kwargs={"full_action_space": True})
    assert made.ours.action_space.n == 18
    check_steps(made, n_games=2)


def test_reset_in_the_middle_of_a_game_goes_on_as_sb3s(pair: Callable[..., Pair]) -> None:
    made = pair("Breakout", n_envs=2)
    for _ in range(3):
        for _ in range(25):
            made.step()
        np.testing.assert_array_equal(made.ours.reset(), made.sb3.reset())
    check_steps(made, n_games=2)


# Known differences: docs/atari.md has a row for each


def test_last_frame_of_a_lost_game_differs(pair: Callable[..., Pair]) -> None:
    """The emulator of ale-py does not look at the frame with which a game ends. Nothing is bootstrapped from it."""
    assert check_steps(pair("Breakout", n_envs=5), n_games=15) > 0


def test_native_grey_differs_where_it_is_not_exact(pair: Callable[..., Pair]) -> None:
    assert frozenset({"breakout"}) == GREY_IS_EXACT
    for game in ("SpaceInvaders", "Seaquest"):
        with pytest.raises(AssertionError, match="Mismatched elements"):
            check_steps(pair(game, n_envs=5, native_grey=True), n_games=5)


@pytest.mark.parametrize("max_frames", [401, 402, 403, 404])
def test_step_in_which_the_time_runs_out_is_played_to_its_end(pair: Callable[..., Pair], max_frames: int) -> None:
    made = pair("Pong", n_envs=4, env_kwargs={"max_num_frames_per_episode": max_frames})
    left = set(range(4))
    while left:
        ours, sb3 = made.step()
        for env in list(left):
            info, expected = ours[3][env], sb3[3][env]
            assert ours[2][env] == sb3[2][env]
            assert info["TimeLimit.truncated"] == expected["TimeLimit.truncated"]
            np.testing.assert_array_equal(ours[0][env], sb3[0][env])
            if sb3[2][env]:
                left.remove(env)
                assert expected["TimeLimit.truncated"] and expected["episode"]["l"] == max_frames
                frames_over = (made.noops[env][0] - max_frames) % 4
                assert info["episode"]["l"] == max_frames + frames_over
                if frames_over == 0:
                    np.testing.assert_array_equal(info["terminal_observation"], expected["terminal_observation"])


def test_rewards_of_the_noops_are_not_counted(pair: Callable[..., Pair]) -> None:
    """Skiing is one of two games that pay, or cost, while nothing is done."""
    made = pair("Skiing", n_envs=8, env_kwargs={"max_num_frames_per_episode": 100})
    differences: dict[int, float] = {}
    while not any(differences.values()):
        ours, sb3 = made.step()
        for env, (info, expected) in enumerate(zip(ours[3], sb3[3], strict=True)):
            if "episode" in expected and info["episode"]["l"] == expected["episode"]["l"]:
                noops = made.noops[env][-2]  # those of the game that has just ended
                differences[noops] = expected["episode"]["r"] - info["episode"]["r"]
    emulator = gym.make(ID.format("Skiing")).unwrapped.ale  # type: ignore[attr-defined]
    for noops, difference in differences.items():
        emulator.reset_game()
        assert difference == sum(emulator.act(0) for _ in range(noops))


def test_render_shows_the_maximum_of_two_frames(pair: Callable[..., Pair]) -> None:
    made = pair("SpaceInvaders", n_envs=1)
    n_differing = 0
    for _ in range(40):
        made.step()
        (ours,), (sb3,) = made.ours.get_images(), made.sb3.get_images()
        assert (ours >= sb3).all()
        n_differing += bool((ours != sb3).any())
    assert n_differing > 0


# Scripted games: what real ones do rarely, or never


class Script:
    """
    What a game does, frame by frame and whatever the agent does: reward and lives; it is over behind its last frame.
    Frame i of the game number g shows one grey, which tells them apart.
    """

    def __init__(self, games: list[list[tuple[int, int]]]) -> None:
        self.games = games
        self.number = -1
        self.reset()

    def reset(self) -> None:
        self.number = (self.number + 1) % len(self.games)
        self.frame = -1

    def act(self) -> float:
        self.frame += 1
        return float(self.games[self.number][self.frame][0])

    @property
    def over(self) -> bool:
        return self.frame == len(self.games[self.number]) - 1

    @property
    def lives(self) -> int:
        return 0 if self.over else self.games[self.number][max(self.frame, 0)][1]

    @property
    def screen(self) -> np.ndarray:
        return np.full((210, 160, 3), (41 * (self.number + 1) + 7 * self.frame + 7) % 251, dtype=np.uint8)


class ScriptedEnv(gym.Env):
    """The script as an environment for SB3's wrappers."""

    observation_space = spaces.Box(0, 255, (210, 160, 3), dtype=np.uint8)
    action_space = spaces.Discrete(3)

    def __init__(self, script: Script, meanings: list[str]) -> None:
        self.script = script
        self.meanings = meanings
        self.ale = SimpleNamespace(lives=lambda: script.lives)
        self.is_fresh = True

    def get_action_meanings(self) -> list[str]:
        return self.meanings

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if not self.is_fresh:
            self.script.reset()
        self.is_fresh = False
        return self.script.screen, {}

    def step(self, action: int) -> Any:
        reward = self.script.act()
        return self.script.screen, reward, self.script.over, False, {"lives": self.script.lives}


class ScriptedEmulator:
    """
    The script as ale-py's C++ environment plays it (ale 0.12: src/ale/vector/), but that this one, if told so, looks at
    the frame with which a game ends, as ``MaxAndSkipEnv`` does.
    """

    def __init__(self, script: Script, frame_skip: int, noops: int, looks_at_the_end: bool = True) -> None:
        self.script = script
        self.frame_skip = frame_skip
        self.noops = noops
        self.looks_at_the_end = looks_at_the_end
        self.frame_number = self.episode_frame_number = 0
        self.seen = np.zeros((2, 210, 160, 3), dtype=np.uint8)
        self.is_fresh = True

    def act(self) -> float:
        self.frame_number += 1
        self.episode_frame_number += 1
        return self.script.act()

    def restart(self) -> None:
        if not self.is_fresh:
            self.script.reset()
        self.is_fresh = False
        self.episode_frame_number = 0
        for _ in range(self.noops):
            self.act()

    def infos(self) -> dict[str, Any]:
        return {
            "lives": np.array([self.script.lives]),
            "frame_number": np.array([self.frame_number]),
            "episode_frame_number": np.array([self.episode_frame_number]),
        }

    def reset(self, indices: list[int], seeds: list[int]) -> Any:
        self.restart()
        return self.script.screen[None, None], self.infos()

    def send(self, actions: list[int], strengths: list[float]) -> None:
        reward, infos = 0.0, {}
        for i in range(self.frame_skip):
            reward += self.act()
            if i >= self.frame_skip - 2 and (self.looks_at_the_end or not self.script.over):
                self.seen[i - self.frame_skip] = self.script.screen
            if self.script.over:
                break
        screen = self.seen.max(axis=0) if self.frame_skip > 1 else self.script.screen
        if over := self.script.over:
            infos["final_obs"] = screen[None, None]
            self.restart()
            screen = self.script.screen
        self.received = (
            screen[None, None],
            np.array([reward]),
            np.array([over]),
            np.array([False]),
            infos | self.infos(),
        )

    def recv(self) -> Any:
        return self.received


@st.composite
def scripts(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Games of lives that are lost at any frame; the first frames, which no-ops pass, are quiet."""
    games = []
    for _ in range(draw(st.integers(1, 3))):
        lives, frames = draw(st.integers(0, 3)), []
        for length in draw(st.lists(st.integers(1, 14), min_size=1, max_size=6)):
            frames += [(draw(st.integers(-2, 2)), lives) for _ in range(length)]
            lives = max(0, lives + draw(st.sampled_from([-1, -1, -1, 0, 1])))
        games.append([(0, frames[0][1])] * 4 + frames)
    return games


@given(
    scripts(),
    st.sampled_from([["NOOP", "FIRE", "RIGHT"], ["NOOP", "UP", "DOWN"]]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
)
def test_any_script_is_played_as_by_sb3(
    games: list[list[tuple[int, int]]], meanings: list[str], frame_skip: int, by_life: bool, clip: bool
) -> None:
    """Lives lost, and games over, in the steps of a reset: no-op, FIRE and the action behind it."""
    noops = 3
    kwargs = {"frame_skip": frame_skip, "terminal_on_life_loss": by_life, "clip_reward": clip}
    env = AtariWrapper(Monitor(ScriptedEnv(Script(games), meanings)), noop_max=noops, **kwargs)
    unwrap_wrapper(env, NoopResetEnv).override_num_noops = noops  # type: ignore[union-attr]
    sb3 = VecTransposeImage(VecFrameStack(DummyVecEnv([lambda: env]), 4))

    ours = AtariVecEnv("breakout", 1, native_grey=False, noop_max=noops, **kwargs)
    game = ours.games[0]
    game.emulator, game.has_fire = ScriptedEmulator(Script(games), frame_skip, noops), "FIRE" in meanings
    np.testing.assert_array_equal(ours.reset(), sb3.reset())
    for _ in range(40):
        (observations, rewards, dones, infos), expected = ours.step(np.array([2])), sb3.step(np.array([2]))
        np.testing.assert_array_equal(observations, expected[0])
        np.testing.assert_array_equal(rewards, expected[1])
        np.testing.assert_array_equal(dones, expected[2])
        assert infos[0]["TimeLimit.truncated"] == expected[3][0]["TimeLimit.truncated"]
        assert ("episode" in infos[0]) == ("episode" in expected[3][0])
        if "episode" in infos[0]:
            assert all(infos[0]["episode"][name] == expected[3][0]["episode"][name] for name in ("r", "l"))
    ours.close()


@pytest.mark.parametrize("n_frames", [1, 2, 3, 4])
def test_action_behind_fire_ends_a_game_within_a_reset(monkeypatch: pytest.MonkeyPatch, n_frames: int) -> None:
    """SB3 hands out the frame with which that game ended, ale-py's emulator did not look at it."""
    noops, quiet = 3, [(0, 3)] * 40
    games = [quiet[:20], quiet[: noops + 4 + n_frames], quiet]  # the second ends behind the no-ops and FIRE
    env = AtariWrapper(Monitor(ScriptedEnv(Script(games), ["NOOP", "FIRE", "RIGHT"])), noop_max=noops)
    unwrap_wrapper(env, NoopResetEnv).override_num_noops = noops  # type: ignore[union-attr]
    sb3 = VecTransposeImage(VecFrameStack(DummyVecEnv([lambda: env]), 4))
    ours = AtariVecEnv("breakout", 1, native_grey=False, noop_max=noops)
    ours.games[0].emulator = ScriptedEmulator(Script(games), 4, noops, looks_at_the_end=False)
    ours.games[0].has_fire = True
    np.testing.assert_array_equal(ours.reset(), sb3.reset())
    for _ in range(8):
        (observations, rewards, dones, _), expected = ours.step(np.array([2])), sb3.step(np.array([2]))
        assert rewards == expected[1] and dones == expected[2]
        # Until it has left the stack, one frame differs, and only where the emulator would have looked at the last one
        differs = (observations != expected[0]).any(axis=(0, 2, 3))
        assert differs.sum() <= (n_frames > 2)
        if n_frames > 2 and dones:
            assert differs[-1]
    ours.close()


# The contract of a VecEnv


@pytest.fixture(scope="module")
def env() -> Iterator[AtariVecEnv]:
    env = make_atari_vec_env(ID.format("Breakout"), 2, seed=0)
    yield env
    env.close()


def play(env: VecEnv, n_steps: int = 60) -> list[Any]:
    rng = np.random.default_rng(0)
    steps = [env.reset()]
    for _ in range(n_steps):
        steps += env.step(rng.integers(0, env.action_space.n, env.num_envs))[:3]
    return steps


def test_spaces_are_sb3s(env: AtariVecEnv) -> None:
    sb3 = sb3_stack("Breakout", 1)
    assert env.observation_space == sb3.observation_space
    assert env.action_space == sb3.action_space
    sb3.close()


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 2])
def test_same_seed_same_trajectories(seed: int) -> None:
    plays = []
    for _ in range(2):
        env = make_atari_vec_env(ID.format("Breakout"), 2, seed=seed)
        plays.append(play(env, 150))  # several games
        env.close()
    for a, b in zip(*plays, strict=True):
        np.testing.assert_array_equal(a, b)


def test_action_space_is_seeded_as_sb3s() -> None:
    ours, sb3 = make_atari_vec_env(ID.format("Pong"), 2, seed=3), sb3_stack("Pong", 2, seed=3)
    samples = [[env.action_space.sample() for _ in range(20)] for env in (ours, sb3)]
    assert samples[0] == samples[1]
    ours.close()
    sb3.close()


def test_narrow_seed() -> None:
    env = make_atari_vec_env(ID.format("Pong"), 2, seed=np.int32(2**31 - 1))
    env.reset()
    env.close()
    with pytest.raises(TypeError):
        make_atari_vec_env(ID.format("Pong"), 2, seed=1.5)


def test_seeds_differ_and_are_consumed() -> None:
    starts = []
    for seed in range(4):
        env = make_atari_vec_env(ID.format("Pong"), 4, seed=seed)
        assert env._seeds == [seed, seed + 1, seed + 2, seed + 3]
        env.set_options({"a": 1})
        env.reset()
        assert env._seeds == [None] * 4 and env._options == [{}] * 4
        starts.append([info["episode_frame_number"] for info in env.reset_infos])
        env.close()
    # environment i of seed s is environment 0 of seed s + i
    assert [start[0] for start in starts] == starts[0]
    assert len(set(starts[0] + starts[3])) > 2


def test_more_environments_than_at_work_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atari, "_IN_FLIGHT", 3)
    many = make_atari_vec_env(ID.format("Breakout"), 8, seed=5)
    monkeypatch.setattr(atari, "_IN_FLIGHT", 100)
    few = make_atari_vec_env(ID.format("Breakout"), 8, seed=5)
    for a, b in zip(play(many), play(few), strict=True):
        np.testing.assert_array_equal(a, b)
    many.close()
    few.close()


def test_noops_are_drawn_from_one_to_noop_max() -> None:
    env = make_atari_vec_env(
        ID.format("Pong"), 4, wrapper_kwargs={"noop_max": 3, "terminal_on_life_loss": False}, seed=0
    )
    drawn = set()
    for _ in range(20):
        env.reset()
        drawn |= {info["episode_frame_number"] - 8 for info in env.reset_infos}  # FIRE and the action behind it
    assert drawn == {1, 2, 3}
    env.close()


def test_sticky_actions() -> None:
    """With probability 1 nothing but the first no-op is ever done: the ball of Breakout is not served."""
    env = make_atari_vec_env(ID.format("Breakout"), 1, wrapper_kwargs={"action_repeat_probability": 1.0}, seed=0)
    env.reset()
    frames = [env.step(np.array([1]))[0][0, -1] for _ in range(10)]
    assert all((frame == frames[0]).all() for frame in frames)
    assert env.env_is_wrapped(StickyActionEnv) == [True]
    env.close()


def test_attributes(env: AtariVecEnv) -> None:
    env.reset()
    assert env.get_attr("lives") == [5, 5]
    assert env.get_attr("lives", indices=1) == [5]
    assert env.env_method("get_action_meanings", indices=[0]) == [["NOOP", "FIRE", "RIGHT", "LEFT"]]
    env.set_attr("nickname", "left", indices=0)
    assert env.has_attr("lives") and not env.has_attr("nickname") and not env.has_attr("no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        env.get_attr("no_such_thing")
    with pytest.raises(AttributeError, match="reset"):
        env.env_method("reset")
    assert env.env_is_wrapped(Monitor) == [True, True]
    assert env.env_is_wrapped(EpisodicLifeEnv, indices=[0]) == [True]
    assert env.env_is_wrapped(StickyActionEnv, indices=[0]) == [False]
    assert [info["lives"] for info in env.reset_infos] == [5, 5]


def test_observations_are_not_overwritten(env: AtariVecEnv) -> None:
    steps = play(env, 5)
    copies = [array.copy() for array in steps]
    env.step(np.array([0, 0]))
    for array, copy in zip(steps, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    steps[-3][:] = 0  # nor are they ours
    observations = env.step(np.array([0, 0]))[0]
    assert observations[:, 0].any()


@pytest.mark.parametrize(("native_grey", "shape"), [(True, (84, 84, 3)), (False, (210, 160, 3))])
def test_rendering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_grey: bool, shape: tuple[int, ...]) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", ModuleType("moviepy"))  # writes the film, which we do not want
    env = make_atari_vec_env(ID.format("Breakout"), 2, native_grey=native_grey)
    recorder = VecVideoRecorder(env, str(tmp_path), lambda step: step == 0, video_length=100)
    recorder.reset()
    recorder.step(np.array([0, 0]))
    assert [image.shape for image in env.get_images()] == [shape, shape]
    assert len(recorder.recorded_frames) == 2
    assert recorder.recorded_frames[1].shape == (2 * shape[0], shape[1], 3)  # tiled
    assert recorder.recorded_frames[1].any()
    recorder.recorded_frames, recorder.recording = [], False
    recorder.close()


def test_monitor_files(tmp_path: Path) -> None:
    env = make_atari_vec_env(ID.format("Breakout"), 2, seed=0, start_index=3, monitor_dir=str(tmp_path))
    episodes: list[list[Any]] = [[], []]
    env.reset()
    rng = np.random.default_rng(0)
    while min(map(len, episodes)) == 0:
        for env_episodes, info in zip(episodes, env.step(rng.integers(0, 4, 2))[3], strict=True):
            env_episodes += [info["episode"]] if "episode" in info else []
    env.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.monitor.csv", "4.monitor.csv"]
    assert len(load_results(str(tmp_path))) == sum(map(len, episodes))
    with open(tmp_path / "3.monitor.csv") as file:
        rows = list(csv.DictReader(file.readlines()[1:]))
    assert [(float(row["r"]), int(row["l"])) for row in rows] == [(e["r"], e["l"]) for e in episodes[0]]


# In use


def test_training_evaluation_and_zips_that_move_between_the_two(tmp_path: Path) -> None:
    env = make_atari_vec_env(ID.format("Breakout"), 2, seed=0)
    evaluation = make_atari_vec_env(ID.format("Breakout"), 1, seed=1, wrapper_kwargs={"terminal_on_life_loss": False})
    model = NStepA2C("CnnPolicy", env, n_steps=2, return_horizon=3, device="cpu", seed=0)
    callback = EvalCallback(evaluation, n_eval_episodes=1, eval_freq=20, deterministic=False, verbose=0)
    model.learn(60, callback)
    assert callback.n_calls == 30 and np.isfinite(callback.last_mean_reward)
    mean, _ = evaluate_policy(model, evaluation, n_eval_episodes=1, deterministic=False)
    assert np.isfinite(mean)
    model.save(tmp_path / "model.zip")
    sb3 = sb3_stack("Breakout", 2)
    A2C.load(tmp_path / "model.zip", env=sb3, device="cpu").learn(20)
    A2C("CnnPolicy", sb3, n_steps=2, device="cpu").save(tmp_path / "sb3.zip")
    NStepA2C.load(tmp_path / "sb3.zip", env=env, device="cpu").learn(20)
    for used in (env, evaluation, sb3):
        used.close()


def test_inside_vec_normalize() -> None:
    env = VecNormalize(make_atari_vec_env(ID.format("Breakout"), 2, seed=0), norm_obs=False)
    NStepA2C("CnnPolicy", env, n_steps=4, return_horizon=3, device="cpu").learn(40)
    assert env.ret_rms.count > 40
    env.close()


class InterruptedEmulator:
    """Ctrl-C comes just behind one of the calls."""

    def __init__(self, emulator: Any, name: str) -> None:
        self.emulator = emulator
        self.name = name

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(self.emulator, name)(*args)
            if name == self.name:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("call", ["send", "recv"])
def test_interrupted_step_leaves_nothing_to_the_next(call: str) -> None:
    env = make_atari_vec_env(ID.format("Breakout"), 3, seed=0)
    env.reset()
    game = env.games[1]
    game.emulator = InterruptedEmulator(game.emulator, call)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.array([0, 0, 0]))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.array([0, 0, 0]))
    env.seed(7)
    fresh = make_atari_vec_env(ID.format("Breakout"), 3, seed=7)
    for a, b in zip(play(env, 30), play(fresh, 30), strict=True):
        np.testing.assert_array_equal(a, b)
    fresh.close()
    env.close()


# Bad input


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.array([0, 4]), "numbers from 0 to 3, got 4 for environment 1"),
        (np.array([-1, 0]), "numbers from 0 to 3, got -1 for environment 0"),
        (np.array([0.0, 1.0]), "2 whole numbers.* got an array of float64 of shape"),
        (np.array([True, False]), "2 whole numbers.* got an array of bool"),
        (np.array([0, 1, 2]), r"2 whole numbers.* of shape \(3,\)"),
        (np.array([[0], [1]]), r"2 whole numbers.* of shape \(2, 1\)"),
    ],
    ids=str,
)
def test_bad_actions(env: AtariVecEnv, actions: np.ndarray, message: str) -> None:
    env.reset()
    with pytest.raises(ValueError, match=message):
        env.step(actions)
    env.step(np.array([0, 1]))  # nothing has been sent


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"env_id": "BreakoutNoFrameskip-v5"}, "env_id.*BreakoutNoFrameskip-v5.*Close to it: .*BreakoutNoFrameskip-v4"),
        ({"env_id": "CartPole-v1"}, "env_id: expected the id of an Atari game, got 'CartPole-v1'"),
        ({"env_id": "ALE/Breakout-v5"}, r'frameskip=4.*Write "BreakoutNoFrameskip-v4" with .*0\.25}, or'),
        ({"env_id": "ALE/Tetris-v5"}, 'frameskip=4.*Write "ALE/Tetris-v5" with env_kwargs={"frameskip": 1}$'),
        ({"env_kwargs": {"frameskip": (2, 5)}}, r"env_kwargs: expected frameskip 1, got \(2, 5\)"),
        ({"env_kwargs": {"game": "pong"}}, "env_kwargs: cannot honour game"),
        ({"env_kwargs": {"render_mode": "human"}}, "env_kwargs: cannot honour render_mode"),
        ({"wrapper_kwargs": {"clip_reward": "no"}}, "clip_reward: expected True or False, got 'no'"),
        ({"native_grey": "no"}, "native_grey: expected True or False, got 'no'"),
        ({"wrapper_kwargs": {"frame_skip": 2**40}}, "frame_skip: expected an int .* ≤ 2³⁰, got"),
        ({"wrapper_kwargs": {"action_repeat_probability": "a"}}, r"expected a number in \[0, 1\], got 'a'"),
        ({"env_id": "Breakout-v4"}, r'Write "BreakoutNoFrameskip-v4"'),
        ({"env_id": "BreakoutNoFrameskip-v0", "wrapper_kwargs": {"action_repeat_probability": 0.1}}, "one of the two"),
        ({"wrapper_kwargs": {"noops": 3}}, "wrapper_kwargs: cannot honour noops, only noop_max"),
        ({"env_kwargs": {"difficulty": 1}}, "env_kwargs: cannot honour difficulty"),
        ({"vec_env_cls": DummyVecEnv}, "vec_env_cls: make_atari_vec_env cannot honour it"),
        ({"monitor_kwargs": {}, "vec_env_kwargs": {}}, "monitor_kwargs, vec_env_kwargs"),
        ({"n_envs": 0}, "n_envs: expected an int ≥ 1 .*got 0"),
        ({"n_stack": 1.5}, "n_stack: expected an int ≥ 1 .*got 1.5"),
        ({"wrapper_kwargs": {"frame_skip": 0}}, "frame_skip: expected an int ≥ 1 .*got 0"),
        ({"wrapper_kwargs": {"noop_max": True}}, "noop_max: expected an int ≥ 0 .*got True"),
        ({"wrapper_kwargs": {"action_repeat_probability": 2.0}}, "action_repeat_probability"),
    ],
    ids=str,
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_atari_vec_env(**{"env_id": ID.format("Breakout"), **kwargs})


def test_unknown_rom() -> None:
    with pytest.raises(ValueError, match=r"'brekout'\. Close to it: .*breakout"):
        AtariVecEnv("brekout", 1)


@pytest.mark.parametrize("missing", ["ale_py", "cv2"])
def test_missing_dependency_names_the_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import sb3_nstep.atari"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert missing in process.stderr and 'pip install "sb3-nstep[atari]"' in process.stderr


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "Breakout-v4"])
def test_ids_with_frame_skip_without_it(env_id: str) -> None:
    env = make_atari_vec_env(env_id, 1, env_kwargs={"frameskip": 1, "repeat_action_probability": 0.0}, seed=0)
    expected = make_atari_vec_env(ID.format("Breakout"), 1, seed=0)
    for a, b in zip(play(env, 20), play(expected, 20), strict=True):
        np.testing.assert_array_equal(a, b)
    env.close()
    expected.close()


def test_closed() -> None:
    env = make_atari_vec_env(ID.format("Breakout"), 2)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.array([0, 0]))
    env.reset()
    with pytest.raises(RuntimeError, match="step_async"):
        env.step_wait()
    env.close()
    env.close()
    for use in (env.reset, env.get_images, lambda: env.get_attr("lives"), lambda: env.env_is_wrapped(Monitor)):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(np.array([0, 0]))
