"""The speculators format against speculators 0.9 itself, and against the contract's complete example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from speculators.models.dflash import DFlashDraftModel as TheirModel
from speculators.models.dflash import DFlashSpeculatorConfig

from draftline.config import DFlashConfig
from draftline.draft.attention import BlockLayout
from draftline.errors import ExportError
from draftline.formats.load import load_drafter
from draftline.formats.write import export_speculators, speculators_config
from draftline.targets.model import save_target
from tests.formats.drafters import ALL_SLIDING, BIDIRECTIONAL, MIX, YARN, make_drafter, make_target, same_weights

EXAMPLE = json.loads(
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


def test_config_has_exactly_the_keys_and_values_of_the_contract() -> None:
    layers = EXAMPLE["transformer_layer_config"]
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
    assert speculators_config(config, "bfloat16", "Qwen/Qwen3-0.6B", ("Qwen3ForCausalLM",)) == EXAMPLE


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
    theirs = TheirModel.from_pretrained(tmp_path / "drafter", config=config).eval()
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
def test_round_trip_is_bit_equal_at_the_stored_dtype(tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
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
def test_what_the_format_cannot_say_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words) as caught:
        export_speculators(make_drafter(**changes), tmp_path / "drafter", "bfloat16", verifier=None)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
