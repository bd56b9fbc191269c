"""Reading a capture from outside: which layers the states are, and what the training targets look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.audit.probe import Probe, StandIn, once_per_audit, relative_difference
from draftline.audit.reference import ReferenceForward, target_forward
from draftline.records import CapturedSample, PackedBatch

AGREEMENT = 0.999
"""Least share of positions at which training targets equal the target's own predictions, near ties left out."""


@dataclass(frozen=True)
class CapturedSlice:
    """One captured layer: the reference layer it is nearest to, and how near (relative difference)."""

    nearest: int
    distance: float


@dataclass(frozen=True)
class TargetSource:
    """What the training targets that come out of the capture look like.

    Attributes:
        agreement: share of positions at which they are the target's own predictions, near ties left out.
        name, best, layer: the explanation that fits best, its agreement, and the layer if it is one.
        perturbed: they come from the last layer, but its states were changed on the way.
        distance: of the last layer's states from the target's own, where they are handed on.
    """

    agreement: float
    name: str
    best: float
    layer: int | None
    perturbed: bool
    distance: float


@once_per_audit
def target_source(probe: Probe) -> TargetSource:
    """Compare the captured training targets with every explanation at hand."""
    last = probe.subject.target.num_layers - 1
    found = [probe.target_ids_of(item).cpu() for item in probe.captured]
    own = [forward.next_ids.cpu() for forward in probe.reference]
    agreement = _agreement(probe, found, own)
    distance = _last_distance(probe)
    if agreement >= AGREEMENT and distance < probe.tolerance:
        return TargetSource(agreement, "the target's own", agreement, last, False, distance)
    candidates: dict[tuple[str, int | None], float] = {}
    for layer in range(last + 1):
        ids = probe.ids_of_layer(layer)
        candidates[f"layer {layer} of {last} through norm and head", layer] = _agreement(probe, found, ids)
    unnormed = [probe.head_ids(forward.layers[-1]) for forward in probe.reference]
    candidates["the last layer without the final norm", None] = _agreement(probe, found, unnormed)
    normed = [probe.norm_and_head(forward.normed) for forward in probe.reference]
    candidates["the last layer with the final norm applied twice", None] = _agreement(probe, found, normed)
    candidates["the target's own, one place late", None] = _agreement(probe, found, [i.roll(1) for i in own])
    candidates["the target's own, one place early", None] = _agreement(probe, found, [i.roll(-1) for i in own])
    place = _wrong_place(found, own)
    if place is not None:
        return TargetSource(agreement, f"the target's own but for {place}", agreement, None, False, distance)
    tokens = [sample.input_ids for sample in probe.samples]
    candidates["the tokens themselves", None] = _agreement(probe, found, tokens)
    candidates["the next tokens of the data", None] = _agreement(probe, found, [i.roll(-1) for i in tokens])
    (name, layer_found), best = max(candidates.items(), key=lambda item: item[1])
    return TargetSource(agreement, name, best, layer_found, layer_found == last, distance)


def _wrong_place(found: list[Tensor], own: list[Tensor]) -> str | None:
    """Which token it is, if the targets are wrong at one and the same place of every conversation and nowhere else."""
    if any(ids.shape != other.shape for ids, other in zip(found, own, strict=True)):
        return None
    wrong = [(ids != other).nonzero()[:, 0].tolist() for ids, other in zip(found, own, strict=True)]
    if all(places == [0] for places in wrong):
        return "the first token of each conversation"
    ends = all(places == [len(ids) - 1] for places, ids in zip(wrong, own, strict=True))
    return "the last token of each conversation" if ends else None


def longest_difference(probe: Probe) -> tuple[int, float, int] | None:
    """Tokens of the longest conversation, largest relative difference of its captured states, and wrong targets.

    The probe's own conversations are short: what goes wrong beyond some length shows only here. None without data.
    """
    sample = probe.longest
    if sample is None:
        return None
    item, forward = probe.subject.capture([sample])[0], target_forward(probe.subject.target, sample.input_ids)
    present = range(len(captured_slices(probe)))  # a layer that is missing is DRF001's to report
    difference = max(_distance(slice_of(probe, item, i), forward.layers[probe.layer_ids[i]]) for i in present)
    wrong = without_ties(probe.target_ids_of(item).cpu() != forward.next_ids.cpu(), forward)
    known = target_source(probe).agreement < AGREEMENT  # then TGT002 or TGT003 has said so
    return len(sample), difference, 0 if known else int(wrong.sum())


def _agreement(probe: Probe, found: list[Tensor], wanted: list[Tensor]) -> float:
    counted = right = 0
    for ids, other, forward in zip(found, wanted, probe.reference, strict=True):
        if ids.shape != other.shape:
            return 0.0
        clear = without_ties(torch.ones_like(ids, dtype=torch.bool), forward)
        counted += int(clear.sum())
        right += int(((ids == other.cpu()) & clear).sum())
    return right / counted if counted else 1.0


def without_ties(mask: Tensor, forward: ReferenceForward) -> Tensor:
    """`mask` without positions at which the two best logits are within rounding of each other."""
    return mask.cpu() & ~forward.ties.cpu()


def _last_distance(probe: Probe) -> float:
    """Largest relative difference of handed-on last states from the target's own; 0 where only ids are sent."""
    return max(
        0.0 if item.verifier_last_hidden_SD is None else _distance(item.verifier_last_hidden_SD, forward.layers[-1])
        for item, forward in zip(probe.captured, probe.reference, strict=True)
    )


def last_states_differ(first: CapturedSample, second: CapturedSample) -> float:
    if first.verifier_last_hidden_SD is None or second.verifier_last_hidden_SD is None:
        return 0.0
    return relative_difference(second.verifier_last_hidden_SD, first.verifier_last_hidden_SD)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Relative difference in the mean square, the largest of any token: one token off counts."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.double().cpu(), wanted.double().cpu()
    per_token = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return float("inf") if per_token.isnan().any() else float(per_token.max())


@once_per_audit
def captured_slices(probe: Probe) -> list[CapturedSlice]:
    """For each captured layer the reference layer it is nearest to."""
    count = probe.captured[0].hidden_states_SLD.shape[1] // probe.subject.target.hidden_size
    return [_nearest(probe, index) for index in range(count)]


def slice_of(probe: Probe, item: CapturedSample, index: int) -> Tensor:
    width = probe.subject.target.hidden_size
    return item.hidden_states_SLD[:, index * width : (index + 1) * width]


def _nearest(probe: Probe, index: int) -> CapturedSlice:
    distances = [
        max(
            _distance(slice_of(probe, item, index), forward.layers[layer])
            for item, forward in zip(probe.captured, probe.reference, strict=True)
        )
        for layer in range(probe.subject.target.num_layers)
    ]
    best = min(range(len(distances)), key=distances.__getitem__)
    return CapturedSlice(best, distances[best])


def describe_change(probe: Probe, found: Tensor, layer: int) -> str:
    """In what way captured states differ from a layer's output."""
    wanted = torch.cat([forward.layers[layer] for forward in probe.reference])
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)}, wanted {list(wanted.shape)}"
    with torch.no_grad():
        normed = probe.subject.target.final_norm(wanted)
    explanations = {
        "they went through the final norm": normed,
        "they belong to the next token": wanted.roll(-1, 0),
        "they belong to the token before": wanted.roll(1, 0),
        "they are the embeddings": torch.cat([forward.first_input for forward in probe.reference]),
    }
    for name, states in explanations.items():
        if float(((found - states).norm(dim=-1) / states.norm(dim=-1)).median()) < probe.tolerance:
            return name
    found, wanted = found.double().cpu(), wanted.double().cpu()
    factor = float((found * wanted).sum() / wanted.square().sum())
    rest = float((found - factor * wanted).norm() / wanted.norm())
    return f"they are {factor:.3f} times the right ones and a rest of {rest:.1e}"


def states_seen_by_drafter(probe: Probe, row: PackedBatch) -> Tensor:
    """The states that the run's loss hands to the drafter for a row."""
    outputs = torch.zeros(len(probe.anchors) * probe.block_size, probe.subject.target.hidden_size, device=probe.device)
    stand_in = StandIn(probe, outputs)
    probe.subject.row_loss(stand_in, row, probe.anchor_positions)
    assert stand_in.seen_states is not None, "the loss did not call the drafter"
    return stand_in.seen_states
