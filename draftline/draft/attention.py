"""Which keys a drafter's query sees, in three implementations with one signature.

A query of the block at anchor `a` sees the context of its own document strictly before `a`, and the slots of its own
block: all of them in a bidirectional layer, only earlier ones and itself in a causal layer. In a sliding layer a key
is seen only if pos_q - pos_k < W. Nothing else. A query that sees nothing gives zeros.

    DenseAttention     builds the whole [Q, S + Q] mask. Slow and plain: the oracle of the tests.
    GroupedAttention   neighbouring anchors of a document share one product over that document's prefix; masks are of
                       the size of a group, never of the row. The path on CPU, and where flex_attention is missing.
    FlexAttention      torch's flex_attention with a block-sparse mask that all heads share. The path on CUDA.

Each is built once per forward and layer kind (the mask is the same for all layers of a kind) and then called per
layer with
    query_QNH, (context_key_SKH, context_value_SKH), (block_key_QKH, block_value_QKH)  ->  output_QNH
where K is the number of key-value heads; position encodings are already applied.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftline.errors import ConfigError

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of the context or of the blocks, [T, K, H] each."""


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of one packed row sit.

    Attributes:
        anchor_positions_A: [A] int64, row positions, increasing, so that neighbours share a document's prefix.
        context_start_A: [A] int64, row position of the first token of each anchor's document.
        position_ids_S: [S] int64, positions within the documents.
        block_size: slots per block.
    """

    anchor_positions_A: Tensor
    context_start_A: Tensor
    position_ids_S: Tensor
    block_size: int

    @staticmethod
    def of_row(anchor_positions_A: Tensor, position_ids_S: Tensor, block_size: int) -> BlockLayout:
        """Layout of blocks in a packed row whose positions restart at 0 in each document."""
        start_A = anchor_positions_A - position_ids_S[anchor_positions_A]
        return BlockLayout(anchor_positions_A, start_A, position_ids_S, block_size)

    @staticmethod
    def at_end(context_length: int, block_size: int, device: torch.device) -> BlockLayout:
        """Layout of decoding: one block right after `context_length` context tokens of one document."""
        return BlockLayout(
            anchor_positions_A=torch.tensor([context_length], device=device),
            context_start_A=torch.zeros(1, dtype=torch.int64, device=device),
            position_ids_S=torch.arange(context_length + 1, device=device),
            block_size=block_size,
        )

    @property
    def position_ids_Q(self) -> Tensor:
        """[Q] int64: positions of the slots, anchor .. anchor + P - 1 within the document."""
        offsets_P = torch.arange(self.block_size, device=self.anchor_positions_A.device)
        return (self.position_ids_S[self.anchor_positions_A][:, None] + offsets_P).flatten()


@dataclass(frozen=True)
class LayerKind:
    """What distinguishes the masks of two layers.

    Attributes:
        causal: slots see only earlier slots of their block, and themselves.
        window: W in tokens, or None for all of the context.
    """

    causal: bool
    window: int | None


class DenseAttention:
    """The whole mask, and one product over it."""

    def __init__(self, layout: BlockLayout, kind: LayerKind, context_length: int) -> None:
        self.visible_QK = dense_mask(layout, kind, context_length)

    def __call__(self, query_QNH: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        key, value = (torch.cat(pair) for pair in zip(context, block, strict=True))
        return _masked_attention(query_QNH, key, value, self.visible_QK)


class GroupedAttention:
    """One product per group of neighbouring anchors, over the prefix that the group needs.

    Costs Q * (prefix + group * P) instead of Q * (S + Q) scores. `anchors_per_group` trades the length of the Python
    loop against scores that the mask throws away (on a CPU 8 took least, 16 took 2 to 12 % more, 32 took 16 to 36 %).
    Tensors are split, not sliced: the gradient of a slice is a table of the size of the whole row, one per group.
    """

    def __init__(self, layout: BlockLayout, kind: LayerKind, context_length: int, anchors_per_group: int = 8) -> None:
        self.kind = kind
        self.groups = list(_groups(layout, kind, anchors_per_group))
        self.slots_per_group = [group.layout.anchor_positions_A.shape[0] * layout.block_size for group in self.groups]
        starts = sorted({0, *layout.context_start_A.tolist()})
        self.document_lengths = [end - start for start, end in itertools.pairwise([*starts, context_length])]
        self.document_of_start = {start: index for index, start in enumerate(starts)}

    def __call__(self, query_QNH: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        if not self.groups:
            return query_QNH
        document_keys, document_values = (tensor.split(self.document_lengths) for tensor in context)
        blocks = (tensor.split(self.slots_per_group) for tensor in (query_QNH, *block))
        outputs = []
        for group, query, block_key, block_value in zip(self.groups, *blocks, strict=True):
            document = self.document_of_start[group.document_start]
            key = torch.cat([document_keys[document][group.prefix], block_key])
            value = torch.cat([document_values[document][group.prefix], block_value])
            outputs.append(_masked_attention(query, key, value, group.visible(self.kind)))
        return torch.cat(outputs)


class FlexAttention:
    """torch's flex_attention; blocks are padded to a fixed count so that one compilation serves every step.

    flex_attention has no backward on CPU: there it serves only to compare the forward.
    """

    padded_anchors = 64
    """The number of anchors is rounded up to a multiple of this; padding blocks see nothing and are cut off."""

    def __init__(self, layout: BlockLayout, kind: LayerKind, context_length: int) -> None:
        self.num_queries = layout.anchor_positions_A.shape[0] * layout.block_size
        padded, valid_A = _pad_anchors(layout, self.padded_anchors)
        self.padded_queries = padded.anchor_positions_A.shape[0] * layout.block_size
        self.padded_context = -(-context_length // 128) * 128
        self.mask = self._block_mask(padded, kind, valid_A)

    def __call__(self, query_QNH: Tensor, context: KeysValues, block: KeysValues) -> Tensor:
        key, value = (
            torch.cat([_pad(first, self.padded_context), _pad(second, self.padded_queries)])
            for first, second in zip(context, block, strict=True)
        )
        output = _on_cuda_compiled(flex_attention, query_QNH.is_cuda)(
            _heads_first(_pad(query_QNH, self.padded_queries)),
            _heads_first(key),
            _heads_first(value),
            block_mask=self.mask,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)[: self.num_queries]

    def _block_mask(self, layout: BlockLayout, kind: LayerKind, valid_A: Tensor) -> BlockMask:
        block, context = layout.block_size, self.padded_context
        anchor_A, start_A = layout.anchor_positions_A, layout.context_start_A

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del batch, head
            index, slot = query // block, query % block
            key_index, key_slot = (key - context) // block, (key - context) % block
            in_context = (key < anchor_A[index]) & (key >= start_A[index])
            in_block = (key >= context) & (key_index == index)
            distance = torch.where(in_block, slot - key_slot, anchor_A[index] + slot - key)
            if kind.causal:
                in_block = in_block & (key_slot <= slot)
            seen = in_context | in_block
            if kind.window is not None:
                seen = seen & (distance < kind.window)
            return seen & valid_A[index]

        build = _on_cuda_compiled(create_block_mask, anchor_A.is_cuda)
        return build(visible, None, None, self.padded_queries, context + self.padded_queries, device=anchor_A.device)


Attention = DenseAttention | GroupedAttention | FlexAttention

_IMPLEMENTATIONS: dict[str, type[Attention]] = {
    "dense": DenseAttention,
    "grouped": GroupedAttention,
    "flex": FlexAttention,
}


def attention_class(name: str, device: torch.device) -> type[Attention]:
    """The implementation for a setting of `train.attention`; `auto` takes flex on CUDA and grouped elsewhere.

    Raises:
        ConfigError: flex on a device that has no backward for it.
    """
    if name == "auto":
        name = "flex" if device.type == "cuda" else "grouped"
    if name == "flex" and device.type != "cuda":
        raise ConfigError(
            f"train.attention = flex: flex_attention cannot train on {device.type}, set train.attention=grouped"
        )
    return _IMPLEMENTATIONS[name]


def dense_mask(layout: BlockLayout, kind: LayerKind, context_length: int) -> Tensor:
    """What each query sees of the row's context and of all blocks, [Q, S + Q] bool."""
    block = layout.block_size
    device = layout.anchor_positions_A.device
    anchor_Q1 = layout.anchor_positions_A.repeat_interleave(block)[:, None]
    start_Q1 = layout.context_start_A.repeat_interleave(block)[:, None]
    query_Q = torch.arange(anchor_Q1.shape[0], device=device)
    slot_Q1, index_Q1 = (query_Q % block)[:, None], (query_Q // block)[:, None]
    key_S = torch.arange(context_length, device=device)
    context_QS = (key_S < anchor_Q1) & (key_S >= start_Q1)
    block_QQ = index_Q1 == index_Q1.T
    if kind.causal:
        block_QQ = block_QQ & (slot_Q1 >= slot_Q1.T)
    if kind.window is not None:
        context_QS = context_QS & (anchor_Q1 + slot_Q1 - key_S < kind.window)
        block_QQ = block_QQ & (slot_Q1 - slot_Q1.T < kind.window)
    return torch.cat([context_QS, block_QQ], dim=1)


@dataclass(frozen=True)
class _Group:
    """Neighbouring anchors of one document, and the context that any of them sees.

    Attributes:
        document_start: row position of the document.
        prefix: positions within the document that any of the anchors sees.
        layout: the group alone, in positions counted from the begin of `prefix`.
    """

    document_start: int
    prefix: slice
    layout: BlockLayout

    def visible(self, kind: LayerKind) -> Tensor | None:
        """Mask of the group, or None where a single block sees all of its prefix and of itself."""
        if self.layout.anchor_positions_A.shape[0] == 1 and not kind.causal and kind.window is None:
            return None
        return dense_mask(self.layout, kind, self.prefix.stop - self.prefix.start)


def _groups(layout: BlockLayout, kind: LayerKind, anchors_per_group: int) -> Iterator[_Group]:
    anchors = layout.anchor_positions_A.tolist()
    starts = layout.context_start_A.tolist()
    first = 0
    while first < len(anchors):
        start = starts[first]
        last = first + 1
        while last < len(anchors) and last - first < anchors_per_group and starts[last] == start:
            last += 1
        begin = start if kind.window is None else max(start, anchors[first] - kind.window + 1)
        own = replace(
            layout,
            anchor_positions_A=layout.anchor_positions_A[first:last] - begin,
            context_start_A=torch.zeros_like(layout.context_start_A[first:last]),
        )
        yield _Group(start, slice(begin - start, anchors[last - 1] - start), own)
        first = last


def _masked_attention(query_QNH: Tensor, key_TKH: Tensor, value_TKH: Tensor, visible_QT: Tensor | None) -> Tensor:
    """Softmax attention over the visible keys; a query without any gives zeros instead of NaN."""
    query, key, value = _heads_first(query_QNH), _heads_first(key_TKH), _heads_first(value_TKH)
    if visible_QT is None:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)[0].transpose(0, 1)
    blind_Q1 = ~visible_QT.any(dim=1, keepdim=True)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible_QT | blind_Q1, enable_gqa=True)
    return output[0].transpose(0, 1).masked_fill(blind_Q1[..., None], 0.0)


def _heads_first(tensor_TNH: Tensor) -> Tensor:
    """[T, N, H] -> [1, N, T, H], the order that torch's attention wants."""
    return tensor_TNH.transpose(0, 1)[None]


def _pad(tensor_TNH: Tensor, length: int) -> Tensor:
    return F.pad(tensor_TNH, (0, 0, 0, 0, 0, length - tensor_TNH.shape[0]))


def _pad_anchors(layout: BlockLayout, multiple: int) -> tuple[BlockLayout, Tensor]:
    """Round the number of anchors up; returns the layout and [A'] bool, true where an anchor is a real one."""
    count = layout.anchor_positions_A.shape[0]
    missing = -count % multiple
    padded = replace(
        layout,
        anchor_positions_A=F.pad(layout.anchor_positions_A, (0, missing)),
        context_start_A=F.pad(layout.context_start_A, (0, missing)),
    )
    return padded, torch.arange(count + missing, device=layout.anchor_positions_A.device) < count


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _on_cuda_compiled(function: Callable[..., Any], cuda: bool) -> Callable[..., Any]:
    """The function, compiled once per process on CUDA: uncompiled, flex_attention builds dense masks and scores."""
    return _compiled(function) if cuda else function
