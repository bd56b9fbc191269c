"""The decoding loop: lossless, counted honestly, maximal for a drafter that knows the future, whatever it can say;
sampling filters against a naive formula, rejection sampling against the distribution of the target by chi-square.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import TopKLogitsWarper

from draftline.draft.block import block_input_ids
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError, DataError, TargetError
from draftline.evaluate.acceptance import Acceptance, teacher_forced_walk
from draftline.evaluate.generate import (
    GREEDY,
    BlockDrafter,
    decode,
    draw,
    generate,
    generate_plain,
    probabilities,
    tie_gap,
    verify_greedy,
    verify_sampled,
)
from draftline.options import Sampling
from tests.evaluate import pairs


@pytest.mark.parametrize(("shift", "forwards"), [(0, 4), (1, 20)])
def test_true_continuations_score_the_maximum_and_shifted_ones_score_one(shift: int, forwards: int) -> None:
    """Blocks of 6 over 20 tokens after the first: 20 / 6 rounded up, and one token per forward when shifted."""
    target = pairs.random_target()
    for prompt in pairs.prompts(20):
        ids = torch.tensor([prompt])
        answer = generate_plain(target, ids, max_new_tokens=28).output_ids
        if all(a != b for a, b in pairwise(answer)):
            break
    else:
        pytest.fail("every answer repeats a token, so that a shifted draft is right by chance")
    generation = decode(target, pairs.Clairvoyant(len(prompt), answer, shift), ids, 21, (), GREEDY, None)
    assert generation.output_ids == answer[:21]
    assert generation.target_forwards == forwards


def test_every_forward_gives_a_token_and_the_block_never_shrinks() -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    for budget in (1, 2, 3, 7, 24):
        generation = generate(target, draft_model, torch.tensor([prompt_ids[0]]), max_new_tokens=budget)
        assert len(generation.output_ids) == budget
        assert {len(block) for block in generation.drafted_blocks} <= {5}
        bonus = budget - 1 - sum(generation.accepted_per_forward)
        # every forward but the last gives a bonus token that is kept
        assert generation.target_forwards - 1 <= bonus <= generation.target_forwards
        assert (generation.target_forwards == 0) == (budget == 1)


def test_stop_token_is_the_last_token_wherever_it_falls() -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    for prompt in prompt_ids[:1]:
        ids = torch.tensor([prompt])
        plain = generate_plain(target, ids, max_new_tokens=24).output_ids
        for stop in set(plain):
            expected = plain[: plain.index(stop) + 1]
            found = generate(target, draft_model, ids, max_new_tokens=24, stop_token_ids=[stop])
            assert found.output_ids == expected
            assert len(expected) == 1 or found.target_forwards <= len(expected) - 1


def test_sampling_with_a_drafter_has_the_distribution_of_sampling_without() -> None:
    """Pairs of tokens after one prompt; expected counts from the target's own probabilities."""
    target, draft_model, prompt_ids = pairs.trained_pair()
    ids, sampling = torch.tensor([prompt_ids[0]]), Sampling(temperature=4.0, top_k=2)
    expected: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        first = probabilities(sampling, target.model(input_ids=ids).logits[0, -1])
        for a in first.nonzero()[:, 0].tolist():
            longer = torch.cat([ids, torch.tensor([[a]])], dim=1)
            second = probabilities(sampling, target.model(input_ids=longer).logits[0, -1])
            expected |= {(a, b): float(first[a] * second[b]) for b in second.nonzero()[:, 0].tolist()}
    generator, draws = torch.Generator().manual_seed(0), 300
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(draws):
        found = generate(target, draft_model, ids, max_new_tokens=2, sampling=sampling, generator=generator)
        counts[tuple(found.output_ids)] += 1
    assert counts.keys() <= expected.keys()
    observed = [counts[pair] for pair in expected]
    assert stats.chisquare(observed, [p * draws for p in expected.values()]).pvalue > 0.001


def test_sampling_is_repeatable_with_a_generator() -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    ids, sampling = torch.tensor([prompt_ids[0]]), Sampling(temperature=1.0, top_p=0.9)
    outputs = [
        generate(
            target,
            draft_model,
            ids,
            max_new_tokens=16,
            sampling=sampling,
            generator=torch.Generator().manual_seed(seed),
        ).output_ids
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_tie_gap_is_the_distance_of_the_two_logits() -> None:
    target, ids = pairs.random_target(), torch.tensor([pairs.prompts(1)[0]])
    answer = generate_plain(target, ids, max_new_tokens=6).output_ids
    with torch.no_grad():
        logits = target.model(input_ids=torch.cat([ids, torch.tensor([answer[:4]])], dim=1)).logits[0, -1]
    other = int(logits.argsort()[-2])
    index, gap = tie_gap(target, ids, answer, [*answer[:4], other, 0])
    assert index == 4
    assert gap == pytest.approx(float(logits.max() - logits[other]), rel=1e-4)
    assert tie_gap(target, ids, answer, answer[:4]) == (4, float("inf"))


@pytest.mark.parametrize(
    ("length", "budget", "words"), [(250, 10, "260|250 tokens"), (0, 5, "no tokens"), (5, 0, "max_new_tokens is 0")]
)
def test_prompts_that_do_not_fit_are_refused_in_one_line(length: int, budget: int, words: str) -> None:
    target, draft_model, _ = pairs.trained_pair()
    with pytest.raises(DataError, match=words) as caught:
        generate(target, draft_model, torch.ones(1, length, dtype=torch.int64), max_new_tokens=budget)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_another_target_is_refused_by_what_differs() -> None:
    target, draft_model, prompt_ids = pairs.trained_pair()
    stranger = pairs.reshaped(draft_model, num_target_layers=12)
    with pytest.raises(TargetError, match=r"the drafter was trained for a target with layers 12, .* has "):
        generate(target, stranger, torch.tensor([prompt_ids[0]]), max_new_tokens=4)


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
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.3, top_k=3),
        Sampling(temperature=2.0, top_p=0.6, top_k=4),
        Sampling(temperature=1.0, top_p=1e-9),
    ],
)
def test_probabilities_follow_the_naive_filter(sampling: Sampling) -> None:
    logits = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([naive_probabilities(row, sampling) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(probabilities(sampling, logits), expected, rtol=1e-6, atol=1e-7)


def test_top_k_keeps_what_ties_with_the_last_token_kept_as_transformers_does() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).bfloat16().float().mul(4).round()
    ours = probabilities(Sampling(temperature=1.0, top_k=5), logits)
    theirs = TopKLogitsWarper(5)(None, logits.double()).softmax(-1)
    assert ((theirs > 0).sum(1) > 5).any()
    assert (ours - theirs).abs().max() < 1e-12


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
    draft[:, :sayable] = probabilities(sampling, torch.randn(BLOCK, sayable, generator=generator) * 1.5)
    target = probabilities(sampling, target_logits)
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
    counts, expected = first_two_tokens(Sampling(temperature=1.5, top_p=0.9, top_k=4), broken, sayable)
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
    assert probabilities(GREEDY, torch.tensor([[0.0, 2.0, 1.0]])).tolist() == [[0.0, 1.0, 0.0]]


KEPT = torch.arange(0, pairs.VOCABULARY - 1, 2)


def reduced(kept_ids: torch.Tensor) -> DFlashDraftModel:
    """The trained drafter of the pair, left with some of its tokens."""
    _, trained, _ = pairs.trained_pair()
    model = DFlashDraftModel(trained.config.model_copy(update={"draft_vocab_size": len(kept_ids)}))
    model.load_state_dict({**trained.state_dict(), "d2t": model.d2t})
    model.keep_tokens(kept_ids)
    return model.eval()


def test_greedy_output_is_the_targets_own_and_only_kept_tokens_are_drafted() -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    model, accepted, whole = reduced(KEPT), 0, 0
    walked, decoded = [], []
    for prompt in prompt_ids[:8]:
        ids = torch.tensor([prompt])
        plain = generate_plain(target, ids, max_new_tokens=pairs.ANSWER).output_ids
        found = generate(target, model, ids, max_new_tokens=pairs.ANSWER)
        assert found.output_ids == plain
        assert {token for block in found.drafted_blocks for token in block} <= set(KEPT.tolist())
        accepted += sum(found.accepted_per_forward)
        whole += sum(generate(target, trained, ids, max_new_tokens=pairs.ANSWER).accepted_per_forward)
        decoded.append(Acceptance(len(plain) - 1, found.target_forwards))
        walked.append((prompt, plain))
    assert 0 < accepted < whole
    assert teacher_forced_walk(target, model, walked) == decoded


def test_all_tokens_kept_but_the_mask_drafts_what_the_whole_vocabulary_does() -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    model = reduced(torch.arange(pairs.VOCABULARY - 1))
    ids = torch.tensor([prompt_ids[0]])
    found, wanted = (generate(target, m, ids, max_new_tokens=pairs.ANSWER) for m in (model, trained))
    assert found.drafted_blocks == wanted.drafted_blocks


def test_a_sampled_proposal_is_a_distribution_over_the_whole_vocabulary() -> None:
    target, _, prompt_ids = pairs.trained_pair()
    model, sampling = reduced(KEPT), Sampling(temperature=1.3, top_p=0.9)
    drafter = BlockDrafter(target, model, sampling, torch.Generator().manual_seed(0))
    states = torch.randn(1, 5, model.fc.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        drafter.extend(states)
        proposal = drafter.propose(prompt_ids[0][-1])
        cache = model.new_cache()
        model.extend_cache(cache, states)
        block = block_input_ids(torch.tensor([prompt_ids[0][-1]]), 6, model.config.mask_token_id)
        logits = target.head.logits(model.draft(cache, target.embed(block))[0, 1:])[:, KEPT]
    assert proposal.probabilities_KV is not None
    torch.testing.assert_close(proposal.probabilities_KV[:, KEPT], probabilities(sampling, logits))
    torch.testing.assert_close(proposal.probabilities_KV.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (proposal.probabilities_KV.gather(1, proposal.tokens_K[:, None]) > 0).all()
    output = generate(
        target,
        model,
        torch.tensor([prompt_ids[0]]),
        max_new_tokens=pairs.ANSWER,
        sampling=sampling,
        generator=torch.Generator().manual_seed(2),
    ).output_ids
    assert set(output) - set(KEPT.tolist())  # the target still says what the drafter cannot
