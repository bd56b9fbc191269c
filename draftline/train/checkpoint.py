"""Checkpoints of a run: complete or absent, checked when read.

    RUN/checkpoints/step-000200/
        drafter.safetensors     weights, float32, under the names that serving engines read
        optimizer.safetensors   both moments and the update count of every parameter
        random.safetensors      state of torch's generators
        state.json              progress, configurations, checksums of the three files above
    RUN/last -> checkpoints/step-000200      RUN/best -> checkpoints/step-000150

A checkpoint is written under another name, synced, and renamed, so a folder called `step-...` is complete whatever
happened: `kill -9`, a full disk, a power cut. `best` is the one with the highest streak on held-out data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.config import DFlashConfig, RunConfig
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError
from draftline.storage import new_folder, point_link, remove_folder, remove_leftovers
from draftline.train.state import TrainState, TrainStateJson

FORMAT_VERSION = 1
_TENSOR_FILES = ("drafter.safetensors", "optimizer.safetensors", "random.safetensors")
_STATE_FILE = "state.json"
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


class StateFile(TypedDict):
    """Exactly what `state.json` holds."""

    format_version: int
    progress: TrainStateJson
    run_config: dict[str, Any]
    drafter_config: dict[str, Any]
    data_fingerprint: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A run at one moment.

    Attributes:
        weights: the drafter's parameters by name.
        moments: the optimiser's tensors, as `optim.optimizer_tensors` names them.
        random: states of torch's generators, see `random_states`.
        state: progress.
        run_config: settings of the run.
        drafter_config: complete shape of the drafter.
        data_fingerprint: of the prepared training data.
    """

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    random: dict[str, Tensor]
    state: TrainState
    run_config: RunConfig
    drafter_config: DFlashConfig
    data_fingerprint: str


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write one checkpoint folder, which must not exist yet.

    Raises:
        StorageError: the disk is full or refuses; nothing is left behind.
    """
    with new_folder(folder) as temporary:
        parts = (checkpoint.weights, checkpoint.moments, checkpoint.random)
        for name, tensors in zip(_TENSOR_FILES, parts, strict=True):
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, temporary / name)
        content: StateFile = {
            "format_version": FORMAT_VERSION,
            "progress": checkpoint.state.to_json(),
            "run_config": checkpoint.run_config.model_dump(mode="json"),
            "drafter_config": checkpoint.drafter_config.model_dump(mode="json"),
            "data_fingerprint": checkpoint.data_fingerprint,
            "sha256": {name: _sha256(temporary / name) for name in _TENSOR_FILES},
        }
        (temporary / _STATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint folder to CPU and check it against its checksums.

    Raises:
        CheckpointError: it is not a checkpoint, of another version, incomplete, or damaged.
    """
    content = _read_state(folder)
    weights, moments, random = (_read_tensors(folder, name, content["sha256"][name]) for name in _TENSOR_FILES)
    try:
        return Checkpoint(
            weights=weights,
            moments=moments,
            random=random,
            state=TrainState.from_json(content["progress"]),
            run_config=RunConfig.model_validate(content["run_config"]),
            drafter_config=DFlashConfig.model_validate(content["drafter_config"]),
            data_fingerprint=content["data_fingerprint"],
        )
    except ValidationError as error:
        raise _other_version(folder) from error


def load_draft_model(folder: Path) -> DFlashDraftModel:
    """The drafter of a checkpoint folder, or of the best checkpoint of a run folder (the last where none is best).

    Raises:
        CheckpointError: there is none, or it cannot be used.
    """
    folder = checkpoint_folder(folder) or folder
    content = _read_state(folder)
    weights = _read_tensors(folder, _TENSOR_FILES[0], content["sha256"][_TENSOR_FILES[0]])
    try:
        model = DFlashDraftModel(DFlashConfig.model_validate(content["drafter_config"]))
    except ValidationError as error:
        raise _other_version(folder) from error
    load_weights(model, weights, folder)
    return model.eval()


def checkpoint_folder(folder: Path) -> Path | None:
    """The checkpoint that a run of ours offers: its best, else its last; the folder itself if it is one; else None."""
    places = (folder, folder / "best", folder / "last")
    return next((place for place in places if (place / _STATE_FILE).is_file()), None)


def load_weights(draft_model: DFlashDraftModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Copy weights into the drafter; every name and shape must match.

    Raises:
        CheckpointError: one does not; `folder` is what the message names.
    """
    wanted = {name: tensor.shape for name, tensor in draft_model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(f"{folder}: tensor {wrong[0]} does not fit the drafter's configuration: use its own run")
    draft_model.load_state_dict(dict(weights))


def random_states() -> dict[str, Tensor]:
    """States of torch's own generators, on CPU and of each CUDA device. Nothing else draws in the drafter loop."""
    devices = range(torch.cuda.device_count())
    return {"cpu": torch.get_rng_state(), **{f"cuda:{i}": torch.cuda.get_rng_state(i) for i in devices}}


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Put generators back; states of devices that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)


class CheckpointStore:
    """The checkpoints of one run folder.

    Arguments:
        run_folder: holds `checkpoints/`, `last` and `best`.
        keep_last: how many of the newest stay; the best one stays besides.
    """

    def __init__(self, run_folder: Path, keep_last: int) -> None:
        self._run_folder = run_folder
        self._folder = run_folder / "checkpoints"
        self._keep_last = keep_last

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint unless its step has one, then `tidy`.

        Raises:
            StorageError: the disk is full or refuses; all earlier checkpoints are intact.
        """
        folder = self._of_step(checkpoint.state.step)
        if not folder.exists():
            write_checkpoint(folder, checkpoint)
        self.tidy(checkpoint.state)
        return folder

    def newest(self) -> Path | None:
        """Folder of the newest checkpoint, none if there is no checkpoint yet."""
        steps = self._steps()
        return self._of_step(steps[-1]) if steps else None

    def tidy(self, state: TrainState) -> None:
        """Make everything agree with a state whose checkpoint exists: links, what is kept, nothing unfinished.

        Done after every checkpoint, and after a resume, in case the process died before it could.
        """
        point_link(self._run_folder / "last", self._of_step(state.step))
        if state.best_step is not None and self._of_step(state.best_step).exists():
            point_link(self._run_folder / "best", self._of_step(state.best_step))
        for step in self._steps()[: -self._keep_last]:
            if step != state.best_step:
                remove_folder(self._of_step(step))
        remove_leftovers(self._folder)

    def _steps(self) -> list[int]:
        matches = (_STEP_FOLDER.fullmatch(path.name) for path in self._folder.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)

    def _of_step(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"


def _other_version(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} was written by another version of Draftline: use that version")


def _read_state(folder: Path) -> StateFile:
    path = folder / _STATE_FILE
    try:
        content: StateFile = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint ({_STATE_FILE} is missing): name another folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: delete this checkpoint and use an earlier one") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has format {version}, known here is {FORMAT_VERSION}: update Draftline")
    if set(content) != set(StateFile.__annotations__) or set(content["sha256"]) != set(_TENSOR_FILES):
        raise CheckpointError(f"{path} lacks entries: delete this checkpoint and use an earlier one")
    return content


def _read_tensors(folder: Path, name: str, sha256: str) -> dict[str, Tensor]:
    path = folder / name
    try:
        if _sha256(path) == sha256:
            return load_file(path)
        reason = "does not match its checksum"
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "cannot be read"
    raise CheckpointError(f"{path} {reason}: copy the checkpoint again, or delete it and use an earlier one")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
