"""Checkpoints of a run: complete or absent, checked when read.

    drafter.safetensors     weights, float32, under the names that serving engines read
    optimizer.safetensors   what the optimiser remembers of every parameter (moments, update counts)
    random.safetensors      state of torch's generators
    state.json              progress, configurations, checksums of the three files above

A checkpoint is written under another name, synced, and renamed, so a folder called `step-...` is complete whatever
happened: `kill -9`, a full disk, a power cut. `best` is the one with the highest streak on held-out data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.config import DFlashConfig, RunConfig
from draftline.draft.loss import StepMetrics
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError
from draftline.storage import new_folder, reason_of, remove_folder, remove_leftovers
from draftline.train.ranks import Ranks
from draftline.train.run_folder import STATE_FILE, RunFolder, checkpoint_folder

FORMAT_VERSION = 1
_USE_ANOTHER = "copy the checkpoint again, or delete it and use an earlier one"
_PARTS = ("weights", "moments", "random")
_TENSOR_FILES = ("drafter.safetensors", "optimizer.safetensors", "random.safetensors")


MetricsJson = dict[str, float | int | list[float]]
"""The fields of `StepMetrics`, tables as lists; floats survive JSON exactly."""


class TrainStateJson(TypedDict):
    """What a checkpoint's `state.json` says about the progress of its run."""

    step: int
    next_row: int
    tokens: int
    seconds: float
    best_step: int | None
    best_streak: float | None
    window: MetricsJson
    logged_step: NotRequired[int]
    """Missing in checkpoints of version 0.1."""


@dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        window: metrics summed since the last line of `metrics.jsonl`. Kept in checkpoints, so that the first line
            after a resume averages over the same steps as in the uninterrupted run.
        step: optimiser steps done.
        next_row: sequence number of the row that comes next.
        tokens: row positions seen, padding excluded because there is none.
        seconds: wall-clock time of the run, earlier sessions included.
        best_step: step of the best checkpoint so far, none before the first evaluation.
        best_streak: its held-out streak.
        logged_step: step of the last line of `metrics.jsonl`; 0 where no line was written or an earlier version did.
    """

    window: StepMetrics
    step: int = 0
    next_row: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_streak: float | None = None
    logged_step: int = 0

    def count(self, metrics: StepMetrics, next_row: int) -> None:
        """Account for one optimiser step."""
        self.step += 1
        self.next_row = next_row
        self.tokens += metrics.tokens
        self.window = self.window + metrics

    def take_window(self) -> StepMetrics:
        """The metrics since the last call, and an empty window from now on: a line with them has been written."""
        window, self.logged_step = self.window, self.step
        self.window = StepMetrics.zero(len(window.slots_P))
        return window

    def note_streak(self, heldout_streak: float) -> bool:
        """Keep the best held-out streak and its step; true if this is the best so far. NaN never is."""
        if not heldout_streak > (float("-inf") if self.best_streak is None else self.best_streak):
            return False
        self.best_step, self.best_streak = self.step, heldout_streak
        return True

    def to_json(self) -> TrainStateJson:
        return {
            "step": self.step,
            "next_row": self.next_row,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "best_step": self.best_step,
            "best_streak": self.best_streak,
            "window": _metrics_to_json(self.window),
            "logged_step": self.logged_step,
        }

    @staticmethod
    def from_json(tree: TrainStateJson) -> TrainState:
        return TrainState(
            window=_metrics_from_json(tree["window"]),
            step=tree["step"],
            next_row=tree["next_row"],
            tokens=tree["tokens"],
            seconds=tree["seconds"],
            best_step=tree["best_step"],
            best_streak=tree["best_streak"],
            logged_step=tree.get("logged_step", 0),
        )


class StateFile(TypedDict):
    """Exactly what `state.json` holds."""

    format_version: int
    progress: TrainStateJson
    run_config: dict[str, Any]
    drafter_config: dict[str, Any]
    data_fingerprint: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class CheckpointRecord:
    """What a checkpoint says besides its tensors.

    Attributes:
        state: progress.
        run_config: settings of the run.
        drafter_config: complete shape of the drafter.
        data_fingerprint: of the prepared training data.
    """

    state: TrainState
    run_config: RunConfig
    drafter_config: DFlashConfig
    data_fingerprint: str


@dataclass(frozen=True)
class Checkpoint(CheckpointRecord):
    """A run at one moment.

    Attributes:
        weights: the drafter's parameters by name.
        moments: the optimiser's tensors, as `optim.optimizer_tensors` names them.
        random: states of torch's generators, see `random_states`.
    """

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    random: dict[str, Tensor]


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
        (temporary / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint folder to CPU and check it against its checksums.

    Raises:
        CheckpointError: it is not a checkpoint, of another version, incomplete, or damaged.
    """
    record, checksums = read_record(folder), read_state(folder)["sha256"]
    return Checkpoint(*_record_of(record), *(_read_tensors(folder, name, checksums[name]) for name in _TENSOR_FILES))


def read_record(folder: Path) -> CheckpointRecord:
    """What a checkpoint says besides its tensors, which are not read.

    Raises:
        CheckpointError: it is not a checkpoint, of another version, or its record is damaged.
    """
    content = read_state(folder)
    try:
        return CheckpointRecord(
            state=TrainState.from_json(content["progress"]),
            run_config=RunConfig.model_validate(content["run_config"]),
            drafter_config=DFlashConfig.model_validate(content["drafter_config"]),
            data_fingerprint=content["data_fingerprint"],
        )
    except ValidationError as error:
        raise _other_version(folder) from error
    except (LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} has a progress that is not one: {_USE_ANOTHER}") from error


def shared_checkpoint(ranks: Ranks, read: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that the first rank reads, on every rank, whatever the others see of its disk."""
    if ranks.count == 1:
        return read()
    held: list[Checkpoint] = []

    def describe() -> tuple[CheckpointRecord, dict[str, dict[str, tuple[Any, Any]]]] | None:
        checkpoint = read()
        if checkpoint is None:
            return None
        held.append(checkpoint)
        record = CheckpointRecord(*_record_of(checkpoint))
        forms = {part: {name: (t.shape, t.dtype) for name, t in getattr(checkpoint, part).items()} for part in _PARTS}
        return record, forms

    described = ranks.first(describe)
    if described is None:
        return None
    record, forms = described
    if not held:
        empty = (
            {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in forms[part].items()} for part in _PARTS
        )
        held.append(Checkpoint(*_record_of(record), *empty))
    ranks.share_([getattr(held[0], part)[name] for part in _PARTS for name in forms[part]])
    return held[0]


def _record_of(record: CheckpointRecord) -> tuple[TrainState, RunConfig, DFlashConfig, str]:
    return record.state, record.run_config, record.drafter_config, record.data_fingerprint


def load_draft_model(folder: Path) -> DFlashDraftModel:
    """The drafter of a checkpoint folder, or of the best checkpoint of a run folder (the last where none is best).

    Raises:
        CheckpointError: there is none, or it cannot be used.
    """
    folder = checkpoint_folder(folder) or folder
    content = read_state(folder)
    weights = _read_tensors(folder, _TENSOR_FILES[0], content["sha256"][_TENSOR_FILES[0]])
    try:
        model = DFlashDraftModel(DFlashConfig.model_validate(content["drafter_config"]))
    except ValidationError as error:
        raise _other_version(folder) from error
    load_weights(model, weights, folder)
    return model.eval()


def run_of(folder: Path) -> RunFolder | None:
    """The run that a folder is, or that the checkpoint in it belongs to; None for anything else."""
    checkpoint = checkpoint_folder(folder)
    places = () if checkpoint is None else (folder, checkpoint.resolve().parent.parent)
    return next((run for run in map(RunFolder, places) if run.exists or run.identity), None)


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

    Args:
        run_folder: where the run lies.
        keep_last: how many of the newest stay; the best one stays besides.
    """

    def __init__(self, run_folder: Path, keep_last: int) -> None:
        self._run = RunFolder(run_folder)
        self._keep_last = keep_last

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint unless its step has one, then `tidy`.

        Raises:
            StorageError: the disk is full or refuses; all earlier checkpoints are intact.
        """
        folder = self._run.step_folder(checkpoint.state.step)
        if not folder.exists():
            write_checkpoint(folder, checkpoint)
        self.tidy(checkpoint.state)
        return folder

    def newest(self) -> Path | None:
        """Folder of the newest checkpoint, none if there is no checkpoint yet."""
        return self._run.checkpoint("newest")

    def tidy(self, state: TrainState) -> None:
        """Make everything agree with a state whose checkpoint exists: links, what is kept, nothing unfinished.

        Done after every checkpoint, and after a resume, in case the process died before it could.
        """
        run = self._run
        run.point("last", state.step)
        if state.best_step is not None and run.step_folder(state.best_step).exists():
            run.point("best", state.best_step)
        for step in run.checkpoint_steps()[: -self._keep_last]:
            if step != state.best_step:
                remove_folder(run.step_folder(step))
        remove_leftovers(run.checkpoints)


def _other_version(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} was written by another version of Draftline: use that version")


def read_state(folder: Path) -> StateFile:
    """Content of a checkpoint's state.json, as it is written there.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    path = folder / STATE_FILE
    try:
        content: StateFile = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a checkpoint ({STATE_FILE} is missing): name another folder") from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): {_USE_ANOTHER}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has format {version}, known here is {FORMAT_VERSION}: update Draftline")
    kinds = {"progress": dict, "run_config": dict, "drafter_config": dict, "data_fingerprint": str, "sha256": dict}
    built = content.keys() == StateFile.__annotations__.keys()
    if not (built and all(isinstance(content.get(name), kind) for name, kind in kinds.items())):
        raise CheckpointError(f"{path} lacks entries: {_USE_ANOTHER}")
    if content["sha256"].keys() != set(_TENSOR_FILES):
        raise CheckpointError(f"{path} lacks checksums: {_USE_ANOTHER}")
    return content


def _read_tensors(folder: Path, name: str, sha256: str) -> dict[str, Tensor]:
    path = folder / name
    try:
        if _sha256(path) == sha256:
            return load_file(path)
        reason = "does not match its checksum"
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "cannot be read"
    raise CheckpointError(f"{path} {reason}: {_USE_ANOTHER}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _metrics_to_json(metrics: StepMetrics) -> MetricsJson:
    values = {field.name: getattr(metrics, field.name) for field in fields(StepMetrics)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def _metrics_from_json(tree: MetricsJson) -> StepMetrics:
    values = {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for name, value in tree.items()
    }
    return StepMetrics(**values)  # type: ignore[arg-type]  # names and types are those written by _metrics_to_json
