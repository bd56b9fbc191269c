"""From a run or a foreign folder to a folder that a program serves, with its card and its command."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file

from draftline import cli
from draftline.config import DataConfig, ExportDtype, RunConfig, TargetConfig
from draftline.data.accounting import ChatMode
from draftline.data.dataset import PreparedDataset
from draftline.errors import CheckpointError, ExportError, StorageError, TargetError
from draftline.formats.card import trained_mode
from draftline.formats.exporting import export_drafter, import_drafter, target_of_export
from draftline.formats.load import load_drafter
from draftline.formats.programs import READERS, Reader, Serving, serving_command
from draftline.options import ExportSettings, Results
from draftline.records import StepMetrics
from draftline.targets.model import TINY_FOLDER, save_target
from draftline.train.checkpoint import Checkpoint, TrainState, write_checkpoint
from tests.formats.checkpoints import CONTRACTS, tensors_of, write
from tests.formats.drafters import ALL_SLIDING, MIX, SMALL, make_drafter, make_target, same_weights

FLOAT32 = ExportSettings(dtype="float32")


def make_run(folder: Path, trained_for: TargetConfig | None = None, **changes: Any) -> Path:
    """A run folder with one checkpoint, which is its last and its best."""
    model, trained_for = make_drafter(**changes), trained_for or TargetConfig(name="a/target")
    checkpoint = Checkpoint(
        weights=model.state_dict(),
        moments={},
        random={},
        state=TrainState(StepMetrics.zero(4), step=12, tokens=3456),
        run_config=RunConfig(target=trained_for, data=DataConfig(path=Path("somewhere/talks"))),
        drafter_config=model.config,
        data_fingerprint="f1n9er",
    )
    write_checkpoint(folder / "best", checkpoint)
    (folder / "run.json").write_text(json.dumps({"sessions": [{"allowed": ["LOS030"]}, {"allowed": []}]}))
    return folder


@pytest.mark.parametrize("reader", READERS)
def test_a_run_is_exported_for_every_reader(tmp_path: Path, reader: Any) -> None:
    run, target = make_run(tmp_path / "run"), make_target()
    report = export_drafter(
        source=run,
        out=tmp_path / "out",
        target=target,
        settings=ExportSettings(reader=reader, dtype="float32", target_path="a/target"),
    )
    loaded = load_drafter(tmp_path / "out", target=target)
    assert loaded.format == report.format == ("speculators" if reader == "speculators" else "zlab")
    assert loaded.config == SMALL
    assert same_weights(make_drafter(), load_file(tmp_path / "out" / "model.safetensors"))
    assert report.command in (tmp_path / "out" / "README.md").read_text()
    assert "a/target" in report.command
    assert report.to_json()["folder"] == str(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_run_is_exported_for_the_target_that_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_target(make_target(), tmp_path / "target")
    own = TargetConfig(name=str(tmp_path / "target"), dtype="float32", device="cpu", trust_remote_code=True)
    run = make_run(tmp_path / "run", own)
    for source in (run, run / "best"):
        assert target_of_export(source) == own
        assert target_of_export(source, "elsewhere") == TargetConfig(name="elsewhere")
    assert cli.run(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert own.name in capsys.readouterr().out
    assert load_drafter(tmp_path / "out").config == SMALL
    assert cli.run(["export", str(run), "--out", str(tmp_path / "other"), "--target", str(tmp_path / "moved")]) == 2
    assert "moved" in capsys.readouterr().err
    assert cli.run(["export", str(tmp_path / "out"), "--out", str(tmp_path / "other")]) == 2
    assert "does not say where its target is: give --target" in capsys.readouterr().err
    (run / "best" / "state.json").write_text("{")
    assert cli.run(["export", str(run), "--out", str(tmp_path / "other")]) == 2
    assert "state.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_embedded_target_is_served_by_its_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "foreign", CONTRACTS["zlab"](), tensors_of("zlab", make_drafter()))
    tiny = dataclasses.replace(make_target(), name="tiny")
    report = export_drafter(
        source=source, out=tmp_path / "out", target=tiny, settings=ExportSettings(reader="speculators", dtype="float32")
    )
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert settings["verifier"] == {"name_or_path": str(TINY_FOLDER), "architectures": ["Qwen3ForCausalLM"]}
    assert str(TINY_FOLDER) in report.command


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


@pytest.mark.parametrize("reader", ["zlab", "vllm", "sglang", "llama.cpp"])
def test_no_server_is_named_for_a_layout_that_none_drafts(tmp_path: Path, reader: Reader) -> None:
    source = make_run(tmp_path / "run", sample_from_anchor=True)
    with pytest.raises(ExportError, match="--for speculators"):
        export_drafter(
            source=source, out=tmp_path / "out", target=make_target(), settings=ExportSettings(reader=reader)
        )
    report = export_drafter(
        source=source, out=tmp_path / "out", target=make_target(), settings=ExportSettings(reader="speculators")
    )
    assert report.command.startswith("draftline evaluate")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve" not in card
    assert "no server is known" in card
    reduced = SMALL.model_copy(update={"sample_from_anchor": True, "draft_vocab_size": 12})
    with pytest.raises(ExportError, match="--for speculators"):
        serving_command(reader, Serving("drafter", "a/target", "bfloat16", reduced))


def test_the_card_says_what_the_drafter_is_and_how_it_was_made(tmp_path: Path) -> None:
    evaluation, audit = tmp_path / "evaluation.json", tmp_path / "audit.json"
    rates = {"acceptance_rate_by_position": [0.8, 0.5], "conditional_acceptance_rate_by_position": [0.8, 0.625]}
    evaluation.write_text(json.dumps({"acceptance_length": 2.3, "greedy_equal": 1.0, "speedup": None, **rates}))
    finding = {"code": "LOS030", "severity": "warning", "title": "gamma | block", "evidence": "x", "fix": "y"}
    audit.write_text(json.dumps({"findings": [finding], "checks": [{"code": "LOS030"}, {"code": "DRF010"}]}))
    export_drafter(
        source=make_run(tmp_path / "run", **ALL_SLIDING),
        out=tmp_path / "out",
        target=make_target(),
        settings=ExportSettings(
            reader="vllm", target_path="a/target", results=Results(evaluation=evaluation, audit=audit)
        ),
    )
    _, front, card = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["base_model"] == "a/target"
    assert fields["model-index"][0]["results"][0]["metrics"][0]["value"] == 2.3
    for words in (
        "| data | talks, fingerprint f1n9er |",
        "| steps | 12 |",
        "| tokens seen | 3456 |",
        "| weights | bfloat16 |",
        ": safe in float16",
        "with a window of 6 tokens, causal inside a block",
        "| acceptance length (with bonus) | 2.300 |",
        "| 2 | 0.500 | 0.625 |",
        "ran 2 checks and reported 1 findings",
        "| LOS030 | warning | gamma \\| block | allowed |",
        "Trained although the audit had found LOS030",
        "forward",
        "### vllm",
        "### llama.cpp",
    ):
        assert words in card, words
    assert str(tmp_path) not in card.replace(str(tmp_path / "out"), "")


def test_the_card_tells_what_the_audit_of_the_run_had_found(tmp_path: Path) -> None:
    source = make_run(tmp_path / "run")
    (source / "audit.json").write_text(json.dumps({"findings": [], "checks": [{"code": "LOS030"}]}))
    export_drafter(source=source, out=tmp_path / "out", target=make_target())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Before the first step `draftline audit` ran 1 checks and reported 0 findings" in card
    assert f"`draftline audit {tmp_path / 'out'} --target small-target`" in card


def test_the_modes_of_the_training_data_go_with_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, target = make_run(tmp_path / "run"), make_target()
    assert trained_mode(run) is None  # its data is gone
    meta = {"template_options": {"enable_thinking": True}}
    report = {"thinking": {"with_reasoning": 9}, "system_prompts": {"none": 9}, "template_options": {"{}": 9}}
    data = SimpleNamespace(meta=meta, report=report, fingerprint="f1n9er")
    monkeypatch.setattr(PreparedDataset, "open", lambda _path: data)
    known = trained_mode(run)
    assert known == ChatMode({"with_reasoning": 9}, {"none": 9}, {'{"enable_thinking": true}': 9})
    export_drafter(source=run, out=tmp_path / "out", target=target, settings=FLOAT32)
    export_drafter(source=tmp_path / "out", out=tmp_path / "again", target=target, settings=FLOAT32)
    data.fingerprint = "other"
    assert trained_mode(run) is None
    assert trained_mode(tmp_path / "out") == trained_mode(tmp_path / "again") == known
    card = (tmp_path / "again" / "README.md").read_text()
    assert "| answers | 100% with_reasoning |" in card
    for text in ("# my own card\n", "---\ntags: [x]\n---\n", "---\ndraftline: 3\n---\n"):
        (tmp_path / "out" / "README.md").write_text(text)
        assert trained_mode(tmp_path / "out") is None


@pytest.mark.parametrize("form", CONTRACTS)
def test_imported_drafters_are_the_same_drafters(tmp_path: Path, form: str) -> None:
    model = make_drafter()
    source = write(tmp_path / "foreign", CONTRACTS[form](), tensors_of(form, model))
    target = make_target() if form == "speculators" else None
    report = import_drafter(source=source, out=tmp_path / "out", target=target)
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == load_drafter(source, target=target).config
    assert loaded.format == report.format == ("speculators" if form == "deepspec" else "zlab")
    assert same_weights(model, load_file(tmp_path / "out" / "model.safetensors"))


def test_an_import_keeps_the_stored_dtype(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of("zlab", make_drafter()).items()}
    source = write(tmp_path / "foreign", CONTRACTS["zlab"]() | {"dtype": "bfloat16"}, tensors)
    assert import_drafter(source=source, out=tmp_path / "out").dtype == "bfloat16"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(stored[name].equal(tensor) for name, tensor in tensors.items())


def test_activations_beyond_float16_are_reported(tmp_path: Path) -> None:
    model = make_drafter()
    model.norm.weight.data[0] = 3e5
    source = write(tmp_path / "foreign", CONTRACTS["zlab"](), tensors_of("zlab", model))
    report = export_drafter(source=source, out=tmp_path / "out", target=make_target(), settings=FLOAT32)
    assert any(note.startswith("Not float16-safe") for note in report.notes)
    assert "NOT safe in float16" in (tmp_path / "out" / "README.md").read_text()


def test_bad_input_is_refused_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run, target = make_run(tmp_path / "run", **MIX), make_target()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "text.json").write_text("{}")
    before = sorted(path.name for path in tmp_path.iterdir())
    for_speculators = ExportSettings(reader="speculators", dtype="float32")
    with_text = ExportSettings(results=Results(evaluation=tmp_path / "text.json"))
    with_absent = ExportSettings(results=Results(audit=tmp_path / "absent.json"))
    cases: list[tuple[type[Exception], dict[str, Any], str]] = [
        (ExportError, {"settings": for_speculators}, "no speculators form that vLLM runs right"),
        (TargetError, {"target": make_target(num_hidden_layers=8)}, "layers 7"),
        (StorageError, {"out": tmp_path / "full"}, "full"),
        (CheckpointError, {"source": tmp_path / "nowhere"}, "nowhere"),
        (CheckpointError, {"settings": with_text}, "acceptance_length"),
        (CheckpointError, {"settings": with_absent}, "absent"),
    ]
    for kind, changes, words in cases:
        arguments = {"source": run, "out": tmp_path / "out", "target": target, "settings": FLOAT32} | changes
        with pytest.raises(kind, match=words) as caught:
            export_drafter(**arguments)
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    for unknown in {"reader": "vlm"}, {"dtype": "float16"}:
        with pytest.raises(ValidationError, match=r"Input should be ('zlab'|'float32')"):
            ExportSettings.model_validate(unknown)
