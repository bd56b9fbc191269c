"""Every way to start, and what ends with which status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftline import cli


def test_bad_places_for_results_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("draftline.targets.model.load_target", lambda _config: pytest.fail("loaded"))
    pair = ["--target", "tiny", "--draft", "d"]
    assert cli.run(["generate", *pair, "--prompt", "x", "--json", str(tmp_path)]) == 2
    assert "name a file" in capsys.readouterr().err
    for words in (["--prompt", "x", "y"], []):
        assert cli.run(["generate", *pair, *words]) == 2
        assert "generate answers one prompt" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("export", "import"):
        assert cli.run([command, "source", "--target", "tiny", "--out", str(tmp_path)]) == 2
        assert "not empty" in capsys.readouterr().err


def test_of_ranks_with_the_same_wrong_word_one_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.run(["train", "--nonsense"]) == 2
        said.append(capsys.readouterr().err)
    assert said == ["draftline: No such option: --nonsense (see draftline --help)\n", ""]


@pytest.mark.parametrize(
    "start", [["-m", "draftline"], ["-m", "draftline.cli"], ["-c", "from draftline.cli import main; main()"]]
)
def test_every_way_to_start_starts_it(start: list[str], tmp_path: Path) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *start, *words], capture_output=True, text=True, check=False)

    shown = call("report", "--help")
    assert shown.returncode == 0
    assert "Usage: draftline report" in shown.stdout
    refused = call("report", str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"draftline: {tmp_path} is not a run")
    assert not refused.stdout


def test_commands_are_listed_and_what_is_not_one_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in cli.COMMANDS)
    assert cli.run([]) == 2
    assert capsys.readouterr().out.strip() == listed.strip()
    assert cli.run(["trian"]) == 2
    assert "trian" in (line := capsys.readouterr().err)
    assert line.count("\n") == 1
