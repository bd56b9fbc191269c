"""A second implementation of the drafter, for comparison only: float64, one conversation at a time, whole masks.

It reads nothing but a `DrafterView` (what some reader believes the drafter to be) and tensors by name, as z-lab names
them. The training code, and what each serving engine makes of an exported folder, are compared with it. Source:
`docs/concepts/semantics.md`, section 4, after DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftline.audit.reference import model_forward
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
    """cos and sin, [..., H] float64 of positions [...], both halves of a head rotated by the same angles."""
    frequencies, factor = rope_frequencies(view)
    angles = positions.double().cpu()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * factor, angles.sin() * factor


@torch.no_grad()
def reference_block(
    view: DrafterView,
    weights: Mapping[str, Tensor],
    context_states: Tensor,
    block_embeddings: Tensor,
    position_shift: int = 0,
    position_step: int = 1,
) -> Tensor:
    """Outputs of one block, [P, D] float64 after `norm`, as decoding asks for it.

    Args:
        context_states: [n, L*D] states of the n tokens before the anchor, from the document's first on.
        block_embeddings: [P, D].
        position_shift, position_step: slots sit at anchor + shift + step * k; 0 and 1 are right.
    """
    slots = len(context_states) + position_shift + position_step * torch.arange(len(block_embeddings))
    anchors = [len(context_states)]
    return _run(view, _Weights(weights), context_states, anchors, block_embeddings[None], slots[None])[0]


def reference_blocks(
    view: DrafterView,
    weights: Mapping[str, Tensor],
    states_SLD: Tensor,
    anchors: Sequence[int],
    embeddings_APD: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Outputs of blocks of one conversation, [A, P, D] float64 after `norm`, as training asks for them.

    Differentiable with respect to the weights. Costs A * P * (S + P) scores per head and layer.

    Args:
        states_SLD: [S, L*D] captured states of all its tokens.
        anchors: A positions in the conversation.
        embeddings_APD: [A, P, D] what the slots start from.
        dtype: what both sides and the result of every matrix product are rounded to.
    """
    slots_AP = torch.tensor(list(anchors))[:, None] + torch.arange(embeddings_APD.shape[1])
    return _run(view, _Weights(weights, dtype), states_SLD, anchors, embeddings_APD, slots_AP)


def visible_keys(
    anchors: Sequence[int], context_length: int, block_size: int, causal: bool, window: int | None
) -> Tensor:
    """What each slot sees of the context and of its own block, [A, P, S + P] bool; `visible` for all at once."""
    anchor_A11 = torch.tensor(list(anchors))[:, None, None]
    slot_P1, key_P = torch.arange(block_size)[:, None], torch.arange(block_size)
    key_S = torch.arange(context_length)
    context_APS = (key_S < anchor_A11).expand(-1, block_size, -1)
    own_PP = slot_P1 >= key_P if causal else torch.ones(block_size, block_size, dtype=torch.bool)
    if window is not None:
        context_APS = context_APS & (anchor_A11 + slot_P1 - key_S < window)
        own_PP = own_PP & (slot_P1 - key_P < window)
    return torch.cat([context_APS, own_PP.expand(len(anchor_A11), -1, -1)], dim=-1)


class _Weights:
    """Weights by name, each in float64 only while it is used: all of them at once would be twice the drafter."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        self._weights, self._dtype = weights, dtype

    def rounded(self, values: Tensor) -> Tensor:
        """Values, and their gradients on the way back, as a matrix product takes or gives them."""
        return values.to(self._dtype).double()

    def linear(self, name: str, states: Tensor) -> Tensor:
        """A linear map without bias."""
        weight = self.rounded(self._weights[f"{name}.weight"].cpu())
        return self.rounded(self.rounded(states) @ weight.T)

    def norm(self, name: str, states: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension."""
        weight = self._weights[f"{name}.weight"].double().cpu()
        return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _run(
    view: DrafterView,
    w: _Weights,
    states_SLD: Tensor,
    anchors: Sequence[int],
    embeddings_APD: Tensor,
    slots_AP: Tensor,
) -> Tensor:
    context_SD = w.norm("hidden_norm", w.linear("fc", states_SLD.double().cpu()), view.eps)
    block_APD = embeddings_APD.double().cpu()
    context_rope, block_rope = rope_table(view, torch.arange(len(context_SD))), rope_table(view, slots_AP)
    for index in range(len(view.causal)):
        name = f"layers.{index}"
        seen = visible_keys(anchors, len(context_SD), slots_AP.shape[1], view.causal[index], view.windows[index])
        normed_APD = w.norm(f"{name}.input_layernorm", block_APD, view.eps)
        block_APD = block_APD + _attention(
            view, w, f"{name}.self_attn", (context_SD, context_rope), (normed_APD, block_rope), seen
        )
        normed_APD = w.norm(f"{name}.post_attention_layernorm", block_APD, view.eps)
        gate, up = w.linear(f"{name}.mlp.gate_proj", normed_APD), w.linear(f"{name}.mlp.up_proj", normed_APD)
        block_APD = block_APD + w.linear(f"{name}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
    return w.norm("norm", block_APD, view.eps)


_Rope = tuple[Tensor, Tensor]


def _attention(
    view: DrafterView,
    w: _Weights,
    name: str,
    context: tuple[Tensor, _Rope],
    block: tuple[Tensor, _Rope],
    seen_APT: Tensor,
) -> Tensor:
    """Each slot over the context and its own block, [A, P, D]; T = S + P keys, context first."""

    def heads(part: str, states: Tensor) -> Tensor:
        split = w.linear(f"{name}.{part}_proj", states).unflatten(-1, (-1, view.head_dim))
        return split if part == "q" else split.repeat_interleave(view.num_heads // view.num_key_value_heads, dim=-2)

    def turned(part: str, states: Tensor, rope: _Rope) -> Tensor:
        return w.rounded(_rotate(w.norm(f"{name}.{part}_norm", heads(part, states), view.eps), *rope))

    query_APNH = turned("q", *block)
    scores = [
        torch.einsum("apnh,snh->naps", query_APNH, turned("k", *context)),
        torch.einsum("apnh,aknh->napk", query_APNH, turned("k", *block)),
    ]
    scores_NAPT = (torch.cat(scores, dim=-1) / math.sqrt(view.head_dim)).masked_fill(~seen_APT, -math.inf)
    shares = w.rounded(scores_NAPT.softmax(-1)).split([len(context[0]), block[0].shape[1]], dim=-1)
    from_context = torch.einsum("naps,snh->apnh", shares[0], heads("v", context[0]))
    from_block = torch.einsum("napk,aknh->apnh", shares[1], heads("v", block[0]))
    return w.linear(f"{name}.o_proj", (from_context + from_block).flatten(-2))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., N, H] by the tables [..., H] of their positions."""
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos[..., None, :] + turned * sin[..., None, :]


@dataclass(frozen=True, eq=False)
class ReferenceDrafter:
    """A drafter with what it borrows from its target.

    Attributes:
        weights: float64 tensors by z-lab's names.
        embed: ids [...] to [..., D], what the target's first layer receives for them.
        head: [n, D] to [n, V], or to [n, Vd] for a reduced vocabulary: the target's, with its factor and cap.
        kept_ids: [Vd] increasing ids that it can say; None: all.
        dtype: what matrix products are rounded to.
    """

    view: DrafterView
    weights: Mapping[str, Tensor]
    embed: Callable[[Tensor], Tensor]
    head: ReferenceHead
    kept_ids: Tensor | None
    dtype: torch.dtype = torch.float64

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """What it says, one row of its head's logits each."""
        return self.head.logits(hidden_nD)

    def with_weights(self, weights: Mapping[str, Tensor]) -> ReferenceDrafter:
        """The same drafter at another moment of its training."""
        return replace(self, weights=in_float64(weights))

    def with_head_in(self, dtype: torch.dtype) -> ReferenceDrafter:
        """The same where the head computes in a narrow dtype: its weights, outputs and logits are rounded to it.

        So are their gradients on the way back. This is all that a narrow target does to a float32 drafter (section 8).
        """
        stored = self.head.stored == dtype
        weight_VD = self.head.weight_VD if stored else self.head.weight_VD.to(dtype).double()
        return replace(self, head=replace(self.head, weight_VD=weight_VD, dtype=dtype))

    def ids_of(self, rows: Tensor) -> Tensor:
        """Token ids of rows of its head."""
        return rows if self.kept_ids is None else self.kept_ids[rows]

    def rows_of(self, ids: Tensor) -> Tensor:
        """Rows of its head of ids that it can say."""
        return ids if self.kept_ids is None else torch.searchsorted(self.kept_ids, ids)


def drafter_of(config: DFlashConfig, weights: Mapping[str, Tensor], model: PreTrainedModel) -> ReferenceDrafter:
    """A drafter from its configuration and its tensors, `d2t` among them if its vocabulary is reduced.

    The head in float64 takes 8 * V * D bytes, and exists once.
    """
    d2t = weights.get("d2t")
    kept_ids = None if d2t is None else d2t.cpu() + torch.arange(len(d2t))
    view = view_of_config(config)
    return ReferenceDrafter(
        view=view,
        weights=in_float64(weights),
        embed=embedding_of(model),
        head=head_of(model, view.output_multiplier, view.final_logit_softcapping, kept_ids),
        kept_ids=kept_ids,
    )


def in_float64(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by name, without the table of a reduced vocabulary, which is none."""
    return {name: tensor.detach().double().cpu() for name, tensor in weights.items() if name != "d2t"}


def embedding_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Ids to what the first layer receives: the model's embedding module and the factor that follows it, if any.

    The factor is measured on the difference of two tokens, so that learned positions drop out; as rounding blurs it,
    the nearest number of the configuration is taken, or the root of the width, which has no field of its own (AFMoE).
    """
    module: Any = model.get_input_embeddings()
    ids = module.weight.detach().float().norm(dim=1).topk(2).indices
    with torch.no_grad():
        row = module(ids).double().diff(dim=0)[0]
    first = torch.cat([model_forward(model, ids[i : i + 1]).first_input for i in (0, 1)]).double().diff(dim=0)[0]
    measured = float(row @ first / row.square().sum())
    values = model.config.get_text_config(decoder=True).to_dict().values()
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    factor = min([1.0, module.weight.shape[1] ** 0.5, *numbers], key=lambda number: abs(number - measured))

    def embed(token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            rows = module(token_ids.to(module.weight.device))
        return (rows if factor == 1.0 else rows * factor).double().cpu()

    return embed


@dataclass(frozen=True, eq=False)
class ReferenceHead:
    """Normed states to logits.

    Attributes:
        weight_VD, bias_V: float64.
        multiplier, softcap: what is done to the logits: times the first, then c * tanh(logits / c).
        stored: number format of the model's own weights.
        dtype: what each result is rounded to, on the way back too.
    """

    weight_VD: Tensor
    bias_V: Tensor | float
    multiplier: float
    softcap: float | None
    stored: torch.dtype
    dtype: torch.dtype = torch.float64

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """[n, D] to [n, V] float64."""
        found = (hidden_nD.to(self.dtype).double() @ self.weight_VD.T + self.bias_V).to(self.dtype)
        if self.multiplier != 1.0:
            found = found * self.multiplier
        if self.softcap is not None:
            found = torch.tanh(found / self.softcap) * self.softcap
        return found.double()


def head_of(model: PreTrainedModel, multiplier: float, softcap: float | None, kept_ids: Tensor | None) -> ReferenceHead:
    """The model's output matrix, or some of its rows.

    Args:
        multiplier, softcap: what the model does to its logits: times the first, then c * tanh(logits / c).
        kept_ids: [Vd] rows to keep; None: all.
    """
    head: Any = model.get_output_embeddings()
    rows = slice(None) if kept_ids is None else kept_ids.to(head.weight.device)
    weight_VD = head.weight.detach()[rows].double().cpu()
    bias = head.bias if hasattr(head, "bias") else None
    bias_V = 0.0 if bias is None else bias.detach()[rows].double().cpu()
    return ReferenceHead(weight_VD, bias_V, multiplier, softcap, head.weight.dtype)


def block_outputs(drafter: ReferenceDrafter, input_ids: Tensor, states: Tensor, anchors: Sequence[int]) -> Tensor:
    """Outputs of the blocks at some anchors of one conversation, [A, P, D] after the drafter's `norm`.

    Args:
        input_ids: [S] its tokens, at least up to the last anchor.
        states: [S, L*D] states of its tokens; those before an anchor are all that its block reads.
    """
    view = drafter.view
    assert view.mask_token_id is not None, "the drafter's configuration names no mask token"
    ids_AP = torch.full((len(anchors), view.block_size), view.mask_token_id)
    ids_AP[:, 0] = input_ids.cpu()[list(anchors)]
    return reference_blocks(view, drafter.weights, states, anchors, drafter.embed(ids_AP), drafter.dtype)


def said(drafter: ReferenceDrafter, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row of logits as a target's id, and how far the second is below it."""
    best = logits.detach().topk(min(2, logits.shape[-1]), dim=-1).values
    return drafter.ids_of(logits.detach().argmax(-1)), best[..., 0] - best[..., -1]


def with_rope(view: DrafterView, **changes: Any) -> DrafterView:
    """The view with other numbers in its rotary settings."""
    return replace(view, rope={**view.rope, **changes})
