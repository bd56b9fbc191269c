"""Rows from files, folders, patterns, standard input and Hugging Face data sets, one at a time.

Nothing is read whole: text row by row (also from gzip, zstd, bzip2 and xz), parquet in batches of rows. A fault inside
a file is a row with a `fault`, so that reading goes on and the fault is counted.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from draftline.data.json_rows import Read, read_json_rows
from draftline.data.rows import RawRow
from draftline.errors import DataError

STDIN = "-"
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst", ".bz2", ".xz")
_NOT_READ = (".csv", ".tsv", ".xlsx", ".yaml", ".yml", ".zip", ".tar", ".tgz", ".arrow", ".feather")
_SAVED_MARKS = ("state.json", "dataset_dict.json")
"""Files by which a folder that `datasets` saved is known."""
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", *_SAVED_MARKS})
_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
_PARQUET_ROWS = 256
_BLOCK = 1 << 16
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError, pa.ArrowException)


def resolve_sources(names: Sequence[str]) -> list[str | Path]:
    """Files for paths, folders and patterns; standard input, saved data sets and names of hub data sets as they are."""
    sources: list[str | Path] = []
    for name in names:
        path = Path(name)
        if name == STDIN:
            sources.append(name)
        elif path.is_dir():
            sources += [path] if is_dataset(path) else _files_of(path)
        elif path.exists():
            sources.append(path)
        elif has_magic(name):
            found = sorted(path for path in map(Path, glob(name, recursive=True)) if not _is_hidden(path))
            if not found:
                raise DataError(f"no file matches {name!r}; check the pattern, and quote it against the shell")
            sources += [path for path in found if path.is_file() or is_dataset(path)]
        elif _is_hub_name(name):
            sources.append(name)
        else:
            raise DataError(f"the data file {name!r} does not exist; give a file, a folder, a pattern or a hub name")
    for source in sources:
        if isinstance(source, Path) and source.is_file() and source.suffix.lower() in _NOT_READ:
            raise DataError(f"{source}: {source.suffix} files are not read; write it as JSONL, one object a line")
    return sources


def is_dataset(source: str | Path) -> bool:
    """Whether a source is a Hugging Face data set, saved in a folder or on the hub, and so has splits."""
    if isinstance(source, str):
        return source != STDIN
    return any((source / name).exists() for name in _SAVED_MARKS)


def _files_of(folder: Path) -> list[Path]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _SUFFIXES
        and path.is_file()
        and path.name not in _DESCRIPTIONS
        and not _is_hidden(path.relative_to(folder))
    )
    if not files:
        raise DataError(f"the folder {folder} has no data file; expected one of {', '.join(_SUFFIXES)}")
    splits = {word for path in files for word in re.split(r"[-._]", path.name.lower())[:1] if word in _SPLITS}
    if len(splits) > 1:
        raise DataError(
            f"the folder {folder} holds the splits {', '.join(sorted(splits))}: "
            f"name the files of one, such as '{folder}/**/{min(splits)}*'"
        )
    return files


def _is_hidden(path: Path) -> bool:
    """Whether a file, or a folder on the way to it, is none of the user's (`._data.jsonl`, `.cache`)."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.parts)


def _is_hub_name(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and Path(name).suffix not in _SUFFIXES


def read_rows(sources: Sequence[str | Path], split: str | None = None, subset: str | None = None) -> Iterator[RawRow]:
    """All rows of all sources; `split` (train if None) and `subset` are those of Hugging Face data sets."""
    done = 0
    for source in sources:
        if is_dataset(source):
            yield from _read_dataset(source, split or "train", subset, done)
        elif source == STDIN:
            yield from _read_stream(cast(io.BufferedReader, sys.stdin.buffer), "stdin", done)
        else:
            yield from _read_file(Path(source), done)
            done += Path(source).stat().st_size


def total_bytes(sources: Sequence[str | Path]) -> int | None:
    """Size of all sources, if they are all files."""
    if all(isinstance(source, Path) and source.is_file() for source in sources):
        return sum(Path(source).stat().st_size for source in sources)
    return None


def _read_file(path: Path, done: int) -> Iterator[RawRow]:
    with path.open("rb") as file:
        if file.peek(4)[:4] == b"PAR1":
            yield from _until_damage(_read_parquet(path, done), str(path))
        else:
            yield from _read_stream(file, str(path), done)


def _read_stream(file: io.BufferedReader, source: str, done: int) -> Iterator[RawRow]:
    seekable = file.seekable()  # a pipe has no position

    def position() -> int:
        return done + (file.tell() if seekable else 0)

    yield from _until_damage(read_json_rows(_unpacked(file), source, position), source)


def _until_damage(rows: Iterator[RawRow], source: str) -> Iterator[RawRow]:
    """The rows before the place where a file cannot be read on; what is lost behind it is one counted fault."""
    last = RawRow(source, 0)
    try:
        for row in rows:
            last = row
            yield row
    except _DAMAGE:
        yield RawRow(source, last.line + 1, fault="damaged_file", bytes_read=last.bytes_read)


def _unpacked(file: io.BufferedReader) -> Read:
    """Reads what a stream holds, packed or not; block by block, so that damage costs nothing before it."""
    magic = file.peek(6)[:6]
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file).read1
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file).read1
    if magic == b"\xfd7zXZ\0":
        return lzma.LZMAFile(file).read1
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        packed = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
        return lambda size: bytes(packed.read(min(size, _BLOCK)))
    return file.read


def _read_parquet(path: Path, done: int) -> Iterator[RawRow]:
    size, file = path.stat().st_size, pq.ParquetFile(path)
    total, line = max(1, file.metadata.num_rows), 0
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
        for value in batch.to_pylist():
            line += 1
            yield RawRow(str(path), line, value, bytes_read=done + size * line // total)


def _read_dataset(source: str | Path, split: str, subset: str | None, done: int) -> Iterator[RawRow]:
    # Imported here because it costs seconds, and files do not need it.
    import datasets

    try:
        if isinstance(source, Path):
            loaded: Any = datasets.load_from_disk(str(source))
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise DataError(f"the data set {source} has the splits {', '.join(loaded)}: name one with --split")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(source, subset, split=split, streaming=True)
        for line, value in enumerate(loaded, start=1):
            yield RawRow(str(source), line, value, bytes_read=done)
    except (OSError, ValueError, KeyError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        # The library ends its messages with the name of an exception in brackets.
        reason = re.sub(r" \(\w+\)$", "", " ".join(str(error).split())[:200])
        raise DataError(f"cannot read the data set {str(source)!r}, split {split!r}: {reason}") from error
