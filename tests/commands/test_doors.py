"""What can be refused without torch is refused before torch is loaded: someone waits for that line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftline.cli import COMMANDS

REFUSED = [
    (["train", "--target", "tiny", "--data", "nope", "--out", "run"], "nope is not a complete prepared data set"),
    (["train", "--target", "./nope", "--data", "nope", "--out", "run"], "target ./nope is not a folder"),
    (["train", "--target", "tiny", "data.path=nope", "--out", "run"], "nope is not a complete prepared data set"),
    (["train", "target.name=/nope", "--out", "run"], "target /nope is not a folder"),
    (["train", "--target", "tiny", "--out", "run", "train.nope=3"], "train.nope is not a setting"),
    (["train", "--target", "tiny", "--out", "run", "train.epochs=many"], "train.epochs"),
    (["train", "--target", "tiny", "--out", "run", "--init-from", "nope"], "nope is not a folder"),
    (["train", "--target", "tiny", "--out", "run", "--recipe", "nope"], "nope"),
    (["train", "--out", "run", "--resume"], "nothing says what to train for"),
    (["audit", "nope"], "nope is not a folder"),
    (["audit", "--target", "tiny", "--data", "nope"], "nope is not a complete prepared data set"),
    (["prepare", "--target", "tiny", "--data", "nope.jsonl", "--out", "data"], "'nope.jsonl' does not exist"),
    (["prepare", "--target", "./nope", "--data", "-", "--out", "data"], "target ./nope is not a folder"),
    (["inspect", "nope"], "nope is not a complete prepared data set"),
    (["evaluate", "--target", "tiny", "--draft", "nope", "--prompts", "a.jsonl"], "'a.jsonl' does not exist"),
    (["generate", "--target", "tiny", "--draft", "nope", "hello"], "nope is not a folder"),
    (["export", "nope", "--out", "drafter"], "nope is not a folder"),
    (["import", "nope", "--out", "drafter"], "nope is not a folder"),
    (["verify", "nope", "--base-url", "http://localhost:1/v1"], "nope has no proof"),
    (["quickstart", "--out", "."], ". holds something that is not a quickstart"),
    (["compare", "nope", "nope2"], "nope"),
    (["report", "nope"], "nope"),
]

WITHOUT = """
import sys
from draftline.cli import run
slow = {"torch", "transformers"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in slow, f"{name} was loaded"
sys.meta_path.insert(0, Refuse())
sys.exit(run(sys.argv[1:]))
"""


def called(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process in which torch and transformers cannot be imported."""
    (folder / "something").touch()
    words = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_wrong_words_are_refused_before_torch_is_loaded(words: list[str], line: str, tmp_path: Path) -> None:
    result = called(words, tmp_path)
    assert result.returncode in {1, 2}
    assert line in result.stderr
    assert "was loaded" not in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(command: str, tmp_path: Path) -> None:
    result = called([command, "--help"], tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_command_that_needs_them_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"turns": ["hello"]}\n')
    result = called(["prepare", "--target", "tiny", "--data", "a.jsonl", "--out", "data"], tmp_path)
    assert "transformers was loaded" in result.stderr
