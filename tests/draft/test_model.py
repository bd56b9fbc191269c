"""Training and decoding run the same drafter: shapes, names, cache, rotation, initial weights."""

from __future__ import annotations

import pytest
import torch

from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from tests.draft.layouts import WIDTH, drafter, drafter_config

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


def test_parameter_names_and_shapes_are_the_published_ones() -> None:
    model = drafter(drafter_config({"num_hidden_layers": 1, "target_layer_ids": (0, 2, 5)}))
    layer = "layers.0."
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        "fc.weight": (16, 48),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        layer + "input_layernorm.weight": (16,),
        layer + "post_attention_layernorm.weight": (16,),
        layer + "self_attn.q_proj.weight": (32, 16),
        layer + "self_attn.k_proj.weight": (16, 16),
        layer + "self_attn.v_proj.weight": (16, 16),
        layer + "self_attn.o_proj.weight": (16, 32),
        layer + "self_attn.q_norm.weight": (8,),
        layer + "self_attn.k_norm.weight": (8,),
        layer + "mlp.gate_proj.weight": (24, 16),
        layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
    }


@pytest.mark.parametrize("changes", [{}, SLIDING, {**SLIDING, "sliding_window_causal": False}])
def test_decoding_with_a_cache_equals_the_training_forward(changes: dict[str, object]) -> None:
    """Blocks at 0, 4 and 11 of one document, the context given to the cache in uneven pieces."""
    model = drafter(drafter_config(changes), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 12, 2 * WIDTH, generator=generator, dtype=torch.float64)
    blocks = torch.randn(3, 4, WIDTH, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([0, 4, 11])
    layout = BlockLayout.of_row(anchors, torch.arange(12), block_size=4)
    with torch.no_grad():
        trained = model(states, blocks.flatten(0, 1)[None], layout)[0].unflatten(0, (3, 4))
        cache = model.new_cache()
        pieces = {0: [], 1: [(0, 1), (1, 4)], 2: [(4, 9), (9, 11)]}
        for index in range(3):
            for start, end in pieces[index]:
                model.extend_cache(cache, states[:, start:end])
            assert cache.length == anchors[index]
            if index == 0:
                model.extend_cache(cache, states[:, :0])
            drafted = model.draft(cache, blocks[index][None])[0]
            assert torch.allclose(drafted, trained[index], atol=1e-12)
            assert torch.equal(model.draft(cache, blocks[index][None])[0], drafted)


def test_window_and_causality_reach_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    states, block = torch.randn(1, 20, 2 * WIDTH, generator=generator), torch.randn(1, 4, WIDTH, generator=generator)
    layout = BlockLayout.of_row(torch.tensor([19]), torch.arange(20), block_size=4)
    outputs = []
    for changes in ({}, SLIDING, {**SLIDING, "sliding_window_causal": False}, {**SLIDING, "sliding_window": 7}):
        with torch.no_grad():
            outputs.append(drafter(drafter_config(changes))(states, block, layout))
    for index, output in enumerate(outputs):
        for other in outputs[index + 1 :]:
            assert (output - other).abs().max() > 1e-3


def test_drafts_do_not_depend_on_where_the_document_lies_in_the_row() -> None:
    model = drafter(drafter_config(), dtype=torch.float64)
    states = torch.randn(1, 12, 2 * WIDTH, dtype=torch.float64)
    block = torch.randn(1, 4, WIDTH, dtype=torch.float64)
    packed = BlockLayout.of_row(torch.tensor([10]), torch.cat([torch.arange(5), torch.arange(7)]), block_size=4)
    alone = BlockLayout.of_row(torch.tensor([5]), torch.arange(7), block_size=4)
    with torch.no_grad():
        assert torch.allclose(model(states, block, packed), model(states[:, 5:], block, alone), atol=1e-12)


@pytest.mark.parametrize("position", [0, 100, 5000])
def test_rotation_is_the_formula(position: int) -> None:
    model = drafter(drafter_config({"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}}))
    rotate = model._rotation(torch.zeros(1, 1), torch.tensor([position]))
    first, second = torch.randn(1, 1, 4), torch.randn(1, 1, 4)
    rotated = rotate(torch.cat([first, second], dim=-1))
    angle = position / 123456.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    cos, sin = angle.cos(), angle.sin()
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    assert torch.allclose(rotated.double(), wanted, atol=2e-3)


def test_initial_weights_come_from_the_seed_alone() -> None:
    config = drafter_config({"hidden_size": 64, "initializer_range": 0.05})
    one, two, other = (DFlashDraftModel(config) for _ in range(3))
    one.init_weights(torch.Generator().manual_seed(1))
    two.init_weights(torch.Generator().manual_seed(1))
    other.init_weights(torch.Generator().manual_seed(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(one.norm.weight, torch.ones(64))
