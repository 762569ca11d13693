"""Workers that die, numbers that are none: learn() says where, leaves nothing behind, and the model lives on."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from sb3_nstep import NStepA2C
from sb3_nstep.faults import NotFiniteError, WorkerError

multiprocessing.set_forkserver_preload(["stable_baselines3.common.vec_env.subproc_vec_env"])


class FaultyEnv(gym.Env):
    """Does ``fault`` at its nth call of ``when``; without one, nothing in particular."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: Callable[[], Any] | None = None, when: str = "step", n: int = 7) -> None:
        self.fault, self.when, self.n = fault, when, n
        self.calls = {"step": 0, "reset": 0}

    def count(self, name: str) -> None:
        self.calls[name] += 1
        if self.fault is not None and name == self.when and self.calls[name] == self.n:
            self.fault()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count("step")
        return np.zeros(2, np.float32), 0.5, self.calls["step"] % 3 == 0, False, {}


def fail() -> None:
    raise ZeroDivisionError("of the environment")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_middle_of_an_answer() -> None:
    """What is sent does not fit into the pipe, which nobody empties: environment 0 is read first, and sleeps."""
    threading.Timer(0.5, kill).start()


class Large(FaultyEnv):
    observation_space = spaces.Box(-1.0, 1.0, (500_000,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(500_000, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count("step")
        return np.zeros(500_000, np.float32), 0.5, False, False, {}


def make(
    fault: Any, when: str = "step", n: int = 7, start_method: str = "forkserver", n_envs: int = 3
) -> SubprocVecEnv:
    """The second environment has the fault."""
    fns = [partial(FaultyEnv, fault if env == 1 else None, when, n) for env in range(n_envs)]
    return SubprocVecEnv(fns, start_method=start_method)


FAULTS = {
    "raises in step": (fail, "step", 7, r"exit code 1, and has printed its traceback"),
    "raises in reset": (fail, "reset", 2, r"exit code 1"),
    "raises in its first reset": (fail, "reset", 1, r"exit code 1"),
    "exits": (partial(os._exit, 3), "step", 7, r"exit code 3"),
    "exits with 0": (partial(os._exit, 0), "step", 7, r"exit code 0"),
    "is killed": (kill, "step", 7, r"SIGKILL.*out of memory"),
    "hangs": (partial(time.sleep, 100), "step", 7, r"hangs.*did not answer within 1.5 seconds"),
    "hangs in reset": (partial(time.sleep, 100), "reset", 1, r"hangs.*did not answer within 1.5 seconds"),
}
if hasattr(signal, "SIGRTMIN"):  # macOS has no signals without names
    FAULTS["is ended by a signal without a name"] = (
        partial(signal.raise_signal, signal.SIGRTMIN + 6),
        "step",
        7,
        rf"signal {signal.SIGRTMIN + 6}\.",
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_dead_worker(fault: str, tmp_path: Path) -> None:
    do, when, n, message = FAULTS[fault]
    env = make(do, when, n)
    model = NStepA2C("MlpPolicy", VecFrameStack(env, 2), n_steps=2, return_horizon=3, device="cpu", seed=0)
    model.worker_timeout = 1.5 if "hangs" in fault else None
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"Environment 1 .*{message}"):
        model.learn(200)
    assert time.monotonic() - start < 15
    assert not any(process.is_alive() for process in env.processes)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 0.1
    with pytest.raises(WorkerError, match="closed"):
        model.learn(10)

    model.save(tmp_path / "model.zip")
    model.set_env(VecFrameStack(DummyVecEnv([FaultyEnv] * 3), 2))
    n_updates = model._n_updates
    model.learn(60)
    # Two rollouts begin anew, none of what waited is left: the first of them completes no window
    assert model._n_updates == n_updates + 60 // 6 - 1
    NStepA2C.load(tmp_path / "model.zip", env=model.env, device="cpu").learn(20)


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_start_methods(start_method: str) -> None:
    env = make(kill, n=9, start_method=start_method)
    model = NStepA2C("MlpPolicy", env, n_steps=4, device="cpu")
    model.learn(12)
    assert model.num_timesteps == 12
    with pytest.raises(WorkerError, match="Environment 1 has died: its worker was ended by SIGKILL"):
        model.learn(1000, reset_num_timesteps=False)
    assert not any(process.is_alive() for process in env.processes)


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_killed_in_the_middle_of_an_answer(start_method: str) -> None:
    faults = [partial(time.sleep, 1.5), kill_in_the_middle_of_an_answer]
    # Under fork the first worker holds the second one's end of its pipe too, which its death does not close
    env = SubprocVecEnv([partial(Large, fault, n=3) for fault in faults], start_method=start_method)
    model = NStepA2C("MlpPolicy", env, n_steps=2, device="cpu", policy_kwargs={"net_arch": [1]})
    with pytest.raises(WorkerError, match="Environment 1 has died: its worker was ended by SIGKILL"):
        model.learn(100)
    assert env.closed and not any(process.is_alive() for process in env.processes)
    env.close()


def stop_in_the_middle_of_an_answer() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_stopped_in_the_middle_of_an_answer(start_method: str) -> None:
    """The third one, whose answer is half-way too, is not waited for when all are closed."""
    faults = [partial(time.sleep, 1.5), stop_in_the_middle_of_an_answer, stop_in_the_middle_of_an_answer]
    env = SubprocVecEnv([partial(Large, fault, n=3) for fault in faults], start_method=start_method)
    model = NStepA2C("MlpPolicy", env, n_steps=2, device="cpu", policy_kwargs={"net_arch": [1]}, worker_timeout=3.0)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"Environment 1 hangs: .* within 3\.0 seconds"):
        model.learn(100)
    assert time.monotonic() - start < 20
    assert env.closed and not any(process.is_alive() for process in env.processes)


class Parent(FaultyEnv):
    """Has a child, which holds the worker's end of its pipe, and lives on."""

    def step(self, action: Any) -> Any:
        if self.calls["step"] == 0 and self.fault is not None:
            multiprocessing.current_process()._config["daemon"] = False  # daemons may have none
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(8,))
            child.start()
        return super().step(action)


def test_killed_with_a_child() -> None:
    env = SubprocVecEnv([FaultyEnv, partial(Parent, kill)], start_method="forkserver")
    start = time.monotonic()
    with pytest.raises(WorkerError, match="Environment 1 has died: its worker was ended by SIGKILL"):
        NStepA2C("MlpPolicy", env, device="cpu").learn(100)
    assert time.monotonic() - start < 6  # the child has not ended yet


def test_other_workers_close_their_environments(tmp_path: Path) -> None:
    class Closing(FaultyEnv):
        def close(self) -> None:
            (tmp_path / "closed").touch()

    env = SubprocVecEnv([partial(FaultyEnv, fail), Closing])
    with pytest.raises(WorkerError, match="Environment 0"):
        NStepA2C("MlpPolicy", env, device="cpu").learn(100)
    assert (tmp_path / "closed").exists()


def test_workers_of_somebody_else() -> None:
    """The error of a callback's own environments is not ours to explain, and ours go on."""

    class Evaluating(BaseCallback):
        def _on_step(self) -> bool:
            raise EOFError

    env = make(None)
    with pytest.raises(EOFError):
        NStepA2C("MlpPolicy", env, device="cpu").learn(100, Evaluating())
    assert not env.closed
    env.reset()
    env.close()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e7, "1", True])
def test_bad_timeout(timeout: Any) -> None:
    with pytest.raises(
        ValueError, match="worker_timeout: expected None or a number of seconds > 0 and up to 1,000,000"
    ):
        NStepA2C("MlpPolicy", DummyVecEnv([FaultyEnv]), worker_timeout=timeout)


@pytest.mark.parametrize("timeout", [1_000_000, np.int64(60), np.float32(60.0)])
def test_long_timeout(timeout: Any) -> None:
    env = make(None)
    NStepA2C("MlpPolicy", env, device="cpu", worker_timeout=timeout).learn(30)
    env.close()


# Not-a-number


class Spoiling(gym.Env):
    """The nth step of environment ``env`` hands out a number that is none."""

    action_space = spaces.Discrete(2)

    def __init__(self, quantity: str | None, number: float, n: int = 7, is_dict: bool = False) -> None:
        self.quantity, self.number, self.n, self.is_dict = quantity, number, n, is_dict
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict(here=box, there=box) if is_dict else box
        self.steps = 0

    def observation(self) -> Any:
        spoilt = np.array([0.5, self.number if self.quantity == "observation" and self.steps == self.n else 1.0])
        fine = np.zeros(2, np.float32)
        return {"here": fine, "there": spoilt.astype(np.float32)} if self.is_dict else spoilt.astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps += 1
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = self.number if self.quantity == "reward" and self.steps == self.n else 1.0
        return self.observation(), reward, False, False, {}


def parameters(model: A2C) -> list[th.Tensor]:
    return [parameter.detach().clone() for parameter in model.policy.parameters()]


class Remembering(BaseCallback):
    """The parameters after the last update."""

    def _on_rollout_start(self) -> None:
        self.parameters = parameters(self.model)

    def _on_step(self) -> bool:
        return True


def spoilt(quantity: str, number: float, is_dict: bool = False, **kwargs: Any) -> NStepA2C:
    envs = [partial(Spoiling, quantity if env == 1 else None, number, is_dict=is_dict) for env in range(3)]
    policy = "MultiInputPolicy" if is_dict else "MlpPolicy"
    return NStepA2C(policy, DummyVecEnv(envs), n_steps=4, device="cpu", seed=0, **kwargs)


@pytest.mark.parametrize("carry_over", [True, False])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("quantity", "is_dict", "message"),
    [
        (
            "reward",
            False,
            "Environment 1, row 1 of the rollout: the reward is",
        ),  # the sixth step, 4 of which were first
        ("observation", False, "Environment 1, row 2 of the rollout: the observation is"),
        ("observation", True, "Environment 1, row 2 of the rollout: the observation 'there' is"),
    ],
)
def test_not_a_number(quantity: str, is_dict: bool, message: str, number: float, carry_over: bool) -> None:
    model, callback = spoilt(quantity, number, is_dict, carry_over=carry_over), Remembering()
    with pytest.raises(NotFiniteError, match=f"{message} {number}"):
        model.learn(100, callback)
    assert model._n_updates == 1
    assert all(map(th.equal, parameters(model), callback.parameters))
    assert all(parameter.isfinite().all() for parameter in parameters(model))
    # What was spoilt is dropped, not trained on later
    model.learn(100)
    assert all(parameter.isfinite().all() for parameter in parameters(model))


@pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)
def test_observation_behind_the_rollout(number: float) -> None:
    """The windows bootstrap from it. tanh makes V of infinity finite: no later number tells."""
    envs = [partial(Spoiling, "observation" if env == 1 else None, number, n=9) for env in range(3)]
    model, callback = NStepA2C("MlpPolicy", DummyVecEnv(envs), n_steps=4, device="cpu"), Remembering()
    with pytest.raises(NotFiniteError, match=f"Environment 1, row 4 of the rollout: the observation is {number}"):
        model.learn(100, callback)
    assert model._n_updates == 1
    assert all(map(th.equal, parameters(model), callback.parameters))


@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)
def test_terminal_observation(number: float, is_dict: bool) -> None:
    """Which never is an observation of the rollout; V of it is added to the reward."""
    envs = [
        partial(gym.wrappers.TimeLimit, Spoiling("observation" if env == 1 else None, number, is_dict=is_dict), 6)
        for env in range(3)
    ]
    policy = "MultiInputPolicy" if is_dict else "MlpPolicy"
    model, callback = NStepA2C(policy, DummyVecEnv(envs), n_steps=4, device="cpu"), Remembering()
    message = "Environment 1, row 1 of the rollout: the terminal_observation" + (" 'there'" if is_dict else "")
    with pytest.raises(NotFiniteError, match=f"{message} is {number}"):
        model.learn(100, callback)
    assert all(map(th.equal, parameters(model), callback.parameters))


@pytest.mark.parametrize("quantity", ["values", "log_probs"])
def test_what_the_network_computes(quantity: str) -> None:
    class Spoil(Remembering):
        def _on_rollout_end(self) -> None:
            if self.num_timesteps == 36:
                getattr(self.model.rollout_buffer, quantity)[2, 1] = np.nan

    model, callback = spoilt("nothing", 0.0), Spoil()
    name = {"values": "V", "log_probs": "the log-probability of the action"}[quantity]
    with pytest.raises(NotFiniteError, match=f"Environment 1, row 2 of the rollout: {name} is nan"):
        model.learn(100, callback)
    assert all(map(th.equal, parameters(model), callback.parameters))


@pytest.mark.parametrize("carry_over", [True, False])
def test_gradient(carry_over: bool) -> None:
    """Everything in the rollout is finite, and so is the loss."""
    model, callback = spoilt("nothing", 0.0, carry_over=carry_over), Remembering()
    model.learn(24)
    parameter = model.policy.value_net.weight
    parameter.register_hook(lambda gradient: gradient * np.inf)
    with pytest.raises(NotFiniteError, match="norm of the gradient is"):
        model.learn(100, callback)
    assert all(map(th.equal, parameters(model), callback.parameters))


def test_switched_off() -> None:
    model = spoilt("reward", np.nan, check_finite=False)
    model.learn(24)
    assert any(parameter.isnan().any() for parameter in parameters(model))


def test_rewards_that_vec_normalize_spoils() -> None:
    env = VecNormalize(DummyVecEnv([partial(Spoiling, "reward", np.nan)]))
    with pytest.raises(NotFiniteError, match="Environment 0, row 0 of the rollout: the reward is nan"):
        NStepA2C("MlpPolicy", env, device="cpu").learn(100)


# Environments


def test_gamma_of_vec_normalize() -> None:
    with pytest.warns(UserWarning, match=r"VecNormalize has gamma=0\.9, the algorithm gamma=0\.99"):
        model = NStepA2C("MlpPolicy", VecNormalize(DummyVecEnv([FaultyEnv]), gamma=0.9), device="cpu")
    model.set_env(VecNormalize(DummyVecEnv([FaultyEnv]), gamma=0.9, norm_reward=False))
    with pytest.warns(UserWarning, match="gamma"):
        model.set_env(VecNormalize(DummyVecEnv([FaultyEnv]), gamma=0.5))


def test_next_step_autoreset_is_refused_where_it_is_declared() -> None:
    class Adapter(DummyVecEnv):
        metadata: Any = None

    adapters = [Adapter([FaultyEnv]) for _ in AutoresetMode]
    for mode, adapter in zip(AutoresetMode, adapters, strict=True):
        adapter.metadata = {"autoreset_mode": mode}
    fine = NStepA2C("MlpPolicy", adapters[list(AutoresetMode).index(AutoresetMode.SAME_STEP)], device="cpu")
    refused = adapters[list(AutoresetMode).index(AutoresetMode.NEXT_STEP)]
    with pytest.raises(ValueError, match=r"env: expected .* got autoreset_mode NEXT_STEP"):
        NStepA2C("MlpPolicy", VecFrameStack(refused, 2), device="cpu")
    with pytest.raises(ValueError, match="NEXT_STEP"):
        fine.set_env(refused)
