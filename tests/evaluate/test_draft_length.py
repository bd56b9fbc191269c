"""Fewer checked tokens: lengths against the decoder itself, the choice of the fastest against hand-made costs."""

from __future__ import annotations

import pytest
import torch

from draftline.errors import ConfigError
from draftline.evaluate.acceptance import Acceptance, teacher_forced_streaks
from draftline.evaluate.draft_length import (
    RoundCosts,
    draft_lengths,
    lengths_from_rates,
    round_costs,
    walked_lengths,
)
from draftline.evaluate.generate import GREEDY, BlockDrafter, generate, generate_plain
from draftline.options import Sampling
from tests.evaluate import pairs


@pytest.mark.parametrize("from_anchor", [False, True])
def test_the_walk_knows_what_the_decoder_reaches_with_each_number(from_anchor: bool) -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    draft_model = pairs.reshaped(trained, sample_from_anchor=from_anchor)
    most = draft_model.config.num_speculative_tokens
    prompts = [torch.tensor([ids]) for ids in prompt_ids[:8]]
    plain = [generate_plain(target, ids, max_new_tokens=24).output_ids for ids in prompts]
    answers = list(zip(prompt_ids[:8], plain, strict=True))
    walked = walked_lengths(teacher_forced_streaks(target, draft_model, answers), most)
    for count in range(1, most + 1):
        found = [generate(target, draft_model, p, max_new_tokens=24, num_speculative_tokens=count) for p in prompts]
        assert [generation.output_ids for generation in found] == plain
        assert {len(block) for generation in found for block in generation.drafted_blocks} == {count}
        decoded = Acceptance.total([Acceptance(len(g.output_ids) - 1, g.target_forwards) for g in found])
        assert walked[count - 1] == decoded.length
    if not from_anchor:
        assert walked == sorted(walked)
        assert walked[0] < walked[-1]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)])
def test_a_shorter_proposal_is_the_beginning_of_the_whole_block(sampling: Sampling) -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    whole, short = (BlockDrafter(target, draft_model, sampling, None, count) for count in (None, 2))
    layers = len(draft_model.config.target_layer_ids)
    states = torch.randn(1, 5, layers * target.hidden_size, generator=torch.Generator().manual_seed(0))
    for drafter in (whole, short):
        drafter.extend(states)
    assert torch.equal(short.block_states(prompt_ids[0][0]), whole.block_states(prompt_ids[0][0])[:2])
    proposal = short.propose(prompt_ids[0][0])
    assert proposal.tokens_K.shape == (2,)
    assert sampling.greedy or (proposal.probabilities_KV is not None and len(proposal.probabilities_KV) == 2)


@pytest.mark.parametrize("count", [0, -1, 99])
def test_more_tokens_than_a_block_has_are_refused(count: int) -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    with pytest.raises(ConfigError, match=rf"--num-speculative-tokens {count}: the drafter drafts \d+ at a time"):
        generate(target, draft_model, torch.tensor(prompt_ids[:1]), max_new_tokens=2, num_speculative_tokens=count)


def test_the_fastest_number_follows_from_lengths_and_costs() -> None:
    costs = RoundCosts(target=(10.0, 11.0, 12.0, 20.0), drafter=(0.0, 2.0, 3.0, 4.0))
    found = draft_lengths([1.5, 1.8, 1.9], costs)
    assert [entry.seconds_per_round for entry in found] == [13.0, 15.0, 24.0]
    assert [entry.speedup for entry in found] == pytest.approx([1.5 * 10 / 13, 1.8 * 10 / 15, 1.9 * 10 / 24])
    assert max(found, key=lambda entry: entry.speedup).num_speculative_tokens == 2


def test_lengths_by_hand() -> None:
    # from each token: 2 right, 0, 1, 3, 0; with one token checked: jumps of 2, 2, 1; with three: 3, 2
    assert walked_lengths([[2, 0, 1, 3, 0]], 3) == [5 / 3, 5 / 2, 5 / 2]
    assert lengths_from_rates([0.5, 0.25]) == [1.5, 1.75]


def test_costs_are_measured_without_leaving_anything_behind() -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    before = generate(target, draft_model, torch.tensor(prompt_ids[:1]), max_new_tokens=8)
    costs = round_costs(target, draft_model, prompt_ids[0])
    assert len(costs.target) == len(costs.drafter) == draft_model.config.num_speculative_tokens + 1
    assert all(seconds > 0 for seconds in (*costs.target, *costs.drafter[1:]))
    assert costs.drafter[0] == 0
    assert generate(target, draft_model, torch.tensor(prompt_ids[:1]), max_new_tokens=8) == before


def test_a_context_that_fills_the_positions_is_cut_for_the_measurement() -> None:
    target, draft_model, _ = pairs.trained_pair()
    round_costs(target, draft_model, [5] * target.config.max_position_embeddings)
