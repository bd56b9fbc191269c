"""The arithmetic of acceptance against counts made by hand; the walk against the decoder, an independent path."""

from __future__ import annotations

import math

import pytest
import torch

from draftline.draft.attention import BlockLayout
from draftline.evaluate.acceptance import (
    Acceptance,
    acceptance_rate_by_position,
    accepted_histogram,
    conditional_acceptance_rate_by_position,
    describe_acceptance_length,
    teacher_forced_walk,
    walk,
)
from draftline.evaluate.generate import generate, generate_plain
from draftline.records import Sample
from draftline.targets.loop import TargetForwardLoop
from tests.evaluate import pairs

ACCEPTED = [1, 2, 3, 0]  # blocks whose drafted tokens were right as 100, 110, 111, 000


def test_rates_by_position_are_both_named_and_counted_per_forward() -> None:
    assert acceptance_rate_by_position(ACCEPTED, 3) == [0.75, 0.5, 0.25]
    assert conditional_acceptance_rate_by_position(ACCEPTED, 3) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert accepted_histogram(ACCEPTED, 3) == [1, 1, 1, 1]


def test_rates_without_any_forward_are_not_numbers() -> None:
    assert all(math.isnan(rate) for rate in acceptance_rate_by_position([], 2))
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
