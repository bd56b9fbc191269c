"""Training and held-out conversations: disjoint by prompt, complete, never empty."""

from __future__ import annotations

import numpy as np

from draftline.data.split import split_heldout


def test_heldout_split_is_disjoint_complete_and_not_empty() -> None:
    for count, fraction in [(1, 0.5), (2, 0.01), (10, 0.25), (100, 0.99), (7, 0.0)]:
        train, heldout = split_heldout(np.arange(count, dtype=np.uint64), fraction)
        assert sorted([*train, *heldout]) == list(range(count))
        assert len(train) >= 1
        assert len(heldout) >= (1 if fraction and count > 1 else 0)
    assert len(split_heldout(np.arange(100, dtype=np.uint64), 0.25)[1]) == 25


def test_no_prompt_is_on_both_sides_of_the_heldout_split() -> None:
    hashes = np.random.default_rng(0).integers(0, 20, size=200).astype(np.uint64)
    train, heldout = split_heldout(hashes, 0.3)
    assert len(set(hashes[heldout])) == 6
    assert not set(hashes[train]) & set(hashes[heldout])
