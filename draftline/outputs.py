"""Where a command writes its results: checked before the work begins, so that nothing of the user's is replaced.

A result may replace an older result, never a file that ends otherwise than results do, and never what the same command
reads or writes besides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftline.errors import StorageError
from draftline.storage import check_unused, check_writable, is_stream, storage_errors, write_bytes

PICTURES = {".jpg", ".jpeg", ".svg", ".pdf", ".webp", ".gif", ".eps", ".tif", ".tiff"}
"""What somebody might expect to get instead of a PNG file."""

OWNED = {"config.json", "generation_config.json", "meta.json", "report.json", "tokenizer.json"}
"""JSON files that models, drafters and prepared data consist of; runs have more."""


def new_folder(path: Path) -> Path:
    """A place for a folder; raises as `storage.check_unused`."""
    check_unused(path)
    return path


def new_json(path: Path | None) -> Path | None:
    """A place for a JSON file, or a pipe; raises as `_check_file`."""
    return _check_file(path, (".json",))


def new_page(path: Path | None) -> Path | None:
    """A place for a page; raises as `_check_file`."""
    return _check_file(path, (".html", ".htm"))


def new_pictures(path: Path | None) -> Path | None:
    """A place for one PNG file, or a folder for several.

    Raises:
        StorageError: the name is that of another kind of picture, or nothing can be written there.
    """
    if path is None:
        return None
    if path.suffix.lower() in PICTURES:
        raise StorageError(f"{path}: pictures are PNG files: name a .png file, or a folder for one file each")
    check_writable(path if path.suffix.lower() == ".png" else path / "picture.png")
    return path


def keep_apart(written: Iterable[Path | None], read: Iterable[str | Path | None]) -> None:
    """Refuse to write over what is read, and to write two results into one file.

    Raises:
        StorageError: naming the place.
    """
    read_places = {Path(place).resolve() for place in read if place}
    places: set[Path] = set()
    for path in written:
        if path is None or is_stream(path):
            continue
        if path.resolve() in read_places:
            raise StorageError(f"{path} is read by this command and would be replaced: name another file to write")
        if path.resolve() in places:
            raise StorageError(f"{path} is named for two results: give each its own file")
        places.add(path.resolve())


def write_json(path: Path | None, value: Any) -> None:
    """Write a result as JSON; nothing without a path."""
    if path is not None:
        write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, and the folders above it; raises as `storage.write_bytes`."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.encode("utf-8") if isinstance(content, str) else content)


def _check_file(path: Path | None, suffixes: tuple[str, ...]) -> Path | None:
    """Refuse a place that cannot be written, or that holds what is not a result of this kind."""
    from draftline.train.run_folder import IDENTITY_FILE, STATE_FILE  # slow to load, and needed late

    if path is None:
        return None
    if path.name == "-":
        raise StorageError("- is not a file: name one; /dev/stdout puts the result behind the table")
    check_writable(path)
    if path.name in {*OWNED, IDENTITY_FILE, STATE_FILE} and path.exists():
        raise StorageError(f"{path} belongs to what lies in {path.absolute().parent}: name another file")
    if path.is_file() and not is_stream(path) and path.suffix.lower() not in (*suffixes, ""):
        raise StorageError(f"{path} exists and is no {suffixes[0]} file: name another file, so that it is not lost")
    return path
