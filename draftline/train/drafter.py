"""The drafter of a run: weights and optimiser together, and what one step does to them.

Everything that a run adds to the bare `train_step` is here: the rate of the step, the anchors of its rows, the
precision of its products; and what of it goes into a checkpoint and comes back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftline.config import DFlashConfig, RunConfig
from draftline.draft.attention import attention_class
from draftline.draft.block import FrozenTarget, draw_anchors
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError
from draftline.records import PackedBatch, StepMetrics
from draftline.train.checkpoint import (
    Checkpoint,
    TrainState,
    load_weights,
    random_states,
    restore_random_states,
)
from draftline.train.optim import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from draftline.train.step import StepResult, row_loss, train_step

HELDOUT_SEED = 0
"""Draws the anchors of held-out rows, whatever the seed of the run: runs that differ in their seed are asked the same
questions, so that what they differ by is what they learned."""


class Drafter:
    """A drafter in training.

    Arguments:
        config: settings of the run.
        shape: of the drafter.
        total_steps: of the run, for the learning rate.
        frozen: embedding and head of the target, on `device`; with them comes a reduced vocabulary.
        device: where the drafter trains.

    Attributes:
        model, optimizer: the weights, and what moves them.
        attention: implementation used in training.
        dtype: of matrix products, see `train.precision`.

    Raises:
        ConfigError: the attention that was asked for does not run on the device.
    """

    def __init__(
        self, *, config: RunConfig, shape: DFlashConfig, total_steps: int, frozen: FrozenTarget, device: torch.device
    ) -> None:
        self.config, self.total_steps, self.frozen, self.device = config, total_steps, frozen, device
        self.attention = attention_class(config.train.attention, device)
        low = config.train.precision == "bfloat16" or (config.train.precision == "auto" and device.type != "cpu")
        self.dtype = torch.bfloat16 if low else torch.float32
        torch.manual_seed(config.train.seed)
        self.model = DFlashDraftModel(shape)
        self.model.init_weights(torch.Generator().manual_seed(config.train.seed))
        if self.model.d2t is not None:
            self.model.keep_tokens(frozen.head.to_target_ids(torch.arange(shape.head_rows)))
        self.model.to(device)
        self.optimizer = build_optimizer(self.model, config.optim)

    def learning_rate(self, step: int) -> float:
        """Rate of the update number `step`, from 0."""
        return learning_rate(step, self.total_steps, self.config.optim)

    def anchors(self, batch: PackedBatch, seed: int) -> Tensor:
        """[A] anchors of a row."""
        return draw_anchors(batch, self.config.train.num_anchors, seed)

    def step(self, batches: Sequence[PackedBatch]) -> StepResult:
        """Move the weights by the rows of one optimiser step."""
        set_learning_rate(self.optimizer, self.learning_rate(batches[0].step))
        with self.precision():
            return train_step(
                draft_model=self.model,
                batches=[self.as_computed(batch) for batch in batches],
                anchors=[self.anchors(batch, self.config.train.seed) for batch in batches],
                frozen=self.frozen,
                optimizer=self.optimizer,
                loss=self.config.loss,
                attention=self.attention,
                clip_norm=self.config.optim.clip_norm,
            )

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> StepMetrics:
        """Metrics of a held-out row; its anchors are the same in every evaluation of every run with that budget."""
        with self.precision():
            row, anchors = self.as_computed(batch), self.anchors(batch, HELDOUT_SEED)
            return row_loss(self.model, row, anchors, self.frozen, self.config.loss, self.attention)[1]

    def checkpoint(self, state: TrainState, data_fingerprint: str) -> Checkpoint:
        """The present moment, to be written before the next step."""
        return Checkpoint(
            weights=self.model.state_dict(),
            moments=optimizer_tensors(self.optimizer, self.model),
            random=random_states(),
            state=state,
            run_config=self.config,
            drafter_config=self.model.config,
            data_fingerprint=data_fingerprint,
        )

    def restore(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Put everything back as it was; `folder` is named in messages.

        Raises:
            CheckpointError: a tensor does not fit, or the checkpoint's reduced vocabulary is not that of this run.
        """
        kept = self.model.d2t
        if kept is not None and not torch.equal(kept.cpu(), checkpoint.weights.get("d2t", torch.empty(0))):
            raise CheckpointError(
                f"{folder} can say other tokens (d2t) than the data gives now: give the same data and tokenizer"
            )
        load_weights(self.model, checkpoint.weights, folder)
        restore_optimizer(self.optimizer, self.model, checkpoint.moments)
        restore_random_states(checkpoint.random)

    def twin(self) -> Drafter:
        """Another drafter of the same run with a copy of the weights and an optimiser that has not moved yet."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.optimizer = build_optimizer(other.model, self.config.optim)
        return other

    def as_computed(self, batch: PackedBatch) -> PackedBatch:
        """States in float32 where products are, whatever the target's precision; autocast converts them otherwise."""
        if self.dtype != torch.float32:
            return batch
        return replace(batch, hidden_states_packed=batch.hidden_states_packed.float())

    def precision(self) -> AbstractContextManager[object]:
        """Matrix products in `dtype`; weights, norms and the optimiser in float32."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)
