"""Answers of the target: what one is, where they are kept, and the conversations that they are put into.

They are kept on disk one by one, so that none is computed twice and none is lost. The file is JSONL, one answered turn
a line:

    {"key", "content", "reasoning_content", "tool_calls", "finish_reason", "output_ids", "prompt_tokens"}

`key` is a hash of everything that determines the answer: the exact prompt, the settings and the target. Nothing else
links a line to a row of the data, so the file can be reused after the data was reordered or extended.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedTokenizerBase

from draftline.data.calls import AnswerFormat, answer_format
from draftline.data.conversations import (
    Conversation,
    FinishReason,
    FunctionCall,
    Message,
    ToolCall,
    Unusable,
    hash_json,
)
from draftline.data.template import ChatTemplate
from draftline.errors import DataError
from draftline.progress import OnProgress
from draftline.storage import storage_errors

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Answer(BaseModel):
    """One answered turn.

    Attributes:
        output_ids: the generated tokens with the stop token, if a server tells them.
        prompt_tokens: how many tokens a server says that it read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason
    output_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None

    def as_message(self, note: str | None = None) -> Message:
        """The assistant turn to put into the conversation, with what is to be said about it."""
        return Message(
            role="assistant",
            content=self.content,
            reasoning_content=self.reasoning_content,
            tool_calls=self.tool_calls,
            finish_reason=self.finish_reason,
            output_ids=self.output_ids,
            note=note,
        )


def answer_key(prompt: Any, settings: dict[str, Any], target_fingerprint: str, sample: int) -> str:
    """Key of an answer.

    Args:
        prompt: the list of prompt ids (in process) or the request (server).
        sample: which of several answers to the prompt; the first is the same whether there are others or not.
    """
    one_of_several = {"sample": sample} if sample else {}
    return hash_json({"prompt": prompt, "settings": settings, "target": target_fingerprint, **one_of_several})


def seed_of(key: str) -> int:
    """The seed of a sampled answer, from its key and so from everything that determines it; 31 bits."""
    return int(key[:8], 16) >> 1


def make_answer(
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    output_ids: Sequence[int],
    stop_ids: frozenset[int],
    asked: Conversation,
) -> Answer:
    """Turn generated ids into an answer: the stop token taken off, reasoning and tool calls in their own fields.

    They are read as the target's template writes them in the conversation that was `asked`.
    """
    stopped = output_ids[-1] in stop_ids
    written = list(output_ids[:-1] if stopped else output_ids)
    text = str(tokenizer.decode(written, clean_up_tokenization_spaces=False))
    form = answer_format(ChatTemplate(tokenizer), asked) if tokenizer.chat_template else AnswerFormat()
    content, reasoning, calls = parse_answer(text, with_tools=bool(asked.tools) and stopped, form=form)
    return Answer(
        key=key,
        content=content,
        reasoning_content=reasoning,
        tool_calls=calls,
        finish_reason=("tool_calls" if calls else "stop") if stopped else "length",
        output_ids=tuple(output_ids),
    )


def parse_answer(
    text: str, *, with_tools: bool, form: AnswerFormat | None = None
) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Content, reasoning (None without any) and tool calls of the text that a target wrote.

    A server with the right parsers does this itself; in process, the answer is read in the form in which the target's
    template writes one, or else by two conventions: reasoning between `<think>` and `</think>` (the opening tag may be
    part of the prompt), and calls as JSON objects between `<tool_call>` and `</tool_call>`. Anything else stays
    content, word for word.
    """
    form = form or AnswerFormat()
    reasoning: str | None
    before, closing, after = text.partition("</think>")
    if closing:
        reasoning, text = before.removeprefix("<think>").strip("\n"), after.lstrip("\n")
    else:
        reasoning, text = form.reasoning(text)
    if not with_tools:
        return text, reasoning, ()
    read = form.read_calls(text)
    if read is not None:
        return read[0], reasoning, read[1]
    calls = tuple(_parse_calls(text))
    return _CALL.sub("", text).strip() if calls else text, reasoning, calls


def _parse_calls(text: str) -> list[ToolCall]:
    """All calls in the text; none at all if one of them is malformed, so that nothing of the text is lost."""
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(found.group(1))
        except ValueError:
            return []
        if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
            return []
        calls.append(ToolCall(function=FunctionCall(name=call["name"], arguments=call.get("arguments", {}))))
    return calls


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


def answer_slots(conversation: Conversation) -> list[tuple[Message, ...]]:
    """What is said before each answer: the turns of others, split where the assistant is to speak.

    A conversation without any assistant turn (prompts only) is answered after each user turn.
    """
    slots: list[tuple[Message, ...]] = []
    waiting: list[Message] = []
    prompts_only = all(message.role != "assistant" for message in conversation.messages)
    for message in conversation.messages:
        if message.role == "assistant":
            if waiting:
                slots.append(tuple(waiting))
            waiting = []
        else:
            waiting.append(message)
            if prompts_only and message.role == "user":
                slots.append(tuple(waiting))
                waiting = []
    if waiting and waiting[-1].role in ("user", "tool"):
        slots.append(tuple(waiting))
    return slots


class Dialogue:
    """A conversation on its way: the history regenerated so far, and what is still to be answered.

    It ends early after a cut answer, because no serving engine would go on from one, and before a tool result when
    the answer made no call that the result could belong to.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._slots = answer_slots(conversation)
        self._history: list[Message] = []
        self._answered = 0
        self._dropped: Unusable | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to answer."""
        if self._dropped is not None or self._answered == len(self._slots):
            return True
        last = self._history[-1] if self._history else None
        if last is None:
            return False
        return last.finish_reason == "length" or (self._slots[self._answered][0].role == "tool" and not last.tool_calls)

    @property
    def sample(self) -> int:
        """Which of several sampled answers it is to get."""
        return self._conversation.sample

    @property
    def remaining(self) -> int:
        """Turns still to be answered at most."""
        return 0 if self.done else len(self._slots) - self._answered

    def prompt(self) -> Conversation:
        """The history up to the next answer."""
        return self._conversation.model_copy(update={"messages": (*self._history, *self._slots[self._answered])})

    def add(self, answer: Answer, note: str | None = None) -> None:
        """Take the next answer into the history."""
        self._history += [*self._slots[self._answered], answer.as_message(note)]
        self._answered += 1

    def drop(self, reason: str) -> None:
        """Give up: the target cannot be asked for the next answer."""
        self._dropped = Unusable(reason)

    def result(self) -> Conversation | Unusable:
        """The regenerated conversation, up to its last answer, or why it was given up."""
        if self._dropped is not None:
            return self._dropped
        return self._conversation.model_copy(update={"messages": tuple(self._history)})


def counted(dialogues: Sequence[Dialogue], progress: OnProgress | None) -> Callable[[], None]:
    """A function that tells `progress`, if there is one, how many turns of the dialogues are answered by now."""
    total = sum(dialogue.remaining for dialogue in dialogues)

    def report() -> None:
        if progress is not None:
            progress(total - sum(dialogue.remaining for dialogue in dialogues), total)

    return report
