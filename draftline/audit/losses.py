"""LOS: is each slot taught the right token, with the right weight, and nothing else?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.optim import SGD

from draftline.audit.loss_reading import (
    LabelsUsed,
    constant_ratio,
    decay_of,
    labels_by_name,
    labels_used,
    loss_trace,
    measured_weights,
    oracle_trace,
    run_loss,
    soft_hint,
    supervised,
    taught_distribution,
    wanted_weights,
    wants_data,
    weights_by_slot,
)
from draftline.audit.probe import Probe, relative_difference
from draftline.audit.reference import naive_anchors, naive_distances, naive_slots, naive_weights
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.config import PUBLISHED_DECAY
from draftline.draft.loss import TaughtSlots
from draftline.draft.model import DFlashDraftModel
from draftline.records import PackedBatch
from draftline.train import step
from draftline.train.ranks import Ranks

_FITS = 0.9
"""Share of slots that an explanation has to fit to be named."""


@check("LOS001", "the loss is not the configured one", needs=("TGT002", "TGT003", "TGT008"))
def configured_loss(probe: Probe) -> Problem | None:
    used, loss = labels_used(probe), probe.subject.config.loss
    meant = "hard cross entropy"
    if loss.ce < 1:
        meant = f"{loss.ce:g} cross entropy + {loss.kl:g} KL(target, drafter) + {loss.tv:g} total variation"
    fix = f"sum weight * ({meant}) over supervised slots, weights as constants, no smoothing, temperature or other term"
    if used.fit < _FITS:
        return Problem(
            f"the gradient is that of {meant} at only {used.fit:.1%} of slots, whatever label is assumed"
            f"{soft_hint(probe, used)}",
            fix,
        )
    wanted = _wanted_loss(probe, used) if used.truth_fit == 1.0 else None
    if wanted is None:
        return None
    difference = abs(used.trace.loss - wanted) / max(abs(wanted), 1e-9)
    if difference > max(1e-3, probe.loss_tolerance / 4):
        return Problem(f"loss of the probe row {used.trace.loss:.5f}, sum of weight * distance {wanted:.5f}", fix)
    return None


def _wanted_loss(probe: Probe, used: LabelsUsed) -> float | None:
    """Sum of measured weight * distance over the slots of the probe, in float64."""
    labels, weights = labels_by_name(probe, "truth"), measured_weights(probe, used)
    loss, slots = probe.subject.config.loss, supervised(probe)
    places = torch.tensor([index * probe.block_size + slot for index, slot, _ in slots])
    logits = torch.cat([forward.logits for forward in probe.reference])[used.trace.source_Q[places]]
    rows = torch.searchsorted(probe.kept_ids, torch.tensor([labels(position) for _, _, position in slots]))
    teacher = None
    if loss.kl or loss.tv:
        teacher = taught_distribution(probe, [position - 1 for _, _, position in slots])
    said = logits.cpu().double()[:, probe.kept_ids]
    distances, _ = naive_distances(said, rows, teacher, (loss.ce, loss.kl, loss.tv))
    return float((weights[places] * distances).sum())


@check("LOS002", "labels are not the right tokens for their slots", needs=("TGT002", "TGT003", "TGT008"))
def right_labels(probe: Probe) -> Problem | None:
    used = labels_used(probe)
    if used.truth_fit == 1.0 or used.fit < _FITS:
        return None
    meant = "the token in the data" if wants_data(probe) else "the target's prediction made at the token before"
    if probe.subject.draft_model.d2t is not None:
        meant = f"the best of the drafter's {len(probe.kept_ids)} tokens in {meant}"
    taught = "something else in places" if used.name == "truth" else used.name
    return Problem(
        f"slot k is taught {taught} (fits {used.fit:.1%} of slots; right ones fit {used.truth_fit:.1%})",
        f"the label of a slot that predicts position p is {meant} p",
    )


@check("LOS003", "the numbers of the weights are no good choice")
def weight_numbers(probe: Probe) -> Problem | None:
    loss = probe.subject.config.loss
    if loss.weights == "dpace":
        if loss.dpace_alpha < 1:
            return None
        return Problem(
            "with loss.dpace_alpha 1 a slot weighs the number of slots from it on, whatever the drafter knows",
            "loss.dpace_alpha=0.5, or loss.weights=decay",
            "warning",
        )
    block, gamma = probe.block_size, probe.gamma
    published = PUBLISHED_DECAY.get(block)
    pairs = ", ".join(f"{g:g} for blocks of {p}" for p, g in PUBLISHED_DECAY.items())
    wanted = block / 2 if published is None else published
    fits = math.isclose(gamma, wanted, rel_tol=1e-6) if published is not None else 0.75 < gamma / wanted < 1.34
    if fits:
        return None
    return Problem(
        f"gamma {gamma:g} with blocks of {block}; published are {pairs}", f"loss.decay_gamma={wanted:g}", "warning"
    )


@check("LOS004", "slots are not weighted as the settings say", needs=("LOS001", "LOS002"))
def right_weights(probe: Probe) -> Problem | None:
    used = labels_used(probe)
    if used.truth_fit < 1.0:
        raise NotApplicable("weights cannot be read without right labels")
    wanted = wanted_weights(probe, used)
    if wanted[[i * probe.block_size + slot for i, slot, _ in supervised(probe)]].isnan().all():
        raise NotApplicable("the target's two best logits are a near tie in every block")
    if constant_ratio(probe, used) is not None:
        return None
    found, loss = weights_by_slot(probe, measured_weights(probe, used)), probe.subject.config.loss
    fix = f"weight of slot k: exp(-(k - {probe.first}) / {probe.gamma:g})"
    if loss.weights == "dpace":
        fix = f"the sum over m >= k of the product over i <= m of (1 - a) q_i + a, a = {loss.dpace_alpha:g}, detached"
    return Problem(
        f"measured weights by slot {_numbers(found)}, wanted {_numbers(weights_by_slot(probe, wanted))}"
        f"{decay_of(found, probe.first)}",
        fix,
    )


@check("LOS005", "the wrong slots carry a loss", needs=("TGT001",))
def right_slots(probe: Probe) -> Problem | None:
    trace = loss_trace(probe)
    found = {int(q) for q in (trace.gradient_QD.norm(dim=-1) > 0).nonzero()[:, 0]}
    wanted = {index * probe.block_size + slot for index, slot, _ in supervised(probe)}
    extra, missing = sorted(found - wanted), sorted(wanted - found)
    counted = [int(count) for count in trace.metrics.slots_P.tolist()]
    by_slot = [sum(slot == k for _, slot, _ in supervised(probe)) for k in range(probe.block_size)]
    fix = (
        "supervise the unbroken run of answer tokens after the anchor: not the anchor's own slot, nothing past the "
        "answer or the document, and keep the slots of a partial block"
    )
    if not extra and not missing:
        if counted == by_slot:
            return None
        return Problem(f"supervised slots by place in the block: counted {counted}, are {by_slot}", fix)
    return Problem(
        f"{len(extra)} slots carry a loss that should not{_examples(probe, extra)}; {len(missing)} carry none that "
        f"should{_examples(probe, missing)}",
        fix,
    )


@check(
    "LOS006",
    "the update depends on how rows are split, or is divided by the wrong count",
    needs=("DRF001", "DRF002", "DRF003", "DRF008", "LOS005"),
)
def split_invariance(probe: Probe) -> Problem | None:
    with probe.shaken_weights():
        whole = _step_gradients(probe, [probe.row])
        parts = _step_gradients(probe, [probe.row_of([item]) for item in probe.reference_captured * 3])
        direct = _direct_gradients(probe)
        ranks = _gradients_of_ranks(probe, [probe.row_of([item]) for item in probe.reference_captured])
    split = _gradient_difference(parts, whole)
    fix = "sum the loss over all rows and ranks of a step, and divide once by the global count of supervised slots"
    if split > probe.loss_tolerance:
        return Problem(
            f"one row, or the same in nine micro-batches, three times each: gradients differ by {split:.1e} (relative)",
            fix,
        )
    if len(ranks) < _SimulatedRank.count:
        return Problem(f"of three ranks {len(ranks)} end a step while the others wait for their sums", fix)
    apart = max(_gradient_difference(found, whole) if found else 1.0 for found in ranks)
    if apart > probe.loss_tolerance:
        return Problem(
            f"one rank with all rows, or three of which one has none: gradients differ by {apart:.1e} (relative)", fix
        )
    ratio = _norm(whole) / max(_norm(direct), 1e-30)
    if max(abs(ratio - 1), _gradient_difference(whole, direct)) > probe.loss_tolerance:
        return Problem(f"the step's gradient is {ratio:.4f} times the sum over slots divided by their number", fix)
    used = labels_used(probe)
    factor = constant_ratio(probe, used) if used.truth_fit == 1.0 else 1.0
    if factor is not None and abs(factor - 1) > max(1e-2, probe.loss_tolerance / 4):
        return Problem(
            f"the loss of a row is {factor:.4f} times its sum over slots: it is divided before rows are added", fix
        )
    return None


@check("LOS007", "the gradient does not reach every parameter of the drafter", needs=("DRF001",))
def gradient_everywhere(probe: Probe) -> Problem | None:
    with probe.shaken_weights():
        shaken = _step_gradients(probe, [probe.row])
    gradients = _step_gradients(probe, [probe.row])  # with the drafter's own weights: a norm of 0 stops those before it
    dead = [name for name in gradients if any(_is_dead(found[name]) for found in (shaken, gradients))]
    trainable = [name for name, p in probe.subject.target.model.named_parameters() if p.grad is not None]
    if not dead and not trainable:
        return None
    return Problem(
        f"no finite gradient in {len(dead)} of {len(gradients)} drafter parameters {dead[:3]}; "
        f"a gradient in {len(trainable)} parameters of the target {trainable[:3]}",
        "detach nothing between the loss and the drafter's inputs, and freeze the target",
    )


@check("LOS008", "chunks change the loss", needs=("LOS001", "LOS005"))
def chunk_independent(probe: Probe) -> Problem | None:
    one = loss_trace(probe)
    other = run_loss(probe, probe.row, one.source_Q, chunk_size=5)
    difference = relative_difference(other.gradient_QD, one.gradient_QD)
    value = abs(other.loss - one.loss) / max(abs(one.loss), 1e-9)
    if max(difference, value) < probe.loss_tolerance:
        return None
    return Problem(
        f"in chunks of 5 slots the loss is {other.loss:.5f}, else {one.loss:.5f}; gradients differ by {difference:.1e}",
        "add the chunks' sums, each with its own slots and labels",
    )


@check("LOS010", "the loss is not taken in float32", needs=("LOS001",))
def wide_loss(probe: Probe) -> Problem | None:
    """Logits of the target's own width, bfloat16, against float64 over the same logits."""
    generator = probe.generator(31)
    hidden = torch.randn(48, 16, generator=generator)
    weight = torch.randn(16, 64, generator=generator)
    labels = torch.randint(64, (48,), generator=generator)
    weights = torch.rand(48, generator=generator) + 0.5
    taught = (torch.randn(48, 16, generator=generator) @ weight).bfloat16()
    loss = probe.subject.config.loss.model_copy(update={"weights": "decay", "chunk_size": 20, "top_k": None})

    def logits_of(hidden_mD: Tensor) -> Tensor:
        return (hidden_mD @ weight).bfloat16()

    slots = TaughtSlots(labels, torch.arange(48) // 4, weights, lambda chunk: taught[chunk])
    results = step.slot_loss_sum(hidden.requires_grad_(), slots, logits_of, loss)
    results.loss_sum.backward()
    assert hidden.grad is not None
    logits = logits_of(hidden.detach()).double().requires_grad_()
    teacher = taught.double().softmax(-1) if loss.kl or loss.tv else None
    wanted = (naive_distances(logits, labels, teacher, (loss.ce, loss.kl, loss.tv))[0] * weights).sum()
    (slopes,) = torch.autograd.grad(wanted, logits)
    off = relative_difference(hidden.grad.double(), slopes @ weight.double().T)
    value = abs(float(results.loss_sum.detach()) - wanted.item()) / wanted.item()
    if value < 1e-5 and off < 1e-2:
        return None
    return Problem(
        f"over logits in bfloat16 the loss is off by {value:.1e} (relative), its gradient by {off:.1e}",
        "widen logits to float32 before the exponentials",
    )


@check("LOS009", "accuracy and streak are not counted from the blocks", needs=("LOS002", "LOS005", "TGT008"))
def right_metrics(probe: Probe) -> Problem | None:
    wrong_slots = {q for q in range(len(probe.anchors) * probe.block_size) if q % 5 == 3}
    metrics = oracle_trace(probe, wrong_slots).metrics
    own, best = probe.spoken
    wrong_slots |= {  # a token that the drafter cannot say is never said
        index * probe.block_size + slot for index, slot, place in supervised(probe) if own[place - 1] != best[place - 1]
    }
    wanted = _naive_metrics(probe, wrong_slots)
    found = {
        "slots": metrics.slots,
        "right slots": int(metrics.correct_target_P.sum()),
        "right in an unbroken run": int(metrics.run_correct_P.sum()),
        "slots reached by a run": int(metrics.run_slots_P.sum()),
        "streak": round(metrics.streak_sum),
        "blocks": metrics.blocks,
        "tokens": metrics.tokens,
    }
    # States are computed to tokens by the loss itself: of two that are near, it may find the other one.
    unsure = (
        0 if probe.row.target_ids is not None else sum(probe.unsure[place - 1] for _, _, place in supervised(probe))
    )
    exact = {"slots", "blocks", "tokens"}
    different = [
        name
        for name, number in wanted.items()
        if abs(number - found[name])
        > (0 if name in exact else unsure * (1 if name == "right slots" else probe.block_size))
    ]
    doubled = metrics + metrics
    if not different and (doubled.slots != 2 * metrics.slots or doubled.blocks != 2 * metrics.blocks):
        different = ["slots"]
    if not different:
        return None
    name = different[0]
    return Problem(
        f"with {len(wrong_slots)} slots answered wrongly on purpose, {name}: counted {found[name]}, are {wanted[name]}",
        "count sums per block, add them over rows and ranks, divide once; the bonus token is not part of the streak",
    )


def _examples(probe: Probe, slots: list[int]) -> str:
    if not slots:
        return ""
    index, slot = divmod(slots[0], probe.block_size)
    return f" (first: slot {slot} of the block at {probe.anchors[index]})"


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.3f}" for v in values) + "]"


# The step.


class _Recorder(SGD):
    """An optimiser that keeps the gradients and moves nothing."""

    def __init__(self, model: DFlashDraftModel) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Keep a copy of every gradient."""
        del closure
        for name, parameter in self.model.named_parameters():
            self.gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        return None


def _step_gradients(probe: Probe, rows: list[PackedBatch]) -> dict[str, Tensor]:
    """Gradients that reach the optimiser in one step over some rows, not clipped."""
    drafter = probe.subject.run.drafter
    recorder = _Recorder(drafter.model)
    anchors = [torch.tensor(_eligible(row), device=probe.device) for row in rows]
    probe.subject.train_step(drafter, rows, anchors, recorder, clip_norm=1e12)
    return recorder.gradients


class _SimulatedRank(Ranks):
    """One of several ranks that are lived one after another: what they sum is replayed from the lives before.

    Args:
        rank: its number.
        sums: of the exchanges that all ranks have come to, in order.
        given: gets what this rank gives to the next one.
    """

    count = 3

    def __init__(self, rank: int, sums: list[list[Tensor]], given: list[list[Tensor]]) -> None:
        self.rank, self._sums, self._given = rank, iter(sums), given

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Put sums in their place, or end where they are not known yet."""
        totals = next(self._sums, None)
        if totals is None:
            self._given.append([tensor.clone() for tensor in tensors])
            raise _UnknownSum
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.copy_(total)


class _UnknownSum(Exception):
    """Not all ranks have come to it."""


def _gradients_of_ranks(probe: Probe, rows: list[PackedBatch]) -> list[dict[str, Tensor]]:
    """Gradients that reach the optimisers of ranks, of which the last has no row; of fewer where the others wait."""
    drafter, sums = probe.subject.run.drafter, list[list[Tensor]]()
    while True:
        given, found = list[list[Tensor]](), list[dict[str, Tensor]]()
        for rank in range(_SimulatedRank.count):
            mine = rows[rank :: _SimulatedRank.count - 1] if rank < _SimulatedRank.count - 1 else []
            anchors = [torch.tensor(_eligible(row), device=probe.device) for row in mine]
            recorder, one = _Recorder(drafter.model), _SimulatedRank(rank, sums, given)
            with suppress(_UnknownSum):
                probe.subject.train_step(drafter, mine, anchors, recorder, clip_norm=1e12, ranks=one)
                found.append(recorder.gradients)
        if found:
            return found
        sums.append([torch.stack(alike).sum(dim=0) for alike in zip(*given, strict=True)])


def _direct_gradients(probe: Probe) -> dict[str, Tensor]:
    """Gradient of the row's loss, divided once by the count that the configuration names."""
    subject = probe.subject
    anchors, loss = naive_anchors(probe.samples), subject.config.loss
    slots = naive_slots(probe.samples, anchors, probe.block_size, probe.first)
    positions = torch.tensor(anchors, device=probe.device)
    value, metrics = subject.row_loss(subject.draft_model, probe.row, positions)
    count: float = len(slots)
    if loss.denominator == "weights":
        weights = naive_weights(probe.block_size, probe.gamma, probe.first)
        by_place = math.fsum(weights[k] for _, k, _ in slots)
        count = by_place if loss.weights == "decay" else metrics.weight_sum  # which RUN005 holds against float64
    names, parameters = zip(*subject.draft_model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(value / count, parameters, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, gradients, strict=True)
    }


def _eligible(row: PackedBatch) -> list[int]:
    mask, documents = row.loss_mask[0].tolist(), row.document_ids[0].tolist()
    return [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1] and documents[t] == documents[t + 1]]


def _is_dead(gradient: Tensor) -> bool:
    return not gradient.isfinite().all() or not (gradient != 0).any()


def _gradient_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max((relative_difference(found[name], g) for name, g in wanted.items() if (g != 0).any()), default=0.0)


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def _naive_metrics(probe: Probe, wrong_slots: set[int]) -> dict[str, int]:
    """What is right when every slot is right but some."""
    blocks: dict[int, list[bool]] = {}
    for index, slot, _ in supervised(probe):
        blocks.setdefault(index, []).append(index * probe.block_size + slot not in wrong_slots)
    runs = [next((i for i, right in enumerate(slots) if not right), len(slots)) for slots in blocks.values()]
    return {
        "slots": sum(map(len, blocks.values())),
        "right slots": sum(map(sum, blocks.values())),
        "right in an unbroken run": sum(runs),
        "slots reached by a run": sum(
            min(run + 1, len(slots)) for run, slots in zip(runs, blocks.values(), strict=True)
        ),
        "streak": sum(runs),
        "blocks": len(blocks),
        "tokens": probe.row.input_ids.shape[1],
    }
