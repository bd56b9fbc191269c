"""What a run will take, said before it starts: memory of the drafter's device, and disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from draftline.config import DFlashConfig, RunConfig, slots_per_chunk
from draftline.draft.model import DFlashDraftModel
from draftline.errors import StorageError
from draftline.train.run_folder import RunFolder

_WEIGHT_BYTES = 4
_STEP_COPIES = 4
"""Weights, gradients and both moments, all float32; Muon keeps one moment, and needs the room while it moves."""
_LOGITS_COPIES, _TEACHER_COPIES = 2, 4
"""Logits of a chunk and their gradient; the target's logits and probabilities, and two tables that compare them."""
_CHECKPOINT_COPIES = 3
"""Weights and both moments."""


@dataclass(frozen=True)
class RunEstimate:
    """Bytes, from shapes alone; activations of the drafter's layers come on top.

    Attributes:
        parameters: of the drafter.
        drafter_bytes: weights, gradients and optimiser state.
        row_bytes: captured states of the longest row.
        logits_bytes: logits and their gradient of one chunk of the loss.
        queue_bytes: rows that wait, at most (0 without a queue).
        checkpoint_bytes: one checkpoint on disk.
        checkpoints: how many exist at the same time at most.
    """

    parameters: int
    drafter_bytes: int
    row_bytes: int
    logits_bytes: int
    queue_bytes: int
    checkpoint_bytes: int
    checkpoints: int

    @property
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints

    def sentence(self) -> str:
        """One line for people."""
        return (
            f"drafter of {self.parameters / 1e6:,.1f}M parameters; memory: {_size(self.drafter_bytes)} for it, "
            f"{_size(self.row_bytes)} per step's rows, {_size(self.logits_bytes)} for logits, "
            f"up to {_size(self.queue_bytes)} queued; disk: {_size(self.disk_bytes)} in {self.checkpoints} checkpoints"
        )


def estimate_run(config: RunConfig, drafter: DFlashConfig, state_bytes: int, longest: int) -> RunEstimate:
    """Estimate a run.

    Args:
        state_bytes: size of one number of the captured states.
        longest: tokens of the longest conversation; a row is at least that long.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DFlashDraftModel(drafter).parameters())
    tables = _LOGITS_COPIES + (_TEACHER_COPIES if config.loss.teaches_distribution else 0)
    slots = config.loss.chunk_size or slots_per_chunk(drafter.head_rows)
    tokens = max(config.train.tokens_per_row, longest) * config.train.rows_per_step
    return RunEstimate(
        parameters=parameters,
        drafter_bytes=parameters * _WEIGHT_BYTES * _STEP_COPIES,
        row_bytes=tokens * len(drafter.target_layer_ids) * drafter.hidden_size * state_bytes,
        logits_bytes=tables * slots * drafter.head_rows * _WEIGHT_BYTES,
        queue_bytes=config.pipeline.queue_bytes if config.pipeline.mode == "threads" else 0,
        checkpoint_bytes=parameters * _WEIGHT_BYTES * _CHECKPOINT_COPIES,
        checkpoints=config.train.keep_last + 2,
    )


def check_disk(folder: Path, estimate: RunEstimate) -> None:
    """Refuse to start or continue a run whose checkpoints do not fit beside what else is on the disk.

    Raises:
        StorageError: less is free where `folder` will be than the run needs.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    own = sum(file.stat().st_size for file in RunFolder(folder).checkpoints.glob("*/*"))
    free = shutil.disk_usage(existing).free + own
    if free < estimate.disk_bytes:
        raise StorageError(
            f"{folder} needs {_size(estimate.disk_bytes)} for checkpoints and {_size(free)} are free: "
            "free space, lower train.keep_last, or name a folder on another disk"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
