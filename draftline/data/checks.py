"""What a conversation must have, given the target, before it is rendered."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from draftline.data.conversations import Chat, Message, ParsedRow, Unusable
from draftline.data.template import ChatTemplate


def settle_roles(template: ChatTemplate, chat: Chat) -> ParsedRow:
    """Give every message a role that the template has: `developer` speaks as the system where it lacks it."""
    if all(message.role in ("system", "user", "assistant", "tool") for message in chat.conversation.messages):
        return chat
    messages: list[Message] = []
    for message in chat.conversation.messages:
        role = message.role
        if role not in ("system", "user", "assistant", "tool") and not template.knows_role(role):
            if role not in ("developer", "ipython"):
                return Unusable(f"unknown_role: {role[:40]}")
            role = "system" if role == "developer" else "tool"
        messages.append(message.model_copy(update={"role": role}))
    return Chat(chat.conversation.model_copy(update={"messages": tuple(messages)}), chat.notes)


def check_answers(chat: Chat, *, answered_later: bool) -> Chat | Unusable:
    """Drop a conversation that has nothing to learn from, or with `answered_later` nothing to answer."""
    messages = chat.conversation.messages
    if not messages:
        return Unusable("empty")
    if answered_later:
        return chat if any(message.role == "user" for message in messages) else Unusable("no_user")
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        return Unusable("no_assistant")
    if not any(message.content or message.reasoning_content or message.tool_calls for message in answers):
        return Unusable("all_answers_empty")
    return chat


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Matches the text of any token that the tokenizer treats as special; None if it has none."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))) if texts else None
