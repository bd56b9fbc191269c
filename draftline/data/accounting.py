"""The accounting of `prepare`, and how the conversations that it kept were put to the target.

Every row that came in is either out or dropped for a counted reason.

A drafter has seen the target in the modes of its training data only: thinking or not, which system prompt, which
options of the chat template. Served in another (thinking switched on, a system prompt that it never saw) its acceptance
may halve without any error, so the modes of the data are counted when it is prepared, go with the run into the
drafter's card, and are compared with those of an evaluation. System prompts are kept as hashes: cards are published,
and a system prompt may be nobody else's business.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from draftline.data.conversations import Conversation, Message, hash_json
from draftline.data.shapes import KNOWN_LAYOUTS
from draftline.errors import DataError

META_FILE, REPORT_FILE = "meta.json", "report.json"
"""Files of a prepared folder: what its samples were made with, and this accounting."""

THINKING, NOT_THINKING = "with_reasoning", "without_reasoning"
NO_SYSTEM_PROMPT = "none"
OTHERS = "others"
"""Label for all further ones when a data set has too many to be listed."""
MOST_LABELS = 50

# Reasons that mean that a row could not even be read.
_UNREADABLE = frozenset({"not_json", "not_utf8", "not_an_object", "damaged_file", "nul_character", "lone_surrogate"})

_FIXES = {
    "all_supervision_truncated": "raise --max-length, or cut the other side with --truncation left",
    "too_few_supervised_tokens": "lower --min-supervised",
    "has_image": "add --strip-images to train on the text alone",
    "has_media": "add --strip-images to train on the text alone",
    "no_answer_markers_in_text": "the text shows no answer as this target's template writes it; "
    "learn all text with --supervise all",
    "no_loss_mask": "add a loss_mask to the rows, or learn all tokens with --supervise all",
    "no_chat_template": "use the target's instruction-tuned version, or put a chat_template.jinja into its folder",
    "not_utf8": "write the file as UTF-8",
    "nul_character": "if the file is UTF-16 or UTF-32, write it as UTF-8",
    "not_json": "give JSON, one object a line",
    "damaged_file": "get the file again",
}
"""What to do where no row is left, by the commonest reason."""

_COLUMNS_NAMED = 8

_LENGTHS = tuple(2**power for power in range(7, 16))

_SCRIPTS = {
    "latin": re.compile(r"[A-Za-z\u00c0-\u024f]"),
    "han": re.compile(r"[\u3400-\u9fff]"),
    "kana": re.compile(r"[\u3040-\u30ff]"),
    "hangul": re.compile(r"[\uac00-\ud7af\u1100-\u11ff]"),
    "cyrillic": re.compile(r"[\u0400-\u052f]"),
    "arabic": re.compile(r"[\u0600-\u06ff]"),
    "hebrew": re.compile(r"[\u0590-\u05ff]"),
    "greek": re.compile(r"[\u0370-\u03ff]"),
    "devanagari": re.compile(r"[\u0900-\u097f]"),
    "thai": re.compile(r"[\u0e00-\u0e7f]"),
}
_SCRIPT_SAMPLE = 400
"""Characters of an answer that are looked at to tell its script."""


class Tally(dict[str, dict[str, Any]]):
    """Reasons with their count and the place where each first occurred."""

    def add(self, reason: str, line: int, source: str) -> None:
        """Count one row under a reason."""
        entry = self.setdefault(reason, {"count": 0, "first_line": line, "first_file": source})
        entry["count"] += 1

    @property
    def total(self) -> int:
        """All rows counted, under any reason."""
        return sum(entry["count"] for entry in self.values())


@dataclass
class Accounting:
    """Counts of one `prepare`; kept as plain JSON values, so that an interrupted run can go on from them."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: Tally = field(default_factory=Tally)
    flagged: Tally = field(default_factory=Tally)
    tokens: int = 0
    supervised_tokens: int = 0
    thinking: Counter[str] = field(default_factory=Counter)
    system_prompts: Counter[str] = field(default_factory=Counter)
    template_options: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    lengths: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    """Rows that have each column that was not read."""

    def keep(self, length: int, supervised: int, conversation: Conversation | None) -> None:
        """Count a row that is kept."""
        self.rows_out += 1
        self.tokens += length
        self.supervised_tokens += supervised
        self.lengths[length_bucket(length)] += 1
        if conversation is not None:
            answers = [message for message in conversation.messages if message.role == "assistant"]
            self.thinking[thinking_label(conversation)] += 1
            count_label(self.system_prompts, system_label(conversation))
            count_label(self.template_options, options_label(conversation.template_options))
            self.scripts[script_of("".join(message.content[:_SCRIPT_SAMPLE] for message in answers))] += 1
            for message in answers:
                self.turns["tool_call" if message.tool_calls else "text"] += 1

    def check(self) -> None:
        """Raise if a row went missing; this would be a fault of Draftline."""
        assert self.rows_in == self.rows_out + self.dropped.total, (self.rows_in, self.rows_out, self.dropped)

    def as_state(self) -> dict[str, Any]:
        """Everything, to be restored by `from_state`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Accounting:
        """The counts of an interrupted run."""
        empty = Accounting()
        return Accounting(**{each.name: type(getattr(empty, each.name))(state[each.name]) for each in fields(empty)})


def refuse_bad_data(accounting: Accounting, *, strict: bool, max_unreadable: float) -> None:
    """Raise `DataError` where the data is not fit to be trained on.

    Raises for any drop with `strict`, for a share of unreadable rows above `max_unreadable`, and if nothing is left.
    """
    counts = ", ".join(
        f"{reason} {entry['count']}, first in {entry['first_file']} line {entry['first_line']}"
        for reason, entry in accounting.dropped.items()
    )
    if accounting.rows_in == 0:
        raise DataError("the data holds no row: give a file with at least one conversation")
    if accounting.rows_out == 0:
        most = max(accounting.dropped, key=lambda reason: accounting.dropped[reason]["count"])
        fix = _fix(most.partition(":")[0], accounting)
        raise DataError(f"none of {accounting.rows_in} rows can be used ({counts}): {fix}")
    damaged = accounting.dropped.get("damaged_file")
    if damaged is not None and max_unreadable < 1:
        raise DataError(
            f"{damaged['first_file']} is damaged from line {damaged['first_line']} on, and how many rows that loses "
            "cannot be told: get it again, or go on without them with --max-unreadable 1"
        )
    if strict and accounting.dropped.total:
        raise DataError(
            f"{accounting.dropped.total} of {accounting.rows_in} rows are dropped ({counts}); "
            "fix them, or leave out --strict"
        )
    unreadable = sum(entry["count"] for reason, entry in accounting.dropped.items() if reason in _UNREADABLE)
    if unreadable > max_unreadable * accounting.rows_in:
        raise DataError(
            f"{unreadable} of {accounting.rows_in} rows are unreadable, more than {max_unreadable:.1%} ({counts}); "
            "fix the file, or raise --max-unreadable"
        )


def _fix(reason: str, accounting: Accounting) -> str:
    """What to do where no row is left for a reason."""
    if reason == "no_assistant":
        named = ", ".join(name for name, _ in accounting.unread.most_common(_COLUMNS_NAMED))
        if not named:
            return "add --regenerate"
        return (
            f"the columns {named} are not read (known are {KNOWN_LAYOUTS}): "
            "rename the one that holds the answers to response, or let the target write them: add --regenerate"
        )
    if reason == "unknown_shape":
        return f"known are {KNOWN_LAYOUTS}; docs/guide/data.md lists all"
    return _FIXES.get(reason, "fix these lines")


def length_bucket(length: int) -> str:
    """Name of the bucket of a length in tokens, by its upper end."""
    return next((f"<= {bound}" for bound in _LENGTHS if length <= bound), f"> {_LENGTHS[-1]}")


def script_of(text: str) -> str:
    """The script of most letters of a text; `none` without letters of a known script."""
    if text.isascii():
        return "latin" if any(character.isalpha() for character in text) else "none"
    counts = {script: len(pattern.findall(text)) for script, pattern in _SCRIPTS.items()}
    best = max(counts, key=lambda script: counts[script])
    return best if counts[best] else "none"


@dataclass(frozen=True)
class ChatMode:
    """Numbers of conversations, by label of each of three properties.

    Attributes:
        thinking: `with_reasoning` or `without_reasoning`.
        system_prompts: `none`, or the hash of the text.
        template_options: keyword arguments of the chat template as JSON, `{}` without any.
    """

    thinking: dict[str, int]
    system_prompts: dict[str, int]
    template_options: dict[str, int]

    @staticmethod
    def of_prepared(meta: Mapping[str, Any], report: Mapping[str, Any]) -> ChatMode | None:
        """The mode of a prepared data set; None where it was not counted, as for rows of token ids."""
        counts = [report.get(name) for name in ("thinking", "system_prompts", "template_options")]
        if not all(counts):
            return None
        thinking, system_prompts, own_options = ({str(k): int(v) for k, v in c.items()} for c in counts if c)
        options: Counter[str] = Counter()
        for label, count in own_options.items():
            own = {} if label == OTHERS else json.loads(label)
            options[OTHERS if label == OTHERS else options_label({**meta["template_options"], **own})] += count
        return ChatMode(thinking, system_prompts, dict(options))

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> ChatMode:
        """What `dataclasses.asdict` gave."""
        return ChatMode(dict(tree["thinking"]), dict(tree["system_prompts"]), dict(tree["template_options"]))


def thinks(message: Message) -> bool:
    """Whether an answer holds reasoning, also one that was cut inside of it."""
    return bool(message.reasoning_content) or "</think>" in message.content or message.content.startswith("<think>")


def thinking_label(conversation: Conversation) -> str:
    """Whether any answer of a conversation holds reasoning."""
    answers = (message for message in conversation.messages if message.role == "assistant")
    return THINKING if any(thinks(message) for message in answers) else NOT_THINKING


def system_label(conversation: Conversation) -> str:
    """Which system prompt a conversation has; `developer` is another name of the role."""
    texts = [message.content for message in conversation.messages if message.role in ("system", "developer")]
    return f"sha256:{hash_json([' '.join(text.split()) for text in texts])[:12]}" if texts else NO_SYSTEM_PROMPT


def options_label(options: Mapping[str, Any]) -> str:
    """Keyword arguments of the chat template as JSON with sorted keys."""
    return json.dumps(dict(options), sort_keys=True, ensure_ascii=False)


def count_label(counts: Counter[str], label: str) -> None:
    """Count a label; from `MOST_LABELS` different ones on, new ones are counted as others."""
    counts[label if label in counts or len(counts) < MOST_LABELS else OTHERS] += 1


def read_descriptions(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a folder that `draftline prepare` completed says of itself: its description, and its report.

    Raises:
        DataError: one of them is not there, or cannot be read.
    """
    try:
        meta, report = (json.loads((folder / name).read_text()) for name in (META_FILE, REPORT_FILE))
    except (OSError, ValueError) as error:
        raise incomplete(folder) from error
    return meta, report


def incomplete(folder: Path) -> DataError:
    """What is said of a folder that is no prepared data."""
    return DataError(
        f"{folder} is not a complete prepared data set; run `draftline prepare ... --out` with this folder"
    )
