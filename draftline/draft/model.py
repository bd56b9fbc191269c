"""The drafter: a few Qwen3-style layers whose queries are a block and whose keys include the target's states.

    context_SD = hidden_norm(fc(hidden_states))          [S, L*D] -> [S, D], once per row
    per layer:   keys, values = k_proj, v_proj of  context_SD  and of the block's own slots
                 queries      = q_proj of the block's slots
    output       = norm(last layer's block slots)        then the target's head, outside of this file

The context has no queries of its own and is not changed by the layers: each layer projects the same context anew.
While decoding, the projected context keys and values are therefore all there is to cache, and a rejected draft leaves
no trace. Training and decoding share every line but the cache.

Parameter names are those of z-lab's checkpoints, which all readers agree on. Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from draftline.config import DFlashConfig
from draftline.draft.attention import Attention, BlockLayout, GroupedAttention, KeysValues, LayerKind
from draftline.draft.vocabulary import kept_ids_of, offsets_of
from draftline.errors import ConfigError


def qwen3_config(config: DFlashConfig) -> Qwen3Config:
    """The same shape in the words of transformers, from which its rotary tables and MLP are built."""
    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        layer_types=list(config.layer_types),
        use_sliding_window=config.sliding_window is not None,
        sliding_window=config.sliding_window,
        max_window_layers=config.num_hidden_layers,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        attention_bias=False,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Rotation:
    """Rotary tables at given positions: cos and sin, [T, 1, H], the same for all heads."""

    cos_T1H: Tensor
    sin_T1H: Tensor

    def __call__(self, states_TNH: Tensor) -> Tensor:
        return states_TNH * self.cos_T1H + rotate_half(states_TNH) * self.sin_T1H


class DFlashAttention(nn.Module):
    """Attention of a block over the injected context and itself."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, states_TD: Tensor, rotate: Rotation) -> KeysValues:
        """Keys (normed, rotated) and values of context or block states, each [T, K, H]."""
        key_TKH = rotate(self.k_norm(self._split_heads(self.k_proj(states_TD))))
        return key_TKH, self._split_heads(self.v_proj(states_TD))

    def forward(self, block_QD: Tensor, context: KeysValues, rotate_block: Rotation, attend: Attention) -> Tensor:
        query_QNH = rotate_block(self.q_norm(self._split_heads(self.q_proj(block_QD))))
        output_QNH = attend(query_QNH, context, self.keys_values(block_QD, rotate_block))
        return self.o_proj(output_QNH.flatten(1))

    def _split_heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class DFlashDecoderLayer(nn.Module):
    """Pre-norm attention and MLP, both residual, on the slots of the blocks."""

    def __init__(self, config: DFlashConfig, layer_type: str) -> None:
        super().__init__()
        sliding = layer_type == "sliding_attention"
        self.kind = LayerKind(
            causal=sliding and config.sliding_window_causal, window=config.sliding_window if sliding else None
        )
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(qwen3_config(config))
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block_QD: Tensor, context: KeysValues, rotate_block: Rotation, attend: Attention) -> Tensor:
        block_QD = block_QD + self.self_attn(self.input_layernorm(block_QD), context, rotate_block, attend)
        return block_QD + self.mlp(self.post_attention_layernorm(block_QD))


class DraftCache:
    """Projected context of the tokens that the target has verified, of all layers together.

    What is added is projected by one product for all layers, into room that doubles when it is full.

    Attributes:
        length: context tokens so far; the next block's anchor has this position.
    """

    def __init__(self, layers: Sequence[DFlashDecoderLayer]) -> None:
        attention = [layer.self_attn for layer in layers]
        self.length = 0
        self._shape = (len(layers), 2, -1, attention[0].head_dim)
        self._weight = torch.cat([matrix for each in attention for matrix in (each.k_proj.weight, each.v_proj.weight)])
        norms = [each.k_norm for each in attention]
        self._norm = Qwen3RMSNorm(attention[0].head_dim, eps=norms[0].variance_epsilon)
        self._norm.weight = nn.Parameter(torch.stack([norm.weight for norm in norms])[:, None], requires_grad=False)
        self._room: Tensor | None = None

    @torch.no_grad()
    def extend(self, context_nD: Tensor, rotate: Rotation) -> None:
        """Append the projections of n tokens, at positions length .. length + n - 1."""
        states_nL2KH = nn.functional.linear(context_nD, self._weight).unflatten(-1, self._shape)
        key_nLKH, value_nLKH = states_nL2KH.unbind(2)
        end = self.length + len(context_nD)
        if self._room is None or end > self._room.shape[1]:
            room = states_nL2KH.new_empty(2, 2 * end, *key_nLKH.shape[1:])  # keys, values
            if self._room is not None:
                room[:, : self.length] = self._room[:, : self.length]
            self._room = room
        keys = rotate(self._norm(key_nLKH).flatten(1, 2))
        self._room[0, self.length : end] = keys.unflatten(1, key_nLKH.shape[1:3])
        self._room[1, self.length : end] = value_nLKH
        self.length = end

    def keys_values(self) -> Iterator[KeysValues]:
        """Keys and values of each layer, [length, K, H]."""
        if self._room is not None:
            yield from zip(*(kept.unbind(1) for kept in self._room[:, : self.length]), strict=True)


class DFlashDraftModel(nn.Module):
    """The trained model. It owns neither embedding nor head: both are the target's.

    With a reduced vocabulary it carries `d2t`, which says whose rows of the target's head are its own; until
    `keep_tokens` or a checkpoint sets it, it maps to no token.
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, kind) for kind in config.layer_types)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(qwen3_config(config))
        unset = None if config.draft_vocab_size is None else torch.full((config.draft_vocab_size,), -config.vocab_size)
        self.register_buffer("d2t", unset)

    @property
    def kept_ids(self) -> Tensor | None:
        """Target id of each row of a reduced head, [Vd] increasing; none where the drafter can say every token."""
        return None if self.d2t is None else kept_ids_of(self.d2t)

    def keep_tokens(self, kept_ids: Tensor) -> None:
        """Set the reduced vocabulary, once, before the first step."""
        assert self.d2t is not None, "the configuration has no draft_vocab_size"
        self.d2t.copy_(offsets_of(kept_ids))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw matrices from N(0, initializer_range^2) on CPU, so that a seed means the same on every device."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                drawn = torch.normal(0.0, self.config.initializer_range, parameter.shape, generator=generator)
                parameter.data.copy_(drawn)

    @torch.no_grad()
    def start_from_layers(self, decoder_layers: Iterable[nn.Module], final_norm: nn.Module) -> None:
        """Take over the weights of a target's last layers, and let `fc` pass on the last captured layer.

        The layers then attend to the context, and change a token's state, as the target's do; what a mask token is to
        become is still to be learned. Not part of the published recipe, which starts from random weights.

        Raises:
            ConfigError: the layers have other tensors or sizes than the drafter's.
        """
        width = self.config.hidden_size
        last = list(decoder_layers)[-len(self.layers) :]
        try:
            for ours, theirs in zip(self.layers, last, strict=True):
                ours.load_state_dict(theirs.state_dict())
            self.norm.load_state_dict(final_norm.state_dict())
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"drafter.start_from = target_layers: {len(self.layers)} layers of {type(last[0]).__name__} do not fit "
                "the drafter's (Qwen3's form, sizes of the target): set drafter.start_from=random"
            ) from error
        self.fc.weight[:, -width:] += torch.eye(width)

    def forward(
        self,
        hidden_states_packed: Tensor,
        block_embeddings: Tensor,
        layout: BlockLayout,
        attention: type[Attention] = GroupedAttention,
    ) -> Tensor:
        """Run all blocks of a packed row.

        Args:
            hidden_states_packed: [1, S, L*D] states of the captured layers.
            block_embeddings: [1, Q, D] target's embeddings of [anchor token, mask, mask, ...] per block.
            layout: where the blocks sit.
            attention: implementation; all give the same result.

        Returns:
            [1, Q, D] after `norm`, ready for the target's head.
        """
        context_SD = self._context(hidden_states_packed[0])
        rotate_context = self._rotation(context_SD, layout.position_ids_S)
        contexts = (layer.self_attn.keys_values(context_SD, rotate_context) for layer in self._layers())
        return self._run_blocks(block_embeddings[0], contexts, layout, attention, context_SD.shape[0])[None]

    def new_cache(self) -> DraftCache:
        """An empty cache for one sequence, with the weights of now."""
        return DraftCache(self._layers())

    def extend_cache(self, cache: DraftCache, hidden_states: Tensor) -> None:
        """Append the states of newly verified tokens, [1, n, L*D], at positions cache.length .. +n-1."""
        context_nD = self._context(hidden_states[0])
        positions = torch.arange(cache.length, cache.length + len(context_nD), device=context_nD.device)
        cache.extend(context_nD, self._rotation(context_nD, positions))

    def draft(self, cache: DraftCache, block_embeddings: Tensor) -> Tensor:
        """Run one block, [1, P, D] embeddings, whose anchor has position cache.length.

        The cache is left as it is. Returns [1, P, D] after `norm`; slot k predicts the token at cache.length + k.
        """
        layout = BlockLayout.at_end(cache.length, block_embeddings.shape[1], block_embeddings.device)
        output = self._run_blocks(block_embeddings[0], cache.keys_values(), layout, GroupedAttention, cache.length)
        return output[None]

    def _run_blocks(
        self,
        block_QD: Tensor,
        contexts: Iterator[KeysValues],
        layout: BlockLayout,
        attention: type[Attention],
        context_length: int,
    ) -> Tensor:
        layers = self._layers()
        attend = {kind: attention(layout, kind, context_length) for kind in {layer.kind for layer in layers}}
        rotate_block = self._rotation(block_QD, layout.position_ids_Q)
        for layer, context in zip(layers, contexts, strict=True):
            block_QD = layer(block_QD, context, rotate_block, attend[layer.kind])
        return self.norm(block_QD)

    def _context(self, hidden_states_SLD: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(hidden_states_SLD))

    def _rotation(self, like: Tensor, position_ids_T: Tensor) -> Rotation:
        cos, sin = self.rotary_emb(like, position_ids_T[None])
        return Rotation(cos[0][:, None], sin[0][:, None])

    def _layers(self) -> list[DFlashDecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashDecoderLayer)]
