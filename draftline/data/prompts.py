"""Prompts for evaluation: the same files and shapes that `prepare` reads, but every line counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from draftline.data.conversations import Chat, Conversation
from draftline.data.readers import RawRow, read_rows, resolve_sources
from draftline.data.shapes import parse_row
from draftline.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """What a user says, in one turn or several, and where it was found.

    Attributes:
        file: file, data set or task that it comes from.
        number: line of a text file, row of a table, from 1.
        conversation: the turns; answers that it carries are not used.
    """

    file: str
    number: int
    conversation: Conversation

    @property
    def place(self) -> str:
        """Where it was found, for messages."""
        return f"{self.file} line {self.number}"


def read_prompts(names: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """All conversations of files, folders or patterns, in order; answers that they carry stay in them.

    With a `limit` only the first ones of each file are read.

    A prompt that cannot be used is an error and not a dropped row: an evaluation over fewer prompts than its file has
    would be compared with others as if it were the same.

    Raises:
        DataError: a row is unreadable, is not a prompt, has a user turn without text, or nothing is there.
    """
    prompts = [_prompt(row) for source in resolve_sources(names) for row in islice(read_rows([source]), limit)]
    if not prompts:
        raise DataError(f'{", ".join(names)} has no prompt: give lines such as {{"turns": ["..."]}}')
    refuse_empty(prompts)
    return prompts


def refuse_empty(prompts: Iterable[Prompt]) -> None:
    """Refuse prompts in which a user says nothing, or of which no user is part.

    Raises:
        DataError: there are such; it counts them and names the first.
    """
    prompts = list(prompts)
    empty = [prompt for prompt in prompts if not _says_something(prompt.conversation)]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(prompts)} prompts have no text in a user turn, the first is {empty[0].place}: "
            "fix or delete such lines"
        )


def _prompt(row: RawRow) -> Prompt:
    where = f"{row.source} line {row.line}"
    if row.fault is not None:
        raise DataError(f"{where} cannot be read ({row.fault}): fix or delete the line")
    parsed = parse_row(row.value)
    if not isinstance(parsed, Chat):
        raise DataError(f'{where} is not a prompt: write it as {{"turns": ["..."]}} or as messages')
    return Prompt(row.source, row.line, parsed.conversation)


def _says_something(conversation: Conversation) -> bool:
    said = [message.content.strip() for message in conversation.messages if message.role == "user"]
    return bool(said) and all(said)
