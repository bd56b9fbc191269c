"""The loss of drafted slots, from hidden states and the frozen head, never from logits of a whole row; and its figures.

Logits of all slots of one 8B sequence are gigabytes; those of one chunk are not. The frozen head needs no gradient,
so each chunk's gradient with respect to its hidden states is computed at once and its logits are dropped: backward
then only scales what is stored, and the head is multiplied twice per slot instead of three times (no recomputation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
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

    The sum is not divided: the divisor is known only when all micro-batches and ranks of a step are counted.

    The gradient of the logits is written out, weight * (softmax - one-hot), in the buffer that held the exponentials:
    autograd would allocate three more tables of the same size. Through `logits_of` autograd does the work.

    Args:
        hidden_nD: [n, D] drafter outputs after its `norm`, supervised slots only.
        labels_n: [n] int64.
        weights_n: [n] float.
        logits_of: the target's head with its scaling and soft cap, [m, D] -> [m, V]; it gets no gradient.
        chunk_size: slots whose logits exist at the same time.
    """
    wants_gradient = torch.is_grad_enabled() and hidden_nD.requires_grad
    gradient_nD = torch.zeros_like(hidden_nD)
    predicted_n = torch.empty_like(labels_n)
    loss_sum = hidden_nD.new_zeros((), dtype=torch.promote_types(hidden_nD.dtype, torch.float32))
    for start in range(0, hidden_nD.shape[0], chunk_size):
        chunk = slice(start, start + chunk_size)
        leaf_mD = hidden_nD[chunk].detach().requires_grad_(wants_gradient)
        logits_mV = logits_of(leaf_mD)
        scores_mV = logits_mV.detach().to(torch.promote_types(logits_mV.dtype, torch.float32))
        top_m1, predicted_m1 = scores_mV.max(dim=-1, keepdim=True)
        label_score_m1 = scores_mV.gather(1, labels_n[chunk, None])
        table_mV = (scores_mV - top_m1).exp_()
        normaliser_m1 = table_mV.sum(dim=-1, keepdim=True)
        nats_m1 = normaliser_m1.log() + top_m1 - label_score_m1
        weights_m1 = weights_n[chunk, None].to(table_mV.dtype)
        loss_sum += (nats_m1 * weights_m1).sum()
        predicted_n[chunk] = predicted_m1[:, 0]
        if wants_gradient:
            table_mV.mul_(weights_m1 / normaliser_m1).scatter_add_(1, labels_n[chunk, None], -weights_m1)
            (gradient_nD[chunk],) = torch.autograd.grad(logits_mV, leaf_mD, table_mV.to(logits_mV.dtype))
    return SlotResults(_KnownGradient.apply(hidden_nD, loss_sum, gradient_nD), predicted_n)


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient with respect to the hidden states is known already: backward only scales it."""

    @staticmethod
    def forward(ctx: Any, _hidden_nD: Tensor, loss_sum: Tensor, gradient_nD: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_nD)
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient_nD,) = ctx.saved_tensors
        return gradient_nD * grad_outputs[0].to(gradient_nD.dtype), None, None


@dataclass(frozen=True)
class StepMetrics:
    """Sums and counts of one or more micro-batches; they are added, and divided only when read.

    Attributes:
        loss_sum: sum over supervised slots of weight * loss (nats).
        weight_sum: sum of the weights w_k of supervised slots.
        slots_P: [P] float64, supervised slots by position in the block (slot 0 is the anchor).
        correct_target_P: [P] float64, slots whose argmax is the target's own next token.
        correct_data_P: [P] float64, slots whose argmax is the token in the data.
        run_correct_P: [P] float64, slots that are right and so are all earlier slots of their block.
        run_slots_P: [P] float64, supervised slots all of whose earlier slots are right (the conditional denominator).
        streak_sum: sum over blocks of the leading run of right slots, bonus token not counted.
        blocks: number of blocks with at least one supervised slot.
        tokens: row positions seen.
    """

    loss_sum: float
    weight_sum: float
    slots_P: Tensor
    correct_target_P: Tensor
    correct_data_P: Tensor
    run_correct_P: Tensor
    run_slots_P: Tensor
    streak_sum: float
    blocks: int
    tokens: int

    def __add__(self, other: StepMetrics) -> StepMetrics:
        return StepMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @staticmethod
    def zero(block_size: int) -> StepMetrics:
        """The neutral element of addition."""
        nothing_AP = torch.zeros(0, block_size, dtype=torch.bool)
        return StepMetrics.of_blocks(
            correct_target_AP=nothing_AP,
            correct_data_AP=nothing_AP,
            supervised_AP=nothing_AP,
            loss_sum=0.0,
            weight_sum=0.0,
            tokens=0,
        )

    @staticmethod
    def of_blocks(
        *,
        correct_target_AP: Tensor,
        correct_data_AP: Tensor,
        supervised_AP: Tensor,
        loss_sum: float,
        weight_sum: float,
        tokens: int,
    ) -> StepMetrics:
        """Count the outcome of blocks: three [A, P] bool tables, of which only supervised slots matter."""
        right_AP = correct_target_AP & supervised_AP
        first = _first_predicting_slot(supervised_AP)
        run_AP = torch.zeros_like(right_AP)
        run_AP[:, first:] = right_AP[:, first:].cumprod(dim=1).bool()
        reached_AP = supervised_AP.clone()
        reached_AP[:, first + 1 :] &= run_AP[:, first:-1]
        return StepMetrics(
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            slots_P=_count(supervised_AP),
            correct_target_P=_count(right_AP),
            correct_data_P=_count(correct_data_AP & supervised_AP),
            run_correct_P=_count(run_AP),
            run_slots_P=_count(reached_AP),
            streak_sum=float(run_AP.sum().item()),
            blocks=int(supervised_AP.any(dim=1).sum().item()),
            tokens=tokens,
        )

    @staticmethod
    def total(parts: Iterable[StepMetrics], block_size: int) -> StepMetrics:
        """Sum of any number of parts, none included."""
        return sum(parts, StepMetrics.zero(block_size))

    @property
    def slots(self) -> int:
        """Supervised slots."""
        return int(self.slots_P.sum().item())

    @property
    def accuracy(self) -> float:
        """Share of supervised slots whose argmax is the target's own next token; NaN without slots."""
        return _ratio(self.correct_target_P.sum().item(), self.slots)

    @property
    def data_accuracy(self) -> float:
        """Share of supervised slots whose argmax is the token in the data; NaN without slots."""
        return _ratio(self.correct_data_P.sum().item(), self.slots)

    @property
    def streak(self) -> float:
        """Mean leading run of right slots over blocks at random anchors, bonus not counted; NaN without blocks."""
        return _ratio(self.streak_sum, self.blocks)

    @property
    def accuracy_by_position(self) -> list[float]:
        """Unconditional accuracy of each of the P slots, NaN where nothing was supervised (slot 0 by default)."""
        return _ratios(self.correct_target_P, self.slots_P)

    @property
    def conditional_accuracy_by_position(self) -> list[float]:
        """Accuracy of each slot given that all earlier slots of its block are right."""
        return _ratios(self.run_correct_P, self.run_slots_P)


def _first_predicting_slot(supervised_AP: Tensor) -> int:
    """0 if the anchor predicts too, else 1: supervised slots always begin at the first slot that predicts."""
    return 0 if supervised_AP[:, 0].any() else 1


def _count(table_AP: Tensor) -> Tensor:
    return table_AP.sum(dim=0).to(torch.float64).cpu()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def _ratios(numerator_P: Tensor, denominator_P: Tensor) -> list[float]:
    return [_ratio(n, d) for n, d in zip(numerator_P.tolist(), denominator_P.tolist(), strict=True)]
