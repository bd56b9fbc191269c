"""Every contract is read in the meaning of its trainer, and wrong variants of each are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from draftline.errors import CheckpointError, DraftlineError
from draftline.formats.load import Given, load_drafter
from draftline.formats.write import export_zlab
from tests.formats.checkpoints import CONTRACTS, FULL, Tree, modelopt_sliding, tensors_of, write
from tests.formats.drafters import (
    SMALL,
    make_drafter,
    same_weights,
)


@pytest.mark.parametrize("form", CONTRACTS)
def test_every_contract_is_read(tmp_path: Path, form: str) -> None:
    model = make_drafter()
    folder = write(tmp_path / "foreign", CONTRACTS[form](), tensors_of(form, model))
    given = Given(num_target_layers=7) if form == "speculators" else None
    loaded = load_drafter(folder, given)
    assert loaded.format == form
    assert loaded.config == SMALL.model_copy(update={"sample_from_anchor": form == "deepspec"})
    assert same_weights(loaded.draft_model, model.state_dict())
    assert loaded.stored_dtype == torch.float32
    assert len(loaded.notes) == {"torchspec": 1, "deepspec": 2}.get(form, 0)


def test_windows_of_modelopt_reach_all_layers_and_are_bidirectional(tmp_path: Path) -> None:
    folder = write(tmp_path / "foreign", modelopt_sliding(), tensors_of("modelopt", make_drafter()))
    config = load_drafter(folder).config
    assert config.layer_types == ("sliding_attention", "sliding_attention")
    assert config.sliding_window == 6
    assert not config.sliding_window_causal


@pytest.mark.parametrize(("form", "causal"), [("zlab", True), ("specforge", True), ("nemo", False)])
def test_sliding_layers_without_a_word_on_causality_mean_what_the_trainer_does(
    tmp_path: Path, form: str, causal: bool
) -> None:
    sliding = {"layer_types": ["sliding_attention", FULL[0]], "use_sliding_window": True, "sliding_window": 6}
    tree = CONTRACTS[form]() | sliding
    tree.pop("is_causal", None)
    loaded = load_drafter(write(tmp_path / "foreign", tree, tensors_of(form, make_drafter())))
    assert loaded.config.sliding_window_causal is causal


@pytest.mark.parametrize("form", ["zlab", "torchspec"])
def test_layers_that_a_configuration_does_not_list_are_those_of_the_reference_code(tmp_path: Path, form: str) -> None:
    tree = CONTRACTS[form]()
    if form == "zlab":
        del tree["dflash_config"]["target_layer_ids"]
        tree |= {"num_target_layers": 7}
        model = make_drafter(target_layer_ids=(1, 4))
        wanted = (1, 4)  # as many as the drafter has layers
    else:
        tree["target_layer_ids"] = None
        model, wanted = make_drafter(), (1, 2, 4)  # as many as it says are captured
    assert load_drafter(write(tmp_path / "foreign", tree, tensors_of(form, model))).config.target_layer_ids == wanted


def put(path: str, value: Any) -> Callable[[Tree], None]:
    """Set a key, given with dots."""

    def edit(tree: Tree) -> None:
        *parents, leaf = path.split(".")
        for parent in parents:
            tree = tree[parent]
        tree[leaf] = value

    return edit


def drop(path: str) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        *parents, leaf = path.split(".")
        for parent in parents:
            tree = tree[parent]
        del tree[leaf]

    return edit


def slide(window: int) -> Callable[[Tree], None]:
    """Make the first layer slide."""
    return lambda tree: tree.update(
        layer_types=["sliding_attention", FULL[0]], use_sliding_window=True, sliding_window=window, is_causal=None
    )


WRONG: list[tuple[str, Callable[[Tree], None], str]] = [
    ("zlab", put("dflash_config.block_size", 5), "block_size is 5 in dflash_config, 4 in the top level"),
    ("zlab", put("dflash_config.target_layer_ids", [1, 3, 6]), "the last layer"),
    ("zlab", put("dflash_config.target_layer_ids", [1, 3]), r"fc\.weight"),
    ("zlab", put("is_causal", True), "is_causal = true with full_attention"),
    ("zlab", put("architectures", ["DFlash2DraftModel"]), "DFlash 2 adds convolutions"),
    ("zlab", put("dflash_config.projector_type", "domino"), "correction head"),
    ("zlab", put("dflash_config.something_new", 1), "something_new is unknown"),
    ("zlab", put("layer_types", ["sliding_attention", FULL[0]]), "no sliding_window"),
    ("zlab", put("layer_types", ["linear_attention", FULL[0]]), "linear_attention"),
    ("zlab", drop("rope_theta"), "rope_theta"),
    ("zlab", put("rope_parameters", {"rope_type": "default", "rope_theta": 1e6}), "rope_theta is given twice"),
    ("zlab", put("partial_rotary_factor", 0.25), "partial_rotary_factor"),
    ("zlab", put("rope_scaling", {"type": "wavy"}), "wavy"),
    ("zlab", put("rope_scaling", {"rope_type": "yarn", "factor": 2.0}), "original_max_position_embeddings"),
    ("zlab", put("rope_scaling", {"type": "longrope", "short_factor": [1.0]}), "'longrope' is not supported"),
    ("zlab", put("attention_bias", True), "attention_bias"),
    ("zlab", put("quantization_config", {"bits": 4}), "quantised"),
    ("zlab", put("dtype", "bfloat16"), "dtype"),
    ("zlab", put("dflash_config.mask_token_id", 40), "mask_token_id 40"),
    ("zlab", drop("num_target_layers"), "num_target_layers"),
    ("specforge", put("block_size", None), "block_size"),
    ("specforge", put("dflash_config.mask_token_id", None), "mask_token_id"),
    ("specforge", put("num_hidden_layers", 3), "tensors|layer_types"),
    ("modelopt", put("dflash_config.causal", True), "causal"),
    ("modelopt", put("dflash_config.attention_sink_bias", True), "attention sinks"),
    ("modelopt", put("dflash_config.use_swa", True), "no sliding_window"),
    ("modelopt", put("dflash_config.markov_rank", 8), "Markov head"),
    ("nemo", put("dflash_config.causal", True), "JetSpec"),
    ("nemo", put("architectures", ["Qwen3DFlash2DraftModel"]), "DFlash 2"),
    ("nemo", put("dflash_config.projector_type", "domino"), "correction head"),
    ("torchspec", put("num_target_layers", 7), "num_target_layers is 7 for 3"),
    ("torchspec", drop("block_size"), "--block-size"),
    ("torchspec", put("target_hidden_size", 48), "target_hidden_size"),
    ("torchspec", put("markov_rank", 16), "Markov head"),
    ("torchspec", put("rope_scaling", {"rope_type": "linear", "factor": 2.0}), "versions of TorchSpec"),
    ("deepspec", put("target_layer_ids", [-1, 3, 4]), "embedding"),
    ("deepspec", put("markov_rank", 256), "Markov head of DSpark"),
    ("deepspec", put("enable_confidence_head", True), "confidence head"),
    ("deepspec", put("enable_d2_feature", True), "real prefix tokens"),
    ("speculators", put("aux_hidden_state_layer_ids", [0, 4, 5]), "embedding"),
    ("speculators", put("draft_vocab_size", 32), "misses 1 tensors, first d2t"),
    ("speculators", put("speculators_model_type", "dspark"), "'dspark'"),
    ("speculators", drop("sample_from_anchor"), "--sample-from-anchor"),
    ("speculators", put("target_hidden_size", 48), "target_hidden_size"),
    ("zlab", put("architectures", ["LlamaForCausalLM"]), "not a known drafter"),
    ("zlab", put("torch_dtype", "bfloat16"), "torch_dtype is 'bfloat16', the weights are float32"),
    ("zlab", put("draft_vocab_size", 32), "draft_vocab_size is 32 of 40"),
    ("zlab", put("mlp_bias", True), "biases in its MLP"),
    ("zlab", put("attention_value_scale", 0.6), "scaled attention values"),
    ("zlab", put("v_head_dim", 4), "v_head_dim 4 differs from 8"),
    ("zlab", put("rms_norm_eps", 0.0), "rms_norm_eps"),
    ("zlab", put("dflash_config.sample_from_anchor", "false"), "without quotes"),
    ("zlab", slide(0), "sliding_window"),
    ("modelopt", put("block_size", 1), "block_size"),
    ("torchspec", put("draft_vocab_size", 32), "draft_vocab_size is 32 of 40"),
    ("deepspec", put("block_size", "4"), "text '4'"),
    ("speculators", put("block_size", 3), "speculative_tokens is 3, and a block_size of 3 drafts 2"),
    ("speculators", put("transformer_layer_config.rms_norm_eps", -1e-6), "rms_norm_eps"),
    ("zlab", put("architectures", "DFlashDraftModel"), "not a known drafter"),
]


@pytest.mark.parametrize(("form", "edit", "words"), WRONG)
def test_a_wrong_variant_is_refused_with_the_reason_in_one_line(
    tmp_path: Path, form: str, edit: Callable[[Tree], None], words: str
) -> None:
    tree = CONTRACTS[form]()
    edit(tree)
    folder = write(tmp_path / "foreign", tree, tensors_of(form, make_drafter()))
    with pytest.raises(DraftlineError, match=words) as caught:
        load_drafter(folder, Given(num_target_layers=7) if form == "speculators" else None)
    assert "\n" not in str(caught.value)


TENSORS = [
    ("layers.1.attention_conv.base_kernel", "convolutions of DFlash 2"),
    ("candidate_selector.hidden_projection.weight", "candidate selector"),
    ("markov_head.w1.weight", "Markov head"),
    ("confidence_head.proj.weight", "confidence head"),
    ("d2t", "reduced vocabulary"),
    ("layers.0.self_attn.q_proj.bias", "unknown 1 tensors"),
]


@pytest.mark.parametrize("form", CONTRACTS)
@pytest.mark.parametrize(("name", "words"), TENSORS)
def test_tensors_of_another_model_are_refused(tmp_path: Path, form: str, name: str, words: str) -> None:
    tensors = tensors_of(form, make_drafter()) | {name: torch.zeros(8)}
    folder = write(tmp_path / "foreign", CONTRACTS[form](), tensors)
    with pytest.raises(CheckpointError, match=words):
        load_drafter(folder, Given(num_target_layers=7) if form == "speculators" else None)


@pytest.mark.parametrize("form", CONTRACTS)
def test_a_renamed_or_missing_tensor_is_refused(tmp_path: Path, form: str) -> None:
    tensors = tensors_of(form, make_drafter())
    tensors["layers.1.mlp.up.weight"] = tensors.pop("layers.1.mlp.up_proj.weight")
    folder = write(tmp_path / "foreign", CONTRACTS[form](), tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_drafter(folder, Given(num_target_layers=7) if form == "speculators" else None)


def test_one_tensor_under_two_trainers_names_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of("torchspec", make_drafter())
    tensors["fc.weight"] = tensors["context_proj.weight"] + 1
    with pytest.raises(CheckpointError, match=r"has context_proj\.weight and fc\.weight"):
        load_drafter(write(tmp_path / "foreign", CONTRACTS["torchspec"](), tensors))


@pytest.mark.parametrize("form", ["zlab", "speculators", "deepspec"])
def test_layer_types_that_are_not_written_are_those_that_transformers_fills_in(tmp_path: Path, form: str) -> None:
    tree = CONTRACTS[form]()
    stack = tree["transformer_layer_config"] if form == "speculators" else tree
    stack |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    del stack["layer_types"]
    tree.pop("is_causal", None)
    folder = write(tmp_path / "foreign", tree, tensors_of(form, make_drafter()))
    wanted = Qwen3Config.from_dict(stack).layer_types
    assert wanted == ["full_attention", "sliding_attention"]
    if form == "deepspec":
        with pytest.raises(CheckpointError, match="writes full layers only"):
            load_drafter(folder)
        return
    config = load_drafter(folder, Given(num_target_layers=7) if form == "speculators" else None).config
    assert (list(config.layer_types), config.sliding_window) == (wanted, 6)


def test_scales_are_found_where_the_reader_of_zlab_looks(tmp_path: Path) -> None:
    tree = CONTRACTS["zlab"]() | {"final_logit_softcapping": 30.0}
    folder = write(tmp_path / "foreign", tree, tensors_of("zlab", make_drafter()))
    assert load_drafter(folder).config.final_logit_softcapping == 30.0
    tree["dflash_config"]["final_logit_softcapping"] = 20.0
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"20\.0 in dflash_config, 30\.0 in the top level"):
        load_drafter(folder)


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
