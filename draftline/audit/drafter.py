"""DRF: does the drafter read what it should, and nothing that serving will not have?

Random states and embeddings are changed one place at a time; which slots move is compared with a table built by
nested loops. What moves in the right places but by the wrong amount is caught by a second implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftline.audit.drafter_reference import DrafterView, embedding_of, reference_block, rope_table, with_rope
from draftline.audit.loss_reading import loss_trace
from draftline.audit.probe import Probe, once_per_audit, relative_difference
from draftline.audit.reference import naive_anchors, role_ids, target_forward
from draftline.audit.report import Problem, check
from draftline.audit.target import captured_slices, has_learned_positions, states_seen_by_drafter
from draftline.audit.visibility import anchors_and_starts, block_mistakes, context_mistakes, refuse_random_drafter
from draftline.draft.attention import BlockLayout
from draftline.records import PackedBatch
from draftline.targets.layers import default_target_layer_ids
from draftline.targets.rope import KINDS

_SCALED = KINDS.keys() - {"default"}
"""Kinds of rotary scaling that a drafter takes over from its target."""

_FAR = 1024
"""Tokens before a block far into a conversation, beside those of the probe's short ones."""

_SAME = 2e-4
"""Relative difference from a float64 computation that float32 explains, with weights of probe size."""


@check("DRF001", "a captured layer does not reach the drafter")
def every_layer_reaches(probe: Probe) -> Problem | None:
    declared = _declared_layers(probe)
    lost = {layer: reason for layer in declared if (reason := _why_lost(probe, layer)) is not None}
    if not lost:
        return None
    layer, reason = next(iter(lost.items()))
    others = f"; also lost: {sorted(lost)[1:]}" if len(lost) > 1 else ""
    width = probe.subject.draft_model.config.hidden_size
    return Problem(
        f"layer {layer} of {list(declared)} changes nothing: {reason}{others}",
        f"fc = Linear({len(declared)} * {width}, {width}) over all captured layers, weights not zero",
    )


@check("DRF002", "a block sees states at or after its anchor, or misses some before it")
def strictly_before_anchor(probe: Probe) -> Problem | None:
    fix = "context of a block at anchor a: positions of its own document with start <= position < a"
    for where in context_mistakes(probe):
        if where.same_document and not where.within_window:
            return Problem(f"{where.text}: {where.effect}", fix)
    return None


@check("DRF003", "a block sees another block or another conversation")
def no_leaks_across(probe: Probe) -> Problem | None:
    fix = "hide every other document's context and every other block's slots from a block"
    for where in context_mistakes(probe):
        if not where.same_document:
            return Problem(f"{where.text}: {where.effect}", fix)
    for where in block_mistakes(probe):
        if not where.same_document:
            return Problem(f"{where.text}: {where.effect}", fix)
    return _moved_by_company(probe, fix)


@check("DRF004", "slots of a block do not see each other as they should")
def inside_the_block(probe: Probe) -> Problem | None:
    kinds = sorted({"causal" if causal else "bidirectional" for causal in probe.view.causal})
    for where in block_mistakes(probe):
        if where.same_document:
            return Problem(
                f"{where.text}: {where.effect}; its layers are to be {' and '.join(kinds)} inside a block",
                "full-attention layers are bidirectional inside a block; sliding ones are causal by default",
            )
    return None


@check("DRF005", "the sliding window is not the one declared", needs=("DRF001",))
def window(probe: Probe) -> Problem | None:
    fix = "a query sees a key if pos_q - pos_k < W, in sliding layers only"
    for where in context_mistakes(probe):
        if where.same_document and where.within_window:
            return Problem(f"{where.text}: {where.effect}; windows by layer {list(probe.view.windows)}", fix)
    return _hidden_window(probe, fix)


@check(
    "DRF006",
    "positions or rotary tables are not those that serving will use",
    needs=("DRF001", "DRF002", "DRF003", "DRF004", "DRF005"),
)
def positions(probe: Probe) -> Problem | None:
    table = _rotary_mistake(probe)
    fix = "rotary positions: restart at 0 in each conversation, slot k at anchor + k, table from rope_parameters"
    if table is not None:
        return Problem(table, fix)
    if _reference_difference(probe, probe.view) <= _SAME:
        return None
    explanation = _explain_positions(probe)
    return None if explanation is None else Problem(explanation, fix)


@check(
    "DRF007",
    "decoding with the draft cache computes something else than training",
    needs=("DRF002", "DRF003", "DRF004", "DRF005"),
)
def training_equals_decoding(probe: Probe) -> Problem | None:
    refuse_random_drafter(probe)
    fix = "cache keys and values of verified tokens only, at their positions, and draft at cache.length"
    with probe.shaken_weights():
        trained = probe.run_drafter(probe.states)
        for index, (anchor, start) in enumerate(anchors_and_starts(probe)):
            try:
                decoded = _decoded_block(probe, index, anchor, start)
            except RuntimeError as error:
                return Problem(f"the draft cache cannot be used twice: {str(error).partition(chr(10))[0]}", fix)
            difference = relative_difference(decoded, trained[index])
            if difference > _SAME:
                return Problem(
                    f"block at position {anchor - start}: decoded and trained outputs differ by {difference:.1e}", fix
                )
    far = _far_block(probe)
    difference = relative_difference(far.decoded, far.trained)
    if difference > _SAME:
        return Problem(f"block at position {far.place}: decoded and trained outputs differ by {difference:.1e}", fix)
    return None


@torch.no_grad()
def _decoded_block(probe: Probe, index: int, anchor: int, start: int) -> Tensor:
    """[P, D] outputs of one block through the draft cache, which is filled in two parts with a draft in between."""
    model, block, middle = probe.subject.draft_model, probe.block_size, (anchor + start + 1) // 2
    embeddings = probe.block_embeddings[:, index * block : (index + 1) * block]
    cache = model.new_cache()
    model.extend_cache(cache, probe.states[:, start:middle])
    model.draft(cache, embeddings)  # a rejected draft must leave no trace
    if middle < anchor:
        model.extend_cache(cache, probe.states[:, middle:anchor])
    return model.draft(cache, embeddings)[0]


@check(
    "DRF008",
    "the drafter's layers do not compute what its configuration says",
    needs=("DRF001", "DRF002", "DRF003", "DRF004", "DRF005", "DRF006"),
)
def layers_compute(probe: Probe) -> Problem | None:
    difference = _reference_difference(probe, probe.view)
    if difference <= _SAME:
        return _wrong_when_far(probe)
    return Problem(
        f"outputs differ by {difference:.1e} (relative) from a second implementation{_explain_layers(probe)}",
        "RMSNorm x * w in float32 with the configured eps, q_norm and k_norm per head, 1/sqrt(head_dim), SiLU MLP, "
        "both residuals, final norm",
    )


def _wrong_when_far(probe: Probe) -> Problem | None:
    far = _far_block(probe)
    difference = relative_difference(far.trained, far.wanted)
    if difference <= _SAME:
        return None
    return Problem(
        f"a block {far.place} tokens into a conversation differs by {difference:.1e} (relative) from a second "
        f"implementation, those within {max(map(len, probe.samples))} tokens do not",
        "no window, no end of positions and no limit of the context that the configuration does not have",
    )


@check("DRF009", "the mask token is a token that text can contain, or no usable row")
def mask_token(probe: Probe) -> Problem | None:
    target, mask_id = probe.subject.target, probe.subject.draft_model.config.mask_token_id
    fix = "drafter.mask_token_id: a padding row of the table, or a special token that never occurs in the data"
    rows = target.embedding.get_parameter("weight")
    if not 0 <= mask_id < len(rows):
        return Problem(f"mask_token_id {mask_id} is not a row of the target's table of {len(rows)}", fix)
    role = _role_of_token(probe, mask_id)
    if role is not None:
        return Problem(f"mask_token_id {mask_id} is the {role}", fix)
    data = probe.subject.data
    seen = 0 if data is None else sum(int((sample.input_ids == mask_id).sum()) for sample in data.samples)
    if seen:
        return Problem(f"mask_token_id {mask_id} occurs {seen} times in the data", fix)
    norms = rows.detach().float().norm(dim=-1)
    if norms[mask_id] < 1e-3 * norms.median():
        return Problem(
            f"row {mask_id} of the table has length {norms[mask_id]:.2e}, the median row {norms.median():.2e}: "
            "programs that keep a mask vector of their own would use another",
            fix,
            "warning",
        )
    return None


@check("DRF010", "blocks are not built from the anchor's token and mask tokens at the anchor's position")
def block_input(probe: Probe) -> Problem | None:
    trace, block = loss_trace(probe), probe.block_size
    embeddings, layout = trace.stand_in.seen_embeddings, trace.stand_in.seen_layout
    assert embeddings is not None, "the loss did not call the drafter"
    assert layout is not None, "the loss did not call the drafter"
    fix = "[embed(token at anchor), embed(mask) * (block_size - 1)] at positions anchor .. anchor + block_size - 1"
    if layout.anchor_positions_A.tolist() != probe.anchors or layout.block_size != block:
        return Problem(
            f"blocks of {layout.block_size} at {layout.anchor_positions_A.tolist()[:4]}, drawn {probe.anchors[:4]}",
            fix,
        )
    if layout.position_ids_S.tolist() != probe.row.position_ids[0].tolist():
        return Problem("positions given to the drafter do not restart in each conversation", fix)
    wanted = _wanted_blocks(probe)
    found = embeddings[0].unflatten(0, (len(probe.anchors), block))
    for name, slots in (("the anchor's slot", slice(0, 1)), ("the mask slots", slice(1, None))):
        difference = relative_difference(found[:, slots], wanted[:, slots])
        if difference > probe.tolerance:
            return Problem(f"embeddings of {name} differ by {difference:.1e} (relative) from the target's own", fix)
    return None


@check("DRF011", "anchors are not drawn from all places where a block may start")
def anchors(probe: Probe) -> Problem | None:
    return _wrong_anchors(probe) or _unstable_anchors(probe)


@check("DRF012", "the drafter's shape does not fit its target")
def shape(probe: Probe) -> Problem | None:
    config, target = probe.subject.draft_model.config, probe.subject.target
    for name, found, wanted in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            return Problem(f"{name} is {found}, the target's is {wanted} (padding rows included)", f"{name}: {wanted}")
    rope = config.rope_parameters
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0 or any("mrope" in key for key in rope)
    if partial:
        return Problem(
            f"rope_parameters {rope}: partial or multimodal, which engines read and the drafter does not compute",
            "drop partial_rotary_factor and mrope_section from the drafter",
        )
    ours = config.max_position_embeddings
    limit = target.config.max_position_embeddings if hasattr(target.config, "max_position_embeddings") else ours
    if ours < limit:
        return Problem(
            f"max_position_embeddings {ours} is below the target's {limit}: engines clamp or size tables by it",
            f"max_position_embeddings: {limit}",
        )
    return _rope_unlike_target(probe)


@check("DRF013", "rows of a reduced head are not the tokens that their mapping names", needs=("TGT008",))
def reduced_head(probe: Probe) -> Problem | None:
    head, d2t = probe.subject.frozen.head, probe.subject.draft_model.d2t
    fix = "d2t[row] = kept id - row, kept ids increasing, and the head's rows those of the target's head at these ids"
    if d2t is None and head.whole is head:
        return None
    if d2t is None or head.whole is head:
        return Problem(f"{'the loss' if d2t is None else 'the drafter'} alone has a reduced vocabulary", fix)
    if probe.mapping_fault is not None:
        return Problem(probe.mapping_fault, fix)
    kept_ids = probe.kept_ids
    if not torch.equal(head.to_target_ids(torch.arange(len(kept_ids), device=probe.device)).cpu(), kept_ids):
        return Problem("the loss maps rows of its head to other tokens than d2t does", fix)
    for forward in probe.reference:
        with torch.no_grad():
            found = head.logits(forward.normed.to(probe.device)).cpu()
        logits = forward.logits.cpu()
        if relative_difference(found, logits[:, kept_ids]) <= probe.tolerance:
            continue
        fits = {by: relative_difference(found, logits[:, (kept_ids + by) % logits.shape[1]]) for by in (-1, 1)}
        shift = next((by for by, difference in fits.items() if difference <= probe.tolerance), None)
        hint = "" if shift is None else f"; they are the rows of ids {shift:+d}"
        return Problem(f"its logits are not those of the target for the tokens that d2t names{hint}", fix)
    return None


def _hidden_window(probe: Probe, fix: str) -> Problem | None:
    """Beside a full layer every state moves the output, and a wrong window shows only in the values."""
    windows = probe.view.windows
    if None not in windows or not any(windows):
        return None
    right = _reference_differences(probe, probe.view)
    if max(right) <= _SAME:
        return None
    for change, text in ((1, "one wider"), (-1, "one narrower"), (1 << 20, "none at all")):
        changed = tuple(None if w is None else w + change for w in windows)
        others = _reference_differences(probe, replace(probe.view, windows=changed))
        if max(map(min, right, others)) <= _SAME:
            return Problem(f"blocks are computed with another window than {list(windows)}: {text}", fix)
    return None


def _moved_by_company(probe: Probe, fix: str) -> Problem | None:
    """The same blocks among all that fit into the row: an implementation may treat many otherwise than a few."""
    few, block, everywhere = probe.few_anchors, probe.block_size, list(range(probe.row.input_ids.shape[1]))
    shape = (len(everywhere) * block, probe.subject.draft_model.config.hidden_size)
    embeddings = torch.randn(shape, generator=probe.generator(12)).to(probe.device)
    places = torch.tensor([anchor * block + slot for anchor in few for slot in range(block)], device=probe.device)
    embeddings[places] = probe.block_embeddings[0]
    with probe.shaken_weights():
        alone = probe.run_drafter(probe.states)
        crowded = probe.run_drafter(probe.states, embeddings[None], everywhere)[few]
    differences = [relative_difference(crowded[i], alone[i]) for i in range(len(few))]
    worst = max(range(len(few)), key=differences.__getitem__)
    if differences[worst] <= _SAME:
        return None
    return Problem(
        f"with {len(everywhere)} blocks in the row instead of {len(few)}, the block at row position {few[worst]} "
        f"differs by {differences[worst]:.1e} (relative)",
        fix,
    )


# Captured layers.


def _declared_layers(probe: Probe) -> tuple[int, ...]:
    """Layers that the run's settings ask for; those of the drafter if the settings leave it open."""
    wanted = probe.subject.config.drafter
    if wanted.target_layer_ids is not None:
        return wanted.target_layer_ids
    if len(probe.layer_ids) >= wanted.num_captured_layers:
        return probe.layer_ids
    return default_target_layer_ids(probe.subject.target.num_layers, wanted.num_captured_layers)


def _why_lost(probe: Probe, layer: int) -> str | None:
    """Why a declared layer has no influence, or None if it has."""
    if layer not in probe.layer_ids:
        return f"the drafter is told to read {list(probe.layer_ids)} only"
    index, width = probe.layer_ids.index(layer), probe.subject.draft_model.config.hidden_size
    count, declared = len(captured_slices(probe)), len(probe.layer_ids)
    if count < declared:
        present = [one.nearest for one in captured_slices(probe)]
        if layer not in present:
            return f"the capture hands on {count} of {declared} layers, {present}"
    seen = states_seen_by_drafter(probe, probe.row)
    part = probe.row.hidden_states_packed[..., index * width : (index + 1) * width]
    if seen.shape[-1] < (index + 1) * width and not _contains(seen, part, width):
        return f"the loss hands {seen.shape[-1]} of {probe.row.hidden_states_packed.shape[-1]} features to the drafter"
    if probe.states_width < declared * width and index >= probe.states_width // width:
        return f"fc reads {probe.states_width} features, not {declared} * {width}"
    deltas = _layer_influence(probe)
    if max(deltas) == 0.0:
        return "no output depends on any captured state"
    if deltas[index] <= 1e-3 * max(deltas):
        return f"max |delta| {deltas[index]:.1e} when its states are replaced (other layers: {max(deltas):.1e})"
    return None


def _contains(states: Tensor, part: Tensor, width: int) -> bool:
    return any(torch.equal(one, part) for one in states.split(width, dim=-1) if one.shape == part.shape)


@once_per_audit
def _layer_influence(probe: Probe) -> list[float]:
    """Largest change of any output when one layer's states are replaced, with the drafter's own weights."""
    width, before = probe.subject.draft_model.config.hidden_size, probe.run_drafter(probe.states)
    deltas = []
    for index in range(len(probe.layer_ids)):
        changed = probe.states.clone()
        part = changed[..., index * width : (index + 1) * width]
        part.copy_(torch.randn(part.shape, generator=probe.generator(6)) * 2)
        deltas.append(float((probe.run_drafter(changed) - before).abs().max()))
    return deltas


# The second implementation.


@dataclass(frozen=True, eq=False)
class _FarBlock:
    """One block further into a conversation than those of the probe, [P, D] each: in training beside another block,
    decoded, and wanted."""

    place: int
    trained: Tensor
    decoded: Tensor
    wanted: Tensor


@once_per_audit
@torch.no_grad()
def _far_block(probe: Probe) -> _FarBlock:
    """Of random states, which cost no forward of the target."""
    model, block = probe.subject.draft_model, probe.block_size
    place = min(_FAR, probe.subject.target.config.max_position_embeddings - block - 1)
    states = torch.randn(1, place + 1, probe.states_width, generator=probe.generator(14)).to(probe.device)
    both = probe.block_embeddings[:, : 2 * block]
    embeddings = both[:, block:]
    anchors = torch.tensor([place - 1, place], device=probe.device)
    layout = BlockLayout.of_row(anchors, torch.arange(place + 1, device=probe.device), block)
    with probe.shaken_weights():
        trained = model(states, both, layout, probe.subject.run.drafter.attention)[0, block:]
        cache = model.new_cache()
        for part in states[:, :place].split(place // 3 + 1, dim=1):
            model.extend_cache(cache, part)
        decoded = model.draft(cache, embeddings)[0]
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    wanted = reference_block(probe.view, weights, states[0, :place], embeddings[0])
    return _FarBlock(place, trained, decoded, wanted)


def _reference_difference(probe: Probe, view: DrafterView, shift: int = 0, step: int = 1) -> float:
    """Largest relative difference of any block from the second implementation under some view."""
    return max(_reference_differences(probe, view, shift, step))


def _reference_differences(probe: Probe, view: DrafterView, shift: int = 0, step: int = 1) -> list[float]:
    """The same for a few blocks."""
    model, block = probe.subject.draft_model, probe.block_size
    with probe.shaken_weights():
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        found = probe.run_drafter(probe.states)
    differences, blocks = [], anchors_and_starts(probe)
    for index in (0, len(blocks) // 2, len(blocks) - 1):
        anchor, start = blocks[index]
        embeddings = probe.block_embeddings[0, index * block : (index + 1) * block]
        wanted = reference_block(view, weights, probe.states[0, start:anchor], embeddings, shift, step)
        differences.append(relative_difference(found[index], wanted))
    return differences


def _rotary_mistake(probe: Probe) -> str | None:
    """Compare the model's own tables with the formula at a few positions."""
    places = torch.tensor([0, 1, 100, 5000])
    like = torch.zeros(1, device=probe.device)
    cos, sin = probe.subject.draft_model.rotary_emb(like, places[None].to(probe.device))
    wanted = rope_table(probe.view, places)
    for index, place in enumerate(places.tolist()):
        difference = max(
            float((found[0, index].double().cpu() - table[index]).abs().max())
            for found, table in zip((cos, sin), wanted, strict=True)
        )
        # the angle at position p is known to about p * 2^-24 in float32
        if difference > 1e-4 + place * 1e-6:
            return (
                f"rotary table at position {place} differs by {difference:.2e} from rope_parameters {probe.view.rope}"
            )
    return None


def _explain_positions(probe: Probe) -> str | None:
    for shift in (-1, 1):
        if _reference_difference(probe, probe.view, shift) <= _SAME:
            return f"slots sit at positions anchor + k {shift:+d}"
    for theta in (10_000.0, 1_000_000.0):
        if _reference_difference(probe, with_rope(probe.view, rope_theta=theta)) <= _SAME:
            return f"it rotates with rope_theta {theta:g}, declared is {probe.view.rope.get('rope_theta')}"
    if _reference_difference(probe, probe.view, step=0) <= _SAME:
        return "all slots of a block sit at its anchor's position"
    return None if _independent_of_distance(probe) is None else "outputs do not depend on positions as rotary ones do"


def _independent_of_distance(probe: Probe) -> str | None:
    """Order of the context matters only through positions: without any, exchanging two tokens changes nothing."""
    first = probe.few_anchors[1]
    exchanged = probe.states.clone()
    exchanged[:, [first - 2, first - 3]] = exchanged[:, [first - 3, first - 2]]
    with probe.shaken_weights():
        difference = relative_difference(probe.run_drafter(exchanged)[1], probe.run_drafter(probe.states)[1])
    return "no positions" if difference < 1e-5 else None


def _explain_layers(probe: Probe) -> str:
    if probe.drafter_is_random:
        return "; two calls with the same input differ: it draws random numbers (dropout)"
    for name, changed in (
        ("the norms' eps is 1e-5", replace(probe.view, eps=1e-5)),
        ("the norms' eps is 1e-6", replace(probe.view, eps=1e-6)),
    ):
        if changed.eps != probe.view.eps and _reference_difference(probe, changed) <= _SAME:
            return f"; it fits if {name}"
    return ""


# Mask token and block input.


def _role_of_token(probe: Probe, token: int) -> str | None:
    """Pad, eos or bos of the tokenizer or of the target's configurations."""
    roles = (role for role in ("pad", "eos", "bos") if token in role_ids(probe.subject.target, role))
    return next((f"{role} token" for role in roles), None)


def _wanted_blocks(probe: Probe) -> Tensor:
    """[A, P, D]: what the target's first layer receives for the anchor's token and for the mask token.

    Learned positions are no part of it: the drafter's are rotary.
    """
    target, mask_id = probe.subject.target, probe.subject.draft_model.config.mask_token_id
    tokens = torch.cat([probe.row.input_ids[0, probe.anchor_positions].cpu(), torch.tensor([mask_id])])
    if has_learned_positions(probe):
        first_inputs = embedding_of(target.model)(tokens)
    else:
        first_inputs = torch.stack([target_forward(target, token[None]).first_input[0] for token in tokens])
    blocks = first_inputs[-1].expand(len(probe.anchors), probe.block_size, -1).clone()
    blocks[:, 0] = first_inputs[:-1]
    return blocks


# Anchors.


def _wrong_anchors(probe: Probe) -> Problem | None:
    eligible = naive_anchors(probe.samples)
    fix = "anchors: t with loss_mask[t] = loss_mask[t+1] = 1 in one document; up to num_anchors per document"
    found = _drawn(probe, probe.row, 10_000)
    if sorted(found) != eligible:
        missing, extra = sorted(set(eligible) - set(found)), sorted(set(found) - set(eligible))
        return Problem(
            f"{len(set(found))} of {len(eligible)} eligible positions can be drawn; never drawn {missing[:6]}, "
            f"not eligible {extra[:6]}, drawn twice {len(found) - len(set(found))}",
            fix,
        )
    documents = probe.row.document_ids[0].tolist()
    places = [sum(documents[a] == d for a in eligible) for d in range(len(probe.samples))]
    for budget, epoch in ((3, 0), (min(places) - 1, 1), (max(places) - 1, 2), (max(places) - 1, 3)):
        few = _drawn(probe, replace(probe.row, epoch=epoch), budget)
        counts = [sum(documents[a] == d for a in set(few)) for d in range(len(probe.samples))]
        wanted = [min(budget, place) for place in places]
        if counts != wanted or len(set(few)) != len(few) or not set(few) <= set(eligible):
            return Problem(
                f"with a budget of {budget} per document, {counts} different anchors were drawn "
                f"({len(few) - len(set(few))} twice), wanted {wanted}",
                fix,
            )
    return None


def _unstable_anchors(probe: Probe) -> Problem | None:
    fix = "draw with a generator seeded by (seed, epoch, sample id) alone"
    row = probe.row
    if _drawn(probe, row, 3) != _drawn(probe, row, 3):
        return Problem("two draws for the same row, epoch and seed differ: a resumed run would not be the same", fix)
    alone = replace(probe.row_of(probe.reference_captured[1:2]), sequence_number=11, step=4)
    offset = len(probe.samples[0])
    in_row = [a - offset for a in _drawn(probe, row, 3) if 0 <= a - offset < len(probe.samples[1])]
    if _drawn(probe, alone, 3) != in_row:
        return Problem("the draw for a conversation depends on its row and what it is packed with", fix)
    draws = {tuple(_drawn(probe, replace(row, epoch=epoch), 3)) for epoch in range(6)}
    if len(draws) == 1:
        return Problem("six passes over the data draw the same anchors", fix)
    seeds = {tuple(_drawn(probe, row, 3, seed)) for seed in range(6)}
    return Problem("six seeds draw the same anchors", fix) if len(seeds) == 1 else None


def _drawn(probe: Probe, row: PackedBatch, budget: int, seed: int = 0) -> list[int]:
    drawn: list[int] = probe.subject.draw_anchors(row, budget, seed).tolist()
    return drawn


def _rope_unlike_target(probe: Probe) -> Problem | None:
    """Rotary base other than the target's: not wrong, but never by accident."""
    config = probe.subject.target.config
    settings = config.rope_parameters if hasattr(config, "rope_parameters") else None
    by_layer = [v for v in settings.values() if isinstance(v, dict)] if settings else []  # Gemma 3 has two
    bases = {one["rope_theta"] for one in by_layer or [settings or {}] if one.get("rope_theta") is not None}
    ours = probe.view.rope.get("rope_theta")
    if bases and ours not in bases:
        return Problem(
            f"rope_theta is {ours}, the target's is {sorted(bases, key=str)}",
            "take rope_theta from the target",
            "warning",
        )
    scaled = [one for one in by_layer or [settings or {}] if one.get("rope_type", one.get("type")) in _SCALED]
    if len(scaled) != max(1, len(by_layer)):  # not scaled, or not in every layer
        return None
    found = {name: probe.view.rope.get(name) for name in ("rope_type", "factor")}
    wanted = [{name: one.get(name, one.get("type")) for name in found} for one in scaled]
    if found in wanted:
        return None
    return Problem(
        f"rotary scaling is {found}, the target's is {wanted[0]}: far positions turn otherwise",
        "take the scaling from the target",
        "warning",
    )
