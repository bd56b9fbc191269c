"""The live objects that one training run uses, each replaceable.

The audit examines these and no configuration strings: whatever the run will call is called here, with inputs for
which the right answer is known from elsewhere. Tests plant faults by replacing exactly one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from draftline.config import LossConfig, RunConfig
from draftline.data.sampler import RowPlan
from draftline.draft.attention import Attention
from draftline.draft.block import FrozenTarget
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.generate import Generation
from draftline.records import CapturedSample, PackedBatch, Sample, StepMetrics
from draftline.targets.model import Target
from draftline.train.step import StepResult


class NotApplicable(Exception):
    """Raised by a check for whose object there is nothing to examine in this subject; the message says what."""


class RowLoss(Protocol):
    """`draftline.train.step.row_loss`."""

    def __call__(
        self,
        draft_model: DFlashDraftModel,
        batch: PackedBatch,
        anchor_positions_A: Tensor,
        frozen: FrozenTarget,
        loss: LossConfig,
        attention: type[Attention],
    ) -> tuple[Tensor, StepMetrics]:
        """Undivided loss and metrics of one row."""


class TrainStep(Protocol):
    """`draftline.train.step.train_step`."""

    def __call__(
        self,
        *,
        draft_model: DFlashDraftModel,
        batches: Sequence[PackedBatch],
        anchors: Sequence[Tensor],
        frozen: FrozenTarget,
        optimizer: Optimizer,
        loss: LossConfig,
        attention: type[Attention],
        clip_norm: float,
    ) -> StepResult:
        """One optimiser step."""


class Generate(Protocol):
    """`draftline.evaluate.generate.generate`, greedy."""

    def __call__(
        self,
        target: Target,
        draft_model: DFlashDraftModel,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        stop_token_ids: Collection[int] = (),
    ) -> Generation:
        """Decode with the drafter."""


class Export(Protocol):
    """Writes the drafter into a folder that does not exist yet."""

    def __call__(self, draft_model: DFlashDraftModel, folder: Path, /) -> None:
        """Write the exported drafter."""


class SaveState(Protocol):
    """Writes weights and optimiser to a folder."""

    def __call__(self, draft_model: DFlashDraftModel, optimizer: Optimizer, folder: Path, /) -> None:
        """Write a checkpoint."""


class RestoreState(Protocol):
    """Reads them back into a drafter and an optimiser of the same shape."""

    def __call__(self, draft_model: DFlashDraftModel, optimizer: Optimizer, folder: Path, /) -> None:
        """Restore a checkpoint."""


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Conversations as the run reads them.

    Attributes:
        samples: a few hundred at most, of the training part.
        heldout: of the held-out part.
        report: what `prepare` wrote: rows in and out, drops, tokens; empty if unknown.
        meta: hashes of tokenizer and template, serving mode; empty if unknown.
        num_samples: how many there are in all.
        num_tokens: in all.
    """

    samples: Sequence[Sample]
    heldout: Sequence[Sample] = ()
    report: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, eq=False)
class AuditSubject:
    """Everything that one run uses.

    Attributes:
        capture: samples to captured samples, as the run's target loop does it.
        pack: captured samples to one row.
        draw_anchors: row, budget per document, seed -> [A] positions.
        frozen: the target's embedding and head as the loss uses them.
        row_loss, train_step: the loss of a row, and one step of the optimiser.
        attention: implementation used in training.
        make_optimizer: a fresh optimiser over a drafter's parameters.
        learning_rate: update number and number of updates -> rate.
        set_learning_rate: makes an optimiser use a rate.
        save_state, restore_state: checkpoint of drafter and optimiser.
        export: writes the drafter that will be served; None if its format cannot express it.
        generate: the decoder that measures acceptance.
        acceptance_length: generations to the reported number.
        teacher_forced: drafter, prompt and answer ids to the estimate from the training forward.
        data: prepared conversations, if there are any yet.
        trained: whether the weights come from training, so that acceptance means something.
        folder: a finished drafter's folder; what lies there is examined instead of a fresh export.
        scratch: makes temporary folders.
    """

    config: RunConfig
    target: Target
    draft_model: DFlashDraftModel
    capture: Callable[[Sequence[Sample]], list[CapturedSample]]
    pack: Callable[[RowPlan, Sequence[CapturedSample]], PackedBatch]
    draw_anchors: Callable[[PackedBatch, int, int], Tensor]
    frozen: FrozenTarget
    row_loss: RowLoss
    train_step: TrainStep
    attention: type[Attention]
    make_optimizer: Callable[[DFlashDraftModel], Optimizer]
    learning_rate: Callable[[int, int], float]
    set_learning_rate: Callable[[Optimizer, float], None]
    save_state: SaveState
    restore_state: RestoreState
    export: Export
    generate: Generate
    acceptance_length: Callable[[Sequence[Generation]], float]
    teacher_forced: Callable[[DFlashDraftModel, Sequence[tuple[list[int], list[int]]]], float]
    scratch: Callable[[], AbstractContextManager[str]]
    data: PreparedData | None = None
    trained: bool = False
    folder: Path | None = None
