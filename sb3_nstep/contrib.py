"""
N-step targets in sb3-contrib: buffers for MaskablePPO and RecurrentPPO, and an A2C for masks and one for LSTMs.

The only module that imports sb3_contrib. Rows, masks, LSTM states, sequences and updates are sb3-contrib's. Ours are
the targets, and the arguments that make A2C of PPO.
"""

from collections.abc import Generator
from typing import Any, TypeVar

import torch as th
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule

from sb3_nstep import distributed
from sb3_nstep.buffers import NStepMixin
from sb3_nstep.targets import Horizon, window_lengths

SelfA2C = TypeVar("SelfA2C", bound="_A2CMixin")

# PPO's first update with all rows of a rollout is A2C's: the ratio is 1 until then, and there is nothing to clip
# (https://arxiv.org/abs/2205.09123). Not infinity, of which TensorBoard would warn at each update
_ONE_UPDATE: dict[str, Any] = {
    "n_epochs": 1,
    "batch_size": None,
    "clip_range": 1e9,
    "clip_range_vf": None,
    "target_kl": None,
}


class _ShortenedMixin(NStepMixin):
    """N-step targets for a buffer that hands out its rows itself."""

    def reset(self) -> None:
        if self.carry_over:
            raise ValueError(
                f"carry_over: expected False for {type(self).__name__}, got {self.carry_over!r}. No row can wait for "
                "the next rollout: sb3-contrib's buffers keep masks and LSTM states for the rollout under way alone"
            )
        super().reset()

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """As in sb3-contrib."""
        # Past NStepMixin, which knows neither masks nor sequences
        return super(NStepMixin, self).get(batch_size)

    @property
    def _is_env_major(self) -> bool:
        return True


class _RecurrentMixin(_ShortenedMixin):
    @property
    def mean_window(self) -> float:
        """Mean number of rows in the windows of the rows handed out."""
        starts = self.episode_starts
        if self.generator_ready:  # get() has flattened these as well, one environment after another
            starts = starts.reshape(self.n_envs, self.buffer_size).T
        return float(window_lengths(starts, self._last_dones, self._horizon).mean())


class NStepMaskableRolloutBuffer(_ShortenedMixin, MaskableRolloutBuffer):
    """
    sb3-contrib's ``MaskableRolloutBuffer`` with N-step targets, for ``rollout_buffer_class=`` of ``MaskablePPO``.
    Arguments: those of ``MaskableRolloutBuffer``, in its order, then ``return_horizon``
    (:class:`~sb3_nstep.buffers.NStepMixin`). Windows are shortened at the rollout's end: ``carry_over=True`` is
    refused.
    """


class NStepMaskableDictRolloutBuffer(_ShortenedMixin, MaskableDictRolloutBuffer):
    """:class:`NStepMaskableRolloutBuffer` for dictionary observations."""


class NStepRecurrentRolloutBuffer(_RecurrentMixin, RecurrentRolloutBuffer):
    """
    sb3-contrib's ``RecurrentRolloutBuffer`` with N-step targets. ``RecurrentPPO`` has no argument that takes it:
    :class:`NStepRecurrentPPO` does. Arguments: those of ``RecurrentRolloutBuffer``, in its order, then
    ``return_horizon`` (:class:`~sb3_nstep.buffers.NStepMixin`). Windows are shortened at the rollout's end:
    ``carry_over=True`` is refused.
    """


class NStepRecurrentDictRolloutBuffer(_RecurrentMixin, RecurrentDictRolloutBuffer):
    """:class:`NStepRecurrentRolloutBuffer` for dictionary observations."""


_N_STEP_CLASSES: dict[type[RolloutBuffer], type[NStepMixin]] = {
    MaskableRolloutBuffer: NStepMaskableRolloutBuffer,
    MaskableDictRolloutBuffer: NStepMaskableDictRolloutBuffer,
    RecurrentRolloutBuffer: NStepRecurrentRolloutBuffer,
    RecurrentDictRolloutBuffer: NStepRecurrentDictRolloutBuffer,
}


class _HorizonMixin(OnPolicyAlgorithm):
    """Gives an algorithm of sb3-contrib the argument ``return_horizon``."""

    def __init__(self, *args: Any, return_horizon: Horizon | None = None, **kwargs: Any):
        self.return_horizon = return_horizon  # before the parent's constructor, which calls _setup_model()
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        if self.rollout_buffer_class not in (None, *_N_STEP_CLASSES):
            raise ValueError(f"rollout_buffer_class: expected None, got {self.rollout_buffer_class!r}")
        if self.rollout_buffer_kwargs:
            raise ValueError(
                f"rollout_buffer_kwargs: expected none, got {self.rollout_buffer_kwargs!r}. N is return_horizon, an "
                f"argument of {type(self).__name__}"
            )
        super()._setup_model()
        # In place of the buffer just built, whose class is the one that a zip names
        stock: Any = self.rollout_buffer
        states = {"hidden_state_shape": stock.hidden_state_shape} if isinstance(self, RecurrentPPO) else {}
        self.rollout_buffer = _N_STEP_CLASSES[type(stock)](
            self.n_steps,
            self.observation_space,
            self.action_space,
            device=self.device,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            n_envs=self.n_envs,
            return_horizon=self.return_horizon,
            **states,
        )

    def _setup_learn(self, *args: Any, **kwargs: Any) -> Any:
        if (n_ranks := distributed.n_ranks()) > 1:
            raise ValueError(
                f"{type(self).__name__} trains in one process, got a torch.distributed process group of {n_ranks}, "
                "each of which would train a model of its own. NStepA2C averages gradients over them"
            )
        return super()._setup_learn(*args, **kwargs)


class NStepRecurrentPPO(_HorizonMixin, RecurrentPPO):
    """
    sb3-contrib's ``RecurrentPPO`` with N-step targets. Takes all of its arguments in its order and, by keyword:

    :param return_horizon: N, the environment steps that a target looks ahead before it bootstraps: an int, or one per
        environment. ``None``: the length of the rollout, as in ``RecurrentPPO``
    :raises ValueError: if it is neither
    """


class _A2CMixin(_HorizonMixin):
    """Makes A2C of PPO: A2C's defaults and optimiser, one update with all rows of the rollout."""

    normalize_advantage: bool

    def __init__(
        self,
        policy: Any,
        env: GymEnv | str,
        learning_rate: float | Schedule = 7e-4,
        n_steps: int = 5,
        gamma: float = 0.99,
        gae_lambda: float = 1.0,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        rms_prop_eps: float = 1e-5,
        use_rms_prop: bool = True,
        *,
        return_horizon: Horizon | None = None,
        normalize_advantage: bool = False,
        policy_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        for name in (*_ONE_UPDATE, "carry_over", "correction"):
            if name in kwargs:
                raise ValueError(
                    f"{name}: {type(self).__name__} has no such argument. It makes one update with all rows of the "
                    "rollout, and none of them waits for the next one"
                )
        policy_kwargs = dict(policy_kwargs or {})
        if use_rms_prop and "optimizer_class" not in policy_kwargs:
            policy_kwargs["optimizer_class"] = th.optim.RMSprop
            policy_kwargs["optimizer_kwargs"] = {"alpha": 0.99, "eps": rms_prop_eps, "weight_decay": 0}
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            return_horizon=return_horizon,
            normalize_advantage=normalize_advantage,
            policy_kwargs=policy_kwargs,
            **_ONE_UPDATE,
            **kwargs,
        )

    def _setup_model(self) -> None:
        if self.normalize_advantage and self.n_steps * self.n_envs == 1:
            raise ValueError("normalize_advantage: expected n_steps · n_envs > 1, the spread of a single row is NaN")
        vars(self).update(_ONE_UPDATE)  # also after a load of PPO's zip
        super()._setup_model()

    def train(self) -> None:
        """Make one update with the rows of the rollout."""
        super().train()
        self.logger.record("train/n_step_mean", self.rollout_buffer.mean_window)  # type: ignore[attr-defined]

    def learn(
        self: SelfA2C,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 100,
        tb_log_name: str = "A2C",
        *args: Any,
        **kwargs: Any,
    ) -> SelfA2C:
        """As in sb3-contrib, logging as often as A2C does."""
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, *args, **kwargs)


class NStepMaskableA2C(_A2CMixin, MaskablePPO):
    """
    A2C with invalid action masking and N-step targets: sb3-contrib's ``MaskablePPO``, reduced to A2C's update.
    Policies, ``predict(action_masks=…)``, ``learn(use_masking=…)`` and what an environment has to offer are those of
    ``MaskablePPO``. Takes A2C's arguments, in its order as far as ``use_rms_prop`` and by keyword from there on, but
    for those of the rollout buffer, and for ``use_sde`` and ``sde_sample_freq``, which ``MaskablePPO`` has not:

    :param return_horizon: N, the environment steps that a target looks ahead before it bootstraps: an int, or one per
        environment. ``None``: the length of the rollout, as in A2C
    :raises ValueError: if it is neither, if an argument is given that belongs to PPO or to ``NStepA2C`` alone, or if
        ``normalize_advantage`` is asked for the single row of ``n_steps=1`` in one environment

    Not that of :class:`~sb3_nstep.NStepA2C`: windows are shortened at the rollout's end (no ``carry_over``, and so no
    ``correction``), N has no schedule, integer rewards lose the fraction that a time limit adds. Dropout and batch
    normalisation make the ratio of PPO differ from 1, with which rows are weighted then.
    """


class NStepRecurrentA2C(_A2CMixin, RecurrentPPO):
    """
    A2C for LSTM policies, with N-step targets: sb3-contrib's ``RecurrentPPO``, reduced to A2C's update. Policies and
    their states are those of ``RecurrentPPO``. The gradient goes back through time as far as the rollout's first row;
    in one environment, drawn at random, it is cut once more, where sb3-contrib's buffer begins its batch.
    Arguments, and what it does not do: those of :class:`NStepMaskableA2C`; it has ``use_sde`` and ``sde_sample_freq``.
    """
