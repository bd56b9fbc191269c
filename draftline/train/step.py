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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from draftline.config import LossConfig, decay_gamma
from draftline.draft.attention import Attention
from draftline.draft.block import Blocks, FrozenTarget, Head, drafted_states, slot_labels, slot_weights
from draftline.draft.loss import cross_entropy_sum
from draftline.draft.model import DFlashDraftModel
from draftline.errors import PipelineError, UpdateError
from draftline.records import PackedBatch, StepMetrics


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
    config, head = draft_model.config, frozen.head
    tokens = batch.input_ids.numel()
    blocks = Blocks.of_row(batch, anchor_positions_A, config)
    supervised_AP = blocks.supervised_AP
    if not supervised_AP.any():
        return torch.zeros(()), replace(StepMetrics.zero(config.block_size), tokens=tokens)

    hidden_APD = drafted_states(draft_model, batch.hidden_states_packed, blocks, frozen.embed, attention)

    target_ids_S = _target_ids_S(batch, head, loss)
    target_AP = slot_labels(blocks.predicted_AP, target_ids_S, shift=-1)
    data_AP = slot_labels(blocks.predicted_AP, batch.input_ids[0], shift=0)
    label_AP = data_AP
    if loss.labels == "target":
        label_AP = slot_labels(blocks.predicted_AP, _label_rows_S(batch, head, target_ids_S, loss), shift=-1)
    weight_P = slot_weights(config.block_size, decay_gamma(loss, config.block_size), config.sample_from_anchor)
    weights_n = weight_P.to(hidden_APD.device).expand_as(supervised_AP)[supervised_AP]
    results = cross_entropy_sum(
        hidden_APD[supervised_AP],
        label_AP[supervised_AP],
        weights_n,
        head.logits,
        loss.chunk_size,
    )
    predicted_AP = torch.full_like(target_AP, -1)
    predicted_AP[supervised_AP] = head.to_target_ids(results.predicted_n)
    metrics = StepMetrics.of_blocks(
        correct_target_AP=predicted_AP == target_AP,
        correct_data_AP=predicted_AP == data_AP,
        supervised_AP=supervised_AP,
        loss_sum=results.loss_sum.item(),
        weight_sum=weights_n.sum().item(),
        tokens=tokens,
    )
    return results.loss_sum, metrics


def _target_ids_S(batch: PackedBatch, head: Head, loss: LossConfig) -> Tensor:
    """The target's greedy next token at each row position, [S]: sent along, or computed here once per position."""
    if batch.target_ids is not None:
        return batch.target_ids[0]
    assert batch.verifier_last_hidden_packed is not None, "PackedBatch carries one of the two"
    with torch.no_grad():
        return head.target_ids(batch.verifier_last_hidden_packed[0], loss.chunk_size)


def _label_rows_S(batch: PackedBatch, head: Head, target_ids_S: Tensor, loss: LossConfig) -> Tensor:
    """Row of the head that is taught for what the target says at each row position, [S]."""
    last = batch.verifier_last_hidden_packed
    with torch.no_grad():
        return head.label_rows(target_ids_S, None if last is None else last[0], loss.chunk_size)
