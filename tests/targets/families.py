"""Tiny random targets of many families: each differs from the others in something that a target can get wrong.

Sizes differ wherever a configuration lets them: heads are not the width divided by their number, there are fewer heads
for keys than for queries, windows are shorter than the texts, layers share keys, embeddings and logits are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB, POSITIONS = 96, 64
"""Of a tiny target, unless a test asks for others."""

WIDTH = 32

_COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 12}
_TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CHOSEN = {"num_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {**_CHOSEN, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
_EVERY_SECOND = {"layer_types": ["linear_attention", "full_attention"] * 2}
_LINEAR = {
    **_EVERY_SECOND,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GRANITE = {
    "logits_scaling": 4.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
_GEMMA4 = {
    **_HEADS,
    "global_head_dim": 24,
    "sliding_window": 8,
    "vocab_size_per_layer_input": "VOCAB",
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_LARGE = {**_GEMMA4, **_TWO_KINDS, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": "POSITIONS / 4",
}
_MINISTRAL_ROPE = {
    **_YARN,
    "type": "yarn",
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "max_position_embeddings": "POSITIONS",
}
_VISION = {"num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 14, "image_size": 28}

_Spec = tuple[str, Mapping[str, Any]]
"""`model_type` of transformers, and the fields beside the common ones."""

FAMILIES: dict[str, _Spec] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-vl-wrapper": (
        "qwen2_vl",
        {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 4, "embed_dim": 16, "num_heads": 2, "hidden_size": WIDTH, "patch_size": 14},
        },
    ),
    "qwen3": ("qwen3", _HEADS),
    "qwen3-moe": ("qwen3_moe", {**_HEADS, **_EXPERTS}),
    "qwen3-next": ("qwen3_next", {**_HEADS, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16}),
    "qwen3.5": ("qwen3_5_text", {**_HEADS, **_LINEAR}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_HEADS, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16}),
    "gemma": ("gemma", _HEADS),
    "gemma2": (
        "gemma2",
        {**_HEADS, "sliding_window": 8, "final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("gemma3_text", {**_HEADS, **_TWO_KINDS, "query_pre_attn_scalar": 8}),
    "gemma3-wrapper": (
        "gemma3",
        {
            "text_config": {**_HEADS, **_TWO_KINDS, "query_pre_attn_scalar": 8},
            "vision_config": {**_VISION, "hidden_size": 16, "intermediate_size": 16},
            "mm_tokens_per_image": 1,
            "image_token_index": VOCAB - 1,
        },
    ),
    "gemma4-large": ("gemma4_text", _GEMMA4_LARGE),
    "gemma4-moe": (
        "gemma4_text",
        {
            **_GEMMA4_LARGE,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "gemma4-shared": (
        "gemma4_text",
        {
            **_GEMMA4,
            **_SIX_LAYERS,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 0.5,
        },
    ),
    "vaultgemma": ("vaultgemma", {**_HEADS, "sliding_window": 8, "final_logit_softcapping": 0.5}),
    "mistral": ("mistral", {**_HEADS, "sliding_window": 8}),
    "ministral": ("ministral", {**_HEADS, **_TWO_KINDS}),
    "ministral3": ("ministral3", {**_HEADS, "rope_parameters": _MINISTRAL_ROPE}),
    "mistral4": ("mistral4", {**_LATENT, **_ROUTED, "rope_parameters": _MINISTRAL_ROPE}),
    "mixtral": ("mixtral", {**_HEADS, **_LOCAL}),
    "gpt-oss": ("gpt_oss", {**_HEADS, **_LOCAL, **_TWO_KINDS, "rope_parameters": {**_YARN, "truncate": False}}),
    "granite": ("granite", _GRANITE),
    "granite-moe": ("granitemoe", {**_GRANITE, **_LOCAL}),
    "granite-swa": ("granite_swa", {**_GRANITE, **_TWO_KINDS}),
    "granite4": (
        "granitemoehybrid",
        {**_GRANITE, **_LOCAL, **_MAMBA, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"] * 2},
    ),
    "granite4-dense": (
        "granitemoehybrid",
        {
            **_GRANITE,
            **_MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention"] * 2,
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {**_TWO_KINDS, "logit_scale": 0.25}),
    "cohere2-moe": ("cohere2_moe", {**_HEADS, **_TWO_KINDS, **_CHOSEN, "logit_scale": 0.25}),
    "gpt2": ("gpt2", {"n_positions": "POSITIONS", "intermediate_size": None, "num_key_value_heads": None}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "num_key_value_heads": None}),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": None}),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    "lfm3": ("lfm3", {**_HEADS, "sliding_window": 8}),
    "nemotron": ("nemotron", {}),
    "nemotron-h": (
        "nemotron_h",
        {
            **_HEADS,
            **_ROUTED,
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba", "attention"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **_HEADS,
            **_MAMBA,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.7,
        },
    ),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "jamba": (
        "jamba",
        {**_CHOSEN, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
        },
    ),
    "minimax": ("minimax", {**_HEADS, **_LOCAL, "block_size": 8}),
    "minimax-m2": ("minimax_m2", {**_HEADS, **_LOCAL}),
    "kimi-linear": (
        "kimi_linear",
        {
            **_LATENT,
            **_LOCAL,
            **_EVERY_SECOND,
            "moe_intermediate_size": 16,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, **_ROUTED, "first_k_dense_replace": 1}),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, **_ROUTED, **_GROUPS, "first_k_dense_replace": 1}),
    "deepseek-v3.2": (
        "deepseek_v32",
        {
            **_LATENT,
            **_ROUTED,
            **_GROUPS,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "index_topk": 16,
            "index_head_dim": 16,
            "index_n_heads": 8,
        },
    ),
    "glm": ("glm", _HEADS),
    "glm4": ("glm4", _HEADS),
    "glm4-moe": ("glm4_moe", {**_HEADS, **_ROUTED, **_GROUPS}),
    "glm4-moe-lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _TWO_KINDS),
    "olmoe": ("olmoe", _CHOSEN),
    "flex-olmo": ("flex_olmo", _CHOSEN),
    "olmo-hybrid": ("olmo_hybrid", _LINEAR),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 8, "original_max_position_embeddings": "POSITIONS"}),
    "phimoe": ("phimoe", _LOCAL),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "stablelm": ("stablelm", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "seed-oss": ("seed_oss", _HEADS),
    "exaone4": ("exaone4", _TWO_KINDS),
    "ernie4.5": ("ernie4_5", _HEADS),
    "ernie4.5-moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "hunyuan": ("hunyuan_v1_dense", _HEADS),
    "hunyuan-moe": ("hunyuan_v1_moe", {**_HEADS, "num_experts": 4, "moe_topk": 2}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 8}),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "bitnet": ("bitnet", {}),
    "dots1": ("dots1", {**_HEADS, **_ROUTED, **_TWO_KINDS}),
    "llama4": (
        "llama4_text",
        {
            **_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 16,
        },
    ),
    "afmoe": ("afmoe", {**_HEADS, **_EXPERTS, **_TWO_KINDS, "num_shared_experts": 1, "mup_enabled": True}),
    "mimo-v2-flash": ("mimo_v2_flash", {**_HEADS, **_ROUTED, **_TWO_KINDS, "v_head_dim": 8}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "solar-open": ("solar_open", {**_HEADS, **_ROUTED}),
    "mellum": ("mellum", {**_HEADS, **_EXPERTS, **_TWO_KINDS}),
    "laguna": ("laguna", {**_HEADS, **_EXPERTS, **_TWO_KINDS, "shared_expert_intermediate_size": 16}),
}

FEW = (
    *("llama", "llama-tied", "qwen2", "qwen2-vl-wrapper", "qwen3", "qwen3-moe", "qwen3.5", "gemma2", "gemma3-wrapper"),
    *("gemma4-large", "gemma4-shared", "mistral", "gpt-oss", "granite", "cohere", "cohere2", "gpt2", "falcon-h1"),
    "afmoe",
)
"""Those that differ most, for tests that need not see every family."""

RECURRENT = (
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "granite4", "granite4-dense", "lfm2", "lfm2-moe", "lfm3", "nemotron-h"),
    *("falcon-h1", "bamba", "jamba", "zamba2", "minimax", "kimi-linear", "olmo-hybrid"),
)
"""Those with layers that hold one state for the whole past."""

LEARNED_POSITIONS = ("gpt2", "opt")

UNSUPPORTED: dict[str, tuple[_Spec, str]] = {
    "bloom": (("bloom", {}), "its first decoder layer does not receive scaled embedding rows"),
    "deepseek-v4": (
        (
            "deepseek_v4",
            {
                **_ROUTED,
                "head_dim": 16,
                "q_lora_rank": 16,
                "o_groups": 2,
                "o_lora_rank": 8,
                "index_n_heads": 2,
                "index_head_dim": 16,
                "index_topk": 4,
                "sliding_window": 8,
                "num_key_value_heads": 1,
            },
        ),
        "its first decoder layer received [[2, 6, 4, 32]] in one forward",
    ),
    "gemma3n": (
        (
            "gemma3n_text",
            {
                **_HEADS,
                **_SIX_LAYERS,
                "sliding_window": 8,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 16,
                "laurel_rank": 8,
                "vocab_size_per_layer_input": "VOCAB",
            },
        ),
        "its first decoder layer received [[4, 2, 6, 32]] in one forward",
    ),
    "longcat-flash": (
        (
            "longcat_flash",
            {
                **_LATENT,
                "num_layers": 4,
                "ffn_hidden_size": 48,
                "head_dim": 8,
                "moe_topk": 2,
                "n_routed_experts": 4,
                "zero_expert_num": 2,
                "expert_ffn_hidden_size": 16,
            },
        ),
        "no list of 4 decoder layers was found",
    ),
    "mamba2": (
        ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8}),
        "its text configuration has no max_position_embeddings",
    ),
    "nanochat": (("nanochat", {}), "its final norm received [[2, 6, 32], [2, 6, 32]] in one forward"),
}
"""Families that cannot be targets, and what is said of them."""


_SEEDS = {"qwen3-next": 2}
"""With weights of the usual seed, it answers everything with one space, of which nothing is kept."""


def tiny(family: str, vocab_size: int = VOCAB, positions: int = POSITIONS) -> PreTrainedModel:
    """A random model in evaluation mode, always the same for a family.

    The weights are spread wider than the usual 0.02: with that, logits are so small that a wrong soft cap, scale or
    norm would hardly show.
    """
    torch.manual_seed(_SEEDS.get(family, 0))
    kind, fields = FAMILIES[family] if family in FAMILIES else UNSUPPORTED[family][0]
    config = _config(kind, _filled(fields, vocab_size, positions), vocab_size, positions)
    text = type(config) in hf.AutoModelForCausalLM._model_mapping and "text_config" not in fields
    model = (hf.AutoModelForCausalLM if text else hf.AutoModelForImageTextToText).from_config(config)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif "conv" not in name:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def _config(kind: str, fields: dict[str, Any], vocab_size: int, positions: int) -> hf.PretrainedConfig:
    common = {**_COMMON, "vocab_size": vocab_size}
    if kind != "mamba2":  # which has no number of positions
        common["max_position_embeddings"] = positions
    if "text_config" in fields:
        return hf.AutoConfig.for_model(kind, **{**fields, "text_config": {**common, **fields["text_config"]}})
    return hf.AutoConfig.for_model(kind, **{**common, **fields})


def _filled(fields: Mapping[str, Any], vocab_size: int, positions: int) -> dict[str, Any]:
    """The fields of a family, with the sizes that were asked for in place of their names."""
    sizes = {"VOCAB": vocab_size, "POSITIONS": positions, "POSITIONS / 4": positions // 4}
    return {
        name: _filled(value, vocab_size, positions)
        if isinstance(value, Mapping)
        else sizes.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in fields.items()
    }


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
