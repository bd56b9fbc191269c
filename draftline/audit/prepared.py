"""DAT013: does `prepare` make of a conversation what the target's template makes of it?

A few conversations of known text go through the whole of `prepare`, in a temporary folder, with the template options of
the run's data. What comes out is compared with the tokenizer alone: every id, what is supervised and what is not, cuts
at both ends, which rows are copies, and which have the same prompt.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from draftline.audit.probe import Probe
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.data import prepare as prepare_module
from draftline.data.dataset import PreparedDataset
from draftline.errors import DataError, TemplateError
from draftline.options import PrepareOptions

_FIX = "the tokens of the whole rendered conversation; answers with what ends them are supervised, nothing else"
_MARKS = 8
"""Most tokens of the template that may be supervised with an answer: what ends it, or opens its reasoning."""

Messages = list[dict[str, str]]


def _chat(system: str | None, *turns: tuple[str, str]) -> Messages:
    words = [] if system is None else [{"role": "system", "content": system}]
    for said, answer in turns:
        words += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    return words


@check("DAT013", "`prepare` makes something else of a conversation than the template", needs=("DAT011",))
def prepared_as_rendered(probe: Probe) -> Problem | None:
    tokenizer = probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template or not tokenizer.is_fast:
        raise NotApplicable("the target has no chat template")
    data = probe.subject.data
    options = {} if data is None else dict(data.meta.get("template_options") or {})
    system = "Use few words." if _takes(tokenizer, _chat("a", ("b", "c")), options) else None
    two = _chat(system, ("Name a colour.", "Blue is one:  the sky."), ("And a fruit?", "Plums.\n\nAlso figs"))
    one, other = _chat(None, ("Say why.", "It is so.")), _chat(None, ("Say why.", "Nobody told me"))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        try:
            made = _prepared(tokenizer, [two, one, other, one], place / "whole", template_options=options)
            length = len(made[0].input_ids) - 3
            ends: Any = ("right", "left")
            cut = {
                end: _prepared(
                    tokenizer, [two], place / end, template_options=options, max_length=length, truncation=end
                )
                for end in ends
            }
        except (DataError, TemplateError) as error:
            raise NotApplicable(f"`prepare` refuses this template: {error}") from error
        hashes = made.prompt_hashes.tolist()
        if len(made) != 3:
            return Problem(f"of four rows, two of them equal, {len(made)} are kept", "drop copies, and only these")
        if hashes[1] != hashes[2] or hashes[0] == hashes[1]:
            return Problem("prompts that are equal pass for different ones, or the reverse", "hash what is asked")
        for number, messages in enumerate((two, one, other)):
            wrong = _unlike(
                tokenizer, messages, options, made[number].input_ids.tolist(), made[number].loss_mask.tolist()
            )
            if wrong is not None:
                return Problem(f"conversation {number + 1}: {wrong}", _FIX)
        whole = list(zip(made[0].input_ids.tolist(), made[0].loss_mask.tolist(), strict=True))
        for end, part in (("right", whole[:length]), ("left", whole[-length:])):
            found = cut[end][0]
            if list(zip(found.input_ids.tolist(), found.loss_mask.tolist(), strict=True)) != part:
                return Problem(f"cut to {length} tokens on the {end}, it is not that part of the whole", "cut, no more")
    return None


def _prepared(tokenizer: Any, chats: Sequence[Messages], out: Path, **options: Any) -> PreparedDataset:
    file = out.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    prepare_module.prepare(tokenizer, [str(file)], out, PrepareOptions(**options))
    return PreparedDataset.open(out)


def _takes(tokenizer: Any, messages: Messages, options: Mapping[str, Any]) -> bool:
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError):
        return False
    return True


def _unlike(
    tokenizer: Any, messages: Messages, options: Mapping[str, Any], ids: Sequence[int], mask: Sequence[bool]
) -> str | None:
    """How ids or mask of a conversation differ from the template's, in words."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    wanted = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if list(ids) != list(wanted["input_ids"]):
        place = next((i for i, (a, b) in enumerate(zip(ids, wanted["input_ids"], strict=False)) if a != b), len(ids))
        return f"its {len(ids)} tokens are not the {len(wanted['input_ids'])} of the template from {place} on"
    beside, start = sum(map(bool, mask)), 0
    for message in messages:
        content = message["content"].strip()
        start = text.index(content, start)
        inside = [
            bool(mask[i])
            for i, (first, end) in enumerate(wanted["offset_mapping"])
            if start <= first < end <= start + len(content)
        ]
        start += len(content)
        if message["role"] != "assistant" and any(inside):
            return f"{sum(inside)} tokens of the {message['role']} are supervised"
        if message["role"] == "assistant":
            beside -= len(inside)
            if not all(inside):
                return f"{inside.count(False)} of {len(inside)} tokens of {content!r} are not supervised"
    answers = sum(message["role"] == "assistant" for message in messages)
    return f"{beside} supervised tokens belong to no answer" if not 0 <= beside <= _MARKS * answers else None
