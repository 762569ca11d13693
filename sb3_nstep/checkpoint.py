"""Checkpoints from which training goes on as if it had not been interrupted. SB3's zips, with what those leave out."""

import io
import os
import pathlib
import random
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv

from sb3_nstep import distributed
from sb3_nstep.buffers import NStepMixin
from sb3_nstep.targets import Array

SelfOnPolicyAlgorithm = TypeVar("SelfOnPolicyAlgorithm", bound=OnPolicyAlgorithm)

_MEMBER = "sb3_nstep.npz"  # SB3 does not look at it


def save_checkpoint(model: OnPolicyAlgorithm, path: str | pathlib.Path) -> None:
    """
    Save a model as ``model.save`` does, and in the same zip the rows that wait for their windows and the random states
    of torch, numpy and Python. ``load`` opens it as well, and leaves these alone.

    To lose nothing, call it in ``_on_rollout_start`` of a callback, or after ``learn``: a rollout under way is not
    saved. (With gSDE, whose noise is drawn before that, a run that goes on from ``_on_rollout_start`` has other noise.)

    :param model: an :class:`~sb3_nstep.NStepA2C`, or another on-policy algorithm
    :param path: where to; what is there already is replaced at the end, whole, or not at all
    :raises OSError: names the file, if it cannot be written
    """
    path = pathlib.Path(path)
    state = {f"random.{name}": array for name, array in _random_states().items()}
    if isinstance(model.rollout_buffer, NStepMixin):
        state |= {f"rows.{name}": array for name, array in model.rollout_buffer.state_dict().items()}
    member = io.BytesIO()
    np.savez(member, **state)  # type: ignore[arg-type]
    with written_whole(path if path.suffix else path.with_suffix(".zip")) as temporary:
        model.save(temporary)
        with zipfile.ZipFile(temporary, "a") as archive:
            archive.writestr(_MEMBER, member.getvalue())


def load_checkpoint(
    algorithm: type[SelfOnPolicyAlgorithm],
    path: str | pathlib.Path,
    env: GymEnv | None = None,
    force_reset: bool = False,
    **kwargs: Any,
) -> SelfOnPolicyAlgorithm:
    """
    Load what :func:`save_checkpoint` saved, to go on with ``learn(…, reset_num_timesteps=False)``.

    A zip is code: SB3 unpickles parts of it. Load none from people whom you would not let run a program.

    :param algorithm: the class of the model
    :param path: the file
    :param env: the environments, as many as there were
    :param force_reset: ``False``: they are where they were when the model was saved. ``True``: they begin anew, and the
        windows of the waiting rows end there, as at any reset from outside
    :param kwargs: for ``algorithm.load``
    :return: the model. In a torch.distributed process group its windows begin empty: the waiting rows are one rank's
    :raises ValueError: if the file is damaged, or the environments are not as many as they were
    """
    path = pathlib.Path(path)
    path = path if path.suffix else path.with_suffix(".zip")
    with open(path, "rb") as file:
        try:
            member = _read_member(file)
        # A spoilt header says anything: encrypted, of a later version, of a part before the file's beginning
        except (zipfile.BadZipFile, EOFError, zlib.error, RuntimeError, OSError) as error:
            raise ValueError(f"{path}: expected a checkpoint, got a file that is damaged: {error}") from error
    model = algorithm.load(path, env, force_reset=force_reset, **kwargs)
    starts = model._last_episode_starts
    if env is not None and not force_reset and starts is not None and len(starts) != model.n_envs:
        raise ValueError(
            f"env: expected {len(starts)} environments, as there were, since they go on (force_reset=False), "
            f"got {model.n_envs}"
        )
    if member is not None:
        state = dict(np.load(io.BytesIO(member), allow_pickle=False))
        if isinstance(model.rollout_buffer, NStepMixin):
            model.rollout_buffer.load_state_dict(_part(state, "rows."))
        if distributed.rank() == 0:  # whose they are; the same on all ranks, all would act alike
            _set_random_states(_part(state, "random."))
    return model


def _read_member(file: IO[bytes]) -> bytes | None:
    """What is ours in a zip, once all of it has proved to be as it was written."""
    with zipfile.ZipFile(file) as archive:
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{damaged} has another checksum than it had")
        names = archive.namelist()
        # The first half of such a zip ends with a zip of torch's
        if missing := {"data", "policy.pth", "policy.optimizer.pth"}.difference(names):
            raise zipfile.BadZipFile(f"it is cut off, or spoilt: {', '.join(sorted(missing))} is missing")
        return archive.read(_MEMBER) if _MEMBER in names else None


@contextmanager
def written_whole(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """
    A temporary path, beside ``path``, that takes its place at the end: a kill leaves the old file or the new one.

    :raises OSError: names ``path``, if that cannot be written
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}")  # the suffix stays: SB3 and Pillow go by it
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written, and is as it was: {error.strerror}", str(path)) from error


def _random_states() -> dict[str, Array]:
    version, key, gauss = random.getstate()
    mt19937 = np.random.get_state(legacy=False)
    states = {
        "torch": th.get_rng_state().numpy(),
        "numpy": mt19937["state"]["key"],
        "numpy_rest": np.array([mt19937["state"]["pos"], mt19937["has_gauss"], mt19937["gauss"]]),
        "python": np.array([version, *key]),
        "python_gauss": np.array([] if gauss is None else [gauss]),
    }
    if th.cuda.is_available():
        states |= {f"cuda_{i}": state.numpy() for i, state in enumerate(th.cuda.get_rng_state_all())}
    return states


def _set_random_states(states: dict[str, Array]) -> None:
    th.set_rng_state(th.from_numpy(states["torch"]))
    pos, has_gauss, gauss = states["numpy_rest"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(pos), int(has_gauss), gauss))
    version, *key = states["python"].tolist()
    random.setstate((version, tuple(key), *(states["python_gauss"].tolist() or [None])))
    cuda = [states[f"cuda_{i}"] for i in range(th.cuda.device_count()) if f"cuda_{i}" in states]
    th.cuda.set_rng_state_all(list(map(th.from_numpy, cuda)))


def _part(state: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
