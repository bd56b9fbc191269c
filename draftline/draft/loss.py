"""The loss of drafted slots, from hidden states and the frozen head, never from logits of a whole row.

Logits of all slots of one 8B sequence are gigabytes; those of one chunk are not. The frozen head needs no gradient,
so each chunk's gradient with respect to its hidden states is computed at once and its logits are dropped: backward
then only scales what is stored, and the head is multiplied twice per slot instead of three times (no recomputation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotResults:
    """What the drafter said in n supervised slots.

    Attributes:
        loss_sum: scalar with gradient, sum of weight * cross entropy (nats).
        predicted_n: [n] int64, argmax of the drafter's logits.
    """

    loss_sum: Tensor
    predicted_n: Tensor


def cross_entropy_sum(
    hidden_nD: Tensor,
    labels_n: Tensor,
    weights_n: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    chunk_size: int,
) -> SlotResults:
    """Weighted sum of hard cross entropy over supervised slots.

    Args:
        hidden_nD: [n, D] drafter outputs after its `norm`, supervised slots only.
        labels_n: [n] int64.
        weights_n: [n] float.
        logits_of: the target's head with its scaling and soft cap, [m, D] -> [m, V]; it gets no gradient.
        chunk_size: slots whose logits exist at the same time.

    The sum is not divided: the divisor is known only when all micro-batches and ranks of a step are counted.
    """
    loss_sum, predicted_n = _ChunkedCrossEntropy.apply(hidden_nD, labels_n, weights_n, logits_of, chunk_size)
    return SlotResults(loss_sum, predicted_n)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradient of the hidden states chunk by chunk in forward, and scales it in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nD: Tensor,
        labels_n: Tensor,
        weights_n: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        gradient_nD = torch.zeros_like(hidden_nD)
        predicted_n = torch.empty_like(labels_n)
        loss_sum = hidden_nD.new_zeros((), dtype=torch.promote_types(hidden_nD.dtype, torch.float32))
        for start in range(0, hidden_nD.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            loss, gradient_nD[chunk], predicted_n[chunk] = _chunk(
                hidden_nD[chunk], labels_n[chunk], weights_n[chunk], logits_of, wants_gradient=ctx.needs_input_grad[0]
            )
            loss_sum += loss
        ctx.save_for_backward(gradient_nD)
        ctx.mark_non_differentiable(predicted_n)
        return loss_sum, predicted_n

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_nD,) = ctx.saved_tensors
        return gradient_nD * grad_outputs[0].to(gradient_nD.dtype), None, None, None, None


def _chunk(
    hidden_mD: Tensor,
    labels_m: Tensor,
    weights_m: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    wants_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the hidden states and argmax of one chunk.

    The gradient of the logits is written out, weight * (softmax - one-hot), in the buffer that held the exponentials:
    autograd would allocate three more tables of the same size. Through `logits_of` autograd does the work.
    """
    with torch.set_grad_enabled(wants_gradient):
        leaf_mD = hidden_mD.detach().requires_grad_(wants_gradient)
        logits_mV = logits_of(leaf_mD)
    scores_mV = logits_mV.detach().to(torch.promote_types(logits_mV.dtype, torch.float32))
    top_m1, predicted_m1 = scores_mV.max(dim=-1, keepdim=True)
    label_score_m1 = scores_mV.gather(1, labels_m[:, None])
    table_mV = (scores_mV - top_m1).exp_()
    normaliser_m1 = table_mV.sum(dim=-1, keepdim=True)
    nats_m1 = normaliser_m1.log() + top_m1 - label_score_m1
    weights_m1 = weights_m[:, None].to(table_mV.dtype)
    loss = (nats_m1 * weights_m1).sum()
    if not wants_gradient:
        return loss, torch.zeros_like(hidden_mD), predicted_m1[:, 0]
    table_mV.mul_(weights_m1 / normaliser_m1).scatter_add_(1, labels_m[:, None], -weights_m1)
    (gradient_mD,) = torch.autograd.grad(logits_mV, leaf_mD, table_mV.to(logits_mV.dtype))
    return loss, gradient_mD, predicted_m1[:, 0]
