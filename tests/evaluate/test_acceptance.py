"""The arithmetic of acceptance against counts made by hand, its intervals on simulated drafters whose rates are known
exactly, and the walk against the decoder, an independent path.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftline.draft.attention import BlockLayout
from draftline.evaluate.acceptance import (
    Acceptance,
    Interval,
    acceptance_interval,
    acceptance_rate_by_position,
    acceptance_rate_intervals,
    accepted_histogram,
    describe_acceptance_length,
    macro_acceptance_interval,
    ratio_interval,
    split_last_answer,
    teacher_forced_walk,
    walk,
)
from draftline.evaluate.generate import generate, generate_plain
from draftline.records import Sample
from draftline.targets.loop import TargetForwardLoop
from tests.evaluate import pairs

ACCEPTED = [1, 2, 3, 0]  # blocks whose drafted tokens were right as 100, 110, 111, 000


def test_rates_by_position_are_both_named_and_counted_per_forward() -> None:
    assert acceptance_rate_by_position(ACCEPTED, 3, conditional=False) == [0.75, 0.5, 0.25]
    assert acceptance_rate_by_position(ACCEPTED, 3, conditional=True) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert accepted_histogram(ACCEPTED, 3) == [1, 1, 1, 1]


def test_rates_without_any_forward_are_not_numbers() -> None:
    assert all(math.isnan(rate) for rate in acceptance_rate_by_position([], 2, conditional=False))
    assert math.isnan(Acceptance(0, 0).length)


def test_acceptance_length_divides_sums_and_counts_the_bonus() -> None:
    parts = [Acceptance(tokens=10, forwards=2), Acceptance(tokens=2, forwards=2)]
    assert Acceptance.total(parts).length == 3.0  # the mean of the two ratios happens to be 3.0 only for equal forwards
    assert Acceptance.total([*parts, Acceptance(tokens=1, forwards=1)]).length == 13 / 5
    assert describe_acceptance_length(13 / 5) == "acceptance length (with bonus): 2.60"


@pytest.mark.parametrize(
    ("streaks", "jumps"), [([2, 9, 9, 0, 0], 3), ([0, 0, 0], 3), ([9, 0], 1), ([1, 5, 1, 5, 1], 3), ([], 0)]
)
def test_walk_jumps_over_what_a_forward_would_have_given(streaks: list[int], jumps: int) -> None:
    assert walk(streaks) == Acceptance(len(streaks), jumps)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_walk_predicts_exactly_what_the_decoder_reaches(from_anchor: bool) -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    draft_model = pairs.reshaped(trained, sample_from_anchor=from_anchor)
    answers, decoded = [], []
    for length, prompt in enumerate(prompt_ids[:12], start=1):
        ids = torch.tensor([prompt])
        answers.append((prompt, generate_plain(target, ids, max_new_tokens=2 * length - 1).output_ids))
        generation = generate(target, draft_model, ids, max_new_tokens=2 * length - 1)
        decoded.append(Acceptance(len(generation.output_ids) - 1, generation.target_forwards))
    assert teacher_forced_walk(target, draft_model, answers) == decoded
    if not from_anchor:
        assert Acceptance.total(decoded).length > 1.3


def test_decoding_and_training_paths_give_the_same_states() -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    sliding = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7}
    ids = torch.tensor(prompt_ids[0] + prompt_ids[1])
    sample = Sample(0, ids, torch.ones(len(ids), dtype=torch.bool))
    states = TargetForwardLoop(target, draft_model.config.target_layer_ids).capture([sample])[0].hidden_states_SLD[None]
    anchors = torch.arange(1, len(ids))
    for model in (draft_model, pairs.reshaped(draft_model, **sliding)):
        block_ids = torch.full((len(anchors), 6), model.config.mask_token_id)
        block_ids[:, 0] = ids[anchors]
        embeddings = target.embed(block_ids)
        with torch.no_grad():
            layout = BlockLayout.of_row(anchors, torch.arange(len(ids)), 6)
            trained = model(states, embeddings.flatten(0, 1)[None], layout)[0].unflatten(0, (-1, 6))
            cache = model.new_cache()
            for index, anchor in enumerate(anchors.tolist()):
                model.extend_cache(cache, states[:, cache.length : anchor])
                decoded = model.draft(cache, embeddings[index : index + 1])[0]
                torch.testing.assert_close(decoded, trained[index], rtol=1e-5, atol=1e-5)


DRAFTED = 7
SIMULATIONS = 200
EASY, HARD = (4.0, 2.0), (0.8, 2.0)
"""Beta distributions of the rate at which one drafted token stands if all before it did; the second is skewed."""


def known_rate(difficulty: tuple[float, float], position: int) -> float:
    """Expected share of forwards in which so many drafted tokens stand: a moment of the beta distribution."""
    a, b = difficulty
    return math.prod((a + i) / (a + b + i) for i in range(position))


def known_length(difficulty: tuple[float, float]) -> float:
    """Expected acceptance length: the bonus, and each drafted token as often as it stands."""
    return 1 + sum(known_rate(difficulty, position) for position in range(1, DRAFTED + 1))


def simulate(generator: np.random.Generator, difficulty: tuple[float, float], prompts: int) -> list[NDArray[np.int64]]:
    """Accepted tokens of each forward, by prompt; prompts have 5 to 40 forwards whatever their difficulty."""
    rates = np.minimum(generator.beta(*difficulty, size=prompts), 1 - 1e-9)
    forwards = generator.integers(5, 41, size=prompts)
    accepted = np.minimum(generator.geometric(1 - np.repeat(rates, forwards)) - 1, DRAFTED)
    return np.split(accepted, np.cumsum(forwards)[:-1])


def clusters_of(accepted_by_prompt: list[NDArray[np.int64]]) -> list[Acceptance]:
    return [Acceptance(int(counts.sum()) + len(counts), len(counts)) for counts in accepted_by_prompt]


def percentile_interval(clusters: list[Acceptance], generator: np.random.Generator) -> Interval:
    """What is usually done, to compare with."""
    pairs = np.array([(cluster.tokens, cluster.forwards) for cluster in clusters])
    sums = pairs[generator.integers(len(pairs), size=(1000, len(pairs)))].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize(("difficulty", "prompts"), [(EASY, 20), (EASY, 100), (HARD, 100), (HARD, 20)])
def test_a_known_acceptance_length_lies_in_its_interval(difficulty: tuple[float, float], prompts: int) -> None:
    generator, known = np.random.default_rng(prompts), known_length(difficulty)
    hits = macro_hits = 0
    for _ in range(SIMULATIONS):
        clusters = clusters_of(simulate(generator, difficulty, prompts))
        low, high = acceptance_interval(clusters, DRAFTED + 1)
        hits += low <= known <= high
        low, high = macro_acceptance_interval(clusters, DRAFTED + 1)
        macro_hits += low <= known <= high
    for found in (hits, macro_hits):
        assert 0.93 * SIMULATIONS <= found < SIMULATIONS


def test_with_few_prompts_the_percentile_bootstrap_is_further_from_its_word() -> None:
    generator, known = np.random.default_rng(0), known_length(HARD)
    ours = theirs = 0
    for _ in range(SIMULATIONS):
        clusters = clusters_of(simulate(generator, HARD, 8))
        low, high = acceptance_interval(clusters, DRAFTED + 1)
        ours += low <= known <= high
        low, high = percentile_interval(clusters, generator)
        theirs += low <= known <= high
    assert theirs + 0.03 * SIMULATIONS < ours < SIMULATIONS


@pytest.mark.parametrize("conditional", [False, True])
def test_known_rates_by_position_lie_in_their_intervals(conditional: bool) -> None:
    generator, hits = np.random.default_rng(1), [0] * 3
    for _ in range(SIMULATIONS):
        accepted = [np.minimum(counts, 3).tolist() for counts in simulate(generator, EASY, 40)]
        intervals = acceptance_rate_intervals(accepted, 3, conditional=conditional)
        for k, (low, high) in enumerate(intervals, start=1):
            rate = known_rate(EASY, k) / (known_rate(EASY, k - 1) if conditional else 1)
            hits[k - 1] += low <= rate <= high
    assert min(hits) >= 0.93 * SIMULATIONS


def test_a_share_without_exception_is_not_taken_for_certain() -> None:
    assert ratio_interval([1] * 40, [1] * 40, (0.0, 1.0)) == pytest.approx((1 - 3 / 40, 1.0))
    assert ratio_interval([0] * 2, [9] * 2, (0.0, 1.0)) == (0.0, 1.0)
    low, high = ratio_interval([3.3, 6.6, 1.1], [3, 6, 1], (1.0, 8.0))  # equal but for rounding
    assert (low, high) == pytest.approx((1.0, 8.0))


def test_nothing_is_known_from_one_prompt_nor_from_none() -> None:
    assert ratio_interval([], [], (0.0, 1.0)) == ratio_interval([2, 5], [4, 0], (0.0, 1.0)) == (0.0, 1.0)


def test_an_interval_is_repeatable_holds_the_figure_and_stays_within_bounds() -> None:
    generator = np.random.default_rng(2)
    for prompts in (2, 3, 5, 12):
        clusters = clusters_of(simulate(generator, HARD, prompts))
        low, high = acceptance_interval(clusters, DRAFTED + 1)
        assert 1.0 <= low <= Acceptance.total(clusters).length <= high <= DRAFTED + 1
        assert acceptance_interval(clusters, DRAFTED + 1) == (low, high)


def test_the_last_answer_of_a_conversation() -> None:
    ids = torch.arange(10, 20)
    for mask, expected in [
        ("0011001100", ([10, 11, 12, 13, 14, 15], [16, 17])),
        ("0000000000", ([], [])),
        ("1111111111", ([], list(range(10, 20)))),
        ("0000000001", (list(range(10, 19)), [19])),
    ]:
        sample = Sample(0, ids, torch.tensor([bit == "1" for bit in mask]))
        assert split_last_answer(sample) == expected
