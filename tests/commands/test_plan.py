"""`draftline plan`: from a configuration alone, with a table of devices or with this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline import cli
from draftline.plan.devices import ACCELERATORS

LENGTH = ["--mean-length", "1000", "--conversations", "50"]


def planned(tmp_path: Path, *words: str) -> dict[str, object]:
    out = tmp_path / "plan.json"
    assert cli.run(["plan", *words, "--json", str(out)]) == 0
    result: dict[str, object] = json.loads(out.read_text())
    return result


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    """The embedded target's configuration in a folder without anything else."""
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "config.json").write_text((Path(cli.__file__).parent / "assets" / "tiny" / "config.json").read_text())
    return folder


def test_a_configuration_is_enough(tmp_path: Path, config_alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = planned(tmp_path, "--target", str(config_alone), *LENGTH, "--accelerator", "h100")
    file = planned(tmp_path, "--target", str(config_alone / "config.json"), *LENGTH, "--accelerator", "h100")
    assert {**folder, "target": ""} == {**file, "target": ""}
    shown = capsys.readouterr().out
    for text in ("largest: ", "lowers it", "target loops per drafter", "40% of 989 TFLOP/s", "bytes per token"):
        assert text in shown
    assert max(map(len, shown.splitlines())) < 200


def test_every_accelerator_has_its_figures_and_their_source(tmp_path: Path) -> None:
    for name, sheet in ACCELERATORS.items():
        assert 1e14 < sheet.peak < 1e16, name
        assert 1e11 < sheet.bytes_per_second < 2e13, name
        assert 1e10 < sheet.memory_bytes < 1e12, name
        assert "heet" in sheet.source or "white paper" in sheet.source, name
    faster = planned(tmp_path, "--target", "tiny", *LENGTH, "--accelerator", "h100", "--efficiency", "0.8")
    slower = planned(tmp_path, "--target", "tiny", *LENGTH, "--accelerator", "h100", "--efficiency", "0.4")
    assert faster["target_seconds"] == pytest.approx(float(str(slower["target_seconds"])) / 2)


def test_this_machine_is_measured(tmp_path: Path) -> None:
    words = ["train.tokens_per_row=256", "train.num_anchors=8", "drafter.num_layers=1", "drafter.num_captured_layers=2"]
    result = planned(tmp_path, "--target", "tiny", "--mean-length", "60", "--conversations", "9", *words)
    assert result["device"] == "this machine"
    assert float(str(result["train_seconds"])) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "tiny"], "give --data, or --mean-length"),
        (["--target", "tiny", *LENGTH, "--accelerator", "abacus"], "--accelerator abacus: not in the table"),
        (["--target", "nowhere/at/all", *LENGTH], "is not a folder"),
    ],
)
def test_what_is_missing_is_said_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", *words]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_configuration_without_sizes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": "many"}')
    assert cli.run(["plan", "--target", str(tmp_path), *LENGTH, "--accelerator", "h100"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"draftline: target {tmp_path}")
    assert line.count("\n") == 1
