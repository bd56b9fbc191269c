"""A conversation while its answers are being regenerated, turn by turn."""

from __future__ import annotations

from draftline.data.answers import Answer
from draftline.data.conversations import Conversation, Message
from draftline.data.rows import Unusable


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
    def remaining(self) -> int:
        """Turns still to be answered at most."""
        return 0 if self.done else len(self._slots) - self._answered

    def prompt(self) -> Conversation:
        """The history up to the next answer."""
        return self._conversation.model_copy(
            update={"messages": (*self._history, *self._slots[self._answered])},
        )

    def add(self, answer: Answer) -> None:
        """Take the next answer into the history."""
        self._history += [*self._slots[self._answered], answer.as_message()]
        self._answered += 1

    def drop(self, reason: str) -> None:
        """Give up: the target cannot be asked for the next answer."""
        self._dropped = Unusable(reason)

    def result(self) -> Conversation | Unusable:
        """The regenerated conversation, up to its last answer, or why it was given up."""
        if self._dropped is not None:
            return self._dropped
        return self._conversation.model_copy(update={"messages": tuple(self._history)})
