"""Rotary settings in every form that configurations use."""

import math
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftline.errors import TargetError
from draftline.targets.rope import rope_parameters

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class RawConfig(PretrainedConfig):
    """A configuration of code that is not part of transformers: nothing standardises its fields."""

    model_type = "raw"

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": None}}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": None}},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                }
            },
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_forms(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert rope_parameters(RawConfig(**fields)) == wanted


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, "'longrope': drafters can do default, linear"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "lacks factor"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}, "has alpha"),
        ({"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1e5}}, "none for full_attention"),
    ],
)
def test_what_a_drafter_cannot_follow_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        rope_parameters(RawConfig(rope_parameters=rope))
    assert "\n" not in str(caught.value)


def test_the_tables_built_from_the_result_match_the_formulas() -> None:
    """Default and llama3 tables at positions 0, 100 and 5000 against the published formulas."""
    dim, base = 16, 5e5
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    stretched = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        blend = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        stretched.append(frequency * min(max(blend, 0.0), 1.0) + frequency / 8.0 * (1 - min(max(blend, 0.0), 1.0)))
    for fields, frequencies in (
        ({"rope_theta": base}, plain),
        ({"rope_parameters": {"rope_theta": base, "partial_rotary_factor": 0.25}}, plain),
        ({"rope_theta": base, "rope_scaling": {"type": "llama3", **LLAMA3}}, stretched),
    ):
        config = Qwen3Config(head_dim=dim, rope_parameters=rope_parameters(RawConfig(**fields)))
        positions = torch.tensor([[0, 100, 5000]])
        cos, _sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
        wanted = [[math.cos(p * f) for f in frequencies] * 2 for p in (0, 100, 5000)]
        torch.testing.assert_close(cos[0], torch.tensor(wanted), rtol=0, atol=2e-3)
