"""Rows from files, folders, patterns, standard input and Hugging Face data sets, one at a time.

Nothing is read whole: text is read line by line (also from gzip and zstd), a JSON array element by element, parquet in
batches of rows. A fault inside a file is a row with a `fault`, so that reading goes on and the fault is counted.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftline.data.rows import RawRow
from draftline.errors import DataError

STDIN = "-"
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")
_PARQUET_ROWS = 256
_CHUNK = 1 << 20


def resolve_sources(names: Sequence[str]) -> list[str | Path]:
    """Files for paths, folders and patterns; standard input and names of hub data sets as they are."""
    sources: list[str | Path] = []
    for name in names:
        path = Path(name)
        if name == STDIN:
            sources.append(name)
        elif path.is_dir():
            sources += [path] if (path / "state.json").exists() else _files_of(path)
        elif path.exists():
            sources.append(path)
        elif has_magic(name):
            found = sorted(Path(item) for item in glob(name, recursive=True))
            if not found:
                raise DataError(f"no file matches {name!r}; check the pattern, and quote it against the shell")
            sources += found
        elif _is_hub_name(name):
            sources.append(name)
        else:
            raise DataError(f"the data file {name!r} does not exist; give a file, a folder, a pattern or a hub name")
    return sources


def _files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"the folder {folder} has no data file; expected one of {', '.join(_SUFFIXES)}")
    return files


def _is_hub_name(name: str) -> bool:
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and Path(name).suffix not in _SUFFIXES


def read_rows(sources: Sequence[str | Path], split: str = "train") -> Iterator[RawRow]:
    """All rows of all sources; `split` is that of Hugging Face data sets."""
    done = 0
    for source in sources:
        if isinstance(source, Path) and source.is_file():
            yield from _read_file(source, done)
            done += source.stat().st_size
        elif source == STDIN:
            yield from _read_text(sys.stdin.buffer, "stdin", done)
        else:
            yield from _read_dataset(source, split, done)


def total_bytes(sources: Sequence[str | Path]) -> int | None:
    """Size of all sources, if they are all files."""
    if all(isinstance(source, Path) and source.is_file() for source in sources):
        return sum(Path(source).stat().st_size for source in sources)
    return None


def _read_file(path: Path, done: int) -> Iterator[RawRow]:
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        try:
            if magic == b"PAR1":
                yield from _read_parquet(path, done)
            elif magic[:2] == b"\x1f\x8b":
                with io.BufferedReader(gzip.GzipFile(fileobj=file)) as text:
                    yield from _read_text(text, str(path), done, file)
            elif magic == b"\x28\xb5\x2f\xfd":
                with io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd")) as text:
                    yield from _read_text(text, str(path), done, file)
            else:
                yield from _read_text(file, str(path), done, file)
        except (EOFError, OSError, zlib.error, pa.ArrowException):
            # What was read so far stays; the rest of this file is one counted fault.
            yield RawRow(str(path), 0, fault="damaged_file", bytes_read=done)


def _read_parquet(path: Path, done: int) -> Iterator[RawRow]:
    size, file = path.stat().st_size, pq.ParquetFile(path)
    total, line = max(1, file.metadata.num_rows), 0
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
        for value in batch.to_pylist():
            line += 1
            yield RawRow(str(path), line, value, bytes_read=done + size * line // total)


def _read_dataset(source: str | Path, split: str, done: int) -> Iterator[RawRow]:
    # Imported here because it costs seconds, and files do not need it.
    import datasets

    try:
        if isinstance(source, Path):
            loaded: Any = datasets.load_from_disk(str(source))
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source, split=split, streaming=True)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot load the data set {str(source)!r}, split {split!r}: {reason}") from error
    for line, value in enumerate(loaded, start=1):
        yield RawRow(str(source), line, value, bytes_read=done)


def _read_text(stream: IO[bytes], source: str, done: int, file: IO[bytes] | None = None) -> Iterator[RawRow]:
    """Rows of JSONL, or of one JSON array or object that runs over several lines."""

    def position() -> int:
        return done + (file.tell() if file is not None else 0)

    lines = _lines(stream)
    first, number = next(((line, n) for n, line in enumerate(lines, start=1) if line.strip()), (b"", 0))
    if first.strip() in (b"[", b"{") or (first.lstrip()[:1] == b"[" and not _is_json(first)):
        yield from _read_array(first, lines, source, number, position)
        return
    value, fault = _load(first)
    after = list(islice(lines, 1))
    if not after and _is_array_of_rows(value):
        yield from (RawRow(source, number, item, bytes_read=position()) for item in value)
        return
    if first.strip():
        yield RawRow(source, number, value, fault, position())
    for later, line in enumerate(chain(after, lines), start=number + 1):
        if line.strip():
            yield RawRow(source, later, *_load(line), position())


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines as UTF-8 without a byte order mark; UTF-16 is recoded."""
    head = stream.readline()
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = (head + stream.read()).decode("utf-16", errors="replace")
        yield from (line.encode() for line in text.splitlines(keepends=True))
        return
    yield head.removeprefix(b"\xef\xbb\xbf")
    yield from stream


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _is_array_of_rows(value: Any) -> bool:
    """Whether a lone line is a whole file of rows; a list of messages is one row."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and not {"role", "from", "speaker"} & item.keys() for item in value)


def _load(line: bytes) -> tuple[Any, str | None]:
    if b"\0" in line:
        return None, "nul_character"
    try:
        return json.loads(line), None
    except UnicodeDecodeError:
        return None, "not_utf8"
    except (ValueError, RecursionError):
        return None, "not_json"


def _read_array(first: bytes, lines: Iterator[bytes], source: str, number: int, position: Any) -> Iterator[RawRow]:
    """Elements of a JSON array that runs over lines, or one object that does; each as soon as it is complete."""
    decoder, buffer, start = json.JSONDecoder(), "", number
    inside = False
    for line in chain([first], lines):
        try:
            buffer += line.decode()
        except UnicodeDecodeError:
            yield RawRow(source, number, fault="not_utf8", bytes_read=position())
            return
        number += 1
        while True:
            buffer = buffer.lstrip().removeprefix(",").lstrip() if inside else buffer.lstrip()
            if not inside and buffer.startswith("["):
                inside, buffer = True, buffer[1:]
                continue
            if not buffer or (inside and buffer.startswith("]")):
                break
            # An element that is an object is complete only at a closing brace: trying at others would be quadratic.
            if not buffer.rstrip().rstrip(",]").rstrip().endswith("}"):
                break
            try:
                value, end = decoder.raw_decode(buffer)
            except json.JSONDecodeError as error:
                if error.pos < len(buffer.rstrip()):  # no further line can mend it
                    yield RawRow(source, start, fault="damaged_file", bytes_read=position())
                    return
                break
            except RecursionError:
                yield RawRow(source, start, fault="damaged_file", bytes_read=position())
                return
            yield RawRow(source, start, value, bytes_read=position())
            buffer, start = buffer[end:], number
    if buffer.strip() not in ("", "]"):
        yield RawRow(source, start, fault="not_json", bytes_read=position())
