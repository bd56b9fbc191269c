"""Rows from files, folders, patterns, standard input and Hugging Face data sets, one at a time.

Nothing is read whole: text row by row (also from gzip, zstd, bzip2 and xz), parquet in batches of rows. A fault inside
a file is a row with a `fault`, so that reading goes on and the fault is counted.

JSON text is told by its beginning. Lines, one value each, are the default, because a bad line costs only itself there.
Where the first value does not end with its line, or is an array of rows, values are read one after another instead,
each as soon as it is complete; a fault between them cannot be stepped over, so it ends the file. Memory is that of the
longest row.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

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

_CHUNK = 1 << 20
_UTF8_MARK, _UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_MESSAGE_KEYS = frozenset({"role", "from", "speaker"})
_LONGEST_LITERAL = len("-Infinity")
_GAP, _GAP_OR_COMMA = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")

Read = Callable[[int], bytes]
"""Up to so many bytes; none at the end."""


@dataclass(frozen=True)
class RawRow:
    """One row as a reader found it.

    Attributes:
        source: file or data set name.
        line: line number of text files, row number of tables, from 1.
        value: the parsed JSON value; None where `fault` is set.
        fault: why the row cannot be read, as a reason of the report.
        bytes_read: bytes of all inputs behind the reader, for the progress bar.
        sample: which of several sampled answers the row is to get.
    """

    source: str
    line: int
    value: Any = None
    fault: str | None = None
    bytes_read: int = 0
    sample: int = 0

    @property
    def place(self) -> str:
        """Where it was found, for messages."""
        return f"{self.source} line {self.line}"


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
        elif _is_hub_name(name) or Path(_named(name)[0]).is_dir():
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
    name = _named(name)[0]
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and Path(name).suffix not in _SUFFIXES


def _named(name: str) -> tuple[str, str | None, str | None]:
    """Name, subset and split of a data set, from `NAME`, `NAME:SUBSET`, `NAME:SUBSET:SPLIT` or `NAME::SPLIT`."""
    parts = name.split(":")
    if len(parts) > 3 or not parts[0]:
        raise DataError(f"{name!r} is no data set: write NAME, NAME:SUBSET, NAME:SUBSET:SPLIT or NAME::SPLIT")
    found, subset, split = (*parts, "", "")[:3]
    return found, subset or None, split or None


def read_rows(sources: Sequence[str | Path], split: str | None = None, subset: str | None = None) -> Iterator[RawRow]:
    """All rows of all sources.

    `split` (train if None) and `subset` are those of Hugging Face data sets that do not name their own.
    """
    done = 0
    for source in sources:
        if is_dataset(source):
            yield from _read_dataset(source, split, subset, done)
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
    types = {column.name: column.type for column in file.schema_arrow}
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
        for value in batch.to_pylist():
            line += 1
            row = {name: _from_table(item, types[name]) for name, item in value.items()}
            yield RawRow(str(path), line, row, bytes_read=done + size * line // total)


def _from_table(value: Any, kind: Any) -> Any:
    """A value of a table without what only its structure adds.

    A table gives all rows the same fields, and fills those that a row has not with nulls; these go. JSON in a column of
    that type is the user's, and keeps its nulls.
    """
    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json" and isinstance(value, str | bytes):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(kind, pa.BaseExtensionType):
        return _from_table(value, kind.storage_type)
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {name: _from_table(item, fields[name]) for name, item in value.items() if item is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_from_table(item, kind.value_type) for item in value]
    return value


def _from_features(value: Any, feature: Any) -> Any:
    """As `_from_table`, by the features of a Hugging Face data set; unknown ones count as structure."""
    if type(feature).__name__ == "Json":
        try:
            return json.loads(value) if isinstance(value, str | bytes) else value
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict):
        known = feature if isinstance(feature, dict) else {}
        return {name: _from_features(item, known.get(name)) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [_from_features(item, inner) for item in value]
    return value


def _read_dataset(source: str | Path, split: str | None, subset: str | None, done: int) -> Iterator[RawRow]:
    # Imported here because it costs seconds, and files do not need it.
    import datasets

    name, own_subset, own_split = _named(source) if isinstance(source, str) else (str(source), None, None)
    subset, split = own_subset or subset, own_split or split or "train"
    try:
        if is_dataset(Path(name)):
            loaded: Any = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise DataError(f"the data set {source} has the splits {', '.join(loaded)}: name one with --split")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(name, subset, split=split, streaming=True)
        features = dict(loaded.features or {})
        for line, value in enumerate(loaded, start=1):
            row = {name: _from_features(item, features.get(name)) for name, item in value.items()}
            yield RawRow(str(source), line, row, bytes_read=done)
    except (OSError, ValueError, KeyError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        # The library ends its messages with the name of an exception in brackets.
        reason = re.sub(r" \(\w+\)$", "", " ".join(str(error).split())[:200])
        raise DataError(f"cannot read the data set {str(source)!r}, split {split!r}: {reason}") from error


class _Broken(Exception):
    """The text cannot be read on; `fault` is the reason of the row that says so."""

    def __init__(self, fault: str, line: int) -> None:
        super().__init__(fault)
        self.fault, self.line = fault, line


def read_json_rows(read: Read, source: str, position: Callable[[], int]) -> Iterator[RawRow]:
    """Rows of one text; `position` gives the bytes of all inputs read so far.

    Raises what `read` raises, behind the last row that is complete.
    """
    head = read(_CHUNK)
    if head.startswith(_UTF16_MARKS):
        read, head = _as_utf8(read, head), b""
    values = _Values(read, head.removeprefix(_UTF8_MARK))
    if values.are_lines():
        for number, line in enumerate(_lines(read, values.consumed), start=1):
            if line.strip():
                yield RawRow(source, number, *_load(line), position())
        return
    try:
        for number, value in values:
            yield RawRow(source, number, value, bytes_read=position())
    except _Broken as broken:
        yield RawRow(source, broken.line, fault=broken.fault, bytes_read=position())


def _as_utf8(read: Read, head: bytes) -> Read:
    decoder = codecs.getincrementaldecoder("utf-16")()
    waiting = [head]

    def read_utf8(size: int) -> bytes:
        while True:
            block = waiting.pop() if waiting else read(size)
            text = decoder.decode(block, final=not block)
            if text or not block:
                return text.encode()

    return read_utf8


def _lines(read: Read, begun: bytes) -> Iterator[bytes]:
    """Lines without their ends; only a line feed ends one."""
    pieces: list[bytes] = []
    block = begun or read(_CHUNK)
    while block:
        *whole, rest = block.split(b"\n")
        if whole:
            yield b"".join(pieces) + whole[0]
            yield from whole[1:]
            pieces = []
        pieces.append(rest)
        block = read(_CHUNK)
    yield b"".join(pieces)


def _load(line: bytes) -> tuple[Any, str | None]:
    if b"\0" in line:
        return None, "nul_character"
    try:
        return json.loads(line), None
    except UnicodeDecodeError:
        return None, "not_utf8"
    except (ValueError, RecursionError):
        return None, "not_json"


class _Values:
    """JSON values one after another, the elements of arrays of rows as values of their own."""

    def __init__(self, read: Read, begun: bytes) -> None:
        self._read, self._scan = read, json.JSONDecoder().raw_decode
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self.consumed = begun or read(_CHUNK)
        """All bytes read until `are_lines` has told what they are."""
        self._first, self._inside = True, False
        self._text, self._at, self._line = "", 0, 1
        self._ended = not self.consumed

    def are_lines(self) -> bool:
        """Whether the text is one value a line, as far as its first value tells; reads no more than that value."""
        try:
            self._decode(self.consumed)
            self._skip(_GAP)
            if self._text[self._at : self._at + 1] == "[" and self._is_array_of_rows():
                return False
            begin, end = self._at, self._text.find("\n", self._at)
            if end < 0:
                return True
            return self._value(begin)[1] <= end
        except _Broken:
            return True
        finally:
            self._first = False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Values with the line on which each begins; raises `_Broken` where no further one can be read."""
        while True:
            self._skip(_GAP_OR_COMMA if self._inside else _GAP)
            begin = self._text[self._at : self._at + 1]
            if not begin:
                if self._inside:
                    raise _Broken("damaged_file", self._line)
                return
            if self._inside and begin == "]":
                self._inside = False
                self._at += 1
            elif not self._inside and begin == "[" and self._is_array_of_rows():
                self._inside = True
                self._at += 1
            else:
                value, end = self._value(self._at)
                yield self._line, value
                self._advance(end)

    def _is_array_of_rows(self) -> bool:
        """Whether the array that begins here holds rows; a list of messages, or of texts, is one row."""
        begin = self._at
        while (place := _end(_GAP, self._text, begin + 1)) == len(self._text) and self._more():
            pass
        if self._text[place : place + 1] in ("]", ""):
            return False
        first, _ = self._value(place)
        return not isinstance(first, str) and not (isinstance(first, dict) and _MESSAGE_KEYS & first.keys())

    def _value(self, begin: int) -> tuple[Any, int]:
        """The value at a place of the text, and its end; tried again when the text has doubled, so at linear cost."""
        while True:
            try:
                value, end = self._scan(self._text, begin)
            except RecursionError:
                raise _Broken("damaged_file", self._line) from None
            except ValueError as error:
                place = error.pos if isinstance(error, json.JSONDecodeError) else 0
                open_ended = str(error).startswith("Unterminated") or place >= len(self._text) - _LONGEST_LITERAL
                if open_ended and self._more():
                    continue
                # How much an array that was cut has lost cannot be told; a last value that was cut is one row.
                cut = open_ended and not self._inside
                raise _Broken("not_json" if cut else "damaged_file", self._line) from None
            if end < len(self._text) or not self._more():
                return value, end

    def _skip(self, gap: re.Pattern[str]) -> None:
        while True:
            self._advance(_end(gap, self._text, self._at))
            if self._at < len(self._text) or not self._more():
                return

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end
        if self._at >= _CHUNK and not self._first:
            self._text, self._at = self._text[self._at :], 0

    def _more(self) -> bool:
        """Read at least as much again as waits; False at the end."""
        if self._ended:
            return False
        block = self._read(max(_CHUNK, len(self._text) - self._at))
        if self._first:
            self.consumed += block
        self._decode(block)
        return bool(block)

    def _decode(self, block: bytes) -> None:
        self._ended = not block
        try:
            self._text += self._utf8.decode(block, final=self._ended)
        except UnicodeDecodeError:
            raise _Broken("not_utf8", self._line) from None


def _end(gap: re.Pattern[str], text: str, at: int) -> int:
    found = gap.match(text, at)
    assert found is not None, "a gap may be empty"
    return found.end()
