"""What is rejected leaves no trace in the target's caches, whatever kinds of layers it has."""

from __future__ import annotations

import pytest
import torch
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

from draftline.evaluate.generate import (
    GREEDY,
    decode,
    generate,
)
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
    generation = decode(target, pairs.Clairvoyant(8, answer, wrong_from=right_for), ids, 24, (), GREEDY, None)
    assert generation.output_ids == answer[:24]
    assert set(generation.accepted_per_forward[:-1]) == {right_for}
    hybrid = family in ("qwen3.5 hybrid", "lfm2 conv")
    assert (generation.replayed_forwards > 0) == (hybrid and right_for < 5)


def test_drafter_and_hybrid_target_decode_together() -> None:
    target = build_target("hybrid", small_model("qwen3.5 hybrid"), None)
    draft_model = pairs.new_drafter(target)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert generate(target, draft_model, ids, max_new_tokens=20).output_ids == uncached_greedy(target, ids, 20)
