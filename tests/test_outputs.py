"""Results: where they may be written, and what they never replace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread

import pytest

from draftline import cli
from draftline.errors import StorageError
from draftline.outputs import keep_apart, new_json, new_page, new_pictures, write_json
from tests.compare.synthetic_runs import STEPS, write_csv


def test_an_older_result_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a.json", "a.html", "a.HTM", "a", "data.csv", "prompts.jsonl", "config.yaml", "model.safetensors"):
        (tmp_path / name).write_text("1")
    assert [new_json(tmp_path / name) for name in ("a.json", "a", "new.txt")]
    assert [new_page(tmp_path / name) for name in ("a.html", "a.HTM", "a")]
    for name in ("a.html", "data.csv", "prompts.jsonl", "config.yaml", "model.safetensors"):
        with pytest.raises(StorageError, match=r"exists and is no \.json file"):
            new_json(tmp_path / name)
    for name in ("a.json", "data.csv"):
        with pytest.raises(StorageError, match=r"exists and is no \.html file"):
            new_page(tmp_path / name)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(StorageError, match="belongs to what lies in"):
        new_json(tmp_path / "run.json")
    with pytest.raises(StorageError, match="is not a file"):
        new_json(Path("-"))


def test_pictures_are_png_files(tmp_path: Path) -> None:
    assert [new_pictures(tmp_path / name) for name in ("x.png", "x.PNG", "folder", "v1.2")]
    for name in ("x.jpg", "x.SVG"):
        with pytest.raises(StorageError, match="pictures are PNG files"):
            new_pictures(tmp_path / name)


def test_what_is_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep_apart([tmp_path / "a.json", None], ["b.json", None])
    with pytest.raises(StorageError, match="is read by this command"):
        keep_apart([None, Path("a.json")], [tmp_path / "a.json"])
    with pytest.raises(StorageError, match="for two results"):
        keep_apart([Path("a.json"), tmp_path / "a.json"], [])
    keep_apart([Path("/dev/null"), Path("/dev/null")], [])


def test_commands_keep_their_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, other = (write_csv(tmp_path / name, STEPS / 1000) for name in ("log.csv", "other"))
    asked = tmp_path / "prompts.json"
    asked.write_text('{"turns": ["hello"]}\n')
    for words in (
        ["compare", str(log), str(other), "--html", str(log)],
        ["compare", str(log), str(other), "--json", str(other)],
        ["compare", str(log), str(other), "--html", str(tmp_path / "new"), "--json", str(tmp_path / "new")],
        ["evaluate", "--target", "tiny", "--draft", "d", "--prompts", str(asked), "--json", str(asked)],
        ["evaluate", "--target", "tiny", "--draft", "d", "--task", f"gsm8k={asked}", "--json", str(asked)],
        ["prepare", "--target", "tiny", "--data", str(asked), "--out", str(tmp_path / "d"), "--json", str(asked)],
        ["report", str(tmp_path), "--evaluation", str(other), "--out", str(other)],
    ):
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert cli.run(words) == 2
        assert "name another file" in (line := capsys.readouterr().err) or "its own file" in line
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_json(new_json(pipe), {"a": 1})
    reader.join(timeout=10)
    assert json.loads(got[0]) == {"a": 1}
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    ends = os.pipe()
    write_json(new_json(Path(f"/dev/fd/{ends[1]}")), [1])  # what a shell gives for >(program)
    assert json.loads(os.read(ends[0], 100)) == [1]
    for end in ends:
        os.close(end)
