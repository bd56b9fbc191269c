"""TGT: are the captured states and the training targets those of the target that will be served?

The reference is the target itself, run on one conversation at a time and watched through its modules' `forward`, and
the logits that its `ForCausalLM.forward` returns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftline.audit.loss_reading import labels_used, read_labels, run_loss
from draftline.audit.probe import Probe, StandIn, once_per_audit, relative_difference
from draftline.audit.reference import ReferenceForward, target_forward
from draftline.audit.report import Problem, check
from draftline.errors import TargetError
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.targets.borrowed import LayersNotLoaded

AGREEMENT = 0.999
"""Least share of positions at which training targets equal the target's own predictions, near ties left out."""


@check("TGT001", "the captured states and the states for the training targets are swapped")
def swapped(probe: Probe) -> Problem | None:
    last = probe.subject.target.num_layers - 1
    source = target_source(probe)
    slices = captured_slices(probe)
    if len(slices) == 1 and slices[0].nearest == last and slices[0].distance < probe.tolerance and source.layer != last:
        return _swap("the target loop", probe)
    if _packed_swapped(probe):
        return _swap("the packed row", probe)
    if _row_loss_swaps(probe):
        return _swap("the loss", probe)
    return None


@check("TGT002", "the training targets are not the target's own next tokens", needs=("TGT001",))
def own_predictions(probe: Probe) -> Problem | None:
    source = target_source(probe)
    if source.agreement >= AGREEMENT:
        return _labels_of_a_layer(probe)
    if source.perturbed:
        return None
    looks = f"they look like {source.name} (agreement {source.best:.1%})" if source.best > 0.5 else "they look random"
    return Problem(
        f"training targets equal the target's own predictions at {source.agreement:.1%} of positions; {looks}",
        "take them from the output of the last decoder layer, through the target's own final norm and lm_head",
    )


@check("TGT003", "what is done to the captured states reaches the training targets", needs=("TGT001",))
def clean_targets(probe: Probe) -> Problem | None:
    fix = "add noise to a copy of the captured states, after the training targets were taken"
    again = [probe.subject.capture([sample])[0] for sample in probe.samples]
    for sample, first, second in zip(probe.samples, probe.captured, again, strict=True):
        differing = probe.target_ids_of(first) != probe.target_ids_of(second)
        states_differ = last_states_differ(first, second)
        if differing.any() or states_differ > probe.tolerance:
            return Problem(
                f"two captures of sample {sample.sample_id} give other training targets at {int(differing.sum())} of "
                f"{len(sample)} tokens (last states differ by {states_differ:.1e})",
                fix,
            )
    source = target_source(probe)
    if source.perturbed:
        return Problem(
            f"training targets equal the target's own at {source.agreement:.1%}: the last layer's states were changed "
            f"before the head (relative difference {source.distance:.1e})",
            fix,
        )
    return _shared_memory(probe, fix) or _loss_depends_on_states(probe, fix)


@check("TGT004", "captured states come from other layers than the drafter is told", needs=("TGT001",))
def declared_layers(probe: Probe) -> Problem | None:
    found = [s.nearest if s.distance < probe.tolerance else None for s in captured_slices(probe)]
    wanted = list(probe.layer_ids)
    known = [layer for layer in found if layer is not None]
    if len(found) == len(wanted):
        wrong = any(f is not None and f != w for f, w in zip(found, wanted, strict=True))
    else:  # a layer that is missing is DRF001's to report
        wrong = any(layer not in wanted for layer in known) or known != sorted(set(known))
    if not wrong:
        return None
    return Problem(
        f"declared target_layer_ids {wanted}, captured are the outputs of layers "
        f"{['?' if layer is None else layer for layer in found]}",
        f"hook the outputs of layers {wanted}, in this order (a shift by one is the other numbering convention)",
    )


@check("TGT006", "captured states are not what the target computes", needs=("TGT001", "TGT004", "TGT005"))
def captured_values(probe: Probe) -> Problem | None:
    for index, one in enumerate(captured_slices(probe)):
        if one.distance < probe.tolerance:
            continue
        layer = probe.layer_ids[index] if index < len(probe.layer_ids) else one.nearest
        found = torch.cat([slice_of(probe, item, index) for item in probe.captured])
        looks = describe_change(probe, found, layer)
        return Problem(
            f"captured layer {layer} differs from the target's own output by {one.distance:.1e} (relative): {looks}",
            "hand on each layer's output as it is, for the same tokens, in the target's dtype",
        )
    return _wrong_when_long(probe)


@check("TGT005", "captured states are unusable: not finite, zero, or not one vector per token")
def usable_states(probe: Probe) -> Problem | None:
    try:
        captured = [probe.subject.capture([sample])[0] for sample in probe.samples]
    except LayersNotLoaded:
        raise
    except TargetError as error:
        return Problem(f"the capture refuses: {error}", "fix what it names")
    for sample, item in zip(probe.samples, captured, strict=True):
        states = item.hidden_states_SLD
        bad = (~states.isfinite().all(-1)) | (states == 0).all(-1)
        if bad.any() or len(states) != len(sample) or not torch.equal(item.sample.input_ids, sample.input_ids):
            return Problem(
                f"sample {sample.sample_id}: {int(bad.sum())} of {len(states)} vectors zero or not finite, "
                f"{len(sample)} tokens",
                "compare the target with its published weights, and use a wider target.dtype",
            )
    return None


@check("TGT007", "a conversation's states depend on what shares its batch", needs=("TGT004", "TGT005", "TGT006"))
def batch_independent(probe: Probe) -> Problem | None:
    together = probe.subject.capture(probe.samples)
    reordered = probe.subject.capture(probe.samples[::-1])[::-1]
    for name, others in (("with the others", together), ("with the others, in another order", reordered)):
        for sample, item, other, forward in zip(probe.samples, probe.captured, others, probe.reference, strict=True):
            difference = relative_difference(other.hidden_states_SLD, item.hidden_states_SLD)
            wrong = without_ties(probe.target_ids_of(other) != probe.target_ids_of(item), forward)
            if difference > probe.tolerance or (wrong.any() and (wrong & _settled(probe, sample, forward)).any()):
                return Problem(
                    f"sample {sample.sample_id} captured {name} differs by {difference:.1e} (relative) from alone",
                    "pad on the right, pass the attention mask, and let no cache or prefix be reused between forwards",
                )
    return None


def _settled(probe: Probe, sample: Sample, forward: ReferenceForward) -> Tensor:
    """[S] bool, where company in a batch cannot turn the greedy token around, by measured rounding.

    The conversation is read again with as many tokens behind it, which it does not see: other sums of the same numbers.
    Families that norm behind their layers move their logits further than the last bit of a number format tells.
    """
    longer = torch.cat([sample.input_ids, sample.input_ids.flip(0)])[
        : probe.subject.target.config.max_position_embeddings
    ]
    again = target_forward(probe.subject.target, longer).logits[: len(sample)].double()
    moved = (again - forward.logits.double()).abs().amax(-1)
    return (forward.gaps > 4 * moved).cpu()


@check("TGT008", "the head that the loss uses is not the target's")
def head_identity(probe: Probe) -> Problem | None:
    head = probe.subject.frozen.head.whole
    fix = "use the target's own norm and lm_head modules, with the scaling and soft cap of its ForCausalLM.forward"
    for forward in probe.reference:
        states = forward.normed.to(probe.device)
        with torch.no_grad():
            found = head.logits(states)
        if found.shape != forward.logits.shape:
            return Problem(f"it gives {found.shape[-1]} logits, the target {forward.logits.shape[-1]}", fix)
        difference = relative_difference(found, forward.logits)
        if difference > probe.tolerance:
            ratio = float((found.double().cpu() * forward.logits.double().cpu()).sum())
            ratio /= float(forward.logits.double().square().sum())
            return Problem(
                f"logits of the same states differ by {difference:.1e} (relative; best factor {ratio:.3f})",
                fix,
            )
        ids = head.target_ids(forward.layers[-1].to(probe.device), 7).cpu()
        wrong = without_ties(ids != forward.next_ids.cpu(), forward)
        if wrong.any():
            return Problem(
                f"its greedy tokens from the last layer differ from the target's at {int(wrong.sum())} of {len(ids)}",
                fix,
            )
    return None


@check("TGT009", "the embedding that blocks are built with is not what the target's first layer receives")
def embedding_identity(probe: Probe) -> Problem | None:
    sample, wanted = probe.samples[0], probe.reference[0].first_input
    found = probe.subject.frozen.embed(sample.input_ids[None].to(probe.device))[0]
    if has_learned_positions(probe):
        # what is added depends on the position alone: it drops out of the difference of two tokens in one place
        few = sample.input_ids[: probe.block_size]
        wanted = torch.cat([target_forward(probe.subject.target, token[None]).first_input for token in few]).diff(dim=0)
        found = found[: len(few)].diff(dim=0)
    difference = relative_difference(found, wanted)
    # rows of a table, multiplied at most twice: four roundings
    if difference <= max(1e-5, 4 * torch.finfo(probe.subject.target.dtype).eps / 2):
        return None
    norm = float(wanted.double().norm() / found.double().norm().clamp_min(1e-30))
    return Problem(
        f"it differs by {difference:.1e} (relative); the first layer receives vectors {norm:.3f} times as long",
        "call the target's own embedding module (Gemma scales inside it), never the raw table",
    )


@check("TGT010", "the target is not frozen, or not in evaluation mode, or draws random numbers")
def frozen_target(probe: Probe) -> Problem | None:
    model = probe.subject.target.model
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    training = [name or "the model" for name, m in model.named_modules() if m.training]
    if not trainable and not training:
        return _random_target(probe)
    return Problem(
        f"{len(trainable)} parameters require a gradient, {len(training)} modules are in training mode "
        f"(first: {(trainable + training)[0]})",
        "model.eval().requires_grad_(False) before the first forward",
    )


@check("TGT011", "captured layers are out of range, doubled, unordered, or include the last layer")
def layer_choice(probe: Probe) -> Problem | None:
    ids, depth = list(probe.layer_ids), probe.subject.target.num_layers
    fix = f"drafter.target_layer_ids: distinct, increasing, from 0..{depth - 2}"
    if any(not 0 <= i < depth for i in ids) or sorted(set(ids)) != ids:
        return Problem(f"target_layer_ids {ids} for a target of {depth} layers", fix)
    if depth - 1 in ids:
        return Problem(
            f"target_layer_ids {ids} has the last layer, {depth - 1}: some programs read it before the final norm, "
            "some after it",
            fix,
        )
    told = probe.subject.draft_model.config.num_target_layers
    if told != depth:
        return Problem(f"the drafter is told of {told} target layers, there are {depth}", f"num_target_layers: {depth}")
    return None


@check("TGT012", "capturing leaves hooks on the target or changes it")
def leaves_no_trace(probe: Probe) -> Problem | None:
    target = probe.subject.target
    before = _num_hooks(probe), _fingerprint(probe)
    probe.subject.capture(probe.samples[:1])
    after = _num_hooks(probe), _fingerprint(probe)
    again = target_forward(target, probe.samples[0].input_ids)
    difference = relative_difference(again.logits, probe.reference[0].logits)
    if before == after and difference <= probe.tolerance:
        return None
    return Problem(
        f"hooks on the target's modules: {before[0]} before a capture, {after[0]} after it; "
        f"sum of weights {before[1]:.6g} and {after[1]:.6g}; its logits moved by {difference:.1e} (relative)",
        "remove every hook when the capture ends, and change nothing in the target",
    )


def _random_target(probe: Probe) -> Problem | None:
    again = target_forward(probe.subject.target, probe.samples[0].input_ids)
    difference = relative_difference(again.logits, probe.reference[0].logits)
    if difference <= probe.tolerance:
        return None
    return Problem(
        f"the same tokens twice give logits that differ by {difference:.1e} (relative): it draws random numbers",
        "switch off dropout and noise in the target, in evaluation mode too",
    )


def _wrong_when_long(probe: Probe) -> Problem | None:
    found = longest_difference(probe)
    if found is None:
        return None
    length, difference, wrong = found
    if difference < probe.tolerance and (wrong == 0 or probe.tolerance > 1e-2):
        return None
    return Problem(
        f"the longest conversation read ({length} tokens): states differ by {difference:.1e} (relative), {wrong} "
        f"training targets are not the target's own; conversations of up to {max(map(len, probe.samples))} are right",
        "capture long conversations whole: no cut, no window that the target itself does not have",
    )


def _swap(where: str, probe: Probe) -> Problem:
    return Problem(
        f"in {where}, fc gets the last layer's states and the training targets are computed from layer "
        f"{list(probe.layer_ids)}",
        "read the two by name (hidden_states_packed, verifier_last_hidden_packed), never by their place in a tuple",
    )


def _packed_swapped(probe: Probe) -> bool:
    packed = probe.subject.pack(probe.plan, probe.reference_captured)
    last, row = packed.verifier_last_hidden_packed, probe.row
    if last is None or row.verifier_last_hidden_packed is None:
        return False
    same = torch.equal(packed.hidden_states_packed.to(last), row.hidden_states_packed.to(last))
    return not same and torch.equal(packed.hidden_states_packed.to(last), row.verifier_last_hidden_packed.to(last))


def _row_loss_swaps(probe: Probe) -> bool:
    last = probe.row.verifier_last_hidden_packed
    seen = states_seen_by_drafter(probe, probe.row)
    return last is not None and torch.equal(seen, last) and not torch.equal(seen, probe.row.hidden_states_packed)


def _labels_of_a_layer(probe: Probe) -> Problem | None:
    """The loss may take its labels from elsewhere although the right ones were delivered."""
    labels = labels_used(probe)
    if labels.layer is None or labels.fit < 0.9:
        return None
    return Problem(
        f"the loss takes its labels from captured layer {labels.layer} (fits {labels.fit:.1%} of slots; the target's "
        f"own predictions fit {labels.truth_fit:.1%})",
        "take them from the output of the last decoder layer, through the target's own final norm and lm_head",
    )


def _shared_memory(probe: Probe, fix: str) -> Problem | None:
    """Write into captured states, as noise in place would, and see whether the targets follow."""
    captured = probe.subject.capture(probe.samples)
    packed = probe.subject.pack(probe.plan, captured)
    for name, states, last in (
        ("the captured sample", captured[0].hidden_states_SLD, captured[0].verifier_last_hidden_SD),
        ("the packed row", packed.hidden_states_packed, packed.verifier_last_hidden_packed),
    ):
        if last is None:
            continue
        before = last.clone()
        states.add_(1.0)
        if not torch.equal(before, last):
            return Problem(f"in {name}, both sets of states share their memory: writing into one changes both", fix)
    return None


def _loss_depends_on_states(probe: Probe, fix: str) -> Problem | None:
    if probe.subject.config.loss.labels != "target":
        return None
    changed = replace(probe.row, hidden_states_packed=probe.row.hidden_states_packed + 3.0)
    before = labels_used(probe)
    after = read_labels(probe, run_loss(probe, changed, before.trace.source_Q))
    noisy = before.truth_fit < 1.0 and before.layer is None and before.truth_fit > 0.2
    if after.truth_fit < before.truth_fit - 1e-9 and before.layer is None:
        return Problem(
            f"after a change of the fc input alone, only {after.truth_fit:.1%} of labels are still the target's own "
            f"({before.truth_fit:.1%} before)",
            fix,
        )
    # with a reduced vocabulary some wrong labels are sooner those of tokens outside it, which LOS002 tells apart
    whole_vocabulary = probe.subject.draft_model.d2t is None
    if noisy and whole_vocabulary and probe.row.verifier_last_hidden_packed is not None:
        return Problem(f"in the loss only {before.truth_fit:.1%} of labels are the target's own predictions", fix)
    return None


def has_learned_positions(probe: Probe) -> bool:
    """Whether the target's first layer receives other vectors for one token in two places."""
    twice = target_forward(probe.subject.target, probe.samples[0].input_ids[:1].repeat(2)).first_input
    return relative_difference(twice[1], twice[0]) > probe.tolerance


def _num_hooks(probe: Probe) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in probe.subject.target.model.modules())


def _fingerprint(probe: Probe) -> float:
    return float(sum(p.detach().sum(dtype=torch.float64) for p in probe.subject.target.model.parameters()))


# Reading a capture from outside: which layers the states are, and what the training targets look like.


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
    place = _wrong_place(probe, found, own)
    if place is not None:
        return TargetSource(agreement, f"the target's own but for {place}", agreement, None, False, distance)
    tokens = [sample.input_ids for sample in probe.samples]
    candidates["the tokens themselves", None] = _agreement(probe, found, tokens)
    candidates["the next tokens of the data", None] = _agreement(probe, found, [i.roll(-1) for i in tokens])
    (name, layer_found), best = max(candidates.items(), key=lambda item: item[1])
    return TargetSource(agreement, name, best, layer_found, layer_found == last, distance)


def _wrong_place(probe: Probe, found: list[Tensor], own: list[Tensor]) -> str | None:
    """Which token it is, if the targets are wrong at one and the same place of every conversation and nowhere else."""
    if any(ids.shape != other.shape for ids, other in zip(found, own, strict=True)):
        return None
    taught = [probe.taught(sample).nonzero()[:, 0].tolist() for sample in probe.samples]
    trios = zip(found, own, taught, strict=True)
    wrong = [[place for place in places if ids[place] != other[place]] for ids, other, places in trios]
    if wrong == [places[:1] for places in taught]:
        return "the first token of each conversation that a slot may ask for"
    return "the last one of each conversation" if wrong == [places[-1:] for places in taught] else None


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
    wrong = without_ties(probe.target_ids_of(item).cpu() != forward.next_ids.cpu(), forward) & probe.taught(sample)
    known = target_source(probe).agreement < AGREEMENT  # then TGT002 or TGT003 has said so
    return len(sample), difference, 0 if known else int(wrong.sum())


def _agreement(probe: Probe, found: list[Tensor], wanted: list[Tensor]) -> float:
    counted = right = 0
    for ids, other, forward, sample in zip(found, wanted, probe.reference, probe.samples, strict=True):
        if ids.shape != other.shape:
            return 0.0
        clear = without_ties(probe.taught(sample), forward)
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
