"""The subject of an audit, put together from the functions that a run uses.

Functions are looked up where the run looks them up (in `train.drafter` and `engine.rows`), and when the subject is
made, so that what is examined is what the run would call now.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from draftline.audit.subject import AuditSubject, PreparedData
from draftline.config import RunConfig, sent_beside_states
from draftline.draft.attention import attention_class
from draftline.draft.model import DFlashDraftModel
from draftline.engine import rows
from draftline.engine.replicas import frozen_target
from draftline.evaluate import acceptance, generate
from draftline.formats import write
from draftline.records import Sample, StepMetrics
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target
from draftline.train import checkpoint, drafter, optim
from draftline.train.checkpoint import TrainState

_CONVERSATIONS_READ = 200
"""Conversations of each part of the data that the audit looks at, spread over all of it."""


class Conversations(Protocol):
    """A prepared data set, as far as the audit reads it."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation."""

    def __getitem__(self, sample_id: int) -> Sample: ...


def prepared_data(
    training: Conversations,
    training_ids: NDArray[np.int64],
    heldout: Conversations,
    heldout_ids: NDArray[np.int64],
    report: dict[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
) -> PreparedData:
    """Some of the conversations that a run has chosen, and what is known about all of them.

    Args:
        report, meta: of the prepared folder, if the conversations come from one.
    """
    return PreparedData(
        samples=[training[int(i)] for i in _spread(training_ids)],
        heldout=[heldout[int(i)] for i in _spread(heldout_ids)],
        report=report or {},
        meta=meta or {},
        num_samples=len(training_ids),
        num_tokens=int(training.lengths[training_ids].sum()),
    )


def _spread(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most so many of the ids as are read, evenly spread."""
    if len(ids) <= _CONVERSATIONS_READ:
        return ids
    return ids[np.linspace(0, len(ids) - 1, _CONVERSATIONS_READ).astype(int)]


def live_subject(
    config: RunConfig,
    target: Target,
    draft_model: DFlashDraftModel,
    data: PreparedData | None = None,
    trained: bool = False,
    folder: Path | None = None,
) -> AuditSubject:
    """Everything that a run with these settings, target and drafter would use."""
    pipeline = config.pipeline
    loop = TargetForwardLoop(
        target, draft_model.config.target_layer_ids, sent_beside_states(config), pipeline.target_batch_tokens, 0
    )
    device = next(draft_model.parameters()).device

    def save(model: DFlashDraftModel, optimizer: Optimizer, folder: Path) -> None:
        state = TrainState(window=StepMetrics.zero(model.config.block_size))
        moments = optim.optimizer_tensors(optimizer, model)
        checkpoint.write_checkpoint(
            folder,
            checkpoint.Checkpoint(
                dict(model.state_dict()), moments, checkpoint.random_states(), state, config, model.config, ""
            ),
        )

    def restore(model: DFlashDraftModel, optimizer: Optimizer, folder: Path) -> None:
        saved = checkpoint.read_checkpoint(folder)
        checkpoint.load_weights(model, saved.weights, folder)
        optim.restore_optimizer(optimizer, model, saved.moments)

    def teacher_forced(model: DFlashDraftModel, answers: Sequence[tuple[list[int], list[int]]]) -> float:
        return acceptance.Acceptance.total(acceptance.teacher_forced_walk(target, model, answers)).length

    def acceptance_length(generations: Sequence[generate.Generation]) -> float:
        parts = [acceptance.Acceptance(len(g.output_ids) - 1, g.target_forwards) for g in generations]
        return acceptance.Acceptance.total(parts).length

    def export(model: DFlashDraftModel, folder: Path) -> None:
        if model.config.draft_vocab_size is None:
            write.export_zlab(model, folder, "float32")
        else:  # z-lab's format has no place for it
            write.export_speculators(model, folder, "float32", verifier=target.name, target_head=target.head)

    return AuditSubject(
        config=config,
        target=target,
        draft_model=draft_model,
        capture=loop.capture,
        pack=rows.pack,
        draw_anchors=drafter.draw_anchors,
        frozen=frozen_target(target, device, draft_model.kept_ids),
        row_loss=drafter.row_loss,
        train_step=drafter.train_step,
        attention=attention_class(config.train.attention, device),
        make_optimizer=lambda model: optim.build_optimizer(model, config.optim),
        learning_rate=lambda update, total: optim.learning_rate(update, total, config.optim),
        set_learning_rate=drafter.set_learning_rate,
        save_state=save,
        restore_state=restore,
        export=export,
        generate=generate.generate,
        acceptance_length=acceptance_length,
        teacher_forced=teacher_forced,
        scratch=tempfile.TemporaryDirectory,
        data=data,
        trained=trained,
        folder=folder,
    )
