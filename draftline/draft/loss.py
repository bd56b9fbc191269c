"""The loss of drafted slots, from hidden states and the frozen head, never from logits of a whole row; and its figures.

Logits of all slots of one 8B sequence are gigabytes; those of one chunk are not. The frozen head needs no gradient,
so each chunk's gradient with respect to its hidden states is computed at once and its logits are dropped: backward
then only scales what is stored, and the head is multiplied twice per slot instead of three times (no recomputation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from draftline.config import LossConfig


@dataclass(frozen=True)
class TaughtSlots:
    """What n supervised slots are to learn, block after block.

    Attributes:
        labels_n: [n] int64, row of the head.
        block_n: [n] int64 that never falls: slots with one number are of one block, in their order.
        weights_n: [n] float, by their place in the block; they count with `loss.weights = decay`.
        teacher: some of the n -> [m, V] logits of the target where they predict; called with
            `loss.teaches_distribution`.
    """

    labels_n: Tensor
    block_n: Tensor
    weights_n: Tensor
    teacher: Callable[[slice], Tensor]


@dataclass(frozen=True)
class SlotResults:
    """What the drafter said in n supervised slots.

    Attributes:
        loss_sum: scalar with gradient, sum of weight * loss.
        weight_sum: scalar, sum of the weights.
        predicted_n: [n] int64, argmax of the drafter's logits.
        lost_mass: scalar, sum of the probability that `loss.top_k` cut off.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    predicted_n: Tensor
    lost_mass: Tensor


def slot_loss_sum(
    hidden_nD: Tensor, slots: TaughtSlots, logits_of: Callable[[Tensor], Tensor], loss: LossConfig
) -> SlotResults:
    """Weighted sum of the loss over supervised slots.

    The sum is not divided: the divisor is known only when all micro-batches and ranks of a step are counted.

    The gradient of the logits is written out, for hard cross entropy weight * (softmax - one-hot), in the buffer that
    holds the probabilities: autograd would allocate three more tables of the same size. Through `logits_of` autograd
    does the work. Weights that depend on what the drafter says are constants of that gradient.

    Args:
        hidden_nD: [n, D] drafter outputs after its `norm`, supervised slots only.
        logits_of: the target's head with its scaling and soft cap, [m, D] -> [m, V]; it gets no gradient.
        loss: settings; without `chunk_size` all slots are one chunk.
    """
    wants_gradient = torch.is_grad_enabled() and hidden_nD.requires_grad
    gradient_nD = torch.zeros_like(hidden_nD)
    predicted_n = torch.empty_like(slots.labels_n)
    wide = torch.promote_types(hidden_nD.dtype, torch.float32)
    loss_sum, weight_sum, lost_mass = (hidden_nD.new_zeros((), dtype=wide) for _ in range(3))
    for chunk in _whole_blocks(slots.block_n, loss.chunk_size or len(hidden_nD)):
        leaf_mD = hidden_nD[chunk].detach().requires_grad_(wants_gradient)
        logits_mV = logits_of(leaf_mD)
        labels_m1 = slots.labels_n[chunk, None]
        scores_mV = logits_mV.detach().to(torch.promote_types(logits_mV.dtype, torch.float32))
        top_m1, predicted_m1 = scores_mV.max(dim=-1, keepdim=True)
        predicted_n[chunk] = predicted_m1[:, 0]
        said_mV = scores_mV.softmax(dim=-1)
        total_m1 = top_m1 - said_mV.gather(1, predicted_m1).log()  # the likeliest has 1 / V at least
        nats_m1 = total_m1 - scores_mV.gather(1, labels_m1)
        weights_m1 = slots.weights_n[chunk, None].to(said_mV.dtype)
        if loss.weights == "dpace":
            weights_m1 = dpace_weights(nats_m1[:, 0].neg().exp(), slots.block_n[chunk], loss.dpace_alpha)[:, None]
        weight_sum += weights_m1.sum()
        if not loss.teaches_distribution:
            distance_m1 = nats_m1
            slopes_mV = said_mV.scatter_add_(1, labels_m1, said_mV.new_full(labels_m1.shape, -1.0))
        else:
            teacher_mV, lost_m1 = _distribution(slots.teacher(chunk).detach(), loss.top_k, said_mV.dtype)
            lost_mass += lost_m1.sum()
            distance_m1 = loss.ce * nats_m1
            if loss.kl:
                far_m1 = total_m1 - (teacher_mV * scores_mV).sum(1, keepdim=True)
                distance_m1 += loss.kl * (far_m1 - torch.special.entr(teacher_mV).sum(1, keepdim=True))
            if loss.tv:
                distance_m1 += loss.tv * (1.0 - torch.minimum(said_mV, teacher_mV).sum(1, keepdim=True))
            slopes_mV = _slopes(said_mV, teacher_mV, labels_m1, loss)
        loss_sum += (distance_m1 * weights_m1).sum()
        if wants_gradient:
            slopes_mV.mul_(weights_m1)
            (gradient_nD[chunk],) = torch.autograd.grad(logits_mV, leaf_mD, slopes_mV.to(logits_mV.dtype))
    return SlotResults(_KnownGradient.apply(hidden_nD, loss_sum, gradient_nD), weight_sum, predicted_n, lost_mass)


def dpace_weights(confidence_n: Tensor, block_n: Tensor, alpha: float) -> Tensor:
    """Weights by what the drafter knows: sum over m >= j of the product over i <= m of (1 - a) q_i + a, [n].

    Each term is about the chance that a block is right up to its slot m; slot j has a part in all terms from its own
    on. Source: D-PACE, arXiv 2605.18810.

    Args:
        confidence_n: [n] the drafter's probability q of each label, without a gradient.
        block_n: see `TaughtSlots`.
        alpha: the least that a slot counts for those behind it.
    """
    _, index_n, sizes_B = block_n.unique_consecutive(return_inverse=True, return_counts=True)
    place_n = torch.arange(len(block_n), device=block_n.device) - (sizes_B.cumsum(0) - sizes_B)[index_n]
    factors_BP = confidence_n.new_ones(len(sizes_B), int(sizes_B.max()))
    factors_BP[index_n, place_n] = (1.0 - alpha) * confidence_n + alpha
    there_BP = torch.arange(factors_BP.shape[1], device=block_n.device) < sizes_B[:, None]
    reached_BP = factors_BP.cumprod(dim=1) * there_BP
    return reached_BP.flip(1).cumsum(dim=1).flip(1)[index_n, place_n]


def _whole_blocks(block_n: Tensor, chunk_size: int) -> Iterator[slice]:
    """Chunks of at most so many slots that cut no block; a block that is larger is a chunk of its own."""
    ends = block_n.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    start = 0
    for end, next_end in pairwise([*ends, math.inf]):
        if next_end - start > chunk_size:
            yield slice(start, end)
            start = end


def _distribution(logits_mV: Tensor, top_k: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Probabilities [m, V] of the target, of its best tokens alone if so many are named; and [m, 1] what is cut off."""
    whole_mV = logits_mV.to(dtype).softmax(dim=-1)
    if top_k is None or top_k >= whole_mV.shape[1]:
        return whole_mV, whole_mV.new_zeros(len(whole_mV), 1)
    least_m1 = whole_mV.topk(top_k, dim=-1).values[:, -1:]
    whole_mV.masked_fill_(whole_mV < least_m1, 0.0)  # those as likely as the last one stay
    sum_m1 = whole_mV.sum(dim=-1, keepdim=True)
    return whole_mV.div_(sum_m1), 1.0 - sum_m1


def _slopes(said_mV: Tensor, teacher_mV: Tensor, labels_m1: Tensor, loss: LossConfig) -> Tensor:
    """Derivative of the mixture of distances with respect to the logits, [m, V].

    Of the total variation: raising a probability q that lies below the target's p lowers it, and all others fall.
    """
    slopes_mV = said_mV * (loss.ce + loss.kl)
    if loss.kl:
        slopes_mV.sub_(teacher_mV, alpha=loss.kl)
    if loss.tv:
        below_mV = said_mV * (said_mV < teacher_mV)
        slopes_mV.add_(said_mV * below_mV.sum(1, keepdim=True) - below_mV, alpha=loss.tv)
    return slopes_mV.scatter_add_(1, labels_m1, torch.full_like(labels_m1, -1, dtype=slopes_mV.dtype) * loss.ce)


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
        loss_sum: sum over supervised slots of weight * loss.
        weight_sum: sum of the weights of supervised slots.
        slots_P: [P] float64, supervised slots by position in the block (slot 0 is the anchor).
        correct_target_P: [P] float64, slots whose argmax is the target's own next token.
        correct_data_P: [P] float64, slots whose argmax is the token in the data.
        run_correct_P: [P] float64, slots that are right and so are all earlier slots of their block.
        run_slots_P: [P] float64, supervised slots all of whose earlier slots are right (the conditional denominator).
        streak_sum: sum over blocks of the leading run of right slots, bonus token not counted.
        blocks: number of blocks with at least one supervised slot.
        tokens: row positions seen.
        lost_mass: sum over supervised slots of the probability that `loss.top_k` cut off.
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
    lost_mass: float = 0.0

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
