"""A2C whose targets look ``return_horizon`` steps ahead, whatever the number of steps between two updates."""

import io
import math
import pathlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.utils import explained_variance
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from torch.nn import functional as F

from sb3_nstep import distributed, faults
from sb3_nstep.buffers import NStepDictRolloutBuffer, NStepMixin, NStepRolloutBuffer

SelfNStepA2C = TypeVar("SelfNStepA2C", bound="NStepA2C")
Correction = Literal["none", "importance", "vtrace"]

# NaN is in none of these
_NUMBERS = {
    "gamma": (0, 1),
    "gae_lambda": (0, 1),
    "vf_coef": (0, math.inf),
    "ent_coef": (-math.inf, math.inf),
    "max_grad_norm": (0, math.inf),
}
_MOST_SECONDS = 1_000_000  # the system counts a wait in milliseconds, in 32 bits


class NStepA2C(A2C):
    """
    A2C with exact N-step targets, one stream of experience per environment. Stands where
    :class:`~stable_baselines3.A2C` stands, takes all of its arguments in its order and, by keyword:

    :param return_horizon: N, the environment steps that a target looks ahead before it bootstraps (``n_steps`` is T,
        the steps between two updates): an int, or one per environment, or a schedule: a function of the remaining
        progress (from 1 to 0) that returns either, read at the start of each rollout. ``None``: N = T
    :param carry_over: ``True``: the last N − 1 rows of a rollout wait until their windows are whole, so that each row
        is trained on once, with all of its N steps; no update is made while no window is whole (the first ⌈N/T⌉ − 1
        rollouts). ``False``: windows are shortened at the rollout's end; with ``return_horizon=None`` this is A2C to
        the last bit, but for integer rewards and the normalised advantage of a single row, where A2C is wrong
    :param correction: what is made of the rows that waited, which an older policy μ acted. ``"none"``: nothing.
        ``"importance"``: min(1, π/μ) weights their policy gradient, whose baseline V is evaluated anew. ``"vtrace"``:
        targets and policy gradient are those of IMPALA inside the window (https://arxiv.org/abs/1802.01561)
    :param channels_last: for image policies: whether the network's convolutions work on images in the channels-last
        memory format, which is faster on most machines
    :param autocast: ``"bf16"``: the features extractor computes in bfloat16, all else stays float32. ``None``: nothing
        does. Neither of these two changes what is saved
    :param check_finite: whether ``learn`` ends with a NotFiniteError, before the update, where a number in the
        rollout, or the norm of the gradient, is not finite
    :param worker_timeout: seconds that a worker of ``SubprocVecEnv`` may take for a step or a reset in ``learn`` before
        it counts as dead; ``None``: as long as it likes
    :raises ValueError: if one of these is not as described, or if ``rollout_buffer_class`` is no N-step buffer

    Logs beside A2C's: ``train/n_step_mean``, the mean length of the windows used; ``train/stale_fraction``, how many of
    the rows waited; ``train/rho_mean``, the mean over all rows of min(1, π/μ).

    Where a torch.distributed process group is initialised when ``learn`` starts, its processes train one model together
    (docs/distributed.md).

    A2C: https://arxiv.org/abs/1602.01783
    """

    rollout_buffer: NStepMixin

    def __init__(
        self,
        *args: Any,
        return_horizon: int | Sequence[int] | Callable[[float], int | Sequence[int]] | None = None,
        carry_over: bool = True,
        correction: Correction = "importance",
        channels_last: bool = False,
        autocast: Literal["bf16"] | None = None,
        check_finite: bool = True,
        worker_timeout: float | None = None,
        **kwargs: Any,
    ):
        # Before the parent's constructor, which calls _setup_model()
        self.return_horizon = return_horizon
        self.carry_over = carry_over
        self.correction = correction
        self.channels_last = channels_last
        self.autocast = autocast
        self.check_finite = check_finite
        self.worker_timeout = worker_timeout
        self._rollout_env: _RolloutEnv | None = None
        self._ranks: distributed.Ranks | None = None
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        buffer_class = self.rollout_buffer_class or (
            NStepDictRolloutBuffer if isinstance(self.observation_space, spaces.Dict) else NStepRolloutBuffer
        )
        if not (isinstance(buffer_class, type) and issubclass(buffer_class, NStepMixin)):
            raise ValueError(
                "rollout_buffer_class: expected None or a subclass of NStepRolloutBuffer or NStepDictRolloutBuffer, "
                f"got {buffer_class!r}"
            )
        if self.env is not None:
            self._check_env(self.env)
        for name in ("return_horizon", "carry_over"):
            if name in self.rollout_buffer_kwargs:
                raise ValueError(
                    f"rollout_buffer_kwargs: {name} is an argument of {type(self).__name__}, give it there (to load a "
                    "zip of another algorithm that has it here, give rollout_buffer_kwargs={} as well)"
                )
        if not (isinstance(self.n_steps, (int, np.integer)) and self.n_steps is not True and self.n_steps >= 1):
            raise ValueError(f"n_steps: expected an int ≥ 1, got {self.n_steps!r}")
        for name, (least, most) in _NUMBERS.items():
            number = getattr(self, name)
            if not (isinstance(number, Real) and least <= float(number) <= most):
                raise ValueError(f"{name}: expected a number from {least} to {most}, got {number!r}")
        for name in ("carry_over", "channels_last", "check_finite"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.correction not in get_args(Correction):
            raise ValueError(f"correction: expected one of {get_args(Correction)}, got {self.correction!r}")
        if not (self.worker_timeout is None or _is_seconds(self.worker_timeout)):
            raise ValueError(
                f"worker_timeout: expected None or a number of seconds > 0 and up to {_MOST_SECONDS:,}, got "
                f"{self.worker_timeout!r}"
            )
        if self.autocast not in (None, "bf16"):
            raise ValueError(f'autocast: expected None or "bf16", got {self.autocast!r}')
        # Bound only while the buffer is built: a class of ours in a saved zip could not be opened without this package
        self.rollout_buffer_class = partial(
            buffer_class, return_horizon=self._horizon_now(), carry_over=bool(self.carry_over)
        )  # type: ignore[assignment]
        try:
            super()._setup_model()
        finally:
            self.rollout_buffer_class = None
        self._speed_up()
        if self.check_finite:
            self.policy.optimizer.register_step_pre_hook(faults.check_gradients)

    def _check_env(self, env: VecEnv) -> None:
        autoreset_mode = getattr(env.unwrapped, "metadata", None) or {}
        if getattr(autoreset_mode.get("autoreset_mode"), "value", None) == "NextStep":
            raise ValueError(
                "env: expected environments that are reset in the step that ends an episode, as SB3's are, got "
                "autoreset_mode NEXT_STEP. The step behind each end of an episode is one that nobody lived; ask for "
                "AutoresetMode.SAME_STEP, or let the adapter drop it"
            )
        normalize = unwrap_vec_normalize(env)
        # Without training, its gamma is not used
        if normalize is not None and normalize.training and normalize.norm_reward and normalize.gamma != self.gamma:
            warnings.warn(
                f"VecNormalize has gamma={normalize.gamma}, the algorithm gamma={self.gamma}: rewards are divided by "
                "the spread of returns that are discounted otherwise"
            )

    def _speed_up(self) -> None:
        """Apply ``channels_last`` and ``autocast`` to the policy just built: to what is not part of its parameters."""
        extractors = {self.policy.pi_features_extractor, self.policy.vf_features_extractor}
        layers = [layer for extractor in extractors for layer in extractor.modules()]
        for name, is_asked, kinds in (
            ("channels_last", self.channels_last, (th.nn.Conv2d,)),
            ("autocast", self.autocast, (th.nn.Conv2d, th.nn.Linear)),
        ):
            if is_asked and not any(isinstance(layer, kinds) for layer in layers):
                raise ValueError(
                    f"{name}: expected a policy whose features extractor has layers to apply it to "
                    f"({', '.join(kind.__name__ for kind in kinds)}), as in CnnPolicy, got {type(self.policy).__name__}"
                )
        if self.channels_last:
            # A convolution takes its input to the format of its weights
            self.policy.to(memory_format=th.channels_last)  # type: ignore[call-overload]
        if self.autocast:
            for extractor in extractors:
                extractor.forward = partial(_in_bfloat16, extractor.forward, self.device.type)

    def _horizon_now(self) -> Any:
        if not callable(self.return_horizon):
            return self.return_horizon
        # Not SB3's _current_progress_remaining, which in a second learn() is still that of the first one's end
        progress = 1.0 - self.num_timesteps / self._total_timesteps if self._total_timesteps else 1.0
        return self.return_horizon(max(0.0, progress))  # the last rollout may go beyond the total

    def learn(
        self: SelfNStepA2C,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 100,
        tb_log_name: str = "A2C",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfNStepA2C:
        """
        As in SB3. After these errors the model can be saved, and goes on from its last update; the rows at hand, those
        that wait too, are dropped.

        :raises WorkerError: a worker of ``SubprocVecEnv`` has died: names the environment. All of them are closed
        :raises NotFiniteError: see ``check_finite``
        """
        try:
            with faults.watched_workers(self.env, self.worker_timeout):
                return super().learn(
                    total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar
                )
        except (faults.WorkerError, faults.NotFiniteError):
            self.rollout_buffer.drop()
            raise

    def set_random_seed(self, seed: int | None = None) -> None:
        """As in SB3. In a process group, the environments of all ranks are seeded as those of one process would be."""
        self._seeded_rank = distributed.rank()
        super().set_random_seed(None if seed is None else seed + self._seeded_rank * self.n_envs)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        self._ranks = distributed.Ranks.join(self)
        if self._ranks is not None:
            total_timesteps, reset_num_timesteps = self._ranks.start(total_timesteps, reset_num_timesteps)
            callback, progress_bar = self._ranks.quieten(callback, progress_bar)
            if self._seeded_rank != self._ranks.rank:  # built before there was a process group
                self.set_random_seed(self.seed)
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        if self._rollout_env is None or self._rollout_env.venv is not env:
            self._rollout_env = _RolloutEnv(env)
        self._rollout_env.ranks = self._ranks
        self._rollout_env.checked = rollout_buffer if self.check_finite else None
        self.rollout_buffer.return_horizon = self._horizon_now()
        try:
            go_on = super().collect_rollouts(self._rollout_env, callback, rollout_buffer, n_rollout_steps)
        except (ValueError, RuntimeError):
            if self.check_finite:  # torch cannot sample from NaN, and does not know where it comes from
                faults.check_rollout(rollout_buffer, self._last_obs)
            raise
        return go_on if self._ranks is None else self._ranks.end_rollout(go_on)

    def train(self) -> None:
        """Make one update with the rows whose windows are whole; none if there is no such row."""
        buffer = self.rollout_buffer
        if self.check_finite:
            faults.check_rollout(buffer, self._last_obs)
        if buffer.n_ready == 0:
            return
        rho_mean = 1.0
        # The spread of a single row is NaN: PPO knows that, A2C does not. Nor does it average gradients over ranks
        if buffer.carry_over or (self.normalize_advantage and buffer.n_ready == 1) or self._ranks is not None:
            rho_mean = self._train_corrected()
        else:
            super().train()
        self.logger.record("train/n_step_mean", buffer.mean_window)
        self.logger.record("train/stale_fraction", buffer.n_stale / buffer.n_ready)
        self.logger.record("train/rho_mean", rho_mean)

    def _train_corrected(self) -> float:
        """A2C's update, with the advantages and the returns that ``correction`` calls for. Returns the mean ratio."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)

        for rollout_data in self.rollout_buffer.get(batch_size=None):  # once
            values, log_prob, entropy = self._evaluate(rollout_data.observations, rollout_data.actions)
            # The rollout just collected was acted by the policy as it is: ratio 1, V as recorded
            stale = th.arange(len(values), device=self.device) < self.rollout_buffer.n_stale
            log_ratio = (log_prob.detach() - rollout_data.old_log_prob).clamp(max=0.0)
            rho = th.where(stale, log_ratio.exp(), 1.0)

            returns, advantages = rollout_data.returns, rollout_data.advantages
            if self.correction == "importance":
                advantages = rho * (returns - th.where(stale, values.detach(), rollout_data.old_values))
            elif self.correction == "vtrace" and self.rollout_buffer.n_stale:  # on-policy, V-trace is the N-step target
                returns, advantages = self._vtrace(values.detach(), log_prob.detach())
            if self.normalize_advantage:
                pool = advantages if self._ranks is None else self._ranks.gather(advantages)
                if len(pool) > 1:
                    advantages = (advantages - pool.mean()) / (pool.std() + 1e-8)

            policy_loss = -(advantages * log_prob).mean()
            value_loss = F.mse_loss(returns, values)
            entropy_loss = -th.mean(-log_prob if entropy is None else entropy)
            loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss

            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if self._ranks is not None:
                self._ranks.average_gradients()
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()

        self._n_updates += 1
        explained = explained_variance(self.rollout_buffer.values.flatten(), self.rollout_buffer.returns.flatten())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/explained_variance", explained)
        self.logger.record("train/entropy_loss", entropy_loss.item())
        self.logger.record("train/policy_loss", policy_loss.item())
        self.logger.record("train/value_loss", value_loss.item())
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())
        return rho.mean().item()

    def _evaluate(self, observations: Any, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        values, log_prob, entropy = self.policy.evaluate_actions(observations, actions)
        return values.flatten(), log_prob, entropy

    def _vtrace(self, values: th.Tensor, log_prob: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """V-trace's returns and advantages, for which the rows that go on waiting are evaluated as well."""
        buffer = self.rollout_buffer
        values, log_prob = values[: buffer.n_stale], log_prob[: buffer.n_stale]
        observations, actions = buffer.unfinished()
        if len(actions):
            with th.no_grad():
                more_values, more_log_prob, _ = self._evaluate(observations, actions)
            values, log_prob = th.cat([values, more_values]), th.cat([log_prob, more_log_prob])
        buffer.vtrace(values.cpu().numpy(), log_prob.cpu().numpy())
        return buffer.to_torch(buffer.returns.flatten()), buffer.to_torch(buffer.advantages.flatten())

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        super().set_env(env, force_reset)
        self._check_env(self.env)  # type: ignore[arg-type]
        # Without a reset, the change of environments shows in no episode start
        if hasattr(self, "rollout_buffer"):
            self.rollout_buffer.end_streams()

    @classmethod
    def load(
        cls: type[SelfNStepA2C],
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfNStepA2C:
        """
        As in SB3, of a zip that NStepA2C or A2C saved. The waiting rows are not part of it, and neither is a
        ``rollout_buffer_class``: the one in a zip of A2C is left there, one of your own is given here again.
        """
        custom_objects = {"rollout_buffer_class": None, **(custom_objects or {})}
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_rollout_env", "_ranks", "_seeded_rank"]


def _is_seconds(number: object) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and 0 < float(number) <= _MOST_SECONDS


def _in_bfloat16(forward: Callable[..., th.Tensor], device_type: str, *args: Any) -> th.Tensor:
    """``forward`` under autocast. The features are float32 again, and so is all that is computed from them."""
    with th.autocast(device_type, dtype=th.bfloat16):
        features = forward(*args)
    return features.float()


class _RolloutEnv(VecEnvWrapper):
    """
    What SB3's ``collect_rollouts`` takes for granted: it adds γ V(terminal observation) to the reward at a time limit,
    which an array of ints would swallow, and does without where there is no terminal observation.
    """

    def __init__(self, venv: VecEnv):
        super().__init__(venv)
        self.ranks: distributed.Ranks | None = None
        self.checked: RolloutBuffer | None = None
        self._has_warned = False

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        return self.venv.step_wait()

    def step(self, actions: np.ndarray) -> VecEnvStepReturn:
        # All that collect_rollouts calls, and not in two halves: a wrapper inside may have a step() of its own
        observations, rewards, dones, infos = self.venv.step(actions)
        if self.ranks is not None:
            self.ranks.count_step(infos, dones)
        if not np.issubdtype(rewards.dtype, np.floating):
            rewards = rewards.astype(np.float32)
        for index in np.flatnonzero(dones):
            if infos[index].get("TimeLimit.truncated"):
                self._look_at(int(index), infos[index].get("terminal_observation"))
        return observations, rewards, dones, infos

    def _look_at(self, index: int, terminal_observation: Any) -> None:
        if terminal_observation is not None:
            if self.checked is not None:
                faults.check_terminal_observation(terminal_observation, index, self.checked.pos)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Environment {index} reached a time limit without giving a terminal_observation: its targets "
                "bootstrap from 0 there, as after a termination. This is said once"
            )
