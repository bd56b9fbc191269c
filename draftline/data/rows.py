"""What a row of a data file turns out to be, before it is rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftline.data.conversations import Conversation


@dataclass(frozen=True)
class RawRow:
    """One row as a reader found it.

    Attributes:
        source: file or data set name.
        line: line number of text files, row number of tables, from 1.
        value: the parsed JSON value; None where `fault` is set.
        fault: why the row cannot be read, as a reason of the report.
        bytes_read: bytes of all inputs behind the reader, for the progress bar.
    """

    source: str
    line: int
    value: Any = None
    fault: str | None = None
    bytes_read: int = 0


@dataclass(frozen=True)
class Chat:
    """A conversation, or prompts without answers; `notes` are reasons of the `flagged` table."""

    conversation: Conversation
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FormattedText:
    """Text to which somebody already applied a template."""

    text: str


@dataclass(frozen=True)
class TokenRow:
    """Token ids and their mask, as the row has them; not checked yet. The mask is None where the row has none."""

    input_ids: list[Any]
    loss_mask: list[Any] | None


@dataclass(frozen=True)
class Unusable:
    """A row that is dropped for this reason."""

    reason: str


ParsedRow = Chat | FormattedText | TokenRow | Unusable
