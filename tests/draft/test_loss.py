"""Chunked cross entropy against a plain sum in Python, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftline.config import LossConfig
from draftline.draft.loss import SlotResults, TaughtSlots, slot_loss_sum

SLOTS, WIDTH, VOCABULARY = 11, 6, 19


def head(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return lambda hidden: logits(hidden @ weight.T.to(hidden.dtype))


HEADS = {
    "plain": head(lambda logits: logits),
    "scaled": head(lambda logits: logits * 0.37),
    "capped": head(lambda logits: 3.0 * torch.tanh(logits / 3.0)),
    "ends in tanh": head(torch.tanh),
}


def slots(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SLOTS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (SLOTS,), generator=generator)
    return hidden, labels, torch.rand(SLOTS, generator=generator, dtype=torch.float64)


def cross_entropy_sum(
    hidden: Tensor, labels: Tensor, weights: Tensor, logits_of: Callable[[Tensor], Tensor], chunk_size: int
) -> SlotResults:
    """Labels alone, every slot a block of its own."""
    taught = TaughtSlots(labels, torch.arange(len(labels)), weights, teacher=lambda _: torch.empty(0))
    return slot_loss_sum(hidden, taught, logits_of, LossConfig(chunk_size=chunk_size))


def python_sum(logits: list[list[float]], labels: list[int], weights: list[float]) -> float:
    total = 0.0
    for row, label, weight in zip(logits, labels, weights, strict=True):
        total += weight * (math.log(math.fsum(math.exp(value) for value in row)) - row[label])
    return total


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100])
def test_value_and_gradient_equal_the_plain_sum(name: str, chunk_size: int) -> None:
    hidden, labels, weights = slots()
    found = cross_entropy_sum(hidden, labels, weights, HEADS[name], chunk_size)
    (gradient,) = torch.autograd.grad(2.5 * found.loss_sum, hidden)

    logits = HEADS[name](hidden)
    picked = logits[torch.arange(SLOTS), labels]
    plain = ((logits.exp().sum(dim=1).log() - picked) * weights).sum()
    (wanted,) = torch.autograd.grad(2.5 * plain, hidden)
    assert found.loss_sum.item() == pytest.approx(
        python_sum(logits.tolist(), labels.tolist(), weights.tolist()), rel=1e-12
    )
    assert torch.allclose(gradient, wanted, rtol=1e-10, atol=1e-12)
    assert torch.equal(found.predicted_n, logits.argmax(dim=1))
    assert found.weight_sum.item() == pytest.approx(weights.sum().item())


def test_single_precision_is_close_and_large_logits_do_not_overflow() -> None:
    hidden, labels, weights = slots()
    single = (hidden.detach().float() * 200).requires_grad_()
    double = single.detach().double().requires_grad_()
    found = cross_entropy_sum(single, labels, weights.float(), HEADS["plain"], 4)
    wanted = cross_entropy_sum(double, labels, weights.float().double(), HEADS["plain"], 4)
    (gradient,) = torch.autograd.grad(found.loss_sum, single)
    (exact,) = torch.autograd.grad(wanted.loss_sum, double)
    assert found.loss_sum.item() == pytest.approx(wanted.loss_sum.item(), rel=1e-5)
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()


def test_half_precision_states_are_summed_in_single() -> None:
    hidden, labels, weights = slots(torch.bfloat16)
    found = cross_entropy_sum(hidden, labels, weights.float(), HEADS["plain"], 4)
    assert found.loss_sum.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found.loss_sum, hidden)
    assert gradient.dtype == torch.bfloat16
    assert gradient.isfinite().all()


@pytest.mark.parametrize("with_gradient", [True, False])
def test_logits_never_exist_for_more_than_a_chunk(with_gradient: bool) -> None:
    hidden, labels, weights = slots()
    rows: list[int] = []

    def counted(states: Tensor) -> Tensor:
        rows.append(states.shape[0])
        return HEADS["plain"](states)

    with torch.set_grad_enabled(with_gradient):
        cross_entropy_sum(hidden, labels, weights, counted, chunk_size=4)
    assert rows == [4, 4, 3]


def test_without_gradient_the_value_is_the_same() -> None:
    hidden, labels, weights = slots()
    with torch.no_grad():
        without = cross_entropy_sum(hidden, labels, weights, HEADS["capped"], 4)
    found = cross_entropy_sum(hidden, labels, weights, HEADS["capped"], 4)
    assert not without.loss_sum.requires_grad
    assert torch.equal(without.loss_sum, found.loss_sum.detach())
    assert torch.equal(without.predicted_n, found.predicted_n)


def test_hand_made_case() -> None:
    """Logits (0, ln 3): the label's probability is 3/4, or 1/4."""
    hidden = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    found = cross_entropy_sum(hidden, torch.tensor([1, 0]), weights, lambda states: states * 1.0, 8)
    assert found.loss_sum.item() == pytest.approx(math.log(4 / 3) + 0.5 * math.log(4))
    (gradient,) = torch.autograd.grad(found.loss_sum, hidden)
    assert torch.allclose(gradient, torch.tensor([[0.25, -0.25], [-0.375, 0.375]], dtype=torch.float64))
