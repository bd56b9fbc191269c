"""What an audit examines, a run as `assemble` made it with its decoder and exporter, and how it is had from a folder.

Nothing is put together here but by `assemble`. Each method calls what training, evaluation and export call, looked up
where they look it up and when the audit asks, with inputs of the audit's own making: so a fault is reported where it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from draftline.audit.life import drawn_data
from draftline.config import DFlashConfig, LossConfig, RunConfig, TargetConfig
from draftline.data.dataset import PreparedDataset, open_data
from draftline.data.sampler import RowPlan
from draftline.data.split import RunData, choose_conversations
from draftline.draft.block import FrozenTarget
from draftline.draft.loss import StepMetrics
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ConfigError, DataError
from draftline.evaluate import generate
from draftline.formats import write
from draftline.formats.beginning import settings_of
from draftline.formats.load import LoadedDrafter
from draftline.formats.programs import formats_for
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.run import Run, assemble
from draftline.targets.model import Target, load_target
from draftline.train import step as step_module
from draftline.train.checkpoint import load_draft_model, read_checkpoint
from draftline.train.ranks import ALONE, Ranks
from draftline.train.run_folder import RunFolder, checkpoint_folder
from draftline.train.step import Drafter, StepResult
from draftline.transfer import pack as rows

_CONVERSATIONS_READ = 200
"""Conversations of each part of the data that the audit looks at, spread over all of it."""


class NotApplicable(Exception):
    """Raised by a check for whose object there is nothing to examine in this subject; the message says what."""


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
        own_masks: ids of samples of which the data itself said what is supervised: rows of token ids.
    """

    samples: Sequence[Sample]
    heldout: Sequence[Sample] = ()
    report: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 0
    num_tokens: int = 0
    own_masks: frozenset[int] = frozenset()


def prepared_data(
    data: RunData, report: dict[str, Any] | None = None, meta: dict[str, Any] | None = None
) -> PreparedData:
    """Some of the conversations that a run has chosen, and what is known about all of them.

    Args:
        report, meta: of the prepared folder, if the conversations come from one.
    """
    training, read = data.training, _spread(data.training_ids)
    known = training if isinstance(training, PreparedDataset) else None
    return PreparedData(
        samples=[training[int(i)] for i in read],
        heldout=[data.heldout[int(i)] for i in _spread(data.heldout_ids)],
        report=report or {},
        meta=meta or {},
        num_samples=len(data.training_ids),
        num_tokens=int(training.lengths[data.training_ids].sum()),
        own_masks=frozenset(int(i) for i in read if known is not None and known.has_own_mask(int(i))),
    )


def _spread(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most so many of the ids as are read, evenly spread."""
    if len(ids) <= _CONVERSATIONS_READ:
        return ids
    return ids[np.linspace(0, len(ids) - 1, _CONVERSATIONS_READ).astype(int)]


@dataclass(frozen=True, eq=False)
class AuditSubject:
    """A run, and what is known about where it comes from.

    Attributes:
        run: what `assemble` made of the settings.
        data: prepared conversations; none: the run has drawn some, because there are none yet.
        trained: whether the weights come from training, so that acceptance means something.
        folder: a finished drafter's folder; what lies there is examined instead of a fresh export.
        run_folder: the folder of a run that has trained; what it logged is measured again.
    """

    run: Run
    data: PreparedData | None = None
    trained: bool = False
    folder: Path | None = None
    run_folder: Path | None = None

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def target(self) -> Target:
        return self.run.target

    @property
    def draft_model(self) -> DFlashDraftModel:
        return self.run.drafter.model

    @property
    def frozen(self) -> FrozenTarget:
        return self.run.drafter.frozen

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        """Through the run's target loop, which is not to refuse bad states: they are what is looked for."""
        loop = self.run.capture_loop()
        loop.checked_batches = 0
        return loop.capture(samples)

    def pack(self, plan: RowPlan, captured: Sequence[CapturedSample]) -> PackedBatch:
        """Captured samples to one row, as every engine does it."""
        return rows.pack(plan, captured)

    def draw_anchors(self, row: PackedBatch, budget: int, seed: int) -> Tensor:
        """[A] positions."""
        return step_module.draw_anchors(row, budget, seed)

    def row_loss(
        self, draft_model: nn.Module, row: PackedBatch, anchor_positions_A: Tensor, loss: LossConfig | None = None
    ) -> tuple[Tensor, StepMetrics]:
        """Undivided loss and metrics of a row, in the run's precision."""
        drafter = self.run.drafter
        with drafter.precision():
            return step_module.row_loss(
                draft_model,  # type: ignore[arg-type]  # a stand-in has the methods of a drafter
                drafter.as_computed(row),
                anchor_positions_A,
                drafter.frozen,
                loss or self.config.loss,
                drafter.attention,
            )

    def train_step(
        self,
        drafter: Drafter,
        batches: Sequence[PackedBatch],
        anchors: Sequence[Tensor],
        optimizer: Optimizer | None = None,
        clip_norm: float | None = None,
        ranks: Ranks = ALONE,
    ) -> StepResult:
        """One step of the optimiser with given anchors, in the run's precision.

        Args:
            optimizer, clip_norm: none: the drafter's own.
            ranks: who has other rows.
        """
        with drafter.precision():
            return step_module.train_step(
                draft_model=drafter.model,
                rows=[(drafter.as_computed(batch), where) for batch, where in zip(batches, anchors, strict=True)],
                frozen=drafter.frozen,
                optimizer=optimizer or drafter.optimizer,
                loss=self.config.loss,
                attention=drafter.attention,
                clip_norm=clip_norm or self.config.optim.clip_norm,
                ranks=ranks,
            )

    def export(self, draft_model: DFlashDraftModel, folder: Path) -> None:
        """Write the drafter that will be served, in float32; a reduced vocabulary has no place in z-lab's format."""
        if formats_for(draft_model.config)[0] == "zlab":
            write.export_zlab(draft_model, folder, "float32")
        else:
            name, head = self.target.name, self.target.head
            write.export_speculators(draft_model, folder, "float32", verifier=name, target_head=head)

    def generate(
        self, draft_model: nn.Module, prompt: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> generate.Generation:
        """Decode greedily with the decoder that measures acceptance."""
        return generate.generate(
            self.target,
            draft_model,  # type: ignore[arg-type]  # a stand-in has the methods of a drafter
            torch.tensor([list(prompt)], device=self.target.device),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
        )


def subject_to_come(config: RunConfig, target: Target) -> AuditSubject:
    """A run that has not started: the drafter has its first weights; without data, on conversations drawn here."""
    if config.data.path is not None:
        training, heldout = open_data(config)
        return subject_of_run(assemble(config, target, choose_conversations(config, training, heldout)))
    if config.drafter.draft_vocab_size is not None:
        raise ConfigError("drafter.draft_vocab_size chooses tokens by their frequency in the data: give --data")
    return AuditSubject(assemble(config, target, drawn_data(target, config.drafter.mask_token_id)))


def subject_of_run(run: Run, trained: bool = False, run_folder: Path | None = None) -> AuditSubject:
    """An assembled run; what is known of its data comes from the prepared folder, if it has one."""
    training = run.data.training
    known = (training.report, training.meta) if isinstance(training, PreparedDataset) else (None, None)
    return AuditSubject(run, prepared_data(run.data, *known), trained, run_folder=run_folder)


def subject_of_run_folder(folder: Path, target: Target | None = None) -> AuditSubject:
    """A run that has written a checkpoint: its best weights, with the settings and data it was trained with.

    Args:
        folder: of the run, or one of its checkpoints.
        target: the run's target, if it is loaded already.

    Raises:
        CheckpointError: there is no checkpoint in the folder.
        ConfigError, DataError, TargetError: what the run used is not there any more, or is something else now.
    """
    place = checkpoint_folder(folder)
    if place is None:
        raise CheckpointError(
            f"{folder} is not a run folder: it has no checkpoint; name one that `draftline train` wrote"
        )
    checkpoint = read_checkpoint(place)
    config = checkpoint.run_config
    saved = RunFolder(folder).config()
    if saved is not None:  # its best checkpoint may be older than an extension
        train = config.train.model_copy(update={"extensions": saved.train.extensions})
        config = config.model_copy(update={"train": train})
    target = target or load_target(config.target)
    start = load_draft_model(folder)
    if config.data.path is None:
        run = assemble(config, target, drawn_data(target, start.config.mask_token_id), start)
        return AuditSubject(run, trained=True, run_folder=folder)
    whole = RunFolder(folder)  # its settings know where data lies that has been moved; a checkpoint alone does not
    data = whole.data() if whole.exists else choose_conversations(config, *open_data(config))
    if data.fingerprint != checkpoint.data_fingerprint:
        raise DataError(f"{config.data.path} holds other data now than {folder} was trained on: restore it")
    return subject_of_run(assemble(config, target, data, start), trained=True, run_folder=folder)


def subject_of_drafter(folder: Path, loaded: LoadedDrafter, target: Target) -> AuditSubject:
    """A finished drafter, of ours or of another trainer, as its folder holds it; on conversations drawn here."""
    config = run_config_of(loaded.config, target)
    run = assemble(config, target, drawn_data(target, loaded.config.mask_token_id), loaded.draft_model)
    return AuditSubject(run, trained=True, folder=folder)


def run_config_of(shape: DFlashConfig, target: Target) -> RunConfig:
    """Settings under which a drafter of this shape would be trained."""
    wanted = TargetConfig(name=target.name, device=str(target.device))
    return RunConfig(target=wanted, drafter=settings_of(shape))
