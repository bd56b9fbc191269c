"""Reading a loss from outside: which slots count, which label each has, and how much it weighs.

The loss is called with a stand-in for the drafter, whose outputs are states of the target with known logits. The
gradient that comes back for each slot is its weight times that of the configured distance (softmax - one-hot(label) for
cross entropy) through the head, whatever the code in between looks like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.audit.probe import Probe, StandIn, once_per_audit
from draftline.audit.reference import best_alone, naive_distances, naive_dpace, naive_slots, naive_weights
from draftline.audit.subject import NotApplicable
from draftline.draft.loss import StepMetrics
from draftline.records import PackedBatch

_SAME_DIRECTION = 0.9999
"""Cosine of two gradients of one slot, both through logits of the run's precision: they agree to 1e-5 in bfloat16."""


@dataclass(frozen=True, eq=False)
class LossTrace:
    """One call of the run's loss with a stand-in.

    Attributes:
        source_Q: [Q] row position whose state the stand-in returned for each slot.
        gradient_QD: [Q, D] float64, what came back for each slot.
        loss: the value returned.
        metrics: what was counted.
    """

    stand_in: StandIn
    source_Q: Tensor
    gradient_QD: Tensor
    loss: float
    metrics: StepMetrics


@dataclass(frozen=True, eq=False)
class LabelsUsed:
    """Which labels explain the gradient of the loss.

    Attributes:
        truth_fit: share of slots whose gradient is that of the configured distance with the right label.
        name, fit, layer: the explanation that fits best, and the captured layer if it is one.
        trace: the call that this was read from.
        unit_QD: gradient of the unweighted distance with the right labels.
    """

    truth_fit: float
    name: str
    fit: float
    layer: int | None
    trace: LossTrace
    unit_QD: Tensor


def supervised(probe: Probe) -> list[tuple[int, int, int]]:
    """Supervised slots of the probe's anchors: index of the anchor, slot, row position predicted."""
    return naive_slots(probe.samples, probe.anchors, probe.block_size, probe.first)


@once_per_audit
def loss_trace(probe: Probe) -> LossTrace:
    """The loss with random states as outputs, none of them that of its own lesson: total variation has a kink there."""
    total = probe.row.input_ids.shape[1]
    source_Q = torch.randint(total, (len(probe.anchors) * probe.block_size,), generator=probe.generator(5))
    for index, slot, position in supervised(probe):
        place = index * probe.block_size + slot
        source_Q[place] += int(source_Q[place] == position - 1)
    return run_loss(probe, probe.row, source_Q)


@once_per_audit
def labels_used(probe: Probe) -> LabelsUsed:
    """The labels that the loss of the probe's row is computed with."""
    return read_labels(probe, loss_trace(probe))


def run_loss(
    probe: Probe, row: PackedBatch, source_Q: Tensor, chunk_size: int | None = None, clear: bool = False
) -> LossTrace:
    """The loss with states of the target as outputs.

    Args:
        source_Q: [Q] row positions, whose states they are.
        clear: the states are moved until each says the best token there for certain.
    """
    subject = probe.subject
    normed = torch.cat([forward.normed for forward in probe.reference]).to(probe.device)
    states = probe.clear_states(normed, probe.spoken[1]) if clear else normed.float()
    stand_in = StandIn(probe, states[source_Q.to(probe.device)])
    loss = subject.config.loss
    if chunk_size is not None:
        loss = loss.model_copy(update={"chunk_size": chunk_size})
    value, metrics = subject.row_loss(stand_in, row, probe.anchor_positions, loss)
    value.backward()
    gradient = stand_in.outputs.grad
    assert gradient is not None, "the loss does not depend on the drafter's outputs"
    return LossTrace(stand_in, source_Q, gradient.double().cpu(), float(value.detach()), metrics)


def oracle_trace(probe: Probe, wrong_slots: set[int]) -> LossTrace:
    """The loss with a drafter that says the target's own next token where it can, but something else in some slots."""
    own, best = probe.spoken
    source = []
    for index, anchor in enumerate(probe.anchors):
        for slot in range(probe.block_size):
            speaker = min(anchor + slot - probe.first, len(own) - 1)
            if index * probe.block_size + slot in wrong_slots:
                speaker = next((i for i, token in enumerate(best) if token != own[speaker]), 0)
            source.append(max(speaker, 0))
    return run_loss(probe, probe.row, torch.tensor(source), clear=True)


def wants_data(probe: Probe) -> bool:
    return probe.subject.config.loss.labels == "data"


@dataclass(frozen=True)
class Lesson:
    """What a slot that predicts row position p may be taught: a label, and the target's distribution at p + shift."""

    label: Callable[[int], int]
    shift: int = -1


def labels_by_name(probe: Probe, name: str) -> Callable[[int], int]:
    """What a slot that predicts row position p is taught, under one explanation."""
    return _explanations(probe, layers=name.startswith("layer"))[name].label


def _explanations(probe: Probe, layers: bool) -> dict[str, Lesson]:
    own, best = probe.spoken
    data = torch.cat([sample.input_ids for sample in probe.samples]).tolist()
    end = len(own) - 1

    def at(ids: Sequence[int], shift: int) -> Callable[[int], int]:
        return lambda position: int(ids[min(max(position + shift, 0), end)])

    named = {
        "truth": Lesson(at(data, 0) if wants_data(probe) else at(best, -1)),
        "what the target predicts at its own position, one place late": Lesson(at(best, 0), 0),
        "what the target predicted two tokens before, one place early": Lesson(at(best, -2), -2),
        "the token in the data": Lesson(at(data, 0)),
        "the target's own next token": Lesson(at(own, -1)),
        "the token in the data, one place late": Lesson(at(data, 1)),
        "the token in the data, one place early": Lesson(at(data, -1)),
    }
    if layers:
        for layer in probe.layer_ids:
            ids = torch.cat(probe.ids_of_layer(layer)).tolist()
            named[f"layer {layer}"] = Lesson(at(ids, -1))
    return named


def read_labels(probe: Probe, trace: LossTrace) -> LabelsUsed:
    """Find the labels that explain the gradient of a call of the loss."""
    if not wants_data(probe) and all(probe.unsure[position - 1] for _, _, position in supervised(probe)):
        raise NotApplicable("the target's two best logits are a near tie everywhere")
    truth = _fit(probe, trace, _explanations(probe, layers=False)["truth"])
    best, name, layer, unit = truth[0], "truth", None, truth[1]
    if best < 1.0:
        for other, lesson in _explanations(probe, layers=True).items():
            fit = _fit(probe, trace, lesson)[0]
            if fit > best:
                best, name = fit, other
        layer = int(name.split()[1]) if name.startswith("layer ") else None
        mixed, by_slot = _fit_by_slot(probe, trace)
        if layer is None and mixed > best:
            best, name = mixed, by_slot
    return LabelsUsed(truth[0], name, best, layer, trace, unit)


def _fit(probe: Probe, trace: LossTrace, lesson: Lesson) -> tuple[float, Tensor]:
    """Share of counted slots whose gradient points as that of the distance from a lesson, and that gradient."""
    unit_QD = _unit_gradient(probe, trace, lesson)
    counted = [q for slots in _counted(probe, trace).values() for q in slots]
    return float(_explained(trace, unit_QD, counted).double().mean()) if counted else 0.0, unit_QD


def _fit_by_slot(probe: Probe, trace: LossTrace) -> tuple[float, str]:
    """The same if each slot of a block may have another explanation: labels can be right in some slots only."""
    units = {name: _unit_gradient(probe, trace, lesson) for name, lesson in _explanations(probe, layers=False).items()}
    explained, texts = 0, []
    counted = _counted(probe, trace)
    for slot, slots in counted.items():
        fits = {name: int(_explained(trace, unit, slots).sum()) for name, unit in units.items()}
        name = max(fits, key=fits.__getitem__)
        explained += fits[name]
        texts.append((slot, "the right token" if name == "truth" else name))
    names = dict.fromkeys(text for _, text in texts)
    where = {name: ", ".join(str(slot) for slot, text in texts if text == name) for name in names}
    text = "; ".join(f"{name} in slot {slots}" for name, slots in where.items())
    return explained / max(1, sum(map(len, counted.values()))), text


def _counted(probe: Probe, trace: LossTrace) -> dict[int, list[int]]:
    """Supervised slots that carry a gradient and have one right label, as places in [Q], by slot of the block."""
    places: dict[int, list[int]] = {}
    for index, slot, position in supervised(probe):
        place = index * probe.block_size + slot
        sure = wants_data(probe) or not probe.unsure[position - 1]
        if sure and trace.gradient_QD[place].norm() > 0:
            places.setdefault(slot, []).append(place)
    return places


def _explained(trace: LossTrace, unit_QD: Tensor, places: list[int]) -> Tensor:
    """[places] bool: whether the gradient there is a multiple of `unit_QD`, be it a negative one."""
    found, unit = trace.gradient_QD[places], unit_QD[places]
    cosine = torch.cosine_similarity(found, unit, dim=-1, eps=1e-30).abs()
    return (cosine > _SAME_DIRECTION) | (_is_faint(found, trace.gradient_QD) & _is_faint(unit, unit_QD))


def _is_faint(gradient_nD: Tensor, gradient_QD: Tensor) -> Tensor:
    """[n] bool: a slot that is certain of its label has a gradient of rounding errors, from which nothing is read."""
    lengths = gradient_QD.norm(dim=-1)
    return gradient_nD.norm(dim=-1) < 1e-3 * lengths.max()


def _unit_gradient(probe: Probe, trace: LossTrace, lesson: Lesson) -> Tensor:
    """[Q, D] gradient of the unweighted distance, dense and in one piece; 0 where nothing is supervised."""
    slots = [(index * probe.block_size + slot, position) for index, slot, position in supervised(probe)]
    chosen, loss = torch.tensor([q for q, _ in slots], device=probe.device), probe.subject.config.loss
    leaf = trace.stand_in.outputs.detach()[chosen].requires_grad_(True)
    rows = probe.draft_logits(leaf)
    logits = rows.new_full((len(rows), probe.subject.target.vocab_size), float("-inf"))
    logits = logits.index_copy(-1, probe.kept_ids.to(rows.device), rows)
    wanted = torch.tensor([lesson.label(position) for _, position in slots], device=probe.device)
    value = loss.ce * -logits.log_softmax(-1).gather(1, wanted[:, None]).sum() if loss.ce else 0.0 * rows.sum()
    if loss.kl or loss.tv:
        teacher = taught_distribution(probe, [position + lesson.shift for _, position in slots]).to(rows)
        any_label = torch.zeros(len(rows), dtype=torch.int64, device=probe.device)
        value = value + naive_distances(rows, any_label, teacher, (0.0, loss.kl, loss.tv))[0].sum()
    value.backward()
    assert leaf.grad is not None, "the head passes no gradient on"
    unit_QD = torch.zeros_like(trace.gradient_QD)
    unit_QD[chosen.cpu()] = leaf.grad.double().cpu()
    return unit_QD


def taught_distribution(probe: Probe, positions: Sequence[int]) -> Tensor:
    """[n, Vd] float64, what the target says at row positions among the tokens that the drafter can say."""
    logits = torch.cat([forward.logits for forward in probe.reference]).cpu()
    places = torch.tensor(positions).clamp(0, len(logits) - 1)
    return best_alone(logits[places][:, probe.kept_ids].double().softmax(-1), probe.subject.config.loss.top_k)[0]


def soft_hint(probe: Probe, used: LabelsUsed) -> str:
    """Whether the gradient is that of the target's whole distribution, where labels are configured."""
    if probe.subject.config.loss.ce < 1:
        return ""
    slots = [(i * probe.block_size + k, p - 1) for i, k, p in supervised(probe)]
    chosen = torch.tensor([q for q, _ in slots], device=probe.device)
    leaf = used.trace.stand_in.outputs.detach()[chosen].requires_grad_(True)
    teacher = torch.cat([forward.logits for forward in probe.reference])[[p for _, p in slots]]
    teacher = teacher[:, probe.kept_ids.to(teacher.device)].to(leaf.device).float()
    logits = probe.draft_logits(leaf)
    (-(teacher.softmax(-1) * logits.log_softmax(-1)).sum()).backward()
    assert leaf.grad is not None, "the head passes no gradient on"
    cosine = torch.cosine_similarity(used.trace.gradient_QD[chosen.cpu()], leaf.grad.double().cpu(), dim=-1)
    share = float((cosine > 0.999).double().mean())
    return f"; it is that of the target's whole distribution (KL) at {share:.1%}" if share > 0.5 else ""


def measured_weights(probe: Probe, used: LabelsUsed) -> Tensor:
    """[Q] how much each slot weighs: its gradient as a multiple of the unweighted one."""
    del probe
    squares = used.unit_QD.square().sum(dim=-1)
    return (used.trace.gradient_QD * used.unit_QD).sum(dim=-1) / squares.clamp_min(1e-60) * (squares > 0)


def weights_by_slot(probe: Probe, weights: Tensor) -> list[float]:
    """Mean of [Q] weights at each place of the block."""
    by_slot: list[list[float]] = [[] for _ in range(probe.block_size)]
    for index, slot, _ in supervised(probe):
        by_slot[slot].append(float(weights[index * probe.block_size + slot]))
    return [sum(values) / len(values) if values else 0.0 for values in by_slot]


def wanted_weights(probe: Probe, used: LabelsUsed) -> Tensor:
    """[Q] float64, how much each slot is to weigh; NaN where the label, and so what it weighs, is a near tie."""
    loss, slots = probe.subject.config.loss, supervised(probe)
    places = torch.tensor([index * probe.block_size + slot for index, slot, _ in slots])
    weights_Q = torch.zeros(len(used.unit_QD), dtype=torch.float64)
    if loss.weights == "decay":
        by_slot = naive_weights(probe.block_size, probe.gamma, probe.first)
        weights_Q[places] = torch.tensor([by_slot[slot] for _, slot, _ in slots], dtype=torch.float64)
        return weights_Q
    labels = labels_by_name(probe, "truth")
    rows = torch.searchsorted(probe.kept_ids, torch.tensor([labels(position) for _, _, position in slots]))
    with torch.no_grad():
        logits = probe.draft_logits(used.trace.stand_in.outputs)[places.to(probe.device)].double().cpu()
    confidences = logits.softmax(-1).gather(1, rows[:, None])[:, 0].tolist()
    weights_Q[places] = naive_dpace([index for index, _, _ in slots], confidences, loss.dpace_alpha)
    if not wants_data(probe):
        unsure = {index for index, _, position in slots if probe.unsure[position - 1]}
        weights_Q[[i * probe.block_size + k for i, k, _ in slots if i in unsure]] = math.nan
    return weights_Q


def constant_ratio(probe: Probe, used: LabelsUsed) -> float | None:
    """Measured over wanted weight if it is the same at all slots, else None."""
    weights, faint = measured_weights(probe, used), _is_faint(used.unit_QD, used.unit_QD).tolist()
    wanted = wanted_weights(probe, used)
    places = [i * probe.block_size + k for i, k, _ in supervised(probe)]
    ratios = [float(weights[place] / wanted[place]) for place in places if not faint[place]]
    ratios = [ratio for ratio in ratios if ratio == ratio and ratio]  # a slot without any weight is LOS005's to report
    if not ratios:
        return None
    middle = sorted(ratios)[len(ratios) // 2]
    tolerance = max(5e-3, probe.loss_tolerance / 2)
    return middle if all(abs(r - middle) <= tolerance * abs(middle) for r in ratios) else None


def decay_of(weights: list[float], first: int) -> str:
    present = [w for w in weights[first:] if w > 0]
    if len(present) < 2 or math.isclose(present[0], present[-1], rel_tol=1e-2):
        return " (all alike)" if len(present) > 1 else ""
    return f" (a decay of {-(len(present) - 1) / math.log(present[-1] / present[0]):.2f})"
