"""Writing: whole or not at all; where results may be written, and what they never replace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread

import pytest

from draftline import cli
from draftline.commands.options import new_result
from draftline.errors import StorageError
from draftline.storage import (
    check_writable,
    keep_apart,
    new_folder,
    new_json,
    new_page,
    new_pictures,
    point_link,
    remove_folder,
    remove_leftovers,
    unused_folder,
    write_json,
    write_text,
)
from draftline.train.run_folder import IDENTITY_FILE, STATE_FILE
from tests.compare.synthetic_runs import STEPS, write_csv


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "x").read_text() == "1"
    with pytest.raises(StorageError), new_folder(tmp_path / "b") as folder:
        (folder / "missing" / "x").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_is_replaced_or_left(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old")
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"
    with pytest.raises(StorageError, match="cannot be written") as caught:
        write_text(tmp_path / "missing" / "x", "y")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_places_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("1")
    for used, reason in ((tmp_path, "not empty"), (tmp_path / "x", "is a file")):
        with pytest.raises(StorageError, match=reason):
            unused_folder(used)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StorageError, match="current folder"):
        unused_folder(Path("."))
    unused_folder(Path("new"))
    for place in (tmp_path, tmp_path / "x" / "y.json"):
        with pytest.raises(StorageError, match="cannot be written"):
            check_writable(place)
    check_writable(tmp_path / "x")
    check_writable(tmp_path / "not" / "yet" / "y.json")


def test_a_link_moves_from_one_folder_to_the_next(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "inside" / name).mkdir(parents=True)
        point_link(tmp_path / "last", tmp_path / "inside" / name)
        assert (tmp_path / "last").resolve() == tmp_path / "inside" / name
    (tmp_path / "moved").mkdir()
    (tmp_path / "last").rename(tmp_path / "moved" / "last")
    (tmp_path / "inside").rename(tmp_path / "moved" / "inside")
    assert (tmp_path / "moved" / "last").resolve().name == "b"


def test_removal_and_leftovers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    remove_folder(tmp_path / "a")
    remove_folder(tmp_path / "a")
    (tmp_path / ".unfinished-b").mkdir()
    (tmp_path / ".unfinished-c").write_text("half")
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_new_folder_are_as_readable_as_the_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new") as folder:
        (folder / "weights").write_text("1")
        (folder / "weights").chmod(0o600)
    assert (tmp_path / "new" / "weights").stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o666


def test_an_older_result_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a.json", "a.html", "a.HTM", "a", "data.csv", "prompts.jsonl", "config.yaml", "model.safetensors"):
        (tmp_path / name).write_text("1")
    assert [new_json(tmp_path / name) for name in ("a.json", "a", "new.txt")]
    assert [new_page(tmp_path / name) for name in ("a.html", "a.HTM", "a")]
    for name in ("a.html", "data.csv", "prompts.jsonl", "config.yaml", "model.safetensors"):
        with pytest.raises(StorageError, match=r"exists and is not a \.json file"):
            new_json(tmp_path / name)
    for name in ("a.json", "data.csv"):
        with pytest.raises(StorageError, match=r"exists and is not a \.html file"):
            new_page(tmp_path / name)
    for name, place in ((IDENTITY_FILE, new_result), (STATE_FILE, new_json), ("tokenizer.json", new_json)):
        (tmp_path / name).write_text("{}")
        with pytest.raises(StorageError, match="belongs to what lies in"):
            place(tmp_path / name)
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
