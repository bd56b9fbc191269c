"""The decoding loop: lossless, counted honestly, and maximal for a drafter that knows the future."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from scipy import stats
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftline.errors import DataError, TargetError
from draftline.evaluate.generate import Proposal, decode, generate, generate_plain, tie_gap
from draftline.evaluate.sampling import GREEDY, Sampling
from draftline.targets.model import Target, build_target
from tests.evaluate import pairs

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


class Clairvoyant:
    """Knows the answer and drafts what follows, read `shift` tokens too late; tokens from `wrong_from` on are wrong."""

    target_layer_ids = (1,)

    def __init__(self, prompt_length: int, answer: list[int], shift: int = 0, wrong_from: int = 5) -> None:
        self.answer, self.shift, self.wrong_from = answer, shift, wrong_from
        self.place = -prompt_length

    def extend(self, hidden_states: torch.Tensor) -> None:
        """As many states as tokens before the anchor, or the place in the answer is wrong."""
        self.place += hidden_states.shape[1]

    def propose(self, anchor_id: int) -> Proposal:
        assert self.answer[self.place] == anchor_id
        begin = self.place + 1 + self.shift
        tokens = torch.tensor(self.answer[begin : begin + 5])
        tokens[self.wrong_from :] ^= 1
        return Proposal(tokens)


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
    generation = decode(target, Clairvoyant(len(prompt), answer, shift), ids, 21, (), GREEDY, None)
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


def small_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SMALL))
    if family == "qwen3 sliding":
        layers = ["sliding_attention", "full_attention"] * 2
        return Qwen3ForCausalLM(Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=5, layer_types=layers))
    if family == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=5, query_pre_attn_scalar=8))
    if family == "qwen3.5 hybrid":
        layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL, **LINEAR, layer_types=layers))
    layers = ["conv", "full_attention"] * 2
    values = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**values, layer_types=layers, block_auto_adjust_ff_dim=False))


def uncached_greedy(target: Target, ids: torch.Tensor, count: int) -> list[int]:
    """One whole forward per token: no cache, so nothing to roll back."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, target.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -count:].tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen3 sliding", "gemma2", "qwen3.5 hybrid", "lfm2 conv"])
@pytest.mark.parametrize("right_for", [0, 2, 5])
def test_rollback_leaves_no_trace_in_any_kind_of_cache(family: str, right_for: int) -> None:
    target = build_target(family, small_model(family), None)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    answer = uncached_greedy(target, ids, 30)
    generation = decode(target, Clairvoyant(8, answer, wrong_from=right_for), ids, 24, (), GREEDY, None)
    assert generation.output_ids == answer[:24]
    assert set(generation.accepted_per_forward[:-1]) == {right_for}
    hybrid = family in ("qwen3.5 hybrid", "lfm2 conv")
    assert (generation.replayed_forwards > 0) == (hybrid and right_for < 5)


def test_drafter_and_hybrid_target_decode_together() -> None:
    target = build_target("hybrid", small_model("qwen3.5 hybrid"), None)
    draft_model = pairs.new_drafter(target)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert generate(target, draft_model, ids, max_new_tokens=20).output_ids == uncached_greedy(target, ids, 20)


def test_sampling_with_a_drafter_has_the_distribution_of_sampling_without() -> None:
    """Pairs of tokens after one prompt; expected counts from the target's own probabilities."""
    target, draft_model, prompt_ids = pairs.trained_pair()
    ids, sampling = torch.tensor([prompt_ids[0]]), Sampling(temperature=4.0, top_k=2)
    expected: dict[tuple[int, int], float] = {}
    with torch.no_grad():
        first = sampling.probabilities(target.model(input_ids=ids).logits[0, -1])
        for a in first.nonzero()[:, 0].tolist():
            longer = torch.cat([ids, torch.tensor([[a]])], dim=1)
            second = sampling.probabilities(target.model(input_ids=longer).logits[0, -1])
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
