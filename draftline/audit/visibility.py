"""Who sees what: inputs of the drafter changed one place at a time, and which slots move.

What should move is worked out by nested loops over positions, layer by layer, because a slot may see a token through
another slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftline.audit.probe import Probe, once_per_audit, perturbed
from draftline.audit.reference import BlockPlace, visible
from draftline.audit.subject import NotApplicable

_MOVED = 1e-6
"""Relative change of an output from which on it counts as moved; slots that see nothing of a change move by 0."""


@dataclass(frozen=True)
class Mistake:
    """A change that moved a slot it must not move, or did not move one that it must."""

    text: str
    effect: str
    same_document: bool
    within_window: bool


def anchors_and_starts(probe: Probe) -> list[tuple[int, int]]:
    return list(zip(probe.few_anchors, probe.starts(probe.few_anchors), strict=True))


def refuse_random_drafter(probe: Probe) -> None:
    """Raise `NotApplicable` for a drafter with dropout or noise: everything it does would look like a leak."""
    if probe.drafter_is_random:
        raise NotApplicable("the drafter draws random numbers, see DRF008")


@once_per_audit
def context_mistakes(probe: Probe) -> list[Mistake]:
    """Slots that move, or do not, when the state at one position of the row changes."""
    refuse_random_drafter(probe)
    expected = [_expected_context(probe, place) for place in _places(probe)]
    found: list[Mistake] = []
    with probe.shaken_weights():
        before = probe.run_drafter(probe.states)
        for position in _positions_to_try(probe):
            changed = perturbed(probe.states, [position], probe.generator(7))
            moved = _moved(probe.run_drafter(changed), before)
            for place in _places(probe):
                for slot in range(probe.block_size):
                    wanted = position in expected[place.index][slot]
                    if bool(moved[place.index, slot]) != wanted:
                        found.append(_context_mistake(probe, place, slot, position, wanted))
    return found


def _context_mistake(probe: Probe, place: BlockPlace, slot: int, position: int, wanted: bool) -> Mistake:
    documents = probe.row.document_ids[0].tolist()
    same = documents[position] == documents[place.anchor]
    text = f"a state of another conversation, {position - place.anchor:+d} from the anchor"
    if same:
        text = (
            f"the state at position {position - place.start} of a conversation whose block starts at "
            f"{place.anchor - place.start}"
        )
    effect = f"slot {slot} {'does not move' if wanted else 'moves'} when it changes"
    return Mistake(text, effect, same, _windowed(probe) and position < place.anchor - 1)


def _places(probe: Probe) -> list[BlockPlace]:
    return [BlockPlace(index, anchor, start) for index, (anchor, start) in enumerate(anchors_and_starts(probe))]


def _windowed(probe: Probe) -> bool:
    return any(window is not None for window in probe.view.windows)


def _positions_to_try(probe: Probe) -> list[int]:
    """Positions at which a mistake shows: around each anchor, at the document's start, at the window's edge."""
    total, block = probe.row.input_ids.shape[1], probe.block_size
    tried: set[int] = set()
    for anchor, start in anchors_and_starts(probe):
        tried |= {start - 1, start, anchor - 2, anchor - 1, anchor, anchor + 1, anchor + block - 1, anchor + block}
        for width in set(probe.view.windows) - {None}:
            assert width is not None
            tried |= {anchor - width - 1, anchor - width, anchor - width + 1, anchor - width + 2}
    return sorted(p for p in tried if 0 <= p < total)


def _expected_context(probe: Probe, place: BlockPlace) -> list[set[int]]:
    """Per slot of a block, the context positions that reach it through any chain of layers."""
    slots, total = range(probe.block_size), probe.row.input_ids.shape[1]
    reach: list[set[int]] = [set() for _ in slots]
    for causal, width in zip(probe.view.causal, probe.view.windows, strict=True):
        now = []
        for query in slots:
            direct = {key for key in range(total) if visible(query, key, None, place, causal, width)}
            through = [reach[key] for key in slots if visible(query, key, place.index, place, causal, width)]
            now.append(direct.union(reach[query], *through))
        reach = now
    return reach


@once_per_audit
def block_mistakes(probe: Probe) -> list[Mistake]:
    """Slots that move, or do not, when one slot's embedding changes."""
    refuse_random_drafter(probe)
    block, found = probe.block_size, []
    expected = _expected_block(probe)
    with probe.shaken_weights():
        before = probe.run_drafter(probe.states)
        for index in (0, 1, len(probe.few_anchors) - 1):
            for slot in sorted({0, 1, block // 2, block - 1}):
                changed = perturbed(probe.block_embeddings, [index * block + slot], probe.generator(8))
                moved = _moved(probe.run_drafter(probe.states, changed), before)
                for other in range(len(probe.few_anchors)):
                    for query in range(block):
                        wanted = other == index and slot in expected[query]
                        if bool(moved[other, query]) != wanted:
                            effect = f"slot {query} {'does not move' if wanted else 'moves'} when it changes"
                            text = f"slot {slot} of the {'same' if other == index else 'another'} block"
                            found.append(Mistake(text, effect, other == index, False))
    return found


def _expected_block(probe: Probe) -> list[set[int]]:
    """Per slot, the slots of its own block that reach it through any chain of layers."""
    slots, place = range(probe.block_size), BlockPlace(index=0, anchor=0, start=0)
    reach = [{slot} for slot in slots]
    for causal, width in zip(probe.view.causal, probe.view.windows, strict=True):
        seen = [[key for key in slots if visible(query, key, 0, place, causal, width)] for query in slots]
        reach = [reach[query].union(*(reach[key] for key in seen[query])) for query in slots]
    return reach


def _moved(after: Tensor, before: Tensor) -> Tensor:
    """[A, P] bool."""
    return ((after - before).abs().amax(-1) > _MOVED * before.abs().max()).cpu()
