"""
Environment steps per second of the environments alone, with random actions: SB3's SubprocVecEnv with stacked frames
beside AtariVecEnv, with ale-py's grey and with SB3's, and beside EnvPool where that is installed (pip install envpool),
whose episodes are others (docs/atari.md). In turns in one process; medians, and the median of the ratio to the first
row that has as many environments. Then the parts of one step of one environment, in one thread.
"""

import argparse
import os
import time
from collections.abc import Callable
from multiprocessing import set_forkserver_preload

import cv2
import gymnasium as gym
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecFrameStack, VecTransposeImage

from sb3_nstep.atari import make_atari_vec_env

try:
    import envpool
except ImportError:
    envpool = None


def make(kind: str, env_id: str, n_envs: int) -> VecEnv:
    """Or what has, of a VecEnv, the methods used below."""
    if kind == "EnvPool":
        task = env_id.replace("NoFrameskip-v4", "-v5")
        options = {"episodic_life": True, "reward_clip": True, "use_fire_reset": True, "repeat_action_probability": 0.0}
        return envpool.make_gymnasium(task, num_envs=n_envs, num_threads=len(os.sched_getaffinity(0)), **options)
    if kind == "SubprocVecEnv":
        env = make_atari_env(env_id, n_envs, seed=0, vec_env_cls=SubprocVecEnv)
        return VecTransposeImage(VecFrameStack(env, n_stack=4))
    return make_atari_vec_env(env_id, n_envs, seed=0, native_grey=kind == "native, ale-py's grey")


def microseconds(call: Callable[[], object], n_calls: int) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(n_calls):
            call()
        times.append((time.perf_counter() - start) / n_calls)
    return 1e6 * float(np.median(times))


def print_parts(env_id: str) -> None:
    """What a step of four frames consists of, each part called by itself through ale-py and OpenCV."""
    ale = gym.make(env_id).unwrapped.ale
    ale.reset_game()
    actions = ale.getMinimalActionSet()
    rng = np.random.default_rng(0)

    def act() -> None:
        if ale.game_over():
            ale.reset_game()
        ale.act(actions[rng.integers(len(actions))])

    cv2.setNumThreads(1)
    grey, colours = ale.getScreenGrayscale(), ale.getScreenRGB()
    four_frames = 4 * microseconds(act, 400)
    print("\n| part of an environment step | µs |\n|---|---:|")
    print(f"| emulation of 4 frames, resets included | {four_frames:.0f} |")
    print(f"| 2 screens from palette to grey | {2 * microseconds(lambda: ale.getScreenGrayscale(grey), 200):.0f} |")
    print(f"| 2 screens from palette to colours | {2 * microseconds(lambda: ale.getScreenRGB(colours), 200):.0f} |")
    print(f"| colours to grey | {microseconds(lambda: cv2.cvtColor(colours, cv2.COLOR_RGB2GRAY), 200):.0f} |")
    resize = microseconds(lambda: cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA), 200)
    print(f"| grey to 84 × 84, INTER_AREA | {resize:.0f} |")


KINDS = ["SubprocVecEnv", "native, ale-py's grey", "native, SB3's grey", *(["EnvPool"] if envpool else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4", help="Atari game (default: %(default)s)")
    parser.add_argument("--n-envs", type=int, nargs="+", default=[16, 64, 256], help="default: 16 64 256")
    parser.add_argument("--subproc-up-to", type=int, default=64, help="environments, a process each (default: 64)")
    parser.add_argument("--turns", type=int, default=9, help="turns of each (default: 9)")
    parser.add_argument("--steps", type=int, default=2_000, help="environment steps of a turn (default: 2,000)")
    args = parser.parse_args()

    set_forkserver_preload(["stable_baselines3", "ale_py"])
    rng = np.random.default_rng(0)
    print("| environments | | steps/s | ratio | threads |\n|---:|---|---:|---:|---:|")
    for n_envs in args.n_envs:
        envs = {}
        for kind in KINDS:
            if kind != "SubprocVecEnv" or n_envs <= args.subproc_up_to:
                before = psutil.Process().num_threads()
                envs[kind] = make(kind, args.env_id, n_envs), psutil.Process().num_threads() - before
                envs[kind][0].reset()
        n_steps = -(-args.steps // n_envs)
        speeds = np.zeros((args.turns, len(envs)))
        for turn in track(range(args.turns), f"{n_envs} environments", console=Console(stderr=True), transient=True):
            for index, (env, _) in enumerate(envs.values()):
                start = time.perf_counter()
                for _ in range(n_steps):
                    env.step(rng.integers(0, env.action_space.n, n_envs))
                speeds[turn, index] = n_steps * n_envs / (time.perf_counter() - start)
        ratios = np.median(speeds / speeds[:, :1], axis=0)
        for (kind, (env, n_threads)), speed, ratio in zip(envs.items(), np.median(speeds, axis=0), ratios, strict=True):
            print(f"| {n_envs} | {kind} | {speed:.0f} | {ratio:.2f} | {n_threads} |")
            env.close()
    print_parts(args.env_id)


if __name__ == "__main__":
    main()
