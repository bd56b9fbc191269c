"""Splits the text that a target wrote into reasoning, content and tool calls.

A server with the right parsers does this itself; in process, two conventions cover the published targets: reasoning
between `<think>` and `</think>` (the opening tag may be part of the prompt), and calls as JSON objects between
`<tool_call>` and `</tool_call>`. Anything else stays content, word for word.
"""

from __future__ import annotations

import json
import re

from draftline.data.conversations import FunctionCall, ToolCall

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def parse_answer(text: str, *, with_tools: bool) -> tuple[str, str | None, tuple[ToolCall, ...]]:
    """Return content, reasoning (None without any) and tool calls of an answer."""
    reasoning = None
    before, closing, after = text.partition("</think>")
    if closing:
        reasoning = before.removeprefix("<think>").strip("\n")
        text = after.lstrip("\n")
    calls = tuple(_parse_calls(text)) if with_tools else ()
    if calls:
        text = _CALL.sub("", text).strip()
    return text, reasoning, calls


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
