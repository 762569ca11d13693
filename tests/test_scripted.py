"""The scripted environment does what its script says."""

import numpy as np
import pytest
import torch as th
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecTransposeImage

from scripted import OBSERVATION_SPACES, ScriptedEnv, arrays, observe, parse, run, tags_of, vec_env


def test_a_script_is_read_as_it_is_written():
    assert parse("1 -0.5T 2L:7 0TL 3:4") == parse(["1", "-0.5T", "2L:7", "0TL", "3:4"])
    assert parse("1 -0.5T 2L:7 0TL 3:4") == [
        (1.0, False, False, None),
        (-0.5, True, False, None),
        (2.0, False, True, 7.0),
        (0.0, True, True, None),
        (3.0, False, False, 4.0),
    ]
    with pytest.raises(AssertionError, match="not a step"):
        parse("1 2X")


def test_arrays_of_a_script():
    # s0 (reset, 9) → 1 → s1 (5) → 2, time limit → 7 | s2 (reset, 9) → 3, terminated | s3 (reset, 9) → 4 → 6
    rollout = arrays("1:5 2L:7 3T:8 4:6", value=0, reset_value=9)
    np.testing.assert_array_equal(rollout.rewards, [[1], [2], [3], [4]])
    np.testing.assert_array_equal(rollout.values, [[9], [5], [9], [9]])
    np.testing.assert_array_equal(rollout.episode_starts, [[True], [False], [True], [True]])
    np.testing.assert_array_equal(rollout.bootstrap_values, [[0], [7], [0], [0]])
    assert (rollout.last_values.tolist(), rollout.last_dones.tolist()) == ([6], [False])
    assert (arrays("1L:7", reset_value=9).last_values.tolist(), arrays("1L:7").last_dones.tolist()) == ([9], [True])


def test_the_environment_plays_its_script_over_and_over():
    env = ScriptedEnv("1 2L:7 3T", value=0, reset_value=9)
    observations = [env.reset()[0]]
    outcomes = []
    for action in (0, 1, 1, 0):
        observation, *outcome, _ = env.step(action)
        outcomes.append(tuple(outcome))
        observations.append(observation)
        if any(outcome[1:]):
            observations.append(env.reset()[0])
    assert outcomes == [(1, False, False), (2, False, True), (3, True, False), (1, False, False)]
    np.testing.assert_array_equal(observations, [[0, 9], [1, 0], [2, 7], [3, 9], [4, 0], [5, 9], [6, 0]])
    assert [(step.tag, step.reward, step.final_tag) for step in env.lived] == [
        (0, 1, 1),
        (1, 2, 2),
        (3, 3, 4),
        (5, 1, 6),
    ]
    assert [int(step.action) for step in env.lived] == [0, 1, 1, 0]


def test_it_is_not_stepped_past_an_end():
    env = ScriptedEnv("1T")
    env.reset()
    env.step(0)
    with pytest.raises(AssertionError, match="before a reset"):
        env.step(0)


@pytest.mark.filterwarnings("ignore:.*A Box observation space m[a-z]+ value is -?infinity:UserWarning")
@pytest.mark.parametrize("kind", OBSERVATION_SPACES)
def test_gymnasium_accepts_it(kind: str):
    class Restarting(ScriptedEnv):
        def reset(self, **kwargs):
            self.tag, self.n_steps = -1, 0  # check_env wants the same observations after each reset
            return super().reset(**kwargs)

    check_env(Restarting("1 2 3L", kind=kind), skip_render_check=True)


@pytest.mark.parametrize("kind", OBSERVATION_SPACES)
@pytest.mark.parametrize("tag", [0, 3, 255, 256, 1023])
def test_tags_survive_the_observation(kind: str, tag: int):
    observation = observe(kind, tag)
    assert observation in OBSERVATION_SPACES[kind]
    batch = {k: v[np.newaxis] for k, v in observation.items()} if kind == "dict" else np.array([observation])
    assert tags_of(batch).tolist() == [tag]
    if kind == "image":
        assert tags_of(VecTransposeImage.transpose_image(batch)).tolist() == [tag]


@pytest.mark.parametrize("vec_env_class", [DummyVecEnv, SubprocVecEnv])
def test_rewards_keep_their_type_in_workers_only(vec_env_class: type):
    venv = vec_env("1", "2", vec_env_class=vec_env_class, reward_type=int)
    try:
        observations = venv.reset()
        rewards = venv.step(np.array([0, 1]))[1]
    finally:
        venv.close()
    np.testing.assert_array_equal(observations, [[0, 0], [1000, 1000]])
    np.testing.assert_array_equal(rewards, [1, 2])
    assert np.issubdtype(rewards.dtype, np.integer) == (vec_env_class is SubprocVecEnv)


def test_one_array_again_and_again():
    env = ScriptedEnv("1", same_array=True)
    first = env.reset()[0]
    assert env.step(0)[0] is first
    np.testing.assert_array_equal(first, [1, 1])


def test_the_critic_reads_and_the_record_keeps_what_train_was_given():
    # V = the number of the observation, r = 0, γ = 1/2, T = 4, N = 1: the target of row t is (t + 1) / 2
    outcome = run(vec_env("0", "0"), 2, return_horizon=1, carry_over=False)
    assert outcome.targets == {first + t: (first + t + 1) / 2 for first in (0, 1000) for t in range(8)}
    assert outcome.advantages == {tag: target - tag for tag, target in outcome.targets.items()}
    assert [len(batch) for batch in outcome.batches] == [8, 8]
    actions = {step.tag: step.action for steps in outcome.lived for step in steps}
    assert all(row.action == actions[row.tag] for row in outcome.rows)
    value = outcome.model.policy.predict_values(th.tensor([[3.0, 8.5]]))
    assert value.item() == 8.5
