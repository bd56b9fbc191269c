"""The page of well-known targets: what it says is what is computed today, and agrees with what others published."""

from __future__ import annotations

import pytest

from draftline.config import DFlashConfig
from scripts.target_plans import PAGE, RECIPES, Planned, page, plan_of

PUBLISHED = {
    "qwen3-8b": (8.2e9, (1, 9, 17, 25, 33)),
    "qwen3-32b": (32.8e9, (1, 16, 31, 46, 61)),
    "qwen3.5-9b": (9e9, None),
    "qwen3.5-27b": (27e9, (1, 16, 31, 46, 61)),
    "llama-3.1-8b": (8.03e9, (1, 8, 15, 22, 29)),
    "gpt-oss-20b": (20.9e9, (1, 6, 11, 16, 21)),
    "gemma-4-31b": (30.7e9, None),
    "ministral-3-8b": (8.4e9, None),
}
"""Parameters by the model cards, without what reads pictures; captured layers of public drafters with five of them."""


@pytest.fixture(scope="module")
def plans() -> dict[str, Planned]:
    return {recipe.file: plan_of(recipe) for recipe in RECIPES}


def test_the_page_is_what_the_script_writes(plans: dict[str, Planned]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(list(plans.values())), "run python -m scripts.target_plans"


def test_targets_are_as_large_and_captured_where_others_say(plans: dict[str, Planned]) -> None:
    assert plans.keys() == PUBLISHED.keys()
    for name, (parameters, layers) in PUBLISHED.items():
        assert plans[name].parameters == pytest.approx(parameters, rel=0.015), name
        if layers is not None:
            assert plans[name].shape.target_layer_ids == layers


def counted_by_hand(shape: DFlashConfig) -> int:
    """Weights of a drafter: projections, gated MLP, two norms and those of queries and keys, `fc` and its two norms."""
    width, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    layer = 2 * width * query + 2 * width * key + 3 * width * shape.intermediate_size + 2 * width + 2 * shape.head_dim
    return shape.num_hidden_layers * layer + len(shape.target_layer_ids) * width * width + 2 * width


def test_drafters_have_the_weights_of_their_shape_and_fit(plans: dict[str, Planned]) -> None:
    for name, each in plans.items():
        assert each.estimate.parameters == counted_by_hand(each.shape), name
        assert max(each.estimate.target_bytes, each.estimate.drafter_bytes) < each.memory, name
        states = len(each.shape.target_layer_ids) * each.shape.hidden_size * 2
        assert each.estimate.wire_bytes == states + 8 + 3 * 8 + 1, name
