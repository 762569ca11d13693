"""
Atari games in the threads of ale-py's C++ environments, seen as Stable-Baselines3's own stack of wrappers shows them:
``VecTransposeImage(VecFrameStack(make_atari_env(...), n_stack=4))``, without a process per environment.
"""

import difflib
import operator
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common import atari_wrappers
from stable_baselines3.common.monitor import Monitor, ResultsWriter
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

try:
    import ale_py
    import cv2
    from ale_py import roms
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise ImportError(f'sb3_nstep.atari: {error}. It comes with the extra: pip install "sb3-nstep[atari]"') from error

gym.register_envs(ale_py)

Frame: TypeAlias = NDArray[np.uint8]
# What ale-py's recv() returns: observations, rewards, terminations, truncations, infos
Received: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]

# Where ale-py's grey, taken before the maximum over two frames, is SB3's, taken after it: bit for bit, by test
GREY_IS_EXACT = frozenset({"breakout"})

# Environments at work at a time. More than the cores, since they do not take equally long
_IN_FLIGHT = max(16, 4 * (os.cpu_count() or 1))
_NEVER = 2**30  # frames


class Rom(NamedTuple):
    """What is to be known of a game before it is played."""

    screen_dims: tuple[int, int]  # height and width, in pixels
    frames_before_noops: int  # of an episode: some games want switches to be pressed


class Step(NamedTuple):
    """What a step of one environment leads to, in the terms of ``VecEnv.step``, but for the stack of frames."""

    reward: float
    done: bool
    info: dict[str, Any]
    last_frame: Frame | None  # of the episode, where it is done


class AtariGame:
    """
    One game under the rules of ``AtariWrapper`` and ``Monitor``. What plays it are generators: they yield the action
    that the emulator is to take next, for ``frame_skip`` frames, and are sent what came of it.

    :attr frame: the newest frame ``[screen_size, screen_size]``, as the agent sees it
    :attr lives: lives left
    """

    render_mode = "rgb_array"

    def __init__(
        self,
        game: str,
        *,
        noop_max: int,
        frame_skip: int,
        screen_size: int,
        terminal_on_life_loss: bool,
        clip_reward: bool,
        repeat_action_probability: float,
        full_action_space: bool,
        max_num_frames_per_episode: int,
        native_grey: bool,
        rom: Rom,
    ) -> None:
        self.noop_max = noop_max
        self.frame_skip = frame_skip
        self.terminal_on_life_loss = terminal_on_life_loss
        self.clip_reward = clip_reward
        self.max_num_frames_per_episode = max_num_frames_per_episode
        self.native_grey = native_grey
        height, width = (screen_size, screen_size) if native_grey else rom.screen_dims
        self._make_emulator = partial(
            AtariVectorEnv,
            game,
            num_envs=1,
            num_threads=1,
            autoreset_mode="SameStep",
            repeat_action_probability=repeat_action_probability,
            full_action_space=full_action_space,
            max_num_frames_per_episode=_NEVER,  # counted here, with the no-ops
            grayscale=native_grey,
            img_height=height,
            img_width=width,
            stack_num=1,
            frameskip=frame_skip,
            maxpool=frame_skip > 1,
            noop_max=noop_max + 1 if noop_max else 0,  # draws from 0 to below it: see _restart
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
            use_fire_reset=False,
        )
        self.emulator: Any = self._make_emulator().ale
        self.action_meanings = [action.name for action in self.emulator.get_action_set()]
        self.has_fire = "FIRE" in self.action_meanings
        self.results_writer: ResultsWriter | None = None
        self.frame: Frame = np.zeros((screen_size, screen_size), dtype=np.uint8)
        self.lives = 0
        self._screen: Frame = np.zeros((height, width) if native_grey else (height, width, 3), dtype=np.uint8)
        self._frames_before_noops = rom.frames_before_noops
        self._was_real_done = True
        self._restarted: Received | None = None  # what the emulator's own reset gave, until it is made use of
        self._frame_number = self._episode_frames = 0
        self._score = 0.0
        self._episode: dict[str, Any] = {}
        self._start_time = time.time()

    def get_action_meanings(self) -> list[str]:
        return self.action_meanings

    def play_step(self, action: int) -> Generator[int, Received, Step]:
        """``AtariWrapper.step``, and a reset where that ends an episode."""
        reward, terminated, truncated = yield from self._episodic_step(action)
        info: dict[str, Any] = {
            "lives": self.lives,
            "episode_frame_number": self._episode_frames,
            "frame_number": self._frame_number,
            "TimeLimit.truncated": truncated and not terminated,
        }
        if self.clip_reward:
            reward = float(np.sign(reward))
        if not (terminated or truncated):
            return Step(reward, False, info, None)
        if self._was_real_done:
            info["episode"] = self._episode
        last_frame = self.frame
        yield from self.play_reset()
        return Step(reward, True, info, last_frame)

    def play_reset(self, seed: int | None = None) -> Generator[int, Received, dict[str, Any]]:
        """``AtariWrapper.reset``: after the loss of a life, and in the middle of a game, it only moves on."""
        yield from self._episodic_reset(seed)
        if self.has_fire:
            for action in (1, 2):
                _, terminated, truncated = yield from self._episodic_step(action)
                frame = self.frame
                if terminated or truncated:
                    yield from self._episodic_reset(seed)
            self.frame = frame  # of the last action, even where that ended an episode
        return {
            "lives": self.lives,
            "episode_frame_number": self._episode_frames,
            "frame_number": self._frame_number,
        }

    def abandon(self) -> None:
        """Let the next reset begin a new game, whatever became of this one: nobody knows what the emulator is doing."""
        self.emulator = self._make_emulator().ale
        self._was_real_done, self._restarted = True, None

    def _episodic_step(self, action: int) -> Generator[int, Received, tuple[float, bool, bool]]:
        """``EpisodicLifeEnv.step``."""
        lives = self.lives
        reward, terminated, truncated = yield from self._skipping_step(action)
        self._was_real_done = terminated or truncated
        if self.terminal_on_life_loss and 0 < self.lives < lives:
            terminated = True
        return reward, terminated, truncated

    def _episodic_reset(self, seed: int | None) -> Generator[int, Received, None]:
        """``EpisodicLifeEnv.reset``."""
        if self.terminal_on_life_loss and not self._was_real_done:
            _, terminated, truncated = yield from self._skipping_step(0)
            if not (terminated or truncated):
                return
        yield from self._restart(seed)

    def _skipping_step(self, action: int) -> Generator[int, Received, tuple[float, bool, bool]]:
        """``MaxAndSkipEnv.step``, counted as by ``Monitor``."""
        received = yield action
        observations, rewards, terminations, _, infos = received
        reward, terminated = float(rewards[0]), bool(terminations[0])
        frame_number = int(infos["frame_number"][0])
        n_frames = frame_number - self._frame_number
        if terminated:
            n_frames -= int(infos["episode_frame_number"][0])
            self._restarted = received
            self.frame = self._as_seen(infos["final_obs"])
            self.lives = 0
        else:
            self.frame = self._as_seen(observations)
            self.lives = int(infos["lives"][0])
        self._frame_number += n_frames
        self._episode_frames += n_frames
        self._score += reward
        truncated = self._episode_frames >= self.max_num_frames_per_episode
        if terminated or truncated:
            seconds = round(time.time() - self._start_time, 6)
            length = self._episode_frames - self._frames_before_noops
            self._episode = {"r": round(self._score, 6), "l": length, "t": seconds}
            if self.results_writer is not None:
                self.results_writer.write_row(self._episode)
        return reward, terminated, truncated

    def _restart(self, seed: int | None) -> Generator[int, Received, None]:
        """``NoopResetEnv.reset``. The emulator has done it already where the game was over."""
        if self._restarted is not None and seed is None:
            observations, infos = self._restarted[0], self._restarted[-1]
        else:
            # The emulator takes 31 bits; a hash of the seed uses them all, as AtariEnv's does
            native_seed = -1 if seed is None else int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
            observations, infos = self.emulator.reset([0], [native_seed])
        # SB3 draws from 1 to noop_max no-ops, the emulator 0 as well. A step is as many as it has frames; what it shows
        # is not what the last of them shows, but nobody looks before FIRE. To reset once more changes some games
        if self.noop_max and infos["episode_frame_number"][0] == self._frames_before_noops:
            if self.has_fire and self.frame_skip <= self.noop_max:
                observations, *_, infos = yield 0
            while infos["episode_frame_number"][0] == self._frames_before_noops:
                observations, infos = self.emulator.reset([0], [-1])
        self._restarted = None
        self.frame = self._as_seen(observations)
        self.lives = int(infos["lives"][0])
        self._frame_number = int(infos["frame_number"][0])
        self._episode_frames = int(infos["episode_frame_number"][0])
        self._score = 0.0

    def _as_seen(self, observations: Any) -> Frame:
        """The one frame of ``[1, 1, height, width]``, or of ``[…, 3]`` made grey and small as ``WarpFrame`` does it."""
        self._screen = observations[0, 0]
        if self.native_grey:
            return self._screen
        grey = cv2.cvtColor(self._screen, cv2.COLOR_RGB2GRAY)
        return np.asarray(cv2.resize(grey, self.frame.shape, interpolation=cv2.INTER_AREA), dtype=np.uint8)

    def render(self) -> Frame:
        """``[height, width, 3]``: the screen where colours are computed (``native_grey=False``), else what is seen."""
        return np.stack([self._screen] * 3, axis=-1) if self.native_grey else self._screen


class AtariVecEnv(VecEnv):
    """
    n_envs Atari games, observations uint8 ``[n_envs, n_stack, screen_size, screen_size]``, newest frame last.

    The same observations, rewards, dones and infos as of ``VecTransposeImage(VecFrameStack(make_atari_env(...)))`` for
    the same actions and no-ops; docs/atari.md lists the exceptions. The numbers of no-ops come from another generator.

    :param game: name of the ROM, as in ale-py: ``"breakout"``
    :param n_envs: number of environments
    :param noop_max: at the start of a game, 1 to ``noop_max`` emulator frames pass without an action. 0: none
    :param frame_skip: emulator frames of an environment step
    :param screen_size: height and width of the observations, in pixels
    :param terminal_on_life_loss: whether the loss of a life ends an episode
    :param clip_reward: whether the agent is given the sign of the reward only
    :param action_repeat_probability: of each emulator frame, to repeat the action of the frame before (sticky actions)
    :param n_stack: frames in an observation
    :param full_action_space: all 18 actions, instead of those that the game knows
    :param max_num_frames_per_episode: emulator frames at which a game is cut (as a time limit); ``None``: never
    :param native_grey: ``True``: ale-py's grey, which is faster, and not always SB3's. ``False``: SB3's, from colours.
        ``None``: the faster one for the games in which they are the same, ``GREY_IS_EXACT``
    :raises ValueError: if an argument is not as described, or if ale-py does not know the game
    """

    def __init__(
        self,
        game: str,
        n_envs: int,
        *,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = 84,
        terminal_on_life_loss: bool = True,
        clip_reward: bool = True,
        action_repeat_probability: float = 0.0,
        n_stack: int = 4,
        full_action_space: bool = False,
        max_num_frames_per_episode: int | None = 108_000,
        native_grey: bool | None = None,
    ) -> None:
        if max_num_frames_per_episode is None:
            max_num_frames_per_episode = _NEVER
        for name, number, minimum in (
            ("n_envs", n_envs, 1),
            ("noop_max", noop_max, 0),
            ("frame_skip", frame_skip, 1),
            ("screen_size", screen_size, 1),
            ("n_stack", n_stack, 1),
            ("max_num_frames_per_episode", max_num_frames_per_episode, 1),
        ):
            is_whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
            if not is_whole or not minimum <= number <= _NEVER:
                raise ValueError(f"{name}: expected an int ≥ {minimum} and ≤ 2³⁰, got {number!r}")
        for name, flag in (
            ("terminal_on_life_loss", terminal_on_life_loss),
            ("clip_reward", clip_reward),
            ("full_action_space", full_action_space),
            ("native_grey", False if native_grey is None else native_grey),
        ):
            if not isinstance(flag, (bool, np.bool_)):
                raise ValueError(f"{name}: expected True or False, got {flag!r}")
        if (
            not isinstance(action_repeat_probability, (int, float, np.floating))
            or not 0 <= action_repeat_probability <= 1
        ):
            raise ValueError(
                f"action_repeat_probability: expected a number in [0, 1], got {action_repeat_probability!r}"
            )
        if game not in roms.get_all_rom_ids():
            raise ValueError(f"game: expected the name of a ROM, got {game!r}{_close_to(game, roms.get_all_rom_ids())}")
        self.native_grey = game in GREY_IS_EXACT if native_grey is None else native_grey
        rom = _read_rom(game)
        self.games = [
            AtariGame(
                game,
                noop_max=noop_max,
                frame_skip=frame_skip,
                screen_size=screen_size,
                terminal_on_life_loss=terminal_on_life_loss,
                clip_reward=clip_reward,
                repeat_action_probability=action_repeat_probability,
                full_action_space=full_action_space,
                max_num_frames_per_episode=max_num_frames_per_episode,
                native_grey=self.native_grey,
                rom=rom,
            )
            for _ in range(n_envs)
        ]
        wrapped_in = {
            Monitor: True,
            atari_wrappers.AtariWrapper: True,
            atari_wrappers.StickyActionEnv: action_repeat_probability > 0,
            atari_wrappers.NoopResetEnv: noop_max > 0,
            atari_wrappers.MaxAndSkipEnv: frame_skip > 1,
            atari_wrappers.EpisodicLifeEnv: terminal_on_life_loss,
            atari_wrappers.FireResetEnv: self.games[0].has_fire,
            atari_wrappers.WarpFrame: True,
            atari_wrappers.ClipRewardEnv: clip_reward,
        }
        self._wrapper_classes = [wrapper for wrapper, is_there in wrapped_in.items() if is_there]
        self._stacks: NDArray[np.uint8] = np.zeros((n_envs, n_stack, screen_size, screen_size), dtype=np.uint8)
        self._actions: list[int] | None = None
        self._is_reset = False
        super().__init__(
            n_envs,
            spaces.Box(0, 255, self._stacks.shape[1:], dtype=np.uint8),
            spaces.Discrete(len(self.games[0].action_meanings)),
        )

    def reset(self) -> VecEnvObs:
        self._check_open()
        self.reset_infos = self._play(game.play_reset(seed) for game, seed in zip(self.games, self._seeds, strict=True))
        self._reset_seeds()
        self._reset_options()  # as AtariEnv, which has none
        self._actions = None
        self._is_reset = True
        self._stacks.fill(0)
        for game, stack in zip(self.games, self._stacks, strict=True):
            stack[-1] = game.frame
        return np.array(self._stacks)

    def step_async(self, actions: NDArray[Any]) -> None:
        self._check_open()
        if not self._is_reset:
            raise RuntimeError(
                "The environments are to be reset() before their first step, and after an interrupted one"
            )
        n_actions, array = self.action_space.n, np.asarray(actions)  # type: ignore[attr-defined]
        if array.shape != (self.num_envs,) or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"actions: expected {self.num_envs} whole numbers, one for each environment, got an array of "
                f"{array.dtype} of shape {array.shape}"
            )
        # An action out of range would never come back from the emulator
        for env in np.flatnonzero((array < 0) | (array >= n_actions)):
            raise ValueError(
                f"actions: expected numbers from 0 to {n_actions - 1}, got {array[env]} for environment {env}"
            )
        self._actions = array.tolist()

    def step_wait(self) -> VecEnvStepReturn:
        if self._actions is None:
            raise RuntimeError("step_wait() needs a step_async() before it")
        actions, self._actions = self._actions, None
        steps = self._play(game.play_step(action) for game, action in zip(self.games, actions, strict=True))
        stacks = np.empty_like(self._stacks)
        stacks[:, :-1] = self._stacks[:, 1:]
        for game, stack, step in zip(self.games, stacks, steps, strict=True):
            if step.last_frame is not None:
                stack[-1] = step.last_frame
                step.info["terminal_observation"] = stack.copy()
                stack[:-1] = 0
            stack[-1] = game.frame
        self._stacks = stacks
        rewards = np.array([step.reward for step in steps], dtype=np.float32)
        dones = np.array([step.done for step in steps])
        return stacks.copy(), rewards, dones, [step.info for step in steps]

    def _play(self, plays: Iterable[Generator[int, Received, Any]]) -> list[Any]:
        """Play all games side by side, each until it needs no more of the emulator. Returns what they return."""
        results: list[Any] = [None] * self.num_envs
        waiting = deque(enumerate(plays))
        in_flight: deque[tuple[int, Generator[int, Received, Any]]] = deque()

        def advance(env: int, play: Generator[int, Received, Any], received: Received | None) -> None:
            try:
                action = play.send(received)  # type: ignore[arg-type]
            except StopIteration as stop:
                results[env] = stop.value
            else:
                self.games[env].emulator.send([action], [1.0])
                in_flight.append((env, play))

        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < _IN_FLIGHT:
                    advance(*waiting.popleft(), None)
                if in_flight:
                    env, play = in_flight.popleft()
                    advance(env, play, self.games[env].emulator.recv())
        except BaseException:  # Ctrl-C: nothing of this step may be taken for the next one's
            self._is_reset = False
            for game in self.games:
                game.abandon()
            raise
        return results

    def _check_open(self) -> None:
        if not self.games:
            raise RuntimeError("The environments are closed")

    def close(self) -> None:
        for game in self.games:
            if game.results_writer is not None:
                game.results_writer.close()
        self.games = []

    def get_images(self) -> Sequence[Frame]:
        self._check_open()
        return [game.render() for game in self.games]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(game, attr_name) for game in self._chosen(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        for game in self._chosen(indices):
            setattr(game, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> Any:
        return [getattr(game, method_name)(*method_args, **method_kwargs) for game in self._chosen(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Whether the environments behave as if they were: true of ``Monitor`` and the parts of ``AtariWrapper``."""
        is_wrapped = any(issubclass(wrapper, wrapper_class) for wrapper in self._wrapper_classes)
        return [is_wrapped for _ in self._chosen(indices)]

    def _chosen(self, indices: VecEnvIndices) -> list[AtariGame]:
        self._check_open()
        return [self.games[index] for index in self._get_indices(indices)]


def make_atari_vec_env(
    env_id: str,
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | None = None,
    wrapper_kwargs: dict[str, Any] | None = None,
    env_kwargs: dict[str, Any] | None = None,
    *,
    n_stack: int = 4,
    native_grey: bool | None = None,
    **unknown: Any,
) -> AtariVecEnv:
    """
    What ``VecTransposeImage(VecFrameStack(make_atari_env(...), n_stack))`` makes, as an :class:`AtariVecEnv`.

    :param env_id: an id without frame skip: ``"BreakoutNoFrameskip-v4"``
    :param n_envs: number of environments
    :param seed: for the first reset; environment i is given ``seed + i``
    :param start_index: number of the first environment, in the names of the files in ``monitor_dir``
    :param monitor_dir: where to write a ``Monitor`` file for each environment
    :param wrapper_kwargs: arguments of SB3's ``AtariWrapper``
    :param env_kwargs: arguments of ale-py's ``AtariEnv``: ``frameskip`` (1), ``repeat_action_probability``,
        ``full_action_space``, ``max_num_frames_per_episode``
    :param n_stack: frames in an observation
    :param native_grey: as in :class:`AtariVecEnv`
    :raises ValueError: names what cannot be honoured: another argument, another kind of environment
    """
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: make_atari_vec_env cannot honour it, for it makes neither processes nor wrappers. "
            "SB3's make_atari_env can"
        )
    if seed is not None:
        seed = operator.index(seed)  # an int: the sum of a narrow one and its number may not be one
    spec = gym.registry.get(env_id) if isinstance(env_id, str) else None
    if spec is None or spec.entry_point != "ale_py.env:AtariEnv":
        atari_ids = [name for name, spec in gym.registry.items() if spec.entry_point == "ale_py.env:AtariEnv"]
        raise ValueError(f"env_id: expected the id of an Atari game, got {env_id!r}{_close_to(str(env_id), atari_ids)}")
    env_kwargs = dict(env_kwargs or {})
    if env_kwargs.get("render_mode") in (None, "rgb_array"):
        env_kwargs.pop("render_mode", None)
    if env_kwargs.get("frameskip", 1) != 1:
        raise ValueError(
            f"env_kwargs: expected frameskip 1, got {env_kwargs['frameskip']!r}: frame_skip, in wrapper_kwargs, says "
            "how many frames a step has"
        )
    settings: dict[str, Any] = spec.kwargs | env_kwargs
    settings.pop("render_mode", None)
    frameskip, sticky = settings.pop("frameskip"), settings.pop("repeat_action_probability")
    if frameskip != 1:
        without_skip = env_id.removeprefix("ALE/").split("-")[0] + "NoFrameskip-v4"
        suggestions = [f'"{env_id}" with env_kwargs={{"frameskip": 1}}']
        if without_skip in gym.registry:
            stickiness = f" with wrapper_kwargs={{'action_repeat_probability': {sticky}}}" if sticky else ""
            suggestions.insert(0, f'"{without_skip}"{stickiness}')
        raise ValueError(
            f"env_id: {env_id} skips frames itself (frameskip={frameskip}), on top of those that the wrapper skips. "
            f"Write {', or '.join(suggestions)}"
        )
    wrapping = dict(wrapper_kwargs or {})
    if sticky and wrapping.get("action_repeat_probability"):
        raise ValueError(
            f"action_repeat_probability: {env_id} repeats actions itself (repeat_action_probability={sticky}): "
            "expected one of the two"
        )
    wrapping.setdefault("action_repeat_probability", sticky)
    known = (
        "noop_max",
        "frame_skip",
        "screen_size",
        "terminal_on_life_loss",
        "clip_reward",
        "action_repeat_probability",
    )
    for argument, given, honoured in (
        ("wrapper_kwargs", wrapping, known),
        (
            "env_kwargs",
            env_kwargs,
            ("frameskip", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"),
        ),
    ):
        if not set(given) <= set(honoured):
            raise ValueError(
                f"{argument}: cannot honour {', '.join(set(given) - set(honoured))}, only {', '.join(honoured)}"
            )
    env = AtariVecEnv(n_envs=n_envs, n_stack=n_stack, native_grey=native_grey, **settings, **wrapping)
    if monitor_dir is not None:
        os.makedirs(monitor_dir, exist_ok=True)
        for rank, game in enumerate(env.games, start_index):
            header: dict[str, float | str] = {"t_start": time.time(), "env_id": env_id}
            game.results_writer = ResultsWriter(os.path.join(monitor_dir, str(rank)), header=header)
    env.seed(seed)
    if seed is not None:
        env.action_space.seed(seed + start_index)
    return env


def _close_to(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    return f". Close to it: {', '.join(matches)}" if matches else ""


def _read_rom(game: str) -> Rom:
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale: Any = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(game))
    ale.reset_game()
    height, width = ale.getScreenDims()
    return Rom((int(height), int(width)), int(ale.getEpisodeFrameNumber()))
