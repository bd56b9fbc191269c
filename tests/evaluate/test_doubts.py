"""Which differences between training data and evaluation are worth a warning, and which are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from draftline.data.accounting import Accounting, ChatMode
from draftline.data.conversations import Conversation, Message
from draftline.evaluate.answer import DecodedTurn
from draftline.evaluate.doubts import mode_of, mode_warnings
from draftline.evaluate.generate import Generation

SYSTEM = "You are a pirate."


def chat(answer: str, system: str | None = None, options: dict[str, Any] | None = None) -> Conversation:
    messages = [Message(role="user", content="Hi"), Message(role="assistant", content=answer)]
    if system is not None:
        messages.insert(0, Message(role="system", content=system))
    return Conversation(messages=tuple(messages), template_options=options or {})


def prepared(chats: list[Conversation], options: dict[str, Any] | None = None) -> ChatMode:
    accounting = Accounting()
    for each in chats:
        accounting.keep(10, 5, each)
    mode = ChatMode.of_prepared({"template_options": options or {}}, accounting.as_state())
    assert mode is not None
    return mode


def served(chats: list[Conversation]) -> ChatMode:
    turns = [DecodedTurn(i, 0, each, [], Generation([]), Generation([]), 0.0, 0.0) for i, each in enumerate(chats)]
    return mode_of(turns, {})


def differ(_first: Mapping[str, Any], _second: Mapping[str, Any]) -> bool:
    return False


PLAIN, THINKING = chat("yes"), chat("<think>\nhm\n</think>\nyes")


@pytest.mark.parametrize(
    ("trained", "evaluated", "words"),
    [
        ([PLAIN] * 9, [THINKING] * 4, ["100% of the answers think first, as 0% of those in the training data do"]),
        ([THINKING] * 9, [PLAIN, THINKING], ["50% of the answers do not think first"]),
        ([PLAIN] * 9, [chat("yes", SYSTEM)], ["have a system prompt of their own, as 0%"]),
        ([chat("yes", SYSTEM)] * 9, [PLAIN], ["have no system prompt, as 0%"]),
        ([PLAIN] * 9, [chat("yes", None, {"enable_thinking": False})], ['{"enable_thinking": false}']),
        ([PLAIN] * 9 + [THINKING], [THINKING] * 4, []),  # both were taught
        ([PLAIN] * 9, [PLAIN] * 30 + [THINKING], []),  # hardly occurs
        ([chat("yes", SYSTEM)] * 9, [chat("no", " You are\na pirate. ")], []),
        ([chat("yes", f"System {i}") for i in range(30)], [chat("yes", SYSTEM)], []),  # system prompts of all kinds
    ],
)
def test_modes_that_training_did_not_have_are_named(
    trained: list[Conversation], evaluated: list[Conversation], words: list[str]
) -> None:
    lines = mode_warnings(prepared(trained), served(evaluated), differ)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_options_that_render_alike_are_no_difference() -> None:
    evaluated = served([chat("yes", None, {"enable_thinking": True})])
    assert mode_warnings(prepared([PLAIN]), evaluated, lambda *_: True) == []
    assert mode_warnings(prepared([PLAIN], {"enable_thinking": True}), evaluated, differ) == []
