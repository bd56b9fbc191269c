"""Answers of the target, kept on disk one by one, so that none is computed twice and none is lost.

The file is JSONL, one answered turn a line:

    {"key", "content", "reasoning_content", "tool_calls", "finish_reason", "output_ids"}

`key` is a hash of everything that determines the answer: the exact prompt, the settings and the target. Nothing else
links a line to a row of the data, so the file can be reused after the data was reordered or extended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from draftline.data.conversations import FinishReason, Message, ToolCall, hash_json
from draftline.errors import DataError
from draftline.storage import storage_errors


class Answer(BaseModel):
    """One answered turn; `output_ids` are the generated tokens with the stop token, absent from a server's answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason
    output_ids: tuple[int, ...] = ()

    def as_message(self) -> Message:
        """The assistant turn to put into the conversation."""
        return Message(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning_content,
            tool_calls=self.tool_calls,
            finish_reason=self.finish_reason,
        )


def answer_key(prompt: Any, settings: dict[str, Any], target_fingerprint: str) -> str:
    """Key of an answer; `prompt` is the list of prompt ids (in process) or the request's messages (server)."""
    return hash_json({"prompt": prompt, "settings": settings, "target": target_fingerprint})


class AnswerStore:
    """The answers known so far, in memory and in an append-only file.

    Each answer is flushed to the operating system when it is added, so that killing the process loses nothing that
    was added. The file is touched by the first answer: then it is made, or a line that a crash cut short is taken off
    its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._answers, self._whole = _read_answers(path)
        self._file: TextIO | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """The answer with this key, if it is known."""
        return self._answers.get(key)

    def add(self, answer: Answer) -> None:
        """Keep an answer; on disk when this returns."""
        with storage_errors(self.path):
            file = self._file = self._file or self._open()
            file.write(answer.model_dump_json(exclude_defaults=True) + "\n")
            file.flush()
        self._answers[answer.key] = answer

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a", encoding="utf-8")
        file.truncate(self._whole)
        return file

    def close(self) -> None:
        """Sync the file and close it."""
        if self._file is None:
            return
        with storage_errors(self.path), self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_answers(path: Path) -> tuple[dict[str, Answer], int]:
    """The answers of a file, and the bytes of its whole lines."""
    if not path.exists():
        return {}, 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    answers = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            answer = Answer.model_validate(json.loads(line))
        except (ValidationError, ValueError) as error:
            raise DataError(
                f"line {number} of {path} is not a stored answer; delete that line, or the file to answer all again"
            ) from error
        answers[answer.key] = answer
    return answers, len(whole)
