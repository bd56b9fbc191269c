"""Training and decoding run the same drafter: shapes, names, cache, rotation, initial weights."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError
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


def qwen3(hidden_size: int, layers: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():  # norms of ones would hide a norm that was not taken over
        parameter.data.add_(0.1 * torch.rand_like(parameter))
    return model


def test_a_start_from_the_targets_layers_attends_and_computes_as_they_do() -> None:
    """With the last captured layer as context, the drafter's first layer sees the keys and values of the target's."""
    target = qwen3(WIDTH, layers=3)
    model = drafter(drafter_config({"num_hidden_layers": 1}))
    model.start_from_layers(target.model.layers, target.model.norm)
    layer = target.model.layers[2]
    for name, tensor in model.layers[0].state_dict().items():
        assert torch.equal(tensor, layer.state_dict()[name])
    assert torch.equal(model.norm.weight, target.model.norm.weight)

    with torch.no_grad():  # fc = [noise | identity + noise]: without the noise it passes the last captured layer on
        model.fc.weight[:, :WIDTH] = 0
        model.fc.weight[:, WIDTH:] = torch.eye(WIDTH)
        model.hidden_norm.weight.copy_(layer.input_layernorm.weight)
    states = torch.randn(1, 6, 2 * WIDTH)
    ids = torch.arange(6)[None]
    keys: list[torch.Tensor] = []
    layer.self_attn.k_norm.register_forward_hook(lambda _module, _args, output: keys.append(output))
    rotary = target.model.rotary_emb(states, ids)
    layer(states[..., WIDTH:], position_embeddings=rotary, attention_mask=None)
    layer.self_attn.k_norm._forward_hooks.clear()
    cache = model.new_cache()
    model.extend_cache(cache, states)
    unrotated = model.layers[0].self_attn.k_norm(
        model.layers[0].self_attn.k_proj(model.hidden_norm(model.fc(states[0]))).unflatten(-1, (-1, 8))
    )
    assert torch.allclose(unrotated, keys[0][0], atol=1e-5)


def test_a_start_from_layers_of_another_form_is_refused() -> None:
    model = drafter(drafter_config())
    with pytest.raises(ConfigError, match=r"start_from=random"):
        model.start_from_layers(qwen3(2 * WIDTH, layers=2).model.layers, model.norm)
    with pytest.raises(ConfigError, match=r"start_from=random"):
        model.start_from_layers(qwen3(WIDTH, layers=1).model.layers, model.norm)
