"""The table of programs against the programs themselves, where they can be imported, and its commands."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash.model import DFlashDraftModel as ZlabDraftModel
from speculators.models.dflash import DFlashSpeculatorConfig
from transformers import Qwen3Config

from draftline.config import ExportDtype
from draftline.errors import ExportError
from draftline.formats.programs import (
    READERS,
    Serving,
    as_trained,
    differences,
    format_for,
    formats_for,
    in_words,
    missing_keys,
    read_as,
    readers_of,
    readings,
    serving_command,
    serving_notes,
)
from draftline.formats.write import zlab_config
from tests.formats.checkpoints import CONTRACTS, Tree
from tests.formats.drafters import ALL_SLIDING, MIX, SMALL

SLIDES: Tree = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
Edit = Callable[[Tree], Any]

ZLAB_EDITS: dict[str, Edit] = {
    "as it is": lambda t: t,
    "no head_dim": lambda t: t.pop("head_dim"),
    "no num_key_value_heads": lambda t: t.pop("num_key_value_heads"),
    "no rms_norm_eps": lambda t: t.pop("rms_norm_eps"),
    "no max_position_embeddings": lambda t: t.pop("max_position_embeddings"),
    "no rope_theta": lambda t: t.pop("rope_theta"),
    "two ropes": lambda t: t.update(
        rope_parameters={"rope_type": "linear", "rope_theta": 7e3, "factor": 2.0},
        rope_scaling={"type": "linear", "factor": 3.0},
    ),
    "no target_layer_ids": lambda t: t["dflash_config"].pop("target_layer_ids"),
    "block_size at top level": lambda t: t["dflash_config"].pop("block_size"),
    "no block_size": lambda t: (t.pop("block_size"), t["dflash_config"].pop("block_size")),
    "two block sizes": lambda t: t.update(block_size=9),
    "no is_causal": lambda t: t.pop("is_causal"),
    "causal": lambda t: t.update(is_causal=True),
    "a window": lambda t: (t.update(SLIDES, use_sliding_window=True), t.pop("is_causal")),
    "a window, bidirectional": lambda t: t.update(SLIDES, use_sliding_window=True),
    "a window that is switched off": lambda t: t.update(SLIDES, use_sliding_window=False),
    "a window that is not switched on": lambda t: (t.update(SLIDES), t.pop("use_sliding_window")),
    "no layer_types": lambda t: (
        t.update(use_sliding_window=True, sliding_window=6, max_window_layers=1),
        t.pop("layer_types"),
        t.pop("is_causal"),
    ),
    "another trainer's window": lambda t: t["dflash_config"].update(use_swa=True, swa_window_size=6),
}


def edited(form: str, edit: Edit) -> Tree:
    tree = copy.deepcopy(CONTRACTS[form]())
    edit(tree)
    return tree


def checked_untouched(tree: Tree) -> Tree:
    """The reading must not change what it reads."""
    before = copy.deepcopy(tree)
    readings(tree)
    assert tree == before
    return tree


@pytest.mark.parametrize("edit", ZLAB_EDITS)
def test_zlabs_rules_are_those_of_its_own_model(tmp_path: Path, edit: str) -> None:
    tree = checked_untouched(edited("zlab", ZLAB_EDITS[edit]))
    (tmp_path / "config.json").write_text(json.dumps(tree))
    config = Qwen3Config.from_pretrained(tmp_path)
    theirs, reading = ZlabDraftModel(config), read_as("zlab", tree)
    assert reading.shape is not None
    shape, attention = reading.shape, [layer.self_attn for layer in theirs.layers]
    assert shape.target_layer_ids == tuple(theirs.target_layer_ids)
    assert (shape.block_size, shape.mask_token_id) == (theirs.block_size, theirs.mask_token_id)
    assert reading.causal == tuple(layer.is_causal for layer in attention)
    assert reading.windows == tuple(layer.sliding_window for layer in attention)
    assert shape.head_dim == attention[0].head_dim
    assert shape.num_attention_heads // shape.num_key_value_heads == attention[0].num_key_value_groups
    assert (shape.rms_norm_eps, shape.max_position_embeddings) == (config.rms_norm_eps, config.max_position_embeddings)
    assert shape.rope_parameters == config.rope_parameters


def test_zlab_and_its_rules_refuse_a_folder_without_depth(tmp_path: Path) -> None:
    tree = edited("zlab", lambda t: t.pop("num_target_layers"))
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(AttributeError, match="num_target_layers"):
        ZlabDraftModel(Qwen3Config.from_pretrained(tmp_path))
    found = {reading.program: reading for reading in readings(tree)}
    assert [name for name, reading in found.items() if reading.shape is None] == ["z-lab", "SGLang"]
    assert "takes num_target_layers = 2 from the drafter's own depth" in found["SGLang"].remarks[0]


SPECULATORS_EDITS: dict[str, Edit] = {
    "as it is": lambda t: t,
    "no flag": lambda t: t.pop("sliding_window_non_causal"),
    "bidirectional": lambda t: t.update(sliding_window_non_causal=True),
    "no block_size": lambda t: t.pop("block_size"),
    "no slot layout": lambda t: t.pop("sample_from_anchor"),
    "slot 0 predicts": lambda t: t.update(sample_from_anchor=True),
    "no layer_types": lambda t: t["transformer_layer_config"].pop("layer_types"),
    "a window": lambda t: t["transformer_layer_config"].update(SLIDES, use_sliding_window=True),
    "a window that is not switched on": lambda t: t["transformer_layer_config"].update(SLIDES),
}


@pytest.mark.parametrize("edit", SPECULATORS_EDITS)
def test_speculators_rules_are_those_of_its_own_configuration(tmp_path: Path, edit: str) -> None:
    tree = checked_untouched(edited("speculators", SPECULATORS_EDITS[edit]))
    (tmp_path / "config.json").write_text(json.dumps(tree))
    theirs, reading = DFlashSpeculatorConfig.from_pretrained(tmp_path), read_as("speculators", tree)
    assert reading.shape is not None
    shape, layers = reading.shape, theirs.transformer_layer_config
    assert [i + 1 for i in shape.target_layer_ids] == theirs.aux_hidden_state_layer_ids
    assert (shape.block_size, shape.mask_token_id) == (theirs.block_size, theirs.mask_token_id)
    assert shape.sample_from_anchor == theirs.sample_from_anchor
    slides = [kind == "sliding_attention" for kind in layers.layer_types]
    assert reading.causal == tuple(s and not theirs.sliding_window_non_causal for s in slides)
    assert reading.windows == tuple(layers.sliding_window if s else None for s in slides)
    assert shape.rope_parameters == layers.rope_parameters


@pytest.mark.parametrize(("flag", "causal"), [(True, False), (False, True), (None, False)])
def test_vllm_runs_every_layer_of_a_speculators_folder_by_its_one_flag(flag: bool | None, causal: bool) -> None:
    tree = edited("speculators", lambda t: t.update(sliding_window_non_causal=flag))
    if flag is None:
        del tree["sliding_window_non_causal"]
    reading = read_as("vllm", tree)
    assert reading.causal == (causal, causal)
    trained = as_trained(SMALL)
    assert ("causal" in differences(reading, trained)) is causal


@pytest.mark.parametrize(
    ("edit", "refusing", "words"),
    [
        (lambda t: t["dflash_config"].pop("mask_token_id"), ("z-lab", "vLLM", "SGLang", "llama.cpp"), "mask_token_id"),
        (lambda t: t["dflash_config"].update(target_layer_ids=[1, 3, 7]), ("SGLang",), "layer 7 of a target of 7"),
        (
            lambda t: (t["dflash_config"].pop("target_layer_ids"), t.update(num_target_layers=4)),
            ("z-lab", "vLLM", "SGLang", "llama.cpp"),
            "target_layer_ids are missing",
        ),
    ],
)
def test_programs_refuse(edit: Edit, refusing: tuple[str, ...], words: str) -> None:
    found = [reading for reading in readings(edited("zlab", edit)) if reading.shape is None]
    assert tuple(reading.program for reading in found) == refusing
    assert all(words in reading.remarks[-1] for reading in found)


@pytest.mark.parametrize(
    ("edit", "program", "words"),
    [
        (lambda t: t, "vLLM", "never reads block_size: give num_speculative_tokens = block_size - 1"),
        (lambda t: t.pop("block_size"), "llama.cpp", "some builds read block_size at top level only"),
        (lambda t: t["dflash_config"].update(sample_from_anchor=True), "z-lab", "every slot one place too early"),
        (lambda t: t["dflash_config"].update(causal=True), "SGLang", "follows is_causal = False"),
        (lambda t: t["dflash_config"].update(swa_window_size=6), "z-lab", "the window is lost"),
    ],
)
def test_what_a_program_ignores_or_assumes_is_remarked(edit: Edit, program: str, words: str) -> None:
    said = {reading.program: "; ".join(reading.remarks) for reading in readings(edited("zlab", edit))}
    assert words in said[program]


def test_a_reading_differs_from_what_was_trained_field_by_field() -> None:
    mix = SMALL.model_copy(update=MIX)
    written = read_as("zlab", zlab_config(mix, "float32"))
    assert differences(written, as_trained(mix)) == {}
    assert differences(written, as_trained(SMALL)) == {
        "causal": "causal [True, False], trained with [False, False]",
        "windows": "windows [6, None], trained with [None, None]",
    }
    other = mix.model_copy(update={"block_size": 5, "sample_from_anchor": True, "rms_norm_eps": 1e-6})
    assert differences(written, as_trained(other)).keys() == {"block_size", "sample_from_anchor", "rms_norm_eps"}


def test_one_sentence_says_what_a_program_reads_and_who_reads_otherwise() -> None:
    tree = CONTRACTS["speculators"]()
    assert in_words("speculators", tree) == (
        "speculators: layers [1, 3, 4], blocks of 4, bidirectional; vLLM reads causal otherwise"
    )
    assert "runs every layer causally" in in_words("vllm", tree)
    assert in_words("zlab", edited("zlab", lambda t: t.pop("num_target_layers"))).startswith("z-lab: refuses")
    broken = edited("zlab", lambda t: t["dflash_config"].update(block_size="many"))
    assert in_words("sglang", broken).startswith("SGLang: cannot read the config (ValueError")


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["of my own", "full_attention"]},
        {"hidden_size": "wide"},
        {"num_hidden_layers": None},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_scaling": "yarn"},
    ],
)
def test_layers_that_no_program_can_read_are_said_to_be_so_in_one_line(change: Tree) -> None:
    for reader in ("zlab", "vllm"):
        words = in_words(reader, CONTRACTS["zlab"]() | change)
        assert "cannot read the config (ValueError" in words
        assert "\n" not in words


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_keys_that_readers_guess_are_named(form: str) -> None:
    assert missing_keys(CONTRACTS[form]()) == []
    layers = (lambda t: t) if form == "zlab" else (lambda t: t["transformer_layer_config"])
    for key in ("layer_types", "head_dim", "rms_norm_eps"):
        tree = CONTRACTS[form]()
        del layers(tree)[key]
        assert missing_keys(tree) == [key]
    tree = CONTRACTS[form]()
    layers(tree).pop("rope_theta", None)
    layers(tree).pop("rope_parameters", None)
    assert missing_keys(tree) == ["rope_theta"]
    bare = {"speculators_model_type": "dflash"} if form == "speculators" else {}
    assert {"block_size", "rope_theta", "dtype"} < set(missing_keys(bare))


def test_each_program_gets_the_format_that_it_reads() -> None:
    reduced, anchor = (SMALL.model_copy(update=u) for u in ({"draft_vocab_size": 12}, {"sample_from_anchor": True}))
    assert {reader: format_for(reader, SMALL) for reader in READERS} == {
        **dict.fromkeys(READERS, "zlab"),
        "speculators": "speculators",
    }
    assert [reader for reader in READERS if format_for(reader, reduced) == "speculators"] == ["vllm", "speculators"]
    assert formats_for(SMALL)[0] == "zlab"
    assert formats_for(reduced) == formats_for(anchor) == ("speculators",)
    assert readers_of("zlab", SMALL) == ("zlab", "vllm", "sglang", "llama.cpp")
    assert readers_of("speculators", SMALL) == ("speculators", "vllm")
    assert readers_of("speculators", anchor) == ("speculators",)
    for reader in READERS:
        assert reader in readers_of(format_for(reader, SMALL), SMALL)


def test_notes_name_what_the_drafter_needs() -> None:
    sliding = SMALL.model_copy(update={**ALL_SLIDING, "draft_vocab_size": 12})
    for reader in READERS:
        notes = " ".join(serving_notes(reader, Serving("drafter", "a/target", "bfloat16", sliding)))
        assert "trained for 3 drafted tokens" in notes
        assert "Of 40 tokens 12 can be drafted" in notes
        assert "Sliding layers see 6 tokens" in notes
    assert any("16 bits" in note for note in serving_notes("sglang", Serving("d", "t", "float32", SMALL)))
    assert not any("16 bits" in note for note in serving_notes("sglang", Serving("d", "t", "bfloat16", SMALL)))
    anchor = SMALL.model_copy(update={"sample_from_anchor": True})
    assert len(serving_notes("speculators", Serving("d", "t", "float32", anchor))) == 1


def test_commands_draft_as_many_tokens_as_were_trained() -> None:
    serving = Serving("my drafter", "a/target", "bfloat16", SMALL)
    vllm = shlex.split(serving_command("vllm", serving).replace("\\\n", ""))
    speculation = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert speculation == {"method": "dflash", "model": "my drafter", "num_speculative_tokens": 3}
    sglang = shlex.split(serving_command("sglang", serving).replace("\\\n", ""))
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "my drafter"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"
    convert_target, convert_drafter, server = serving_command("llama.cpp", serving).replace("\\\n", "").splitlines()
    assert shlex.split(convert_target)[2] == "a/target"
    assert shlex.split(convert_drafter)[2:5] == ["my drafter", "--target-model-dir", "a/target"]
    assert "--spec-draft-n-max 3" in server
    with pytest.raises(ExportError, match="not a known reader"):
        serving_command("llamafile", serving)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "flash_attn"), ("float32", "triton_attn")])
def test_vllm_is_given_a_backend_that_takes_the_dtype(dtype: ExportDtype, backend: str) -> None:
    command = serving_command("vllm", Serving("drafter", "a/target", dtype, SMALL))
    assert f"--attention-backend {backend}" in command
