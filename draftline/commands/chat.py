"""What commands share that put conversations to a target: texts that may stand in files, options of its template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.errors import DataError
from draftline.progress import say
from draftline.storage import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_NAME = 255
"""Bytes; the system refuses to look for longer ones."""


def text_or_file(text: str | None) -> str | None:
    """The text itself, or what the file of that name holds, without the line break at its end.

    Raises:
        DataError: there is such a file, but it cannot be read.
    """
    if text is None or "\n" in text or len(text.encode()) > _LONGEST_NAME or not Path(text).is_file():
        return text
    try:
        return Path(text).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--system-prompt {text} cannot be read ({reason_of(error)}): give a text, or a file"
        ) from error


def warn_unread_options(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> None:
    """Say which options the target's chat template does not look at, and which it does."""
    from draftline.data.template import ChatTemplate

    warning = ChatTemplate(tokenizer, options).unread_options() if options and tokenizer.chat_template else None
    if warning is not None:
        say(f"warning: {warning}")
