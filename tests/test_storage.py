"""Writing: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import StorageError
from draftline.storage import (
    check_unused,
    check_writable,
    new_folder,
    point_link,
    remove_folder,
    remove_leftovers,
    write_text,
)


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
            check_unused(used)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(StorageError, match="current folder"):
        check_unused(Path("."))
    check_unused(Path("new"))
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
