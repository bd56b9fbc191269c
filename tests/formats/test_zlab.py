"""z-lab's format against z-lab's own reader, and against the complete example of the contract, written out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel as ZlabDraftModel
from safetensors.torch import load_file, save_file

from draftline.config import DFlashConfig
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ExportError, StorageError
from draftline.formats.load import load_drafter
from draftline.formats.write import export_zlab, zlab_config
from tests.formats.drafters import ALL_SLIDING, BIDIRECTIONAL, MIX, SMALL, YARN, make_drafter

EXAMPLE = json.loads(
    """
{"architectures":["DFlashDraftModel"],"model_type":"qwen3","block_size":16,"num_target_layers":28,"is_causal":false,
 "dflash_config":{"block_size":16,"mask_token_id":151669,"target_layer_ids":[1,13,25],"sample_from_anchor":false},
 "vocab_size":151936,"hidden_size":1024,"intermediate_size":3072,"num_hidden_layers":3,"num_attention_heads":16,
 "num_key_value_heads":8,"head_dim":128,"hidden_act":"silu","rms_norm_eps":1e-6,"rope_theta":1000000,"rope_scaling":null,
 "max_position_embeddings":40960,"max_window_layers":3,"use_sliding_window":false,"sliding_window":null,
 "layer_types":["full_attention","full_attention","full_attention"],"attention_bias":false,"attention_dropout":0.0,
 "initializer_range":0.02,"tie_word_embeddings":false,"use_cache":true,"bos_token_id":151643,"eos_token_id":151645,
 "dtype":"bfloat16"}
"""
)


@torch.no_grad()
def our_block(model: DFlashDraftModel, states: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block right after all states."""
    cache = model.new_cache()
    model.extend_cache(cache, states)
    return model.draft(cache, block)


def test_config_has_exactly_the_keys_and_values_of_the_contract() -> None:
    names = set(DFlashConfig.model_fields) & set(EXAMPLE)
    config = DFlashConfig(
        **{name: EXAMPLE[name] for name in names},
        mask_token_id=151669,
        target_layer_ids=(1, 13, 25),
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        sample_from_anchor=False,
    )
    assert zlab_config(config, "bfloat16") == EXAMPLE


@pytest.mark.parametrize("changes", [{}, MIX, ALL_SLIDING, BIDIRECTIONAL, YARN])
def test_zlab_loads_every_tensor_and_computes_the_same_block(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours = make_drafter(**changes)
    export_zlab(ours, tmp_path / "drafter", "float32")
    theirs, report = ZlabDraftModel.from_pretrained(tmp_path / "drafter", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    states, block = torch.randn(1, 11, 3 * 24), torch.randn(1, 4, 24)
    with torch.no_grad():
        found = theirs.eval()(
            position_ids=torch.arange(15)[None], noise_embedding=block, target_hidden=states, past_key_values=None
        )
    torch.testing.assert_close(found, our_block(ours, states, block), rtol=1e-5, atol=1e-5)


def test_window_and_causality_change_the_block() -> None:
    """The comparison above could not fail if they did not."""
    states, block = torch.randn(1, 11, 3 * 24), torch.randn(1, 4, 24)
    sliding = our_block(make_drafter(**MIX), states, block)
    for other in (make_drafter(), make_drafter(**BIDIRECTIONAL)):
        assert (our_block(other, states, block) - sliding).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_equal_at_the_stored_dtype(tmp_path: Path, dtype: str) -> None:
    ours = make_drafter(**YARN, **MIX)
    export_zlab(ours, tmp_path / "first", dtype)
    loaded = load_drafter(tmp_path / "first").draft_model
    assert loaded.config == ours.config
    export_zlab(loaded, tmp_path / "second", dtype)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert {tensor.dtype for tensor in first.values()} == {getattr(torch, dtype)}
    assert first.keys() == dict(ours.named_parameters()).keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(torch.equal(tensor, ours.get_parameter(name).to(tensor.dtype)) for name, tensor in first.items())
    assert (tmp_path / "first" / "config.json").read_bytes() == (tmp_path / "second" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({}, {"is_causal": False, "use_sliding_window": False, "sliding_window": None}),
        (MIX, {"use_sliding_window": True, "sliding_window": 6}),
        (ALL_SLIDING, {"is_causal": True, "use_sliding_window": True, "sliding_window": 6}),
        (BIDIRECTIONAL, {"is_causal": False, "sliding_window": 6}),
    ],
)
def test_is_causal_is_left_out_only_for_the_mix(changes: dict[str, Any], written: dict[str, Any]) -> None:
    tree = zlab_config(make_drafter(**changes).config, "float32")
    assert written.items() <= tree.items()
    assert ("is_causal" in tree) == ("is_causal" in written)


def test_scales_of_the_target_are_written_only_where_they_act(tmp_path: Path) -> None:
    scales = {"input_embedding_scale": 4.5, "output_multiplier": 0.25, "final_logit_softcapping": 30.0}
    model = make_drafter(**scales)
    assert scales.items() <= zlab_config(model.config, "float32")["dflash_config"].items()
    assert not scales.keys() & zlab_config(SMALL, "float32")["dflash_config"].keys()
    export_zlab(model, tmp_path / "drafter", "bfloat16")
    assert load_drafter(tmp_path / "drafter").config == model.config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({**BIDIRECTIONAL, "sliding_window": 3}, "sliding_window 3"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        export_zlab(make_drafter(**changes), tmp_path / "drafter", "bfloat16")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make_drafter()
    model.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ExportError, match=r"fc\.weight"):
        export_zlab(model, tmp_path / "drafter", "bfloat16")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_content_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="drafter"):
        export_zlab(make_drafter(), tmp_path / "drafter", "bfloat16")
    assert [path.name for path in tmp_path.rglob("*")] == ["drafter", "notes.txt"]


def edit_config(folder: Path, edit: dict[str, Any]) -> None:
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    for key, value in edit.items():
        tree.pop(key) if value is KeyError else tree.update({key: value})
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"num_target_layers": KeyError}, "num_target_layers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"head_dim": 16}, "self_attn"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "misses 11 tensors"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "has unknown 11 tensors"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen3DSparkModel"]}, "has no mask_token_id"),
        ({"is_causal": True}, "is_causal"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.25}}, "rotary"),
        ({"dflash_config": [1]}, "does not describe a drafter"),
    ],
)
def test_a_folder_that_is_no_such_drafter_is_refused_in_one_line(
    tmp_path: Path, edit: dict[str, Any], words: str
) -> None:
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    edit_config(tmp_path / "drafter", edit)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_drafter(tmp_path / "drafter")
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "nothing")
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    weights = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(weights), "embed_tokens.weight": torch.zeros(40, 24)}, weights)
    with pytest.raises(CheckpointError, match=r"unknown 1 tensors, first embed_tokens\.weight"):
        load_drafter(tmp_path / "drafter")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "drafter")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load_drafter(tmp_path / "drafter")
