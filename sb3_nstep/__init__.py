"""N-step A2C for Stable-Baselines3: one stream per environment, N free of the rollout length."""

from sb3_nstep.a2c import NStepA2C
from sb3_nstep.buffers import NStepDictRolloutBuffer, NStepRolloutBuffer
from sb3_nstep.targets import n_step_targets

__version__ = "0.1.0"

__all__ = ["NStepA2C", "NStepDictRolloutBuffer", "NStepRolloutBuffer", "n_step_targets"]
