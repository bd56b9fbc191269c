"""Who proposed each token of an output."""

from __future__ import annotations

from collections.abc import Sequence


def token_slots(output_length: int, accepted_per_forward: Sequence[int]) -> list[int]:
    """Which drafted token each token of an output was: 1, 2, .. K, or 0 for one that the target chose itself.

    The first token comes from the prompt's own forward. Every later forward gives its accepted tokens and one of the
    target's; the last forward may be cut short by the end of the output.
    """
    slots = [0]
    for accepted in accepted_per_forward:
        slots += [*range(1, accepted + 1), 0]
    return slots[:output_length]
