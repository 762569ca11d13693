"""MinAtar (https://arxiv.org/abs/1903.03176), the small games of the study, for SB3's image policies."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv
from torch import nn


class ChannelsFirst(gym.ObservationWrapper):
    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        height, width, n_channels = env.observation_space.shape
        self.observation_space = gym.spaces.Box(0, 1, (n_channels, height, width), dtype=bool)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation.transpose(2, 0, 1)


class MinAtarCNN(BaseFeaturesExtractor):
    """The network of the paper: SB3's own needs images of 36 x 36 at least."""

    def __init__(self, observation_space: gym.spaces.Box, features_dim: int = 128) -> None:
        super().__init__(observation_space, features_dim)
        n_channels, height, width = observation_space.shape
        self.layers = nn.Sequential(
            nn.Conv2d(n_channels, 16, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), features_dim),
            nn.ReLU(),
        )

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.layers(observations)


def make_minatar_env(env_id: str, n_envs: int, seed: int | None = None) -> VecEnv:
    from minatar.gym import register_envs  # an optional package

    if env_id not in gym.registry:
        register_envs()
    return make_vec_env(env_id, n_envs, seed, wrapper_class=ChannelsFirst)
