"""D-PACE weights and distances of distributions: plain Python, autograd over dense tables, and speculators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.config import LossConfig, load_run_config, sent_beside_states
from draftline.draft.loss import SlotResults, TaughtSlots, dpace_weights, slot_loss_sum
from draftline.errors import ConfigError

BLOCKS, WIDTH, VOCABULARY = (3, 1, 4, 2, 4), 6, 13
SLOTS = sum(BLOCKS)


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, TaughtSlots, Tensor, Tensor]:
    """States, what they are taught, the head [V, D], and the target's logits [n, V]: sharp, so that some p are 0."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(SLOTS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    teacher = 4.0 * torch.randn(SLOTS, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    teacher[2, 5:] = -1e4
    block = torch.arange(len(BLOCKS)).repeat_interleave(torch.tensor(BLOCKS)) * 2
    labels = teacher.argmax(-1)
    labels[4] = 0
    weights = torch.rand(SLOTS, generator=generator, dtype=torch.float64)
    return hidden, TaughtSlots(labels, block, weights, lambda chunk: teacher[chunk]), head, teacher


def run(loss: LossConfig, **changes: Any) -> tuple[SlotResults, Tensor]:
    """Result and gradient of the states."""
    hidden, taught, head, _ = case(**changes)
    results = slot_loss_sum(hidden, taught, lambda states: states @ head.T, loss)
    return results, torch.autograd.grad(2.5 * results.loss_sum, hidden)[0]


def python_dpace(confidence: list[float], alpha: float) -> list[float]:
    """The formula of the paper for one block, as it stands there."""
    smooth = [(1 - alpha) * q + alpha for q in confidence]
    return [sum(math.prod(smooth[: m + 1]) for m in range(j, len(smooth))) for j in range(len(smooth))]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0])
def test_weights_are_those_of_the_paper(alpha: float) -> None:
    _, taught, _, _ = case()
    confidence = torch.rand(SLOTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    confidence[[0, 5]] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = dpace_weights(confidence, taught.block_n, alpha).split(BLOCKS)
    for weights, block in zip(found, confidence.split(BLOCKS), strict=True):
        assert weights.tolist() == pytest.approx(python_dpace(block.tolist(), alpha))
        assert alpha < 1 or weights.tolist() == list(range(len(block), 0, -1))


def test_weights_of_a_hand_made_block() -> None:
    """With a = 0.5 and q = 1, 0, 1 the factors are 1, 1/2, 1; the block is right up to its slots by 1, 1/2, 1/2."""
    weights = dpace_weights(torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64), 0.5)
    assert weights.tolist() == [2.0, 1.0, 0.5]


def dense(loss: LossConfig, hidden: Tensor, taught: TaughtSlots, head: Tensor, teacher: Tensor) -> tuple[Tensor, float]:
    """Loss by torch's own functions on whole tables, and the summed weights."""
    logits = hidden @ head.T
    target = teacher.softmax(-1)
    if loss.top_k is not None:
        outside = target < target.topk(loss.top_k, dim=-1).values[:, -1:]
        target = target.masked_fill(outside, 0.0)
        target = target / target.sum(-1, keepdim=True)
    cross = torch.nn.functional.cross_entropy(logits, taught.labels_n, reduction="none")
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1)
    variation = 0.5 * (logits.softmax(-1) - target).abs().sum(-1)
    weights = taught.weights_n.to(logits.dtype)
    if loss.weights == "dpace":
        blocks = (-cross).exp().detach().split(BLOCKS)
        weights = torch.tensor([w for b in blocks for w in python_dpace(b.tolist(), loss.dpace_alpha)])
    value = (weights * (loss.ce * cross + loss.kl * kl + loss.tv * variation)).sum()
    return value, float(weights.sum())


MIXTURES = {
    "ce": {},
    "kl": {"ce": 0.0, "kl": 1.0},
    "tv": {"ce": 0.0, "tv": 1.0},
    "dspark": {"ce": 0.1, "tv": 0.9},
    "all": {"ce": 0.2, "kl": 0.5, "tv": 0.3},
    "three best": {"ce": 0.0, "kl": 0.5, "tv": 0.5, "top_k": 3},
}


@pytest.mark.parametrize("chunk_size", [1, 5, 6, 100])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("name", MIXTURES)
def test_value_and_gradient_are_those_of_dense_tables(name: str, weights: str, chunk_size: int) -> None:
    loss = LossConfig(weights=weights, dpace_alpha=0.3, chunk_size=chunk_size, **MIXTURES[name])
    results, gradient = run(loss)
    hidden, *rest = case()
    wanted, weight_sum = dense(loss, hidden, *rest)
    (slopes,) = torch.autograd.grad(2.5 * wanted, hidden)
    assert results.loss_sum.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert results.weight_sum.item() == pytest.approx(weight_sum, rel=1e-6)
    assert (gradient - slopes).abs().max() < 1e-6 * slopes.abs().max()
    assert torch.equal(results.predicted_n, (hidden @ rest[1].T).argmax(-1))


def test_single_precision_and_large_logits() -> None:
    loss = LossConfig(weights="dpace", **MIXTURES["all"])
    single, double = run(loss, dtype=torch.float32), run(loss)
    assert single[0].loss_sum.item() == pytest.approx(double[0].loss_sum.item(), rel=1e-5)
    assert (single[1] - double[1]).abs().max() < 1e-5 * double[1].abs().max()
    hidden, taught, head, _ = case()
    far = slot_loss_sum((300 * hidden).float(), taught, lambda states: states @ head.T.float(), loss)
    assert far.loss_sum.isfinite()


def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn() -> None:
    hidden, taught, head, _ = case()
    taught = TaughtSlots(taught.labels_n, taught.block_n, taught.weights_n, lambda chunk: (hidden @ head.T)[chunk])
    for name in ("kl", "tv"):
        results = slot_loss_sum(hidden, taught, lambda states: states @ head.T, LossConfig(**MIXTURES[name]))
        assert results.loss_sum.item() == pytest.approx(0.0, abs=1e-12)
        slopes = torch.autograd.grad(results.loss_sum, hidden)[0].abs().max()
        assert name == "tv" or slopes < 1e-12  # the total variation has a kink there


def test_what_a_cut_loses_is_counted() -> None:
    _, _, _, teacher = case()
    best = teacher.softmax(-1).sort(-1, descending=True).values
    for top_k in (1, 3, VOCABULARY, 50):
        results, _ = run(LossConfig(ce=0.0, kl=1.0, top_k=top_k))
        assert results.lost_mass.item() == pytest.approx(best[:, top_k:].sum().item(), abs=1e-12)
    assert run(LossConfig(ce=0.0, kl=1.0))[0].lost_mass == 0.0


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 7, 100])
def test_chunks_cut_no_block_and_hold_as_many_as_fit(chunk_size: int) -> None:
    hidden, taught, head, _ = case()
    rows: list[int] = []

    def counted(states: Tensor) -> Tensor:
        rows.append(len(states))
        return states @ head.T

    slot_loss_sum(hidden, taught, counted, LossConfig(weights="dpace", chunk_size=chunk_size))
    wanted = {1: [3, 1, 4, 2, 4], 4: [4, 4, 2, 4], 5: [4, 4, 2, 4], 7: [4, 6, 4], 100: [14]}
    assert rows == wanted[chunk_size]


def test_speculators_weights_and_distances() -> None:
    """Their functions on the same logits: every block is filled up to four slots, what is added is masked."""
    losses = pytest.importorskip("speculators.losses.utils", reason="the independent trainer is not installed")
    hidden, taught, head, teacher = case(torch.float32)
    size = max(BLOCKS)
    place = torch.cat([size * i + torch.arange(n) for i, n in enumerate(BLOCKS)])
    mask = torch.zeros(1, size * len(BLOCKS)).index_fill_(1, place, 1.0)

    def filled(values: Tensor) -> Tensor:
        return torch.zeros(1, mask.shape[1], VOCABULARY).index_copy(1, place, values[None])

    taught.labels_n[4] = teacher[4].argmax()  # theirs are always the target's own
    settings = {"loss_mask": mask, "block_size": size, "dpace_alpha": 0.5}
    for kind in ({"ce": 1.0}, {"kl_div": 1.0}, {"tv": 1.0}, {"ce": 0.1, "tv": 0.9}):
        config = {name: (losses._EAGER_LOSS_FN_MAP[name], share) for name, share in kind.items()}
        shares = {"ce": 0.0} | {name.removesuffix("_div"): share for name, share in kind.items()}
        for weights in ("decay", "dpace") if kind == {"ce": 1.0} else ("decay",):

            def weigh(_place: Tensor, elementwise_loss: Tensor, weights: str = weights) -> Tensor:
                if weights == "dpace":
                    return losses.dpace_loss_decay(_place, elementwise_loss=elementwise_loss, **settings)
                return torch.zeros(1, mask.shape[1]).index_copy(1, place, taught.weights_n[None].float())

            given = (filled(hidden @ head.T), filled(teacher), mask, torch.zeros_like(mask))
            theirs, _ = losses.compound_loss(*given, loss_config=config, decay_fn=weigh)
            (wanted,) = torch.autograd.grad(theirs, hidden)
            loss = LossConfig(weights=weights, **shares)
            ours = slot_loss_sum(hidden, taught, lambda states: states @ head.T, loss).loss_sum / (SLOTS + 1e-5)
            (found,) = torch.autograd.grad(ours, hidden)
            assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
            assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_shares_that_do_not_add_up_and_a_cut_of_nothing_are_refused() -> None:
    for words, message in (
        (["loss.kl=1"], r"ce \+ kl \+ tv is 2: set shares that add up to 1"),
        (["loss.ce=0"], r"ce \+ kl \+ tv is 0"),
        (["loss.top_k=8"], "top_k = 8 cuts a distribution that is not taught"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_run_config(None, words)


def test_a_distribution_needs_the_last_states() -> None:
    soft = ["loss.ce=0.1", "loss.tv=0.9"]
    assert sent_beside_states(load_run_config(None, soft)) == "last_hidden"
    assert sent_beside_states(load_run_config(None, [])) == "target_ids"
    with pytest.raises(
        ConfigError, match=r"no distribution to teach \(loss.kl = 0, loss.tv = 0.9\): set pipeline.send="
    ):
        sent_beside_states(load_run_config(None, [*soft, "pipeline.send=target_ids"]))
