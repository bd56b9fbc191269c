"""Which keys a query sees: against nested loops, and the implementations against each other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from draftline.draft.attention import (
    Attention,
    BlockLayout,
    DenseAttention,
    FlexAttention,
    GroupedAttention,
    LayerKind,
    attention_class,
    dense_mask,
)
from draftline.errors import ConfigError
from tests.draft.layouts import random_lengths

HEAD_DIM = 8
WITHOUT_COMPILATION = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def random_layout(rng: random.Random) -> tuple[BlockLayout, LayerKind]:
    lengths = random_lengths(rng)
    position_ids_S = torch.cat([torch.arange(length) for length in lengths])
    total = len(position_ids_S)
    anchors_A = torch.tensor(sorted(rng.sample(range(total), rng.randint(1, total))))
    layout = BlockLayout.of_row(anchors_A, position_ids_S, block_size=rng.randint(2, 6))
    return layout, LayerKind(causal=rng.random() < 0.5, window=rng.choice([None, None, 2, 3, 7, 40]))


def random_tensors(rng: random.Random, layout: BlockLayout, dtype: torch.dtype) -> list[Tensor]:
    """Queries, context keys and values, block keys and values."""
    kv_heads = rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 3])
    context, queries = len(layout.position_ids_S), len(layout.position_ids_Q)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shapes = [(queries, heads), (context, kv_heads), (context, kv_heads), (queries, kv_heads), (queries, kv_heads)]
    return [torch.randn(*shape, HEAD_DIM, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def attended(attention: Attention, tensors: list[Tensor]) -> Tensor:
    query, context_key, context_value, block_key, block_value = tensors
    return attention(query, (context_key, context_value), (block_key, block_value))


def output_and_gradients(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    output = attended(attention, tensors)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weight).sum(), tensors)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for have, want in zip(found, wanted, strict=True):
        assert (have - want).abs().max() <= tolerance * want.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_mask_is_what_nested_loops_say(seed: int) -> None:
    layout, kind = random_layout(random.Random(seed))
    total, block = len(layout.position_ids_S), layout.block_size
    found = dense_mask(layout, kind, total)
    for index, anchor in enumerate(layout.anchor_positions_A.tolist()):
        start = anchor - int(layout.position_ids_S[anchor])
        for slot in range(block):
            seen = []
            for key in range(total):
                near = kind.window is None or anchor + slot - key < kind.window
                seen.append(start <= key < anchor and near)
            for key_index in range(len(layout.anchor_positions_A)):
                for key_slot in range(block):
                    near = kind.window is None or slot - key_slot < kind.window
                    seen.append(key_index == index and near and (key_slot <= slot or not kind.causal))
            assert found[index * block + slot].tolist() == seen


def test_layout_counts_positions_within_the_document() -> None:
    layout = BlockLayout.of_row(torch.tensor([1, 5]), torch.tensor([0, 1, 2, 0, 1, 2, 3]), block_size=3)
    assert layout.context_start_A.tolist() == [0, 3]
    assert layout.position_ids_Q.tolist() == [1, 2, 3, 2, 3, 4]


@pytest.mark.parametrize("seed", range(50))
def test_grouped_equals_dense_forward_and_backward(seed: int) -> None:
    rng = random.Random(seed)
    layout, kind = random_layout(rng)
    dtype, tolerance = rng.choice([(torch.float64, 1e-10), (torch.float32, 1e-5)])
    tensors = random_tensors(rng, layout, dtype)
    total = len(layout.position_ids_S)
    wanted = output_and_gradients(DenseAttention(layout, kind, total), tensors)
    for anchors_per_group in (1, 3, 16):
        grouped = GroupedAttention(layout, kind, total, anchors_per_group)
        assert_close(output_and_gradients(grouped, tensors), wanted, tolerance)


def flex_mask(flex: FlexAttention) -> Tensor:
    """What flex_attention is told, as a table [padded queries, padded keys]."""
    visible = create_mask(
        flex.mask.mask_mod, None, None, flex.padded_queries, flex.padded_context + flex.padded_queries
    )
    return visible[0, 0]


@pytest.mark.parametrize("seed", range(50))
def test_mask_of_flex_is_the_dense_mask_between_padding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlexAttention, "padded_anchors", 8)
    layout, kind = random_layout(random.Random(seed))
    total, queries = len(layout.position_ids_S), len(layout.position_ids_Q)
    flex = FlexAttention(layout, kind, total)
    wanted = torch.zeros(flex.padded_queries, flex.padded_context + flex.padded_queries, dtype=torch.bool)
    dense = dense_mask(layout, kind, total)
    wanted[:queries, :total] = dense[:, :total]
    wanted[:queries, flex.padded_context : flex.padded_context + queries] = dense[:, total:]
    assert torch.equal(flex_mask(flex), wanted)


@WITHOUT_COMPILATION
@pytest.mark.parametrize("seed", range(4))
def test_flex_equals_dense_forward(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlexAttention, "padded_anchors", 8)
    rng = random.Random(seed)
    layout, kind = random_layout(rng)
    total = len(layout.position_ids_S)
    with torch.no_grad():
        tensors = random_tensors(rng, layout, torch.float32)
        wanted = attended(DenseAttention(layout, kind, total), tensors)
        assert_close([attended(FlexAttention(layout, kind, total), tensors)], [wanted], 1e-5)


@WITHOUT_COMPILATION
def test_padding_blocks_of_flex_see_nothing_and_give_zeros() -> None:
    layout = BlockLayout.of_row(torch.tensor([2, 4]), torch.arange(9), block_size=3)
    flex = FlexAttention(layout, LayerKind(causal=False, window=None), 9)
    visible = flex_mask(flex)
    assert flex.padded_queries == 3 * FlexAttention.padded_anchors
    assert visible[:6].any(dim=1).all()
    assert not visible[6:].any()
    keys = torch.randn(1, 1, flex.padded_context + flex.padded_queries, 8)
    output = flex_attention(torch.randn(1, 1, flex.padded_queries, 8), keys, keys, block_mask=flex.mask)
    assert torch.equal(output[0, 0, 6:], torch.zeros_like(output[0, 0, 6:]))


def test_mask_of_flex_does_not_grow_with_the_heads() -> None:
    layout = BlockLayout.of_row(torch.tensor([2, 4]), torch.arange(9), block_size=3)
    mask = FlexAttention(layout, LayerKind(causal=False, window=None), 9).mask
    assert mask.kv_num_blocks.shape[:2] == (1, 1)


def test_query_that_sees_nothing_gives_zeros_and_finite_gradients() -> None:
    rng = random.Random(3)
    layout, kind = random_layout(rng)
    tensors = random_tensors(rng, layout, torch.float64)
    dense = DenseAttention(layout, kind, len(layout.position_ids_S))
    dense.visible_QK[1] = False
    output, query_gradient, *gradients = output_and_gradients(dense, tensors)
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    assert torch.equal(query_gradient[1], torch.zeros_like(query_gradient[1]))
    assert output[0].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_first_token_as_anchor_sees_its_block_alone() -> None:
    layout = BlockLayout.of_row(torch.tensor([0]), torch.arange(3), block_size=2)
    tensors = random_tensors(random.Random(0), layout, torch.float64)
    tensors[3] = torch.zeros_like(tensors[3])
    output = attended(GroupedAttention(layout, LayerKind(causal=False, window=None), 3), tensors)
    repeat = tensors[0].shape[1] // tensors[4].shape[1]
    assert torch.allclose(output[0], tensors[4].mean(dim=0).repeat_interleave(repeat, dim=0))


def test_no_anchors_no_output() -> None:
    layout = BlockLayout.of_row(torch.zeros(0, dtype=torch.int64), torch.arange(3), block_size=2)
    tensors = random_tensors(random.Random(0), layout, torch.float32)
    assert attended(GroupedAttention(layout, LayerKind(causal=False, window=None), 3), tensors).shape[0] == 0


def test_auto_takes_flex_on_cuda_alone() -> None:
    assert attention_class("auto", torch.device("cuda")) is FlexAttention
    assert attention_class("auto", torch.device("cpu")) is GroupedAttention
    assert attention_class("dense", torch.device("cpu")) is DenseAttention
    with pytest.raises(ConfigError, match=r"cannot train on cpu, set train\.attention=grouped"):
        attention_class("flex", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(10))
def test_flex_equals_dense_forward_and_backward_on_cuda(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(20, 300) for _ in range(rng.randint(1, 4))]
    position_ids_S = torch.cat([torch.arange(length) for length in lengths]).cuda()
    total = len(position_ids_S)
    anchors_A = torch.tensor(sorted(rng.sample(range(total), rng.randint(1, 100)))).cuda()
    layout = BlockLayout.of_row(anchors_A, position_ids_S, block_size=rng.choice([4, 8, 16]))
    kind = LayerKind(causal=rng.random() < 0.5, window=rng.choice([None, 50]))
    queries = len(layout.position_ids_Q)
    shapes = [(queries, 4), (total, 2), (total, 2), (queries, 2), (queries, 2)]
    tensors = [torch.randn(*shape, 64, device="cuda", requires_grad=True) for shape in shapes]
    wanted = output_and_gradients(DenseAttention(layout, kind, total), tensors)
    assert_close(output_and_gradients(FlexAttention(layout, kind, total), tensors), wanted, 2e-3)
