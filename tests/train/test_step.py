"""The optimiser step against the formula written out, and its independence of how rows are split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from draftline.config import DFlashConfig, LossConfig
from draftline.draft.attention import BlockLayout, DenseAttention, GroupedAttention
from draftline.draft.block import FrozenTarget, draw_anchors
from draftline.draft.model import DFlashDraftModel
from draftline.errors import PipelineError, UpdateError
from draftline.records import PackedBatch
from draftline.targets.head import TargetHead
from draftline.train.step import StepResult, row_loss, train_step
from tests.draft.layouts import VOCABULARY, TinyTarget, drafter, drafter_config, make_row

DOUBLE = torch.float64
TARGET = TinyTarget(dtype=DOUBLE)
GAMMA = 2.0  # what a block of 4 gets when nothing is set: half the block


def row_of(lengths: Sequence[int], unsupervised: Sequence[int] = (), seed: int = 0) -> PackedBatch:
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    mask[list(unsupervised)] = False
    return make_row(lengths, mask, seed=seed, dtype=DOUBLE)


def documents(batch: PackedBatch, first: int, last: int) -> PackedBatch:
    """The documents first..last-1 of a row as a row of their own."""
    inside_S = (batch.document_ids[0] >= first) & (batch.document_ids[0] < last)
    cut = {name: tensor[:, inside_S] for name, tensor in batch.tensors().items()}
    cut["document_ids"] = cut["document_ids"] - first
    return replace(batch, sample_ids=batch.sample_ids[first:last], **cut)


def step(
    model: DFlashDraftModel,
    batches: Sequence[PackedBatch],
    loss: LossConfig | None = None,
    clip_norm: float = 1e9,
    frozen: FrozenTarget | None = None,
    num_anchors: int = 5,
) -> StepResult:
    return train_step(
        draft_model=model,
        rows=[(batch, draw_anchors(batch, num_anchors, seed=0)) for batch in batches],
        frozen=frozen or TARGET.frozen(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=loss or LossConfig(),
        attention=GroupedAttention,
        clip_norm=clip_norm,
    )


def gradients(
    batches: Sequence[PackedBatch], loss: LossConfig | None = None, num_anchors: int = 5
) -> tuple[dict[str, Tensor], StepResult]:
    """Gradients by name, read off an SGD step of rate 1."""
    model = drafter(drafter_config(), dtype=DOUBLE)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    result = step(model, batches, loss, num_anchors=num_anchors)
    return {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}, result


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, want in wanted.items():
        assert want.abs().max() > 0, name
        assert (found[name] - want).abs().max() <= 1e-6 * want.abs().max(), name


def plain_loss(model: DFlashDraftModel, batch: PackedBatch, anchors: Tensor, labels_S: Tensor) -> tuple[Tensor, int]:
    """Summed loss and slots of a row, slot by slot; `labels_S` holds the label of each predicted position."""
    block = model.config.block_size
    mask, document = batch.loss_mask[0].tolist(), batch.document_ids[0].tolist()
    ids = [[int(batch.input_ids[0, a])] + [model.config.mask_token_id] * (block - 1) for a in anchors.tolist()]
    layout = BlockLayout.of_row(anchors, batch.position_ids[0], block)
    embeddings = TARGET.embedding(torch.tensor(ids)).flatten(0, 1)[None]
    hidden_APD = model(batch.hidden_states_packed, embeddings, layout, DenseAttention)[0].unflatten(0, (-1, block))
    total, slots = torch.zeros((), dtype=DOUBLE), 0
    for index, anchor in enumerate(anchors.tolist()):
        for k in range(1, block):
            position = anchor + k
            if position >= len(mask) or not mask[position] or document[position] != document[anchor]:
                break
            nats = -TARGET.logits(hidden_APD[index, k]).log_softmax(-1)[labels_S[position]]
            total = total + math.exp(-(k - 1) / GAMMA) * nats
            slots += 1
    return total, slots


def labels_of(batch: PackedBatch, kind: str) -> Tensor:
    if kind == "data":
        return batch.input_ids[0]
    assert batch.verifier_last_hidden_packed is not None
    predicted_S = TARGET.logits(TARGET.norm(batch.verifier_last_hidden_packed[0])).argmax(-1)
    return torch.cat([predicted_S[:1], predicted_S[:-1]])


@pytest.mark.parametrize("kind", ["target", "data"])
@pytest.mark.parametrize("denominator", ["slots", "weights"])
def test_step_is_the_formula_written_out(kind: str, denominator: str) -> None:
    batch = row_of([9, 14], unsupervised=(0, 1, 5, 12, 13))
    anchors = draw_anchors(batch, 5, seed=0)
    model = drafter(drafter_config(), dtype=DOUBLE)
    total, slots = plain_loss(model, batch, anchors, labels_of(batch, kind))
    found, result = gradients([batch], LossConfig(labels=kind, denominator=denominator, chunk_size=4))
    assert result.metrics.slots == slots
    divisor = slots if denominator == "slots" else result.metrics.weight_sum
    expected_weights = sum(n * math.exp(-(k - 1) / GAMMA) for k, n in enumerate(result.metrics.slots_P.tolist()) if k)
    assert result.metrics.weight_sum == pytest.approx(expected_weights, rel=1e-6)
    assert result.metrics.loss_sum == pytest.approx(total.item(), rel=1e-6)
    wanted = torch.autograd.grad(total / divisor, list(model.parameters()))
    assert_same_gradients(found, dict(zip(found, wanted, strict=True)))
    assert result.grad_norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in wanted)), rel=1e-6)


@pytest.mark.parametrize("denominator", ["slots", "weights"])
@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4), (0, 2, 4), (0, 1, 4), (0, 3, 4)])
def test_gradients_do_not_depend_on_the_split(cuts: tuple[int, ...], denominator: str) -> None:
    batch = row_of([5, 17, 9, 12], unsupervised=(7, 8, 25))
    loss = LossConfig(denominator=denominator)
    wanted, whole = gradients([batch], loss)
    rows = [documents(batch, first, last) for first, last in itertools.pairwise(cuts)]
    found, split = gradients(rows, loss)
    assert_same_gradients(found, wanted)
    assert split.metrics.slots == whole.metrics.slots
    assert split.metrics.tokens == whole.metrics.tokens == 43
    assert split.metrics.loss_sum == pytest.approx(whole.metrics.loss_sum, rel=1e-9)
    assert split.metrics.slots_P.tolist() == whole.metrics.slots_P.tolist()


def test_three_slots_and_three_hundred_weigh_by_their_slots() -> None:
    batch = row_of([3, 102])
    rows = [documents(batch, 0, 1), documents(batch, 1, 2)]
    small, large = (gradients([row], num_anchors=512)[1].metrics.slots for row in rows)
    assert (small, large) == (3, 300)
    assert_same_gradients(gradients(rows, num_anchors=512)[0], gradients([batch], num_anchors=512)[0])


def test_order_of_micro_batches_does_not_matter() -> None:
    batch = row_of([8, 11])
    rows = [documents(batch, 0, 1), documents(batch, 1, 2)]
    assert_same_gradients(gradients(rows[::-1])[0], gradients(rows)[0])


def test_row_without_anchors_contributes_nothing() -> None:
    batch, empty = row_of([12]), row_of([6], unsupervised=range(6), seed=3)
    wanted, alone = gradients([batch])
    found, both = gradients([empty, batch])
    assert_same_gradients(found, wanted)
    assert both.metrics.slots == alone.metrics.slots
    assert both.metrics.tokens == alone.metrics.tokens + 6


def test_step_without_any_anchor_leaves_the_weights() -> None:
    model = drafter(drafter_config(), dtype=DOUBLE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = step(model, [row_of([6], unsupervised=range(6))])
    assert result.grad_norm == 0.0
    assert result.metrics.slots == 0
    assert math.isnan(result.metrics.accuracy)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_states_stop_the_run_and_leave_the_weights(value: float) -> None:
    model = drafter(drafter_config(), dtype=DOUBLE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = row_of([12])
    batch.hidden_states_packed[0, 2, 3] = value
    with pytest.raises(PipelineError, match=r"gradient norm nan at step 0: .*draftline audit"):
        step(model, [row_of([12], seed=1), batch])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimiser_that_fails_half_way_says_that_the_weights_are_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: torch.optim.SGD) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.optim.SGD, "step", fail)
    with pytest.raises(UpdateError, match=r"at step 0 \(RuntimeError: out of memory\).*--resume"):
        step(drafter(drafter_config(), dtype=DOUBLE), [row_of([12])])


def test_ids_and_last_states_give_the_same_step_bit_for_bit() -> None:
    batch = row_of([12, 9])
    assert batch.verifier_last_hidden_packed is not None
    ids = TARGET.target_ids(batch.verifier_last_hidden_packed[0], chunk_size=5)[None]
    sent = replace(batch, target_ids=ids, verifier_last_hidden_packed=None)
    (found, with_ids), (wanted, with_states) = gradients([sent]), gradients([batch])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert with_ids.metrics.loss_sum == with_states.metrics.loss_sum
    assert with_ids.metrics.correct_target_P.tolist() == with_states.metrics.correct_target_P.tolist()


def test_clipping_bounds_the_update_and_reports_the_norm_before() -> None:
    batch = row_of([12, 9])
    wanted, free = gradients([batch])
    model = drafter(drafter_config(), dtype=DOUBLE)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    clipped = step(model, [batch], clip_norm=free.grad_norm / 4)
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    found = {name: 4 * (before[name] - parameter.detach()) for name, parameter in model.named_parameters()}
    assert_same_gradients(found, wanted)


class CountingHead(TargetHead):
    """TinyTarget's head, which writes down what it is asked."""

    def __init__(self) -> None:
        super().__init__(TARGET.norm, TARGET.lm_head)
        self.logit_rows: list[int] = []
        self.last_hidden: list[Tensor] = []

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(hidden.shape[0])
        return TARGET.logits(hidden)

    def target_ids(self, last_hidden: Tensor, chunk_size: int = 2048) -> Tensor:
        self.last_hidden.append(last_hidden)
        return TARGET.target_ids(last_hidden, chunk_size)


def test_head_sees_supervised_slots_alone_and_each_position_once() -> None:
    head = CountingHead()
    batch = row_of([12, 9], unsupervised=(5, 6))
    model = drafter(drafter_config(), dtype=DOUBLE)
    result = step(model, [batch], LossConfig(chunk_size=7), frozen=FrozenTarget(TARGET.embedding, head))
    assert max(head.logit_rows) == 6  # two blocks of three
    assert sum(head.logit_rows) == result.metrics.slots
    anchors, block = draw_anchors(batch, 5, seed=0).tolist(), model.config.block_size
    ends = [
        next(e for e in range(a + 1, 22) if e in (5, 6, 12, 21)) for a in anchors
    ]  # what stops the run after an anchor
    asked = sorted({p - 1 for a, end in zip(anchors, ends, strict=True) for p in range(a + 1, min(a + block, end))})
    assert batch.verifier_last_hidden_packed is not None
    assert len(head.last_hidden) == 1
    assert torch.equal(head.last_hidden[0], batch.verifier_last_hidden_packed[0, asked])


def test_noise_on_captured_states_does_not_reach_the_targets() -> None:
    head = CountingHead()
    batch = row_of([12])
    noisy = replace(batch, hidden_states_packed=batch.hidden_states_packed + 1.0)
    model = drafter(drafter_config(), dtype=DOUBLE)
    for row in (batch, noisy):
        row_loss(model, row, torch.tensor([3, 5]), FrozenTarget(TARGET.embedding, head), LossConfig(), DenseAttention)
    assert torch.equal(head.last_hidden[0], head.last_hidden[1])


def test_evaluation_without_gradient_counts_the_same() -> None:
    batch, anchors = row_of([12, 9]), torch.tensor([2, 4, 15])
    model = drafter(drafter_config(), dtype=DOUBLE)
    args = (model, batch, anchors, TARGET.frozen(), LossConfig(), GroupedAttention)
    loss_sum, metrics = row_loss(*args)
    with torch.no_grad():
        without, same = row_loss(*args)
    assert loss_sum.requires_grad
    assert not without.requires_grad
    assert without.item() == loss_sum.item() == metrics.loss_sum == same.loss_sum


class Oracle(nn.Module):
    """A drafter that says what it was told, as one-hot rows; the head below hands them through as logits."""

    def __init__(self, config: DFlashConfig, said_AP: Tensor) -> None:
        super().__init__()
        self.config = config
        self.said_AP = said_AP

    def forward(self, *_: object) -> Tensor:
        return 20.0 * nn.functional.one_hot(self.said_AP.flatten(), VOCABULARY).to(DOUBLE)[None]


class HandThrough(TargetHead):
    """A head whose logits are the drafter's output."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden * 1.0


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize(("shift", "accuracy"), [(0, 1.0), (1, 0.0), (-1, 0.0)])
def test_true_next_tokens_score_the_maximum_and_shifted_ones_nothing(
    sample_from_anchor: bool, shift: int, accuracy: float
) -> None:
    """Slot k of anchor a is to say what the target predicts at a + k - 1, one later where the anchor predicts too."""
    config = drafter_config({"sample_from_anchor": sample_from_anchor})
    batch = row_of([30])
    ids = (torch.arange(30) * 7 % VOCABULARY)[None]
    batch = replace(batch, target_ids=ids, verifier_last_hidden_packed=None)
    anchors = torch.arange(5, 15)
    first = anchors[:, None] + torch.arange(4) + (0 if sample_from_anchor else -1)
    model = Oracle(config, ids[0, first + shift])
    frozen = FrozenTarget(TARGET.embedding, HandThrough(TARGET.norm, TARGET.lm_head))
    _, metrics = row_loss(model, batch, anchors, frozen, LossConfig(), GroupedAttention)  # type: ignore[arg-type]
    assert metrics.accuracy == accuracy
    assert metrics.streak == accuracy * config.num_speculative_tokens
    if accuracy == 1.0:
        assert metrics.loss_sum < 1e-4 * metrics.slots
