"""Prompts for evaluation: the same files and shapes that `prepare` reads, but every line counts."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.data.conversations import Conversation
from draftline.data.readers import read_rows, resolve_sources
from draftline.data.rows import Chat
from draftline.data.shapes import parse_row
from draftline.errors import DataError


def read_prompts(names: Sequence[str]) -> list[Conversation]:
    """All conversations of files, folders or patterns, in order; answers that they carry stay in them.

    A prompt that cannot be used is an error and not a dropped row: an evaluation over fewer prompts than its file has
    would be compared with others as if it were the same.

    Raises:
        DataError: a row is unreadable, holds no user turn, or nothing is there.
    """
    prompts = []
    for row in read_rows(resolve_sources(names)):
        where = f"{row.source} line {row.line}"
        if row.fault is not None:
            raise DataError(f"{where} cannot be read ({row.fault}): mend or delete the line")
        parsed = parse_row(row.value)
        if not isinstance(parsed, Chat):
            raise DataError(f'{where} is no prompt: write it as {{"turns": ["..."]}} or as messages')
        if not any(message.role == "user" and message.content.strip() for message in parsed.conversation.messages):
            raise DataError(f"{where} has no user turn with text: mend or delete the line")
        prompts.append(parsed.conversation)
    if not prompts:
        raise DataError(f'{", ".join(names)} has no prompt: give lines such as {{"turns": ["..."]}}')
    return prompts
