"""Faults of the drafter: what it sees, where it sits, what it computes, how blocks and anchors are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftline.draft import attention as attention_module
from draftline.draft import block as block_module
from draftline.draft.attention import BlockLayout, DenseAttention, LayerKind, dense_mask
from draftline.draft.model import DFlashAttention, DFlashDraftModel
from draftline.records import PackedBatch
from draftline.targets import drafter_shape
from draftline.train import step as step_module
from tests.zoo.fault import fault, handing, on_drafter, on_model, shaped, with_samples
from tests.zoo.pipeline import MASK, Recipe, World, llama

SLIDING = Recipe(settings={"drafter": {"num_layers": 2, "num_sliding_layers": 2, "sliding_window": 6}})
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Mask = Callable[[BlockLayout, LayerKind, int, Tensor], Tensor]


def masked(world: World, change: Mask) -> None:
    """Attention in training that sees what `change` makes of the right mask."""

    class Changed(DenseAttention):
        def __init__(self, layout: BlockLayout, kind: LayerKind, context_length: int) -> None:
            super().__init__(layout, kind, context_length)
            self.visible_QK = change(layout, kind, context_length, self.visible_QK)

    world.patch.setattr(step_module, "attention_class", lambda _name, _device: Changed)


def _shifted(by: int) -> Mask:
    """Context up to a border that lies `by` positions further right."""

    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        moved = replace(layout, anchor_positions_A=(layout.anchor_positions_A + by).clamp(max=length))
        wrong = dense_mask(moved, replace(kind, window=None), length)
        return torch.cat([wrong[:, :length], right[:, length:]], dim=1)

    return change


@fault("context up to and with the anchor (<= for <)", "B50", "DRF002")
def _(world: World) -> None:
    masked(world, _shifted(1))


@fault("context without the token before the anchor", "B50", "DRF002")
def _(world: World) -> None:
    masked(world, _shifted(-1))


@fault("context of the whole block's span", "B50", "DRF002")
def _(world: World) -> None:
    masked(world, _shifted(8))


@fault("each slot sees the context before itself, not before the anchor", "B50", "DRF002")
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        anchor = layout.anchor_positions_A.repeat_interleave(layout.block_size)
        slot = torch.arange(len(anchor)) % layout.block_size
        start = layout.context_start_A.repeat_interleave(layout.block_size)
        key = torch.arange(length)
        seen = (key < (anchor + slot)[:, None]) & (key >= start[:, None])
        return torch.cat([seen, right[:, length:]], dim=1)

    masked(world, change)


@fault("context of all conversations of the row", "B51", "DRF003")
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        return dense_mask(replace(layout, context_start_A=torch.zeros_like(layout.context_start_A)), kind, length)

    masked(world, change)


@fault("context from one token before the conversation", "B51", "DRF003")
def _(world: World) -> None:
    masked(
        world,
        lambda layout, kind, length, right: dense_mask(
            replace(layout, context_start_A=layout.context_start_A - 1), kind, length
        ),
    )


@fault("blocks see each other", "B50", "DRF003")
def _(world: World) -> None:
    masked(world, lambda _l, _k, length, right: torch.cat([right[:, :length], torch.ones_like(right[:, length:])], 1))


@fault("a block sees the one before it", "B50", "DRF003")
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        index = torch.arange(right.shape[0]) // layout.block_size
        before = index[:, None] == index + 1
        return torch.cat([right[:, :length], right[:, length:] | before], dim=1)

    masked(world, change)


@fault("causal inside the block", "B41", "DRF004")
def _(world: World) -> None:
    masked(world, lambda layout, _k, length, _r: dense_mask(layout, LayerKind(True, None), length))


@fault("a slot sees only itself in its block", "B41", "DRF004")
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        return torch.cat([right[:, :length], torch.eye(right.shape[0], dtype=torch.bool)], dim=1)

    masked(world, change)


@fault("mask slots do not see each other", "B41", "DRF004")
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        slot = torch.arange(right.shape[0]) % layout.block_size
        own = torch.eye(right.shape[0], dtype=torch.bool)
        return torch.cat([right[:, :length], right[:, length:] & ((slot == 0)[None, :] | own)], dim=1)

    masked(world, change)


@fault("sliding layers bidirectional in the block", "B58", "DRF004", SLIDING)
def _(world: World) -> None:
    masked(world, lambda layout, kind, length, _r: dense_mask(layout, LayerKind(False, kind.window), length))


@fault("the window is ignored", "B58", "DRF005", SLIDING)
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        whole = dense_mask(layout, replace(kind, window=None), length)
        return torch.cat([whole[:, :length], right[:, length:]], dim=1)

    masked(world, change)


@fault("the window is one token too wide (<= for <)", "B58", "DRF005", SLIDING)
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        wide = dense_mask(layout, replace(kind, window=7), length)
        return torch.cat([wide[:, :length], right[:, length:]], dim=1)

    masked(world, change)


@fault("the window is counted from the anchor for every slot", "B58", "DRF005", SLIDING)
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        anchor = layout.anchor_positions_A.repeat_interleave(layout.block_size)
        key = torch.arange(length)
        start = layout.context_start_A.repeat_interleave(layout.block_size)[:, None]
        seen = (key < anchor[:, None]) & (key >= start) & (key >= (anchor - 6)[:, None])
        return torch.cat([seen, right[:, length:]], dim=1)

    masked(world, change)


# Positions.


def _with_rotation(world: World, change: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]) -> None:
    def replaced(model: DFlashDraftModel) -> None:
        clean = model.rotary_emb.forward
        model.rotary_emb.forward = lambda like, positions: change(*clean(like, positions), positions)

    on_model(world, replaced)


@fault("rope_theta lost", "B55", "DRF006", Recipe(settings={"drafter": {"num_layers": 1}}))
def _(world: World) -> None:
    table = 1.0 / 500_000.0 ** (torch.arange(8) / 8)
    on_model(world, lambda model: setattr(model.rotary_emb, "inv_freq", table.clone()))


@fault("half of each head rotated", "B53", "DRF006")
def _(world: World) -> None:
    on_model(world, lambda model: model.rotary_emb.inv_freq[4:].zero_())


@fault("no rotary positions at all", "B55", "DRF006")
def _(world: World) -> None:
    _with_rotation(world, lambda cos, sin, _p: (torch.ones_like(cos), torch.zeros_like(sin)))


@fault("slots one position too far", "B41", "DRF006")
def _(world: World) -> None:
    clean = BlockLayout.position_ids_Q.fget
    world.patch.setattr(BlockLayout, "position_ids_Q", property(lambda layout: clean(layout) + 1))


@fault("all slots at the anchor's position", "B41", "DRF006")
def _(world: World) -> None:
    def at_anchor(layout: BlockLayout) -> Tensor:
        return layout.position_ids_S[layout.anchor_positions_A].repeat_interleave(layout.block_size)

    world.patch.setattr(BlockLayout, "position_ids_Q", property(at_anchor))


# Decoding.


@fault("the draft cache counts one token too many", "B41", "DRF007")
def _(world: World) -> None:
    clean = DFlashDraftModel.extend_cache

    def extend(model: DFlashDraftModel, cache: Any, states: Tensor) -> None:
        cache.length += int(cache.length == 0)
        clean(model, cache, states)

    world.patch.setattr(DFlashDraftModel, "extend_cache", extend)


@fault("the draft cache forgets what came before", "B41", "DRF007")
def _(world: World) -> None:
    clean = DFlashDraftModel.extend_cache

    def extend(model: DFlashDraftModel, cache: Any, states: Tensor) -> None:
        if cache.length:
            for kept in cache.keys_values():
                for tensor in kept:
                    tensor.zero_()
        clean(model, cache, states)

    world.patch.setattr(DFlashDraftModel, "extend_cache", extend)


@fault("context states are not normed while decoding", "B38", "DRF007")
def _(world: World) -> None:
    clean = DFlashDraftModel.extend_cache

    def extend(model: DFlashDraftModel, cache: Any, states: Tensor) -> None:
        norm, model.hidden_norm = model.hidden_norm, nn.Identity()
        clean(model, cache, states)
        model.hidden_norm = norm

    world.patch.setattr(DFlashDraftModel, "extend_cache", extend)


# Layers.


class _OnePlus(nn.Module):
    """Gemma's norm: x * (1 + w)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, states.shape[-1:], 1.0 + self.weight, self.eps)


class _Nothing(_OnePlus):
    def forward(self, states: Tensor) -> Tensor:
        return states + 0.0 * self.weight


class _Weightless(_OnePlus):
    def forward(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, states.shape[-1:], None, self.eps) + 0.0 * self.weight


@fault("hidden_norm is x * (1 + w)", "B38", "DRF008")
def _(world: World) -> None:
    on_model(world, lambda model: setattr(model, "hidden_norm", _OnePlus(model.hidden_norm)))


@fault("q_norm without its weight", "B38", "DRF008")
def _(world: World) -> None:
    def weightless(model: DFlashDraftModel) -> None:
        attention = model.layers[0].self_attn
        attention.q_norm = _Weightless(attention.q_norm)

    on_model(world, weightless)


@fault("the final norm is left out", "B38", "DRF008")
def _(world: World) -> None:
    on_model(world, lambda model: setattr(model, "norm", _Nothing(model.norm)))


@fault("the MLP uses GELU", "B48", "DRF008")
def _(world: World) -> None:
    def other(model: DFlashDraftModel) -> None:
        for layer in model.layers:
            layer.mlp.act_fn = nn.GELU()

    on_model(world, other)


@fault("queries are scaled once more", "B48", "DRF008")
def _(world: World) -> None:
    clean = DFlashAttention.forward

    def forward(attention: DFlashAttention, block: Tensor, context: Any, rotate: Any, attend: Any) -> Tensor:
        return clean(attention, block, context, rotate, lambda query, *rest: attend(query * 0.5, *rest))

    world.patch.setattr(DFlashAttention, "forward", forward)


@fault("no residual around the attention of one layer", "B48", "DRF008")
def _(world: World) -> None:
    clean = DFlashAttention.forward

    def forward(attention: DFlashAttention, block: Tensor, *rest: Any) -> Tensor:
        whole = clean(attention, block, *rest)
        return whole - 0.5 * block if hasattr(attention, "is_bare") else whole

    on_model(world, lambda model: setattr(model.layers[1].self_attn, "is_bare", True))
    world.patch.setattr(DFlashAttention, "forward", forward)


# Mask token and block input.


def _unchecked_mask(world: World) -> None:
    """Nobody asks whether a row can be the mask token."""
    world.patch.setattr(drafter_shape, "resolve_mask_token", lambda _target, wanted, _used: wanted)


@fault("the mask token is eos", "B61", "DRF009")
def _(world: World) -> None:
    _unchecked_mask(world)
    world.set("drafter", mask_token_id=2)


@fault("the mask token is pad", "B61", "DRF009")
def _(world: World) -> None:
    _unchecked_mask(world)
    world.set("drafter", mask_token_id=0)


@fault("the mask token is past the table", "B62", "DRF009")
def _(world: World) -> None:
    shaped(world, mask_token_id=96)


@fault("the mask token occurs in the data", "W32", "DRF009")
def _(world: World) -> None:
    _unchecked_mask(world)
    with_samples(world, lambda s: replace(s, input_ids=torch.where(torch.arange(len(s)) == 3, MASK, s.input_ids)))


@fault("the mask token's row is zero", "B63", "DRF009")
def _(world: World) -> None:
    _unchecked_mask(world)
    world.target.embedding.weight.data[MASK] = 0.0


def _embeddings(
    change: Callable[[Tensor, int], Tensor],
) -> Callable[[Tensor, Tensor, BlockLayout], tuple[Tensor, Tensor, BlockLayout]]:
    return lambda states, embeddings, layout: (states, change(embeddings, layout.block_size), layout)


@fault("the anchor's slot holds the mask token", "B41", "DRF010")
def _(world: World) -> None:
    def change(embeddings: Tensor, block: int) -> Tensor:
        changed = embeddings.clone()
        changed[:, ::block] = embeddings[:, 1::block]
        return changed

    handing(world, _embeddings(change))


@fault("mask slots hold the anchor's token", "B41", "DRF010")
def _(world: World) -> None:
    handing(world, _embeddings(lambda e, block: e[:, ::block].repeat_interleave(block, dim=1)))


@fault("blocks laid one position later than drawn", "B41", "DRF010")
def _(world: World) -> None:
    def later(states: Tensor, embeddings: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor, BlockLayout]:
        anchors = (layout.anchor_positions_A + 1).clamp(max=len(layout.position_ids_S) - 1)
        return states, embeddings, replace(layout, anchor_positions_A=anchors)

    handing(world, later)


@fault("positions of the row not restarted in the loss", "B51", "DRF010")
def _(world: World) -> None:
    def going_on(states: Tensor, embeddings: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor, BlockLayout]:
        return states, embeddings, replace(layout, position_ids_S=torch.arange(len(layout.position_ids_S)))

    handing(world, going_on)


# Anchors.

Draw = Callable[[PackedBatch, int, int], Tensor]


def _drawing(world: World, change: Callable[[Draw, PackedBatch, int, int], Tensor]) -> None:
    """Anchors of every row, by `change` of the right draw."""
    clean = step_module.draw_anchors
    world.patch.setattr(step_module, "draw_anchors", lambda row, budget, seed: change(clean, row, budget, seed))


@fault("anchors only where a whole block fits", "B105", "DRF011")
def _(world: World) -> None:
    def draw(clean: Draw, row: PackedBatch, budget: int, seed: int) -> Tensor:
        anchors, mask = clean(row, budget, seed), row.loss_mask[0]
        whole = [bool(mask[i : i + 8].all()) and i + 8 <= len(mask) for i in anchors.tolist()]
        return anchors[torch.tensor(whole)]

    _drawing(world, draw)


@fault("one budget of anchors for the whole row", "B46", "DRF011")
def _(world: World) -> None:
    _drawing(world, lambda clean, row, budget, seed: clean(row, budget, seed)[:budget])


@fault("the last token of an answer is an anchor", "B45", "DRF011")
def _(world: World) -> None:
    _drawing(world, lambda _clean, row, budget, _seed: row.loss_mask[0].nonzero()[:, 0][:budget])


@fault("the first token of an answer is never an anchor", "B45", "DRF011")
def _(world: World) -> None:
    def draw(clean: Draw, row: PackedBatch, budget: int, seed: int) -> Tensor:
        anchors = clean(row, budget, seed)
        return anchors[row.loss_mask[0][(anchors - 1).clamp(min=0)]]

    _drawing(world, draw)


@fault("the same anchors in every pass", "B48", "DRF011")
def _(world: World) -> None:
    _drawing(world, lambda clean, row, budget, seed: clean(replace(row, epoch=0), budget, seed))


@fault("anchors drawn from a generator that nobody saves", "B77", "DRF011")
def _(world: World) -> None:
    fresh = torch.Generator()
    fresh.seed()
    _drawing(world, lambda clean, row, budget, _: clean(row, budget, int(torch.randint(1 << 30, (), generator=fresh))))


# Shape.


@fault("positions end before the target's", "B54", "DRF012")
def _(world: World) -> None:
    shaped(world, max_position_embeddings=128)


def _rope_written(world: World, **more: Any) -> None:
    """Rotary settings in the drafter's shape that its layers do not compute."""

    def change(model: DFlashDraftModel) -> None:
        model.config = model.config.model_copy(update={"rope_parameters": {**model.config.rope_parameters, **more}})

    on_model(world, change)


@fault("partial rotary inherited from the target", "B53", "DRF012")
def _(world: World) -> None:
    _rope_written(world, partial_rotary_factor=0.25)


@fault("three-axis rotary inherited from the target", "B57", "DRF012")
def _(world: World) -> None:
    _rope_written(world, mrope_section=[2, 3, 3])


@fault("vocab_size of the tokenizer, not of the table", "B65", "DRF012")
def _(world: World) -> None:
    shaped(world, vocab_size=90)


# Faults that show only in some rows, blocks or layers.

MIXED = Recipe(settings={"drafter": {"num_layers": 2, "num_sliding_layers": 1, "sliding_window": 6}})


def _grouped(world: World, change: Callable[[int, Any], Any]) -> None:
    """Grouped attention whose groups go through `change`, which is told how many of the document came before."""
    clean = attention_module._groups

    def groups(layout: BlockLayout, kind: LayerKind, size: int) -> Any:
        before: dict[int, int] = {}
        for group in clean(layout, kind, size):
            count = before.get(group.document_start, 0)
            before[group.document_start] = count + 1
            yield change(count, group)

    world.patch.setattr(attention_module, "_groups", groups)


def _without_oldest(group: Any) -> Any:
    return replace(group, layout=replace(group.layout, context_start_A=group.layout.context_start_A + 1))


@fault("later groups of blocks miss the first token of their document", "B50", "DRF003")
def _(world: World) -> None:
    _grouped(world, lambda before, group: _without_oldest(group) if before else group)


@fault("with many blocks, the context ends at the first anchor of each group", "B89", "DRF003")
def _(world: World) -> None:
    def change(before: int, group: Any) -> Any:
        anchors = group.layout.anchor_positions_A
        earlier = torch.minimum(anchors, anchors[0] if len(anchors) > 8 else anchors)
        return replace(group, layout=replace(group.layout, anchor_positions_A=earlier))

    _grouped(world, change)


@fault("the window of one sliding layer is one token too wide", "B58", "DRF005", MIXED)
def _(world: World) -> None:
    def change(layout: BlockLayout, kind: LayerKind, length: int, right: Tensor) -> Tensor:
        return right if kind.window is None else dense_mask(layout, replace(kind, window=kind.window + 1), length)

    masked(world, change)


@fault("the one sliding layer of a mixed drafter runs as full", "B58", "DRF005", MIXED)
def _(world: World) -> None:
    masked(world, lambda layout, kind, length, right: dense_mask(layout, replace(kind, window=None), length))


@fault("dropout in the drafter's layers", "B41", "DRF008")
def _(world: World) -> None:
    def dropping(module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return F.dropout(out, 0.1, module.training)

    on_model(world, lambda model: model.layers[0].register_forward_hook(dropping))


@fault("anchors drawn with replacement", "B48", "DRF011")
def _(world: World) -> None:
    def draw(positions: np.ndarray, count: int, seed: Any) -> np.ndarray:
        if len(positions) <= count:
            return positions
        return np.sort(np.random.default_rng(seed).choice(positions, size=count, replace=True))

    world.patch.setattr(block_module, "_draw", draw)


@fault("the draw of anchors depends on the number of the row", "B77", "DRF011")
def _(world: World) -> None:
    _drawing(world, lambda clean, row, budget, seed: clean(row, budget, seed + row.sequence_number))


@fault("the target's rotary scaling is dropped", "B55", "DRF012", Recipe(target=llama(rope_parameters=SCALED_ROPE)))
def _(world: World) -> None:
    plain = {"rope_type": "default", "rope_theta": SCALED_ROPE["rope_theta"]}
    world.patch.setattr(drafter_shape, "rope_of_target", lambda _config: dict(plain))


@fault("a norm of the drafter starts at 0", "B71", "LOS007")
def _(world: World) -> None:
    on_drafter(world, lambda made: nn.init.zeros_(made.model.get_parameter("layers.0.input_layernorm.weight")))
