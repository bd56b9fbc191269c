"""Both formats against their own readers, and against the contracts' complete examples, written out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel as ZlabDraftModel
from safetensors.torch import load_file
from speculators.models.dflash import DFlashDraftModel as SpeculatorsDraftModel
from speculators.models.dflash import DFlashSpeculatorConfig

from draftline.config import DFlashConfig
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ExportError
from draftline.formats.load import load_drafter
from draftline.formats.write import export_speculators, export_zlab, speculators_config, zlab_config
from draftline.targets.model import save_target
from tests.formats.drafters import (
    ALL_SLIDING,
    BIDIRECTIONAL,
    MIX,
    SMALL,
    YARN,
    make_drafter,
    make_target,
    same_weights,
)

ZLAB_EXAMPLE = json.loads(
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


def test_zlabs_config_has_exactly_the_keys_and_values_of_the_contract() -> None:
    names = set(DFlashConfig.model_fields) & set(ZLAB_EXAMPLE)
    config = DFlashConfig(
        **{name: ZLAB_EXAMPLE[name] for name in names},
        mask_token_id=151669,
        target_layer_ids=(1, 13, 25),
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        sample_from_anchor=False,
    )
    assert zlab_config(config, "bfloat16") == ZLAB_EXAMPLE


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
def test_a_round_trip_through_zlabs_format_is_bit_equal_at_the_stored_dtype(tmp_path: Path, dtype: str) -> None:
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
def test_what_zlabs_format_cannot_say_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        export_zlab(make_drafter(**changes), tmp_path / "drafter", "bfloat16")
    assert not list(tmp_path.iterdir())


SPECULATORS_EXAMPLE = json.loads(
    """
{"architectures":["DFlashSpeculator"],"speculators_model_type":"dflash","speculators_version":"0.9.0",
 "aux_hidden_state_layer_ids":[2,14,26],"block_size":16,"draft_vocab_size":151936,"mask_token_id":151669,
 "sample_from_anchor":false,"sliding_window_non_causal":true,"target_hidden_size":null,"dtype":"bfloat16",
 "speculators_config":{"algorithm":"dflash","default_proposal_method":"greedy",
   "proposal_methods":[{"proposal_type":"greedy","speculative_tokens":15,"accept_tolerance":0.0,"verifier_accept_k":1}],
   "verifier":{"name_or_path":"Qwen/Qwen3-0.6B","architectures":["Qwen3ForCausalLM"]}},
 "transformer_layer_config":{"model_type":"qwen3","vocab_size":151936,"hidden_size":1024,"intermediate_size":3072,
   "num_hidden_layers":3,"num_attention_heads":16,"num_key_value_heads":8,"head_dim":128,"hidden_act":"silu",
   "rms_norm_eps":1e-6,"max_position_embeddings":40960,
   "layer_types":["full_attention","full_attention","full_attention"],"attention_bias":false,
   "rope_parameters":{"rope_type":"default","rope_theta":1000000.0},"tie_word_embeddings":false,"use_cache":true}}
"""
)


def test_speculators_config_has_exactly_the_keys_and_values_of_the_contract() -> None:
    layers = SPECULATORS_EXAMPLE["transformer_layer_config"]
    config = DFlashConfig(
        **{name: layers[name] for name in DFlashConfig.model_fields if name in layers},
        sliding_window=None,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 13, 25),
        num_target_layers=28,
        sample_from_anchor=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    assert speculators_config(config, "bfloat16", "Qwen/Qwen3-0.6B", ("Qwen3ForCausalLM",)) == SPECULATORS_EXAMPLE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        YARN,
        {"sample_from_anchor": True},
        # speculators lets every slot of a block see the window of the anchor: a window wider than the row is the same
        {**ALL_SLIDING, "sliding_window": 64},
        {**BIDIRECTIONAL, "sliding_window": 64},
    ],
)
def test_speculators_computes_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    ours, target = make_drafter(**changes), make_target()
    save_target(target, tmp_path / "target")
    export_speculators(ours, tmp_path / "drafter", "float32", verifier=str(tmp_path / "target"))
    config = DFlashSpeculatorConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorsDraftModel.from_pretrained(tmp_path / "drafter", config=config).eval()
    assert theirs.config.aux_hidden_state_layer_ids == [layer + 1 for layer in ours.config.target_layer_ids]

    generator = torch.Generator().manual_seed(1)
    ids, anchors = torch.randint(0, 39, (1, 12), generator=generator), torch.tensor([2, 5, 6])
    states = torch.randn(1, 12, 3 * 24, generator=generator)
    monkeypatch.setattr("speculators.models.dflash.core.select_anchors", lambda *_: (anchors, torch.ones(3).bool()))
    with torch.no_grad():
        _, found, *_ = theirs._backbone_forward(
            hidden_states=states,
            input_ids=ids,
            loss_mask=torch.ones(1, 12),
            verifier_last_hidden_states=torch.zeros(1, 12, 24),
            document_ids=torch.zeros(1, 12, dtype=torch.int64),
            max_anchors=3,
        )
        blocks = torch.full((3, 4), 39)
        blocks[:, 0] = ids[0, anchors]
        layout = BlockLayout.of_row(anchors, torch.arange(12), 4)
        wanted = target.head.logits(ours(states, target.embed(blocks.flatten()[None]), layout))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, YARN, ALL_SLIDING, BIDIRECTIONAL, {"sample_from_anchor": True}])
def test_a_round_trip_through_speculators_format_is_bit_equal_at_the_stored_dtype(
    tmp_path: Path, changes: dict[str, Any], dtype: str
) -> None:
    ours = make_drafter(**changes)
    export_speculators(ours, tmp_path / "first", dtype, verifier="a/target")
    loaded = load_drafter(tmp_path / "first").draft_model
    assert loaded.config == ours.config
    stored = load_file(tmp_path / "first" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    assert same_weights(ours, stored)
    export_speculators(loaded, tmp_path / "second", dtype, verifier="a/target")
    again = load_file(tmp_path / "second" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in stored.items())
    assert (tmp_path / "first" / "config.json").read_bytes() == (tmp_path / "second" / "config.json").read_bytes()


@pytest.mark.parametrize(("changes", "non_causal"), [({}, True), (BIDIRECTIONAL, True), (ALL_SLIDING, False)])
def test_the_flag_that_vllm_applies_to_all_layers_is_right_for_all(changes: dict[str, Any], non_causal: bool) -> None:
    tree = speculators_config(make_drafter(**changes).config, "float32", None, ())
    assert tree["sliding_window_non_causal"] is non_causal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (MIX, "full bidirectional layers mixed with causal sliding"),
        ({"input_embedding_scale": 4.9}, "input_embedding_scale"),
        ({"output_multiplier": 0.1}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({**BIDIRECTIONAL, "sliding_window": 3}, "sliding_window 3"),
    ],
)
def test_what_speculators_format_cannot_say_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words) as caught:
        export_speculators(make_drafter(**changes), tmp_path / "drafter", "bfloat16", verifier=None)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
