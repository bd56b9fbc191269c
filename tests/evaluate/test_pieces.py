"""Who proposed each token of an output."""

from __future__ import annotations

import pytest

from draftline.evaluate.pieces import token_slots


@pytest.mark.parametrize(
    ("length", "accepted", "slots"),
    [
        (1, [], [0]),
        (7, [2, 0, 1], [0, 1, 2, 0, 0, 1, 0]),
        (6, [2, 0, 1], [0, 1, 2, 0, 0, 1]),  # the stop token was drafted: the target adds nothing
    ],
)
def test_slots_tell_drafted_tokens_from_the_targets_own(length: int, accepted: list[int], slots: list[int]) -> None:
    assert token_slots(length, accepted) == slots
