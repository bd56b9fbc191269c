"""A second implementation of the drafter, for comparison only: one block at a time, explicit loops over heads' masks.

It reads nothing but a `DrafterView` (what some reader believes the drafter to be) and tensors by name. The training
code, and what each serving engine makes of an exported folder, are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftline.audit.reference import BlockPlace, visible
from draftline.config import DFlashConfig


@dataclass(frozen=True)
class DrafterView:
    """How one reader understands a drafter.

    Attributes:
        causal: per layer, whether a slot sees only earlier slots of its block.
        windows: per layer, W in tokens or None.
        rope: `rope_type`, `rope_theta` and the numbers of a scaling.
        first: 1 if the anchor's slot predicts nothing, 0 if it predicts too.
    """

    target_layer_ids: tuple[int, ...]
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    eps: float
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    rope: dict[str, Any]
    max_position_embeddings: int
    block_size: int
    mask_token_id: int | None
    first: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None


def view_of_config(config: DFlashConfig) -> DrafterView:
    """The drafter as its own configuration means it."""
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return DrafterView(
        target_layer_ids=config.target_layer_ids,
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        causal=tuple(s and config.sliding_window_causal for s in sliding),
        windows=tuple(config.sliding_window if s else None for s in sliding),
        rope=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        first=0 if config.sample_from_anchor else 1,
        input_embedding_scale=config.input_embedding_scale,
        output_multiplier=config.output_multiplier,
        final_logit_softcapping=config.final_logit_softcapping,
    )


def rope_frequencies(view: DrafterView) -> tuple[Tensor, float]:
    """Inverse frequencies [H/2] and the factor on cos and sin, in float64 where the formula is simple.

    `default`, `linear` and `llama3` are written out; other kinds are taken from transformers.
    """
    rope, half = view.rope, view.head_dim // 2
    kind = rope.get("rope_type", "default") or "default"
    exponents = torch.arange(half, dtype=torch.float64) / half
    if kind in ("default", "linear", "llama3"):
        frequencies = 1.0 / float(rope["rope_theta"]) ** exponents
        if kind == "linear":
            return frequencies / float(rope["factor"]), 1.0
        if kind == "llama3":
            return _llama3(frequencies, rope), 1.0
        return frequencies, 1.0
    config = Qwen3Config(
        hidden_size=view.num_heads * view.head_dim,
        num_attention_heads=view.num_heads,
        head_dim=view.head_dim,
        max_position_embeddings=view.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    found, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return found.double(), float(factor)


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched, short ones kept, those between are mixed."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    waves = 2 * math.pi / frequencies
    share = ((original / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * frequencies / factor + share * frequencies


def rope_table(view: DrafterView, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, H] float64, both halves of a head rotated by the same angles."""
    frequencies, factor = rope_frequencies(view)
    angles = positions.double().cpu()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def reference_block(
    view: DrafterView,
    weights: Mapping[str, Tensor],
    context_states: Tensor,
    block_embeddings: Tensor,
    position_shift: int = 0,
    position_step: int = 1,
) -> Tensor:
    """Outputs of one block, [P, D] float64 after `norm`.

    Args:
        context_states: [n, L*D] states of the n tokens before the anchor, from the document's first on.
        block_embeddings: [P, D].
        position_shift, position_step: slots sit at anchor + shift + step * k; 0 and 1 are right.
    """
    tensor = _Weights(weights)
    context = _norm(context_states.double().cpu() @ tensor["fc.weight"].T, tensor["hidden_norm.weight"], view.eps)
    block = block_embeddings.double().cpu()
    slots = len(context) + position_shift + position_step * torch.arange(len(block))
    positions = torch.cat([torch.arange(len(context)), slots])
    for index in range(len(view.causal)):
        block = _layer(view, tensor, index, context, block, positions)
    return _norm(block, tensor["norm.weight"], view.eps)


class _Weights:
    """Weights by name, each in float64 only while it is used: all of them at once would be twice the drafter."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].detach().double().cpu()


def _layer(
    view: DrafterView, tensor: _Weights, index: int, context: Tensor, block: Tensor, positions: Tensor
) -> Tensor:
    name = f"layers.{index}."
    normed = _norm(block, tensor[name + "input_layernorm.weight"], view.eps)
    block = block + _attention(view, tensor, index, context, normed, positions)
    normed = _norm(block, tensor[name + "post_attention_layernorm.weight"], view.eps)
    gate = normed @ tensor[name + "mlp.gate_proj.weight"].T
    up = normed @ tensor[name + "mlp.up_proj.weight"].T
    return block + (gate * torch.sigmoid(gate) * up) @ tensor[name + "mlp.down_proj.weight"].T


def _attention(
    view: DrafterView, tensor: _Weights, index: int, context: Tensor, block: Tensor, positions: Tensor
) -> Tensor:
    name = f"layers.{index}.self_attn."
    keys_from = torch.cat([context, block])
    heads = {
        part: (states @ tensor[f"{name}{part}_proj.weight"].T).unflatten(-1, (-1, view.head_dim))
        for part, states in (("q", block), ("k", keys_from), ("v", keys_from))
    }
    cos, sin = rope_table(view, positions)
    query = _rotate(
        _norm(heads["q"], tensor[name + "q_norm.weight"], view.eps), cos[len(context) :], sin[len(context) :]
    )
    key = _rotate(_norm(heads["k"], tensor[name + "k_norm.weight"], view.eps), cos, sin)
    seen = _visible_keys(len(context), len(block), view.causal[index], view.windows[index])
    shared = view.num_heads // view.num_key_value_heads
    outputs = []
    for head in range(view.num_heads):
        scores = query[:, head] @ key[:, head // shared].T / math.sqrt(view.head_dim)
        outputs.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ heads["v"][:, head // shared])
    return torch.cat(outputs, dim=-1) @ tensor[name + "o_proj.weight"].T


def _visible_keys(context: int, block: int, causal: bool, window: int | None) -> Tensor:
    """[P, n + P] bool, by nested loops; the block follows its context, and a slot always sees itself."""
    place = BlockPlace(index=0, anchor=context, start=0)
    rows = []
    for query in range(block):
        in_context = [visible(query, key, None, place, causal, window) for key in range(context)]
        in_block = [visible(query, key, 0, place, causal, window) for key in range(block)]
        rows.append(in_context + in_block)
    return torch.tensor(rows)


def _norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(states_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    half = states_TNH.shape[-1] // 2
    turned = torch.cat([-states_TNH[..., half:], states_TNH[..., :half]], dim=-1)
    return states_TNH * cos_TH[:, None] + turned * sin_TH[:, None]


def with_rope(view: DrafterView, **changes: Any) -> DrafterView:
    """The view with other numbers in its rotary settings."""
    return replace(view, rope={**view.rope, **changes})
