"""Writing so that whatever happens, what is on disk is the old state or the new one, never a half, and nobody else's.

Files and folders are written under a temporary name beside their place, synced to the disk, and renamed; a rename
within one folder is atomic. Whatever the operating system refuses becomes a one-line `StorageError`.

Where a command writes its results is checked before the work begins. A result may replace an older result, never a file
that ends otherwise than results do, and never what the same command reads or writes besides.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from draftline.errors import StorageError

TEMPORARY_PREFIX = ".unfinished-"
"""Names that a crash may leave behind; they are never read, and removed by `remove_leftovers`."""

PICTURES = {".jpg", ".jpeg", ".svg", ".pdf", ".webp", ".gif", ".eps", ".tif", ".tiff"}
"""What somebody might expect to get instead of a PNG file."""

OWNED = {
    "config.json",
    "generation_config.json",
    "meta.json",
    "report.json",
    "state.json",
    "tokenizer.json",
}
"""JSON files that models, drafters, prepared data and checkpoints consist of; a run has one more."""


def unused_folder(path: Path) -> Path:
    """A place for a new folder; refused if it is in use, before anything expensive happens.

    Raises:
        StorageError: it holds something, is a file, or is the current folder, which cannot be replaced.
    """
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file: name a folder")
    if path.exists() and any(path.iterdir()):
        raise StorageError(f"{path} is not empty: delete it, or name another folder")
    if path.resolve() == Path.cwd():
        raise StorageError(f"{path} is the current folder, which cannot be replaced: name a new folder")
    return path


def new_json(path: Path | None, owned: Collection[str] = ()) -> Path | None:
    """A place for a JSON file, or a pipe, but for names that are `owned` by something else; raises as `_new_file`."""
    return _new_file(path, (".json",), owned)


def new_page(path: Path | None) -> Path | None:
    """A place for a page; raises as `_new_file`."""
    return _new_file(path, (".html", ".htm"))


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


def _new_file(path: Path | None, suffixes: tuple[str, ...], owned: Collection[str] = ()) -> Path | None:
    """Refuse a place that cannot be written, or that holds what is not a result of this kind."""
    if path is None:
        return None
    if path.name == "-":
        raise StorageError("- is not a file: name one; /dev/stdout puts the result behind the table")
    check_writable(path)
    if path.name in {*OWNED, *owned} and path.exists():
        raise StorageError(f"{path} belongs to what lies in {path.absolute().parent}: name another file")
    if path.is_file() and not is_stream(path) and path.suffix.lower() not in (*suffixes, ""):
        raise StorageError(f"{path} exists and is not a {suffixes[0]} file: name another file, so that it is not lost")
    return path


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before anything expensive happens; an older file may be replaced.

    Raises:
        StorageError: it is a folder, or no file can be made there.
    """
    place = path if is_stream(path) else next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not (place == path or place.is_dir()) or not os.access(place, os.W_OK):
        raise StorageError(f"{path} cannot be written: name a file in a folder of yours")


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a terminal or a device: something to write to, and never to replace."""
    if str(path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/")):
        return path.exists()  # names of open files, whatever these are
    return path.exists() and not path.is_file() and not path.is_dir()


def without_nan(value: Any) -> Any:
    """JSON has no NaN: None says that there was nothing to divide by. Dictionaries and lists are copied."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reason_of(error: BaseException) -> str:
    """Why something could not be read or written, in a few words on one line."""
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(words.split())[:120]


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system or safetensors reports while `path` is written into a `StorageError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path} cannot be written ({reason_of(error)}): free space or choose another folder"
        ) from error


def write_json(path: Path | None, value: Any) -> None:
    """Write a result as JSON; nothing without a path."""
    if path is not None:
        write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, and the folders above it; raises as `write_bytes`."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.encode("utf-8") if isinstance(content, str) else content)


def write_text(path: Path, text: str) -> None:
    """Write or replace one text file; raises as `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace one file; what is not a file but a pipe or a device is written to as it is.

    Raises:
        StorageError: the disk is full or refuses; an older file of that name is intact.
    """
    if is_stream(path):
        with storage_errors(path), path.open("ab") as stream:
            stream.write(content)
        return
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    with storage_errors(path):
        try:
            temporary.write_bytes(content)
            _sync(temporary)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file to write; it replaces `path` when the block ends without an exception.

    Raises:
        StorageError: the disk is full or refuses; no trace is left, and an older file of that name is intact.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    with storage_errors(path):
        try:
            yield temporary
            temporary.chmod(path.parent.stat().st_mode & 0o666)  # as in `new_folder`
            _sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it takes the name `path` when the block ends without an exception.

    Raises:
        StorageError: the disk is full or refuses; no trace is left.
    """
    path = path.absolute()
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    with storage_errors(path):
        remove_folder(temporary)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.iterdir():
                if file.is_file():  # safetensors writes for the owner alone; a server may run as another user
                    file.chmod(temporary.stat().st_mode & 0o666)
                _sync(file)
            _sync(temporary)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(path.parent)


def move(source: Path, destination: Path) -> None:
    """Rename within one file system, replacing a file of that name; on the disk when this returns."""
    with storage_errors(destination):
        source.replace(destination)
        _sync(destination.parent)


def point_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, replacing an older one in one step."""
    temporary = link.with_name(TEMPORARY_PREFIX + link.name)
    with storage_errors(link):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        temporary.replace(link)
        _sync(link.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder; under its own name it is either complete or gone."""
    if not path.exists():
        return
    doomed = path.with_name(TEMPORARY_PREFIX + "removed-" + path.name)
    with storage_errors(path):
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what an earlier crash left unfinished in a folder."""
    for path in folder.glob(TEMPORARY_PREFIX + "*"):
        with storage_errors(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
