"""From a run or a foreign folder to a folder that a program serves, with its card and its command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file

from draftline import cli
from draftline.config import TargetConfig
from draftline.errors import CheckpointError, ExportError, StorageError, TargetError
from draftline.formats.exporting import export_drafter, import_drafter, target_of_export
from draftline.formats.load import load_drafter
from draftline.formats.programs import READERS, Reader, Serving, serving_command
from draftline.options import ExportSettings, Results
from draftline.targets.model import TINY_FOLDER, save_target
from tests.formats.checkpoints import CONTRACTS, tensors_of, write
from tests.formats.drafters import (
    MIX,
    SMALL,
    make_drafter,
    make_run,
    make_target,
    same_weights,
)

FLOAT32 = ExportSettings(dtype="float32")


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


def test_what_an_import_leaves_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "foreign", CONTRACTS["deepspec"](), tensors_of("deepspec", make_drafter()))
    assert cli.run(["import", str(folder), "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    assert output.out.strip() == str(tmp_path / "out")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert f"{name} is left out: the target's own is used, and was not compared" in output.err
