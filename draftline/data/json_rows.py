"""Rows from JSON text: one value a line, one array, or values that run over lines; memory is that of the longest row.

A file is told by its beginning. Lines are the default, because a bad line costs only itself there. Where the first
value does not end with its line, or is an array of rows, values are read one after another instead, each as soon as it
is complete; a fault between them cannot be stepped over, so it ends the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from draftline.data.rows import RawRow

_CHUNK = 1 << 20
_UTF8_MARK, _UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_MESSAGE_KEYS = frozenset({"role", "from", "speaker"})
_LONGEST_LITERAL = len("-Infinity")
_GAP, _GAP_OR_COMMA = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")

Read = Callable[[int], bytes]
"""Up to so many bytes; none at the end."""


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
        self._first = True
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
        inside = False
        while True:
            self._skip(_GAP_OR_COMMA if inside else _GAP)
            begin = self._text[self._at : self._at + 1]
            if not begin:
                if inside:
                    raise _Broken("not_json", self._line)
                return
            if inside and begin == "]":
                inside = False
                self._at += 1
            elif not inside and begin == "[" and self._is_array_of_rows():
                inside = True
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
                raise _Broken("not_json" if open_ended else "damaged_file", self._line) from None
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
