"""The mapping of a reduced vocabulary, and what is not a mapping."""

from __future__ import annotations

import pytest
import torch

from draftline.draft.vocabulary import kept_ids_of, mapping_fault, membership_of, offsets_of
from tests.draft.layouts import drafter_config

KEPT = [2, 3, 7, 11]


def test_offsets_and_membership_are_those_of_the_definition() -> None:
    d2t = offsets_of(torch.tensor(KEPT))
    assert [row + int(d2t[row]) for row in range(4)] == KEPT
    assert kept_ids_of(d2t).tolist() == KEPT
    assert [token for token, kept in enumerate(membership_of(d2t, 12)) if kept] == KEPT
    assert mapping_fault(d2t, 4, 12) is None


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (offsets_of(torch.tensor([2, 3, 7])), r"d2t is \[3\] int64, expected \[4\]"),
        (offsets_of(torch.tensor(KEPT)).int(), r"\[4\] int32"),
        (offsets_of(torch.tensor([2, 3, 7, 12])), "row 3 to token 12 of a table of 12$"),
        (offsets_of(torch.tensor([-1, 3, 7, 11])), "row 0 to token -1"),
        (offsets_of(torch.tensor([2, 7, 3, 11])), "rows 1 and 2 to tokens 7 and 3, which do not increase$"),
        (offsets_of(torch.tensor([2, 3, 3, 11])), "tokens 3 and 3"),
        (torch.tensor(KEPT), "increasing ids themselves, where offsets"),
    ],
)
def test_what_is_no_mapping_is_named(d2t: torch.Tensor, words: str) -> None:
    fault = mapping_fault(d2t, 4, 12)
    assert fault is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(fault)


@pytest.mark.parametrize("size", [0, 48, 49])
def test_a_size_that_reduces_nothing_is_no_shape(size: int) -> None:
    with pytest.raises(ValueError, match="does not reduce 48 tokens"):
        drafter_config({"draft_vocab_size": size})
