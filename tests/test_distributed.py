"""Two processes that train one model, beside one process that has all of the environments."""

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
import torch.distributed as dist
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize

from sb3_nstep import NStepA2C
from sb3_nstep.checkpoint import load_checkpoint, save_checkpoint
from sb3_nstep.contrib import NStepRecurrentA2C
from sb3_nstep.distributed import merged
from scripted import vec_env

SIZE = 2
SCRIPTS = ["1 0 2", "0 3T 1 -1", "1 1 0 2L 5", "-2 4 1TL 0 0 1 3T"]
MANY = 10**6  # more steps than any of these tests makes


class Sines(FlattenExtractor):
    def forward(self, observations: th.Tensor) -> th.Tensor:
        return th.sin(super().forward(observations).double())


class ActingByNumber(ActorCriticPolicy):
    """
    An ordinary network, but for its actions, which follow from the number of the observation, without chance; and for
    its float64: what RMSprop makes of rounding in float32 is more than 1e-6 after a few updates.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, features_extractor_class=Sines, **kwargs)
        self.double()

    def forward(self, obs: Any, deterministic: bool = False) -> Any:
        actions = (obs[:, 0].long() // 2) % 2
        values, log_prob, _ = self.evaluate_actions(obs, actions)
        return actions, values, log_prob


def envs(rank: int | None, **kwargs: Any) -> VecEnv:
    """The half of the environments that a rank has, or all of them."""
    if rank is None:
        return vec_env(*SCRIPTS, **kwargs)
    n_envs = len(SCRIPTS) // SIZE
    return vec_env(*SCRIPTS[rank * n_envs : (rank + 1) * n_envs], first_tag=1000 * rank * n_envs, **kwargs)


def build(env: VecEnv, **kwargs: Any) -> NStepA2C:
    defaults = {"n_steps": 4, "return_horizon": 6, "learning_rate": 0.01, "seed": 3, "device": "cpu"}
    return NStepA2C(kwargs.pop("policy", ActingByNumber), env, **(defaults | kwargs))


def parameters(model: NStepA2C) -> np.ndarray:
    return th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().numpy()


class Record(BaseCallback):
    """What a callback sees, and a stop of its own."""

    def __init__(self, stop_at_call: int = MANY) -> None:
        super().__init__()
        self.stop_at_call = stop_at_call
        self.seen: list[tuple[int, float, float]] = []

    def _on_step(self) -> bool:
        learning_rate = self.model.policy.optimizer.param_groups[0]["lr"]
        self.seen.append((self.num_timesteps, self.model._current_progress_remaining, learning_rate))
        return self.n_calls < self.stop_at_call


UPDATES: dict[str, dict[str, Any]] = {
    **{correction: {"correction": correction} for correction in ("none", "importance", "vtrace")},
    "normalize_advantage": {"normalize_advantage": True},
    "one row each": {"normalize_advantage": True, "n_steps": 1, "return_horizon": 1},
    "exact": {"carry_over": False, "return_horizon": None},
    "one horizon per environment": {"return_horizon": [3, 6]},
}


def learn(rank: int | None, **kwargs: Any) -> np.ndarray:
    with closing(envs(rank)) as env:
        if rank is None and isinstance(kwargs.get("return_horizon"), list):
            kwargs["return_horizon"] *= SIZE
        return parameters(build(env, max_grad_norm=0.3, **kwargs).learn(240))


def update(rank: int, folder: Path) -> dict[str, np.ndarray]:
    return {name: learn(rank, **kwargs) for name, kwargs in UPDATES.items()}


def count(rank: int | None, folder: Path) -> Any:
    """All that is counted and scheduled, and what is written."""
    with closing(VecMonitor(envs(rank))) as env, closing(VecMonitor(vec_env("1 2T"))) as eval_env:
        mine = folder / f"counted_by_{rank}"
        model = build(env, learning_rate=lambda progress: 0.01 * progress, tensorboard_log=str(mine / "log"))
        record = Record()
        checkpoints = CheckpointCallback(10, str(mine / "checkpoints"))
        often = EveryNTimesteps(50, CheckpointCallback(1, str(mine / "often")))
        evaluation = EvalCallback(eval_env, eval_freq=7, best_model_save_path=str(mine / "best"), verbose=0)
        model.learn(160, [record, checkpoints, often, evaluation], log_interval=2)
        episodes = sorted((episode["r"], episode["l"]) for episode in model.ep_info_buffer)
        files = sorted(path.name for path in mine.rglob("*.*")) if mine.exists() else []
        return record.seen, model.num_timesteps, model._n_updates, episodes, files


def seed(rank: int, folder: Path) -> Any:
    """Built in the group, and built before it (as far as the model can tell)."""
    seeds, acted = [], []
    for was_built_before in (False, True):
        with closing(envs(rank)) as env:
            model = build(env, policy="MlpPolicy")
            if was_built_before:
                env.seed(3)
                model._seeded_rank = 0
            model.learn(0)
            seeds.append(env.get_attr("np_random_seed"))
            initial = parameters(model).copy()
            model.learn(80)
            acted.append([int(step.action) for lived in env.get_attr("lived") for step in lived])
    return seeds, acted, initial


def start(rank: int, folder: Path) -> Any:
    """Rank 0 has learned before, alone; the other one has not, and was asked for something else."""
    with closing(VecNormalize(envs(rank))) as env:
        model = build(env, seed=rank)
        if rank == 0:
            model.num_timesteps, model._n_updates = 64, 2
            model.policy.optimizer.param_groups[0]["lr"] = 0.5
            for parameter in model.policy.parameters():
                parameter.grad = th.ones_like(parameter)
            model.policy.optimizer.step()
            env.obs_rms.mean = env.obs_rms.mean + 5.0
        model.learn(*[(16,), (800,)][rank], reset_num_timesteps=bool(rank))
        state = model.policy.optimizer.state_dict()["state"]
        squares = np.concatenate([each["square_avg"].flatten().numpy() for each in state.values()])
        return parameters(model), squares, env.obs_rms.mean, model.num_timesteps, model._n_updates


def stop(rank: int, folder: Path) -> Any:
    """Rank 1's callback stops in the middle of the third rollout; then all go on."""
    with closing(envs(rank)) as env:
        model = build(env)
        model.learn(MANY, Record(stop_at_call=[MANY, 10][rank]))
        stopped = model.num_timesteps, model._n_updates, model.rollout_buffer.n_ready
        model.learn(64, reset_num_timesteps=False)
        return stopped, (model.num_timesteps, model._n_updates), parameters(model)


def normalize(rank: int, folder: Path) -> Any:
    first_tag = 1000 * rank
    with closing(VecNormalize(vec_env("2", "3", first_tag=first_tag), gamma=0.5)) as env:
        build(env).learn(48)
        stats = env.obs_rms, env.ret_rms
        return [(each.mean, each.var, each.count) for each in stats]


def refuse(rank: int, folder: Path) -> list[str]:
    messages = []
    for kwargs in ({"n_steps": 4 + rank}, {"return_horizon": 2 + rank}):
        with closing(envs(rank)) as env, pytest.raises(ValueError) as error:
            build(env, **kwargs).learn(100)
        messages.append(str(error.value))
    for env in (vec_env(*SCRIPTS[: 1 + rank]), VecNormalize(envs(rank), norm_obs=bool(rank))):
        with closing(env), pytest.raises(ValueError) as error:
            build(env).learn(100)
        messages.append(str(error.value))
    with closing(envs(rank)) as env, pytest.raises(ValueError) as error:
        NStepRecurrentA2C("MlpLstmPolicy", env).learn(100)
    return [*messages, str(error.value)]


def resume(rank: int, folder: Path) -> Any:
    """From a checkpoint of rank 0, whose waiting rows are its own: loaded by rank 0 alone, and by both."""
    resumed = []
    path = folder / "resumed.zip"
    with closing(envs(rank)) as env:
        model = build(env, policy="MlpPolicy")
        model.learn(64)
        if rank == 0:
            save_checkpoint(model, path)
    for ranks in ((0,), (0, 1)):
        dist.barrier()
        with closing(envs(rank)) as env:
            model = build(env, policy="MlpPolicy")
            if rank in ranks:
                model = load_checkpoint(NStepA2C, path, env, force_reset=True)
            model.learn(64, reset_num_timesteps=False)
            acted = [int(step.action) for lived in env.get_attr("lived") for step in lived]
            resumed.append((model.num_timesteps, model._n_updates, parameters(model), acted))
    return resumed


class Accident(BaseCallback):
    def __init__(self, happen: Callable[[], Any]) -> None:
        super().__init__()
        self.happen = happen

    def _on_step(self) -> bool:
        if self.n_calls == 6:
            self.happen()
        return True


def suffer(rank: int, folder: Path, happen: Callable[[], Any]) -> tuple[float, str]:
    """Something happens to rank 1. How long the other waited for it, and what it said then."""
    with closing(envs(rank)) as env:
        began = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            build(env).learn(MANY, Accident(happen) if rank else None)
        return time.monotonic() - began, str(error.value)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Name, what each rank does, seconds that it waits for the other. The last one takes a rank with it
JOBS: list[tuple[str, Callable[[int, Path], Any], float]] = [
    *((job.__name__, job, 60.0) for job in (update, count, seed, start, stop, resume, normalize, refuse)),
    ("hang", partial(suffer, happen=partial(time.sleep, 5.0)), 2.0),
    ("die", partial(suffer, happen=die), 60.0),
]


def work(rank: int, folder: Path) -> None:
    th.set_num_threads(1)
    for name, job, seconds in JOBS:
        store = f"file://{folder / name}"
        dist.init_process_group("gloo", store, timedelta(seconds=seconds), rank=rank, world_size=SIZE)
        (folder / f"{name}.{rank}").write_bytes(pickle.dumps(job(rank, folder)))
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = get_context("spawn")
    processes = [context.Process(target=work, args=(rank, folder)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, -signal.SIGKILL], "see the first error in the output"
        yield lambda name: [pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{name}.*"))]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("name", UPDATES)
def test_ranks_with_half_the_environments_each_equal_one_process_with_all(told: Any, name: str) -> None:
    first, second = (updated[name] for updated in told("update"))
    np.testing.assert_array_equal(first, second)
    whole = learn(None, **UPDATES[name])
    np.testing.assert_allclose(first, whole, rtol=0, atol=1e-6)
    with closing(envs(None)) as env:
        assert np.abs(whole - parameters(build(env))).max() > 0.01, "nothing was learned"


def test_steps_schedules_and_episodes_are_those_of_all_ranks(told: Any, tmp_path: Path) -> None:
    *expected, files = count(None, tmp_path)
    for *got, _ in told("count"):
        assert got == expected
    (*_, of_first), (*_, of_second) = told("count")
    assert {"best_model.zip", "rl_model_160_steps.zip"} <= set(of_first)
    assert [name for name in of_first if name.endswith("zip")] == [name for name in files if name.endswith("zip")]
    assert of_second == []


def test_each_rank_has_seeds_of_its_own_and_the_same_network(told: Any) -> None:
    (seeds_0, acted_0, initial_0), (seeds_1, acted_1, initial_1) = told("seed")
    assert seeds_0 == [[3, 4]] * 2 and seeds_1 == [[5, 6]] * 2
    assert all(mine != its for mine, its in zip(acted_0, acted_1, strict=True))
    np.testing.assert_array_equal(initial_0, initial_1)


def test_all_start_as_rank_0_does(told: Any) -> None:
    of_first, of_second = told("start")
    for first, second in zip(of_first, of_second, strict=True):
        np.testing.assert_array_equal(first, second)
    assert of_first[1].min() > 0
    assert of_first[3:] == (64 + 16, 2)  # N = 6: no update yet


def test_a_stop_of_one_is_a_stop_of_all(told: Any) -> None:
    (stopped, after, first), (stopped_1, after_1, second) = told("stop")
    # Two rollouts and a third one, of which one rank made 2 steps and the other 4. N = 6: the first makes no update
    assert stopped == stopped_1 == (2 * 16 + 2 * (2 + 4), 1, 0)
    assert after == after_1 == (stopped[0] + 64, 1 + 3)
    np.testing.assert_array_equal(first, second)


def test_a_checkpoint_has_the_waiting_rows_of_one_rank(told: Any) -> None:
    for (n_steps, n_updates, first, acted), (*counts_1, second, acted_1) in zip(*told("resume"), strict=True):
        # Four rollouts of 16 steps, and four more: N = 6, windows begin empty both times
        assert (n_steps, n_updates) == tuple(counts_1) == (128, 3 + 3)
        np.testing.assert_array_equal(first, second)
        assert acted != acted_1  # the random states are one rank's as well


def test_statistics_of_vec_normalize_are_those_of_all_ranks(told: Any) -> None:
    of_first, of_second = told("normalize")
    for first, second in zip(of_first, of_second, strict=True):
        for mine, its in zip(first, second, strict=True):
            np.testing.assert_array_equal(mine, its)
    # 12 steps of four environments, and the observations that they began with
    tags = np.concatenate([np.arange(first, first + 13) for first in (0, 1000, 1000, 2000)])
    returns = np.array([np.array([reward] * 12) @ np.eye(12) for reward in (2.0, 3.0, 2.0, 3.0)])
    for step in range(1, 12):
        returns[:, step] += 0.5 * returns[:, step - 1]
    for data, (mean, var, n) in zip((tags, returns), of_first, strict=True):
        # RunningMeanStd begins with 1e-4 of an observation, 0, whose variance is 1
        total = data.size + 1e-4
        assert n == pytest.approx(total)
        assert mean == pytest.approx(data.sum() / total)
        assert var == pytest.approx((np.square(data, dtype=float).sum() + 1e-4) / total - (data.sum() / total) ** 2)


def test_merged_statistics_by_hand() -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(1e6, 1e-2, size=(5, 100, 3))  # variance far below the square of the mean
    before, whole = RunningMeanStd(shape=(3,)), RunningMeanStd(shape=(3,))
    before.update(data[0])
    after = [before.copy() for _ in range(3)]
    for mine, batch in zip(after, data[1:], strict=False):  # of four batches the last goes to rank 2, too
        mine.update(batch)
    after[2].update(data[4])
    result = merged(before, after)
    whole.update(np.concatenate(data))
    assert result.count == pytest.approx(whole.count)
    np.testing.assert_allclose(result.mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(result.var, whole.var, rtol=1e-6)


def test_what_does_not_fit_together_is_refused_by_all(told: Any) -> None:
    of_first, of_second = told("refuse")
    assert of_first == of_second
    expected = ["n_steps: .* got [4, 5]", "return_horizon, carry_over: .* got [6, 4]", "n_envs: .* got [1, 2]"]
    expected += ["statistics of VecNormalize: ", "NStepRecurrentA2C trains in one process, got "]
    for message, parts in zip(of_first, (text.split(".*") for text in expected), strict=True):
        assert message.startswith(parts[0]) and message.endswith(parts[-1] if len(parts) > 1 else "")


def test_a_rank_that_hangs_ends_the_other_one(told: Any) -> None:
    (waited, message), _ = told("hang")
    assert waited < 4.5
    assert "Rank 0: another process of the group has ended, or kept this one waiting" in message


def test_a_rank_that_is_killed_ends_the_other_one(told: Any) -> None:
    ((waited, message),) = told("die")
    assert waited < 20.0
    assert "Rank 0: another process of the group has ended" in message
