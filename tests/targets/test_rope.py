"""Rotary settings in every form that configurations use, against the tables that transformers makes of them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftline.errors import CheckpointError, TargetError
from draftline.targets.rope import KINDS, rope_of_folder, rope_of_target

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
NUMBERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": YARN,
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 32,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
"""Settings of every type that transformers has, for heads of 8 numbers."""


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
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "beta_fast": None}},
            {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
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
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "type": "yarn",
                    "rope_theta": 1e6,
                    **YARN,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                    "max_position_embeddings": 128,
                }
            },
            {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_targets(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert rope_of_target(RawConfig(**fields)) == wanted


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, "'longrope': drafters can do default, linear"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "lacks factor: add it to config.json"),
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
            "has alpha, which no reader .* not supported",
        ),
        ({"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 1e5}}, "none for full_attention"),
    ],
)
def test_what_a_drafter_cannot_follow_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        rope_of_target(RawConfig(rope_parameters=rope))
    assert "\n" not in str(caught.value)


def table(rope: dict[str, Any], positions: Tensor, head_dim: int = 8) -> Tensor:
    """Cosines and sines [T, 2H] as readers make them, with all positions asked in one call."""
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=128, rope_parameters=dict(rope))
    return torch.cat(Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None]), dim=-1)[0]


@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
def test_a_drafter_can_have_the_kinds_whose_table_is_one_table_and_turns_whole_heads(kind: str) -> None:
    """Packed rows, cached decoding and servers ask for the same position in other company."""
    rope, positions = {"rope_type": kind, "rope_theta": 5e3, **NUMBERS[kind]}, torch.arange(128)
    together, alone = table(rope, positions), torch.cat([table(rope, positions[i : i + 1]) for i in range(128)])
    turns_all = bool((together[1, 8:] != 0).all())
    assert (kind in KINDS) == (torch.equal(together, alone) and turns_all)
    target = LlamaConfig(head_dim=8, max_position_embeddings=128, rope_parameters=dict(rope))
    folder = {"rope_theta": 5e3, "rope_scaling": {"type": kind, **NUMBERS[kind]}}
    if kind in KINDS:
        assert rope_of_target(target) == rope_of_folder(folder, "config.json") == rope
    else:
        with pytest.raises(CheckpointError, match=f"'{kind}' is not supported|partial_rotary_factor"):
            rope_of_folder(folder, "config.json")


@pytest.mark.parametrize(("kind", "left_out"), [(kind, name) for kind in KINDS for name in KINDS[kind][0]])
def test_needed_numbers_are_those_that_transformers_cannot_do_without_or_guesses(kind: str, left_out: str) -> None:
    """Both doors give a table without guesses: from the target's own length, or not at all."""
    rope = {"rope_type": kind, "rope_theta": 5e3, **NUMBERS[kind]}
    del rope[left_out]
    with pytest.raises(CheckpointError, match=f"'{kind}' needs {left_out}"):
        rope_of_folder({"rope_parameters": rope}, "config.json")
    if left_out != "original_max_position_embeddings":
        with pytest.raises(KeyError, match=left_out):
            table(rope, torch.arange(4))
        with pytest.raises(TargetError, match=f"lacks {left_out}"):
            rope_of_target(RawConfig(rope_parameters=rope))
        return
    guessed = Qwen3Config(head_dim=8, max_position_embeddings=128, rope_parameters=dict(rope))
    assert guessed.rope_parameters[left_out] == 128 != NUMBERS[kind][left_out]
    for beside, wanted in (({}, 128), ({left_out: 32}, 32)):
        found = rope_of_target(RawConfig(rope_parameters=rope, max_position_embeddings=128, **beside))
        assert found == {**rope, left_out: wanted} == rope_of_folder({"rope_parameters": found}, "config.json")


@pytest.mark.parametrize("name", KINDS["yarn"][1])
def test_numbers_that_a_scaling_may_have_change_its_table(name: str) -> None:
    values = {"attention_factor": 2.0, "beta_fast": 8.0, "beta_slow": 4.0, "truncate": False}
    scales = {"mscale": 2.0, "mscale_all_dim": 0.5}
    plain = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 4096}
    changed = {**plain, **(scales if name in scales else {name: values[name]})}
    assert rope_of_folder({"rope_parameters": changed}, "config.json") == changed
    assert not torch.equal(table(plain, torch.arange(128), 64), table(changed, torch.arange(128), 64))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "alpha": 1.0}}, "has alpha"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}, "given twice, as 10000.0 and 1000000.0"),
        ({"rope_parameters": {"factor": 2.0}, "rope_scaling": {"factor": 3.0}}, "factor is 2.0 in rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layer types"),
        ({"rope_scaling": "linear"}, "must be a mapping"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "no rope_theta"),
    ],
)
def test_what_a_folder_leaves_unclear_is_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        rope_of_folder(tree, "config.json")
    assert "\n" not in str(caught.value)


def test_two_places_of_a_folder_that_agree_are_read_as_one() -> None:
    tree = {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_of_folder(tree, "config.json") == {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


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
        config = Qwen3Config(head_dim=dim, rope_parameters=rope_of_target(RawConfig(**fields)))
        positions = torch.tensor([[0, 100, 5000]])
        cos, _sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
        wanted = [[math.cos(p * f) for f in frequencies] * 2 for p in (0, 100, 5000)]
        torch.testing.assert_close(cos[0], torch.tensor(wanted), rtol=0, atol=2e-3)
