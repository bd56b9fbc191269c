"""Answers: taken apart, kept on disk, put into conversations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftline.data.answers import Answer, AnswerStore, Dialogue, answer_slots, parse_answer
from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall
from draftline.errors import DataError, StorageError


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("plain", "plain", None, 0),
        ("<think>\nwhy\n</think>\n\nso", "so", "why", 0),
        ("why\n</think>\n\nso", "so", "why", 0),
        ('ok\n<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>', "ok", None, 1),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', None, 0),
    ],
)
def test_answers_are_taken_apart(text: str, content: str, reasoning: str | None, calls: int) -> None:
    found = parse_answer(text, with_tools=True)
    assert (found[0], found[1], len(found[2])) == (content, reasoning, calls)


def test_store_refuses_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"line 1 of .* is not a stored answer"):
        AnswerStore(tmp_path / "answers.jsonl")


def test_store_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer(key="1", content="yo", finish_reason="stop")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="cannot be written"):
        AnswerStore(tmp_path / "file" / "answers.jsonl").add(answer)
    store = AnswerStore(tmp_path / "answers.jsonl")
    store.add(answer)

    def refuse(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        store.close()


def test_tool_result_needs_a_call() -> None:
    call = ToolCall(function=FunctionCall(name="f", arguments={}))
    chat = Conversation(
        messages=(
            Message(role="user", content="q"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="42"),
            Message(role="assistant", content="old"),
        )
    )
    assert [[message.role for message in slot] for slot in answer_slots(chat)] == [["user"], ["tool"]]
    without, with_call = Dialogue(chat), Dialogue(chat)
    without.add(Answer(key="1", content="no call", finish_reason="stop"))
    assert without.done
    with_call.add(Answer(key="1", content="", tool_calls=(call,), finish_reason="tool_calls"))
    assert not with_call.done
    assert with_call.prompt().messages[-1].content == "42"
