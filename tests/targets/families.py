"""Tiny random targets of many families: each differs from the others in something that a capture can get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB = 96
LAYERS = 4
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_DIM = {**_COMMON, "head_dim": 8}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _qwen3_5() -> PreTrainedModel:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    types = ["linear_attention", "full_attention"] * 2
    config = hf.Qwen3_5TextConfig(**_HEAD_DIM, **linear, linear_value_head_dim=8, layer_types=types)
    return hf.Qwen3_5ForCausalLM(config)


def _gemma3_wrapper() -> PreTrainedModel:
    text = hf.Gemma3TextConfig(**_HEAD_DIM, sliding_window=8, query_pre_attn_scalar=8)
    vision = hf.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=VOCAB - 1)
    )


def _qwen2_vl_wrapper() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": LAYERS, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 14}
    config = hf.Qwen2VLConfig(text_config={**_COMMON, "rope_parameters": rope}, vision_config=vision)
    return hf.Qwen2VLForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_COMMON)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_HEAD_DIM)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_HEAD_DIM, **_MOE)),
    "qwen3.5-hybrid": _qwen3_5,
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_HEAD_DIM, sliding_window=8, final_logit_softcapping=0.5, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_HEAD_DIM, sliding_window=8, query_pre_attn_scalar=8)),
    "gemma3-wrapper": _gemma3_wrapper,
    "gemma4": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **_HEAD_DIM,
            global_head_dim=8,
            num_global_key_value_heads=2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=16,
            final_logit_softcapping=0.5,
        )
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_COMMON, sliding_window=8)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**_HEAD_DIM, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    ),
    "granite": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(**_COMMON, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5)
    ),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**_COMMON, logit_scale=0.25)),
    "cohere2": lambda: hf.Cohere2ForCausalLM(hf.Cohere2Config(**_COMMON, logit_scale=0.25, sliding_window=8)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        )
    ),
    "qwen2-vl-wrapper": _qwen2_vl_wrapper,
}


def tiny(family: str) -> PreTrainedModel:
    """A random model in evaluation mode, always the same for a family.

    The weights are spread wider than the usual 0.02: with that, logits are so small that a wrong soft cap, scale or
    norm would hardly show.
    """
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif "conv" not in name:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    """Ids that are neither special nor an image placeholder."""
    return torch.randint(3, VOCAB - 1, shape, generator=torch.Generator().manual_seed(seed))


CHAT_TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }} {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant {% endif %}"
)


def word_tokenizer(size: int = 90, extra: tuple[str, ...] = (), template: str | None = None) -> PreTrainedTokenizerBase:
    """`size` words, of which 0, 1, 2 are pad, bos and eos and 3 is <turn>; `extra` special tokens come after them."""
    words = ["<pad>", "<bos>", "<eos>", "<turn>", *(f"w{i}" for i in range(4, size))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w4"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.add_tokens([AddedToken("<turn>", special=True)], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in extra], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer
