"""Sampling filters against a naive formula; rejection sampling against the target's own distribution by chi-square."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftline.errors import ConfigError
from draftline.evaluate.sampling import GREEDY, Sampling, draw, verify_greedy, verify_sampled

VOCABULARY = 5
BLOCK = 2
DRAWS = 20_000


def naive_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    """Filter one distribution by walking down the ranking."""
    weights = [math.exp(x / sampling.temperature) for x in logits]
    ranking = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = ranking[: sampling.top_k] if sampling.top_k else ranking
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7, top_p=0.8),
        Sampling(1.3, top_k=3),
        Sampling(2.0, top_p=0.6, top_k=4),
        Sampling(1.0, 1e-9),
    ],
)
def test_probabilities_follow_the_naive_filter(sampling: Sampling) -> None:
    logits = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([naive_probabilities(row, sampling) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(sampling.probabilities(logits), expected, rtol=1e-6, atol=1e-7)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    assert (Sampling(1.0, top_k=2).probabilities(torch.zeros(1, 6)) > 0).sum() == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1)],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Sampling(**{"temperature": 1.0, field: value})


@pytest.mark.parametrize(("drafted", "accepted", "bonus"), [([3, 1], 2, 4), ([3, 2], 1, 1), ([0, 1], 0, 3)])
def test_greedy_verification_keeps_the_matching_prefix(drafted: list[int], accepted: int, bonus: int) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4]), VOCABULARY).float()
    assert verify_greedy(torch.tensor(drafted), logits) == (accepted, bonus)


def first_two_tokens(sampling: Sampling, broken: bool, sayable: int) -> tuple[Tensor, Tensor]:
    """Counts [V, V] of the first two tokens of speculative decoding, and their true probabilities.

    The drafter sees only the place in the block, as a DFlash drafter does; the target sees the token before.
    The drafter can say the first `sayable` tokens. With `broken`, a rejected token is replaced from p instead of from
    the residual: the commonest wrong rule.
    """
    generator = torch.Generator().manual_seed(1)
    target_logits = torch.randn(VOCABULARY + 1, VOCABULARY, generator=generator) * 1.5
    draft = torch.zeros(BLOCK, VOCABULARY, dtype=torch.float64)
    draft[:, :sayable] = sampling.probabilities(torch.randn(BLOCK, sayable, generator=generator) * 1.5)
    target = sampling.probabilities(target_logits)
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for _ in range(DRAWS):
        tokens: list[int] = []
        while len(tokens) < 2:
            drafted = draw(draft, generator)
            after = [tokens[-1] if tokens else VOCABULARY, *drafted.tolist()]
            accepted, bonus = verify_sampled(drafted, draft, target[after], generator)
            if broken and accepted < BLOCK:
                bonus = int(draw(target[after[accepted]][None], generator))
            tokens += [*drafted[:accepted].tolist(), bonus]
        counts[tokens[0], tokens[1]] += 1
    return counts, target[VOCABULARY][:, None] * target[:VOCABULARY]


def p_value(broken: bool, sayable: int = VOCABULARY) -> float:
    """Chi-square test of what was counted against what the target says."""
    counts, expected = first_two_tokens(Sampling(1.5, top_p=0.9, top_k=4), broken, sayable)
    possible = expected > 0
    assert 8 < possible.sum() < possible.numel()
    assert counts[~possible].sum() == 0
    return float(stats.chisquare(counts[possible], expected[possible] * DRAWS).pvalue)


@pytest.mark.parametrize("sayable", [VOCABULARY, VOCABULARY // 2])
def test_rejection_sampling_keeps_the_distribution(sayable: int) -> None:
    assert p_value(broken=False, sayable=sayable) > 0.001


def test_a_wrong_replacement_rule_fails_the_same_test() -> None:
    assert p_value(broken=True) < 0.001


def test_greedy_probabilities_are_a_single_point() -> None:
    assert GREEDY.probabilities(torch.tensor([[0.0, 2.0, 1.0]])).tolist() == [[0.0, 1.0, 0.0]]
