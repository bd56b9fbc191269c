"""The reference run against other people's code, hand-made cases, and the real pipeline on small runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from draftline.audit import oracle, oracle_update
from draftline.audit.oracle import Conversation, Counts
from draftline.audit.oracle_update import Moment
from draftline.config import LossConfig, OptimConfig, TrainConfig
from draftline.data.sampler import RowPlan, Sampler, heldout_rows
from draftline.data.split import split_heldout
from draftline.draft.block import draw_anchors
from draftline.draft.loss import StepMetrics
from draftline.draft.vocabulary import count_supervised, reduce_vocabulary
from draftline.train.checkpoint import read_checkpoint
from draftline.train.log import metrics_record
from draftline.train.optim import extension_rate, learning_rate, optimizer_tensors
from tests.audit.real_run import LAYOUTS, RealRun, assert_close, planned_row, real_run, recorded_row, two_answers
from tests.engine.tiny_target import VOCAB_SIZE
from tests.run.small_run import read_lines, small_run
from tests.test_imports import MODULES, imports_of

ALLOWED = {"draftline.config", "draftline.errors"}
REFERENCES = {
    f"draftline.audit.{name}"
    for name in ("oracle", "oracle_decoding", "oracle_update", "reference", "drafter_reference")
}


def test_the_reference_run_imports_nothing_of_what_it_judges() -> None:
    assert MODULES.keys() >= REFERENCES | ALLOWED
    waiting, seen = set(REFERENCES), set[str]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= imports_of(module, at_load=False) - seen
    assert seen <= REFERENCES | ALLOWED


# order


@pytest.mark.parametrize("rows_per_step", [1, 2, 3])
@pytest.mark.parametrize("length", [{"epochs": 2}, {"epochs": 3}, {"max_steps": 1}, {"max_steps": 23}])
@pytest.mark.parametrize(("seed", "extensions"), [(0, ()), (5, (2,)), (2**63 + 11, (1, 3))])
def test_rows_are_those_of_the_sampler(
    rows_per_step: int, length: dict[str, int], seed: int, extensions: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    ids, lengths = np.flatnonzero(rng.random(40) < 0.8), rng.integers(1, 60, 40)
    lengths = lengths[ids]
    train = TrainConfig(tokens_per_row=50, rows_per_step=rows_per_step, seed=seed, extensions=extensions, **length)
    sampler = Sampler(
        sample_ids=ids,
        lengths=lengths,
        tokens_per_row=50,
        rows_per_step=rows_per_step,
        epochs=train.epochs,
        max_steps=train.max_steps,
        seed=seed,
    )
    for passes in extensions:
        sampler.extend(passes)
    assert tuple(oracle.seams(ids.tolist(), lengths.tolist(), train)) == sampler.seams
    found = oracle.plan_run(ids.tolist(), lengths.tolist(), train)
    assert [_fields(row) for row in found] == [_fields(plan) for plan in sampler.plans()]
    assert found[-1].step + 1 == sampler.total_steps
    heldout = oracle.plan_heldout(ids.tolist(), lengths.tolist(), 50)
    assert [_fields(row) for row in heldout] == [_fields(plan) for plan in heldout_rows(ids, lengths, 50)]


def _fields(row: oracle.PlannedRow | RowPlan) -> dict[str, object]:
    return {field.name: getattr(row, field.name) for field in fields(oracle.PlannedRow)}


def test_rows_of_a_hand_made_pass() -> None:
    assert [row.sample_ids for row in oracle.plan_heldout([7, 8, 9, 3, 4], [4, 6, 1, 12, 2], 10)] == [
        (7, 8),
        (9,),
        (3,),
        (4,),
    ]


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.25, 0.9])
def test_held_out_conversations_are_those_of_the_run(fraction: float) -> None:
    hashes = np.random.default_rng(1).integers(0, 30, 60).astype(np.uint64)
    wanted = tuple(side.tolist() for side in split_heldout(hashes, fraction))
    assert oracle.held_out(hashes, fraction) == wanted


# formulas against other people's


def test_adamw_and_clipping_are_torchs() -> None:
    torch.manual_seed(0)
    optim = OptimConfig(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95)
    weights = {"a": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    theirs = torch.optim.AdamW(parameters.values(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    moments = {name: Moment.zero(weight) for name, weight in weights.items()}
    for scale in (3.0, 0.01, 1.0, 1e-6):
        gradients = {name: scale * torch.randn_like(weight) for name, weight in weights.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        assert oracle.global_norm(gradients) == pytest.approx(norm.item(), rel=1e-12)
        clipped = oracle.clip(gradients, 1.0)
        theirs.step()
        for name, parameter in parameters.items():
            torch.testing.assert_close(clipped[name], parameter.grad)
            weights[name], moments[name] = oracle_update.adamw(weights[name], clipped[name], moments[name], 0.01, optim)
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(shape: tuple[int, int], nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch iterates in bfloat16; here it is kept from rounding."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())
    optim = OptimConfig(name="muon", muon_weight_decay=0.2, muon_momentum=0.7, muon_nesterov=nesterov, muon_ns_steps=3)
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameter, moment = nn.Parameter(weight.clone()), Moment.zero(weight)
    numbers = {"weight_decay": 0.2, "momentum": 0.7, "nesterov": nesterov, "ns_steps": 3}
    theirs = torch.optim.Muon([parameter], lr=0.03, adjust_lr_fn="match_rms_adamw", **numbers)
    for seed in range(4):
        gradient = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
        parameter.grad = gradient.clone()
        theirs.step()
        weight, moment = oracle_update.muon(weight, gradient, moment, 0.03, optim)
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("total", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5, 0.9])
@pytest.mark.parametrize("schedule", [{}, {"schedule": "wsd"}, {"schedule": "wsd", "decay_fraction": 1.0}])
def test_the_rate_is_that_of_the_run_and_ends_where_it_should(
    total: int, warmup: float, schedule: dict[str, Any]
) -> None:
    optim = OptimConfig(learning_rate=0.3, warmup_fraction=warmup, final_fraction=0.1, **schedule)
    rates = [oracle_update.learning_rate(step, total, optim) for step in range(total)]
    assert rates == pytest.approx([learning_rate(step, total, optim) for step in range(total)])
    assert total < 7 or round(warmup * total) > total - 2 or rates[-1] == pytest.approx(0.03)
    assert max(rates) <= 0.3


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_the_rate_of_an_extension_is_that_of_the_run(schedule: Any, length: int) -> None:
    ends = 0.0 if schedule == "constant" else 0.1
    optim = OptimConfig(learning_rate=0.3, warmup_fraction=0.2, final_fraction=ends, schedule=schedule)
    seams, total = (30, 37), 37 + length
    rates = [oracle_update.rate_of_run(step, total, seams, optim) for step in range(total)]
    assert rates[:30] == [oracle_update.learning_rate(step, 30, optim) for step in range(30)]
    assert rates[30:37] == pytest.approx([extension_rate(step, 7, optim) for step in range(7)])
    assert rates[37:] == pytest.approx([extension_rate(step, length, optim) for step in range(length)])


def test_rates_of_an_extension_by_hand() -> None:
    """Ten steps, of which two rise: from the third of the way between the end and the highest, as the page says."""
    cosine = OptimConfig(learning_rate=1.0, warmup_fraction=0.2, final_fraction=0.1)
    assert extension_rate(0, 10, cosine) == pytest.approx(0.1 + 0.9 / 3)
    assert extension_rate(1, 10, cosine) == pytest.approx(0.1 + 0.9 * 2 / 3)
    assert (extension_rate(2, 10, cosine), extension_rate(9, 10, cosine)) == pytest.approx((1.0, 0.1))
    wsd = OptimConfig(learning_rate=1.0, warmup_fraction=0.2, schedule="wsd", decay_fraction=0.2)
    assert [extension_rate(step, 10, wsd) for step in range(10)] == pytest.approx([1.0] * 8 + [0.5, 0.0])
    constant = OptimConfig(learning_rate=1.0, schedule="constant")
    assert {extension_rate(step, 10, constant) for step in range(10)} == {1.0}


def test_counts_and_figures_of_a_hand_made_case() -> None:
    """Two blocks of four: right, right, wrong; and wrong, right."""
    slots = [(0, 1, 5), (0, 2, 6), (0, 3, 7), (2, 1, 9), (2, 2, 10)]
    nothing = Counts.zero(4)
    counts = oracle._count(slots, [True, True, False, False, True], [False, False, True, True, True], nothing)
    assert counts.slots == (0, 2, 2, 1)
    assert counts.right == (0, 1, 2, 0)
    assert counts.right_in_data == (0, 1, 1, 1)
    assert counts.run == (0, 1, 1, 0)
    assert counts.reached == (0, 2, 1, 1)
    assert counts.blocks == 2
    assert counts + counts == oracle._count(
        [*slots, *((b + 3, k, p) for b, k, p in slots)],
        [True, True, False, False, True] * 2,
        [False, False, True, True, True] * 2,
        nothing,
    )
    found = oracle.figures(counts, LossConfig())
    assert found["accuracy"] == 3 / 5
    assert found["streak"] == 1.0
    assert found["accuracy_by_position"] == [None, 0.5, 1.0, 0.0]
    assert found["conditional_accuracy_by_position"] == [None, 0.5, 1.0, 0.0]
    assert oracle.figures(nothing, LossConfig())["loss"] is None


def test_lines_and_checkpoints_of_a_hand_made_run() -> None:
    train = TrainConfig(log_every=3, eval_every=4, save_every=5)
    counts = [Counts((1,), (0,), (0,), (0,), (0,), 1, step, 0.0, 0.0) for step in range(1, 12)]
    lines = oracle.log_lines(counts, train, 11, evaluates=True)
    assert {step: window.tokens for step, window in lines.items()} == {3: 6, 4: 4, 6: 11, 8: 15, 9: 9, 11: 21}
    assert set(oracle.log_lines(counts, train, 11, evaluates=False)) == {3, 6, 9, 11}
    assert oracle.checkpoints({4: 0.5, 8: 0.5, 11: 0.7}, train, 11) == ([4, 5, 10, 11], 11)
    assert oracle.checkpoints({4: 0.5, 8: None, 11: 0.4}, train, 11) == ([4, 5, 10, 11], 4)


def test_the_loss_is_torchs_cross_entropy_of_whole_logits() -> None:
    run = real_run()
    reference = run.reference()
    row = planned_row(run, reference, 0, run.data.training_ids[:1].tolist(), run.data.training)
    (item,) = row.conversations
    anchors = oracle.draw_anchors(item.loss_mask, item.sample_id, 0, 0, 100)
    heard = oracle.speak(reference, item, anchors, LossConfig(decay_gamma=2.0))
    outputs = oracle.block_outputs(reference, item.input_ids, item.states, anchors)
    total = 0.0
    for block, slot, position in heard.slots:
        logits = run.target.model.lm_head.weight.double() @ outputs[block, slot]
        nats = nn.functional.cross_entropy(logits[None], item.next_ids[None, position - 1])
        total += math.exp(-(slot - 1) / 2.0) * nats.item()
    assert heard.counts.loss_sum == pytest.approx(total, rel=1e-12)
    assert heard.loss.item() == pytest.approx(total, rel=1e-12)


def test_a_step_without_a_supervised_slot_moves_nothing() -> None:
    run = real_run()
    reference = run.reference()
    row = planned_row(run, reference, 0, run.data.training_ids[:1].tolist(), run.data.training)
    (item,) = row.conversations
    silent = Conversation(0, item.input_ids, torch.zeros_like(item.loss_mask), item.states, item.next_ids)
    moments = {name: Moment.zero(weight) for name, weight in reference.weights.items()}
    outcome = oracle.train_step(reference, moments, [oracle.Row(0, (silent,))], 0, 10, run.config)
    assert outcome.gradient.norm == 0.0
    assert outcome.weights == reference.weights
    assert outcome.moments == moments
    assert outcome.gradient.counts.tokens == len(item.input_ids)


# the real pipeline, step by step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_what_the_reference_makes_of_the_state_before_it(layout: str) -> None:
    run = real_run(*LAYOUTS[layout], "train.epochs=2")
    received, model, optimizer = _received(run), run.drafter.model, run.drafter.optimizer
    steps = run.steps()
    assert len({batch.epoch for step in steps for batch in step}) == 2
    for number, batches in enumerate(steps):
        before = run.reference()
        moments = oracle_update.moments_of(optimizer_tensors(optimizer, model), before.weights)
        rows = [recorded_row(run, before, batch, run.data.training) for batch in batches]
        for row, batch in zip(rows, batches, strict=True):
            drawn = oracle.row_anchors(row, run.config.train.seed, run.config.train.num_anchors)
            assert oracle.in_row_positions(row, drawn) == _real_anchors(run, batch)
        wanted = oracle.train_step(before, moments, rows, number, len(steps), run.config)
        result = run.drafter.step(batches)
        _assert_same_counts(result.metrics, wanted.gradient.counts)
        assert result.grad_norm == pytest.approx(wanted.gradient.norm, rel=1e-5)
        assert_close(received, oracle.clip(wanted.gradient.gradients, run.config.optim.clip_norm), 1e-5)
        _assert_same_update(run, before.weights, moments, received, wanted.rate)


def test_a_narrow_target_rounds_nothing_but_what_passes_its_head() -> None:
    """States and labels as they arrive; without the rounding of the head, gradients are off by 1e-3."""
    run = real_run("drafter.block_size=8", "train.epochs=1", target_dtype=torch.bfloat16)
    received = _received(run)
    for batches in run.steps():
        reference = run.reference()
        rows = [recorded_row(run, reference, batch, run.data.training) for batch in batches]
        anchors = [oracle.row_anchors(row, run.config.train.seed, run.config.train.num_anchors) for row in rows]
        exact = oracle.step_gradient(reference, rows, anchors, run.config.loss)
        wanted = oracle.step_gradient(reference.with_head_in(torch.bfloat16), rows, anchors, run.config.loss)
        result = run.drafter.step(batches)
        _assert_same_counts(result.metrics, wanted.counts)
        assert_close(received, oracle.clip(wanted.gradients, run.config.optim.clip_norm), 1e-5)
        with pytest.raises(AssertionError):
            assert_close(received, oracle.clip(exact.gradients, run.config.optim.clip_norm), 1e-4)


def _received(run: RealRun) -> dict[str, Tensor]:
    """Where the gradients of each step will be, as the optimiser receives them."""
    received: dict[str, Tensor] = {}

    def receive(*_: object) -> None:
        gradients = {name: parameter.grad for name, parameter in run.drafter.model.named_parameters()}
        received.update({name: gradient.clone() for name, gradient in gradients.items() if gradient is not None})

    run.drafter.optimizer.register_step_pre_hook(receive)
    return received


def _real_anchors(run: RealRun, batch: object) -> list[int]:
    return draw_anchors(batch, run.config.train.num_anchors, run.config.train.seed).tolist()


def _assert_same_counts(found: StepMetrics, wanted: Counts) -> None:
    assert found.slots_P.tolist() == list(wanted.slots)
    assert found.correct_target_P.tolist() == list(wanted.right)
    assert found.correct_data_P.tolist() == list(wanted.right_in_data)
    assert found.run_correct_P.tolist() == list(wanted.run)
    assert found.run_slots_P.tolist() == list(wanted.reached)
    assert (found.streak_sum, found.blocks, found.tokens) == (sum(wanted.run), wanted.blocks, wanted.tokens)
    assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)
    assert found.weight_sum == pytest.approx(wanted.weight_sum, rel=1e-5)


def _assert_same_update(
    run: RealRun,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Moment],
    gradients: Mapping[str, Tensor],
    rate: float,
) -> None:
    """Weights and moments now, from those before and the gradient that the optimiser received."""
    optim = run.config.optim
    after = {
        name: oracle_update.moved(weight, gradients[name].double(), moments[name], rate, optim)
        for name, weight in weights.items()
    }
    # a direction that gradients of few tokens hardly have is amplified, and its rounding with it
    tolerance = 1e-6 if optim.name == "adamw" else 0.02
    assert_close(run.reference().weights, {name: weight for name, (weight, _) in after.items()}, tolerance)
    now = oracle_update.moments_of(optimizer_tensors(run.drafter.optimizer, run.drafter.model), weights)
    assert_close({n: m.mean for n, m in now.items()}, {n: m.mean for n, (_, m) in after.items()}, 1e-6)
    adamw = [name for name, weight in weights.items() if not oracle_update.goes_by_muon(weight, optim)]
    assert_close({n: now[n].square for n in adamw}, {n: after[n][1].square for n in adamw}, 1e-6)
    assert [m.updates for m in now.values()] == [m.updates for _, m in after.values()]


@pytest.mark.parametrize("layout", ["plain", "anchor-predicts", "reduced", "data-labels", "kl", "dspark"])
def test_evaluation_counts_what_the_run_counts(layout: str) -> None:
    run = real_run(*LAYOUTS[layout], "train.seed=3", "data.heldout_fraction=0.4")
    for batches in run.steps()[:4]:
        run.drafter.step(batches)
    ids, heldout = run.data.heldout_ids, run.data.heldout
    plans = heldout_rows(ids, heldout.lengths[ids], run.config.train.tokens_per_row)
    metrics = StepMetrics.total(
        (run.drafter.measure(run.row(plan, heldout)) for plan in plans), run.config.drafter.block_size
    )
    reference = run.reference()
    rows = [planned_row(run, reference, plan.epoch, plan.sample_ids, heldout) for plan in plans]
    counts = oracle.evaluate(reference, rows, run.config.train.num_anchors, run.config.loss)
    _assert_same_counts(metrics, counts)
    assert counts.blocks > 20
    figures, record = oracle.figures(counts, run.config.loss), metrics_record(metrics, run.config.loss)
    assert figures.keys() == record.keys()
    for name, value in figures.items():
        wanted = [math.nan if entry is None else entry for entry in value] if isinstance(value, list) else value
        assert record[name] == pytest.approx(wanted, rel=1e-5, nan_ok=True), name


# beginning


@pytest.mark.parametrize("layout", ["plain", "sliding"])
def test_first_weights_are_the_drawn_ones_bit_for_bit(layout: str) -> None:
    run = real_run(*LAYOUTS[layout], "train.seed=5")
    found = oracle.first_weights(run.drafter.model.config, 5)
    wanted = run.drafter.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_of_the_targets_layers() -> None:
    run = real_run("drafter.num_layers=2")
    run.drafter.model.start_from_layers(run.target.decoder_layers, run.target.final_norm)
    first = oracle.first_weights(run.drafter.model.config, 0)
    found = oracle.weights_of_target(first, run.target.model)
    wanted = run.drafter.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("size", [3, 12, VOCAB_SIZE - 1])
def test_tokens_of_a_reduced_vocabulary(size: int) -> None:
    data = real_run().data
    counts_V = count_supervised(data.training, data.training_ids, VOCAB_SIZE)
    conversations = [(item.input_ids, item.loss_mask) for item in map(data.training.__getitem__, data.training_ids)]
    for always in (set(), {0, 39}):
        wanted = reduce_vocabulary(counts_V, size, always).kept_ids.tolist()
        assert oracle.kept_tokens(conversations, size, VOCAB_SIZE, always) == wanted


# a whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    small_run(out, samples=two_answers())
    return out


def test_a_whole_run_from_the_recipe_alone(whole: Path) -> None:
    """From seeds and conversations to the last weights; the paths part slowly, as float32 rounds."""
    run = real_run()
    config, data = run.config, run.data
    reference = run.reference().with_weights(oracle.first_weights(run.drafter.model.config, config.train.seed))
    moments = {name: Moment.zero(weight) for name, weight in reference.weights.items()}
    ids = data.training_ids.tolist()
    plans = oracle.plan_run(ids, data.training.lengths[ids].tolist(), config.train)
    total = plans[-1].step + 1
    counts, norms, streaks = [], [], {}
    heldout_ids = data.heldout_ids.tolist()
    heldout = [
        planned_row(run, reference, plan.epoch, plan.sample_ids, data.heldout)
        for plan in oracle.plan_heldout(
            heldout_ids, data.heldout.lengths[heldout_ids].tolist(), config.train.tokens_per_row
        )
    ]
    for step in range(total):
        of_step = [plan for plan in plans if plan.step == step]
        rows = [planned_row(run, reference, plan.epoch, plan.sample_ids, data.training) for plan in of_step]
        outcome = oracle.train_step(reference, moments, rows, step, total, config)
        reference, moments = reference.with_weights(outcome.weights), outcome.moments
        counts.append(outcome.gradient.counts)
        norms.append(outcome.gradient.norm)
        if oracle.is_due(step + 1, config.train.eval_every, total):
            found = oracle.evaluate(reference, heldout, config.train.num_anchors, config.loss)
            streaks[step + 1] = oracle.figures(found, config.loss)["streak"]
    lines = oracle.log_lines(counts, config.train, total, evaluates=True)
    logged = read_lines(whole)
    assert [line["step"] for line in logged] == list(lines)
    for line in logged:
        step, found = line["step"], oracle.figures(lines[line["step"]], config.loss)
        assert line["tokens"] == sum(of_step.tokens for of_step in counts[:step])
        assert line["learning_rate"] == pytest.approx(oracle_update.learning_rate(step - 1, total, config.optim))
        assert line["grad_norm"] == pytest.approx(norms[step - 1], rel=1e-3)
        assert line["loss"] == pytest.approx(found["loss"], rel=1e-4)
        assert line["accuracy"] == pytest.approx(found["accuracy"], abs=0.01)
        if step in streaks:
            assert line["heldout_streak"] == pytest.approx(streaks[step], abs=0.05)
    saved, best = oracle.checkpoints(streaks, config.train, total)
    newest = saved[-config.train.keep_last :]
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {f"step-{step:06d}" for step in {*newest, best}}
    assert (whole / "best").resolve().name == f"step-{best:06d}"
    assert_close(read_checkpoint(whole / "last").weights, reference.weights, 1e-3)
