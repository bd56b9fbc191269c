"""One optimiser step, top to bottom, as a function of its arguments: no logging, clock, rank or environment inside.

    labels      the target's own greedy next token, once per row position
    blocks      [embed(token at anchor), embed(mask), ...] for every anchor
    hidden      drafter(captured states, blocks)
    loss        sum over supervised slots of w_k * cross entropy, through the target's head
    gradient    summed over the rows of the step, divided once by the global count, clipped

The division comes last, so the update does not depend on how rows are split over micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from draftline.config import LossConfig, decay_gamma
from draftline.draft.anchors import block_input_ids, slot_labels, slot_weights, supervised_slots
from draftline.draft.attention import Attention, BlockLayout
from draftline.draft.loss import cross_entropy_sum
from draftline.draft.model import DFlashDraftModel
from draftline.errors import PipelineError, UpdateError
from draftline.records import PackedBatch, StepMetrics


class OutputHead(Protocol):
    """The target's final norm and head, as `draftline.targets.TargetHead` provides them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states that are already normed, scaled and soft-capped as the target does."""

    def target_ids(self, last_hidden: Tensor, chunk_size: int) -> Tensor:
        """Greedy next tokens [...] of raw last-layer states [..., D]."""


class DrafterHead(OutputHead, Protocol):
    """Those rows of the target's head that a drafter with a reduced vocabulary has, as `ReducedHead` provides them."""

    kept_ids: Tensor

    def label_rows(self, last_hidden: Tensor, chunk_size: int) -> Tensor:
        """The target's best kept token [...], as a row of this head, of raw last-layer states [..., D]."""

    def to_target_ids(self, rows: Tensor) -> Tensor:
        """Tokens of rows."""


@dataclass(frozen=True)
class FrozenTarget:
    """The parts of the target that the drafter borrows, on the drafter's device.

    Attributes:
        embed: ids [...] -> what the target's first layer receives, [..., D].
        head: the target's final norm and head.
        draft_head: what the drafter speaks through if it can say only some tokens; none: `head`.
    """

    embed: Callable[[Tensor], Tensor]
    head: OutputHead
    draft_head: DrafterHead | None = None


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for the log.

    Attributes:
        metrics: sums and counts over all rows of the step.
        grad_norm: global gradient norm before clipping; 0 where nothing was supervised.
    """

    metrics: StepMetrics
    grad_norm: float


def train_step(
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
    """Sum the gradients of all rows of a step and move the optimiser once.

    Args:
        batches: the rows of this optimiser step.
        anchors: [A] int64 anchor positions per row.

    Raises:
        PipelineError: the gradient is not finite; the weights are left as they were.
        UpdateError: the optimiser itself failed. Whatever else is raised, nothing has moved yet.
    """
    optimizer.zero_grad(set_to_none=True)
    metrics = StepMetrics.zero(draft_model.config.block_size)
    for batch, anchor_positions_A in zip(batches, anchors, strict=True):
        loss_sum, row_metrics = row_loss(draft_model, batch, anchor_positions_A, frozen, loss, attention)
        if loss_sum.requires_grad:
            loss_sum.backward()
        metrics = metrics + row_metrics
    if metrics.slots == 0:
        return StepResult(metrics, grad_norm=0.0)
    parameters = list(draft_model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    denominator = metrics.slots if loss.denominator == "slots" else metrics.weight_sum
    torch._foreach_div_(gradients, float(denominator))
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm).item()
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise PipelineError(
            f"gradient norm {grad_norm} at step {batches[0].step}: the captured states or the learning rate are broken,"
            " run `draftline audit`, or lower optim.learning_rate"
        )
    try:
        optimizer.step()
    except Exception as error:  # the border between nothing has moved and all has
        raise UpdateError(
            f"the optimiser failed at step {batches[0].step} ({type(error).__name__}: {' '.join(str(error).split())}): "
            "continue from the last checkpoint with --resume"
        ) from error
    optimizer.zero_grad(set_to_none=True)
    return StepResult(metrics, grad_norm)


def row_loss(
    draft_model: DFlashDraftModel,
    batch: PackedBatch,
    anchor_positions_A: Tensor,
    frozen: FrozenTarget,
    loss: LossConfig,
    attention: type[Attention],
) -> tuple[Tensor, StepMetrics]:
    """Undivided loss of one row (with a gradient where grad mode is on) and its metrics.

    With a reduced vocabulary a slot is taught the best token that the drafter can say, whether or not the target would
    say another, as in speculators 0.9; but it counts as right only if it says what the target would.

    Under `torch.no_grad()` this is the evaluation of a held-out row.
    """
    config = draft_model.config
    shape = (config.block_size, config.sample_from_anchor)
    tokens = batch.input_ids.numel()
    supervised_AP = supervised_slots(anchor_positions_A, batch.loss_mask[0], batch.document_ids[0], *shape)
    if not supervised_AP.any():
        return torch.zeros(()), replace(StepMetrics.zero(config.block_size), tokens=tokens)

    layout = BlockLayout.of_row(anchor_positions_A, batch.position_ids[0], config.block_size)
    block_ids_AP = block_input_ids(batch.input_ids[0, anchor_positions_A], config.block_size, config.mask_token_id)
    embeddings = frozen.embed(block_ids_AP.flatten()[None])
    hidden_QD = draft_model(batch.hidden_states_packed, embeddings, layout, attention)[0]

    target_AP = slot_labels(anchor_positions_A, _target_ids_S(batch, frozen.head, loss), *shape, shift=-1)
    data_AP = slot_labels(anchor_positions_A, batch.input_ids[0], *shape, shift=0)
    label_AP = target_AP if loss.labels == "target" else data_AP
    head = frozen.head if frozen.draft_head is None else frozen.draft_head
    if frozen.draft_head is not None:
        label_AP = slot_labels(anchor_positions_A, _label_rows_S(batch, frozen.draft_head, loss), *shape, shift=-1)
    weight_P = slot_weights(config.block_size, decay_gamma(loss, config.block_size), config.sample_from_anchor)
    weights_n = weight_P.to(hidden_QD.device).expand_as(supervised_AP)[supervised_AP]
    results = cross_entropy_sum(
        hidden_QD[supervised_AP.flatten()],
        label_AP[supervised_AP],
        weights_n,
        head.logits,
        loss.chunk_size,
    )
    predicted_AP = torch.full_like(target_AP, -1)
    said_n = results.predicted_n if frozen.draft_head is None else frozen.draft_head.to_target_ids(results.predicted_n)
    predicted_AP[supervised_AP] = said_n
    metrics = StepMetrics.of_blocks(
        correct_target_AP=predicted_AP == target_AP,
        correct_data_AP=predicted_AP == data_AP,
        supervised_AP=supervised_AP,
        loss_sum=results.loss_sum.item(),
        weight_sum=weights_n.sum().item(),
        tokens=tokens,
    )
    return results.loss_sum, metrics


def _target_ids_S(batch: PackedBatch, head: OutputHead, loss: LossConfig) -> Tensor:
    """The target's greedy next token at each row position, [S]: sent along, or computed here once per position."""
    if batch.target_ids is not None:
        return batch.target_ids[0]
    assert batch.verifier_last_hidden_packed is not None, "PackedBatch carries one of the two"
    with torch.no_grad():
        return head.target_ids(batch.verifier_last_hidden_packed[0], loss.chunk_size)


def _label_rows_S(batch: PackedBatch, head: DrafterHead, loss: LossConfig) -> Tensor:
    """The target's best kept token at each row position, [S], by row of a reduced head."""
    assert batch.verifier_last_hidden_packed is not None, "a reduced vocabulary is trained with send = last_hidden"
    with torch.no_grad():
        return head.label_rows(batch.verifier_last_hidden_packed[0], loss.chunk_size)
