"""Who sees what: inputs of the drafter changed one place at a time, and which slots move.

What should move is worked out by nested loops over positions, layer by layer, because a slot may see a token through
another slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftline.audit.probe import Probe, once_per_audit, perturbed
from draftline.audit.reference import visible

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


@once_per_audit
def context_mistakes(probe: Probe) -> list[Mistake]:
    """Slots that move, or do not, when the state at one position of the row changes."""
    expected = _expected_context(probe)
    found: list[Mistake] = []
    with probe.shaken_weights():
        before = probe.run_drafter(probe.states)
        for position in _positions_to_try(probe):
            changed = perturbed(probe.states, [position], probe.generator(7))
            moved = _moved(probe.run_drafter(changed), before)
            for index, (anchor, start) in enumerate(anchors_and_starts(probe)):
                same_document = probe.row.document_ids[0, position] == probe.row.document_ids[0, anchor]
                for slot in range(probe.block_size):
                    wanted = expected[index][slot](position)
                    if bool(moved[index, slot]) != wanted:
                        found.append(
                            Mistake(
                                f"the state at position {position - start} of a conversation whose block starts at "
                                f"{anchor - start}"
                                if same_document
                                else f"a state of another conversation, {position - anchor:+d} from the anchor",
                                f"slot {slot} {'does not move' if wanted else 'moves'} when it changes",
                                bool(same_document),
                                _windowed(probe) and position < anchor - 1,
                            )
                        )
    return found


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


def _expected_context(probe: Probe) -> list[list[Callable[[int], bool]]]:
    """Per block and slot: whether a context position reaches it through any chain of layers."""
    view, block, total = probe.view, probe.block_size, probe.row.input_ids.shape[1]
    table = []
    for index, (anchor, start) in enumerate(anchors_and_starts(probe)):
        reach: list[set[int]] = [set() for _ in range(block)]
        for causal, width in zip(view.causal, view.windows, strict=True):
            common = {"anchor": anchor, "start": start, "block": index, "causal": causal, "window": width}
            now: list[set[int]] = []
            for query in range(block):
                direct = {k for k in range(total) if visible(query=query, key=k, key_block=None, **common)}  # type: ignore[arg-type]
                through = [reach[k] for k in range(block) if visible(query=query, key=k, key_block=index, **common)]  # type: ignore[arg-type]
                now.append(direct.union(reach[query], *through))
            reach = now
        table.append([reached.__contains__ for reached in reach])
    return table


@once_per_audit
def block_mistakes(probe: Probe) -> list[Mistake]:
    """Slots that move, or do not, when one slot's embedding changes."""
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
    view, block = probe.view, probe.block_size
    reach = [{slot} for slot in range(block)]
    for causal, width in zip(view.causal, view.windows, strict=True):
        common = {"anchor": 0, "start": 0, "block": 0, "causal": causal, "window": width}
        reach = [
            reach[query].union(*(reach[k] for k in range(block) if visible(query=query, key=k, key_block=0, **common)))  # type: ignore[arg-type]
            for query in range(block)
        ]
    return reach


def _moved(after: Tensor, before: Tensor) -> Tensor:
    """[A, P] bool."""
    return ((after - before).abs().amax(-1) > _MOVED * before.abs().max()).cpu()
