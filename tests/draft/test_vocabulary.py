"""Which tokens are kept (the most frequent supervised ones: against a counter, and speculators); how files say it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from draftline.draft.vocabulary import (
    count_supervised,
    coverage_of,
    kept_ids_of,
    mapping_fault,
    membership_of,
    offsets_of,
    reduce_vocabulary,
)
from draftline.errors import ConfigError, DataError
from draftline.records import Sample
from tests.draft.layouts import drafter_config

KEPT = [2, 3, 7, 11]
VOCABULARY = 50


def conversations(seed: int, count: int = 30) -> list[Sample]:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 20) for _ in range(count)]
    rows = [[min(int(rng.expovariate(0.1)), VOCABULARY - 1) for _ in range(length)] for length in lengths]
    masks = [[rng.random() < 0.6 for _ in range(length)] for length in lengths]
    return [Sample(i, torch.tensor(r), torch.tensor(m)) for i, (r, m) in enumerate(zip(rows, masks, strict=True))]


@pytest.mark.parametrize("seed", range(5))
def test_only_supervised_tokens_of_the_chosen_conversations_count(seed: int) -> None:
    samples, chosen = conversations(seed), range(0, 30, 2)
    wanted = Counter(
        token
        for i in chosen
        for token, kept in zip(samples[i].input_ids.tolist(), samples[i].loss_mask.tolist(), strict=True)
        if kept
    )
    counts_V = count_supervised(samples, chosen, VOCABULARY)
    assert {token: n for token, n in enumerate(counts_V.tolist()) if n} == wanted


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 7, 20, 49])
def test_the_same_tokens_as_speculators_chooses(seed: int, size: int) -> None:
    mapping = pytest.importorskip("speculators.train.vocab_mapping")
    counts_V = count_supervised(conversations(seed), range(30), VOCABULARY)
    frequencies = {token: n for token, n in enumerate(counts_V.tolist()) if n}
    d2t, t2d = mapping.build_vocab_mappings_from_distribution(frequencies, size, VOCABULARY)
    found = reduce_vocabulary(counts_V, size, always=())
    assert torch.equal(found.kept_ids, torch.arange(size) + d2t)
    assert torch.equal(found.kept_ids, t2d.nonzero()[:, 0])
    covered = sum(n for token, n in frequencies.items() if t2d[token])
    assert found.coverage == covered / sum(frequencies.values())


def test_ends_of_answers_are_kept_whatever_their_count() -> None:
    counts_V = torch.tensor([5, 5, 0, 9, 1, 0])
    assert reduce_vocabulary(counts_V, 3, always={5}).kept_ids.tolist() == [0, 3, 5]
    assert coverage_of(counts_V, torch.tensor([0, 3, 5])) == 14 / 20
    with pytest.raises(ConfigError, match=r"draft_vocab_size 1 is less than the 2 tokens that end"):
        reduce_vocabulary(counts_V, 1, always={4, 5})


def test_a_token_that_the_target_does_not_know_is_refused() -> None:
    with pytest.raises(DataError, match=r"token 4, the target knows 0\.\.3"):
        count_supervised([Sample(0, torch.tensor([1, 4]), torch.ones(2).bool())], [0], 4)


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
