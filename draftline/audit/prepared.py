"""DAT013: does `prepare` make of every field of a row what it says?

One file with a row for each kind of field (flags and weights, system prompts, options of the template, cut answers,
other layouts, token ids, copies, rows that are none) goes through the whole of `prepare`, with each of its options.
What lies in the folder is compared with a second, naive preparer: ids from the tokenizer alone, masks from where the
texts stand in what the template renders, sides from the prompts as words.

How many tokens of the template belong to an answer (what ends it, what opens its reasoning) is read from one plain row
and one plain dialogue, and holds for all others.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftline.audit.comparison import text_of
from draftline.audit.probe import Probe
from draftline.audit.reference import role_ids
from draftline.audit.report import Problem, check
from draftline.audit.sampling import an_option
from draftline.audit.subject import NotApplicable
from draftline.data import prepare as prepare_module
from draftline.data.dataset import HELDOUT_FOLDER, PROMPTS_FILE, PreparedDataset
from draftline.data.template import TEMPLATE_FAULTS
from draftline.errors import DataError, TemplateError
from draftline.options import PrepareOptions

_FIX = (
    "each field of a row as docs/guide/data.md says: the template's own tokens, answers and what ends them supervised"
)
_MARKS = 32
"""Most tokens of the template that may be supervised with an answer: what ends it, or opens its reasoning, which some
tokenizers write letter by letter."""
_LONGEST = 1 << 16
"""Some templates begin with thousands of words of their own."""
_HELD_OUT = 2
_SYSTEM = "Use few words."
_AT_ONCE = 5
"""Rows that `prepare` takes at once here, so that a few rows have borders between them."""

Turn = tuple[str, str, bool]
"""Role, text, and whether it is learned if it is an answer."""
Masks = list[bool | None]
"""None where a token of the template may be supervised or not."""


@dataclass(frozen=True)
class _Row:
    """A row as a user has it, and what it says.

    Attributes:
        given: a JSON value, or the line as it stands.
        options: of the template, its own.
        cut: its last answer has no end.
        exact: the template opens and ends its answers as those of plain rows.
        tokens: ids and mask, if those are given.
        thought: what its last answer thinks.
        dropped: why it is not kept.
    """

    given: Any
    turns: tuple[Turn, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    cut: bool = False
    exact: bool = True
    tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    thought: str = ""
    dropped: str = ""

    @property
    def prompt(self) -> tuple[str, ...]:
        """What is asked: upper case and white space do not tell two prompts apart."""
        return tuple(" ".join(text.lower().split()) for role, text, _ in self.turns if role == "user")


@dataclass(frozen=True)
class _Kept:
    """A row that is to be in the folder; `mask` as far as it is known."""

    row: _Row
    line: int
    ids: list[int]
    mask: Masks


@check("DAT013", "`prepare` makes something else of a row than its fields say", needs=("DAT011",))
def prepared_as_said(probe: Probe) -> Problem | None:
    tokenizer = probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template or not tokenizer.is_fast:
        raise NotApplicable("the target has no chat template")
    data = probe.subject.data
    given = {} if data is None else dict(data.meta.get("template_options") or {})
    plain = PrepareOptions(template_options=given, max_unreadable=1.0, max_length=_LONGEST)
    whole, prepare_module._CHUNK_ROWS = prepare_module._CHUNK_ROWS, _AT_ONCE
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return _Preparer(tokenizer, role_ids(probe.subject.target, "eos"), Path(scratch)).compare(plain)
    finally:
        prepare_module._CHUNK_ROWS = whole


class _Preparer:
    """The naive one, beside the real one.

    Args:
        stops: tokens that end an answer.
        place: an empty folder.
    """

    def __init__(self, tokenizer: Any, stops: set[int], place: Path) -> None:
        self._tokenizer, self._stops, self._place = tokenizer, stops, place
        self._marks: dict[bool, tuple[int, int]] = {}

    def compare(self, plain: PrepareOptions) -> Problem | None:
        try:
            rows = _rows(self._tokenizer, plain.template_options)
            wrong = self._learn_marks(rows, plain)
        except (DataError, TemplateError) as error:
            raise NotApplicable(f"`prepare` refuses this template: {error}") from error
        except TEMPLATE_FAULTS as error:
            raise NotApplicable(f"this template does not show plain texts as they are: {error}") from error
        try:
            wrong = wrong or self._compared(rows, plain)
        except (DataError, TemplateError) as error:  # plain rows were taken, so these are to be
            wrong = f"it is refused: {error}"
        return None if wrong is None else Problem(wrong, _FIX)

    def _compared(self, rows: Sequence[_Row], plain: PrepareOptions) -> str | None:
        """How what is prepared with each of the options differs, in words."""
        length = max(len(self._rendered(row, plain)[0]) for row in rows if row.turns and not row.dropped) - 3
        mask = plain.mask
        settings = {
            "plain": plain,
            "--supervise last": plain.model_copy(
                update={
                    "mask": mask.model_copy(update={"supervise": "last"}),
                    "truncation": "left",
                    "max_length": length,
                    "min_supervised": self._rendered(rows[-2], plain)[1].count(True) + 1,
                }
            ),
            "--supervise all": plain.model_copy(
                update={"mask": mask.model_copy(update={"supervise": "all"}), "max_length": length}
            ),
            "--no-reasoning": plain.model_copy(
                update={"mask": mask.model_copy(update={"reasoning": False}), "deduplicate": False}
            ),
        }
        told = self._told(rows, plain)
        if told is not None:
            settings["--system-prompt, --template-option"] = told
        for name, options in settings.items():
            loose = [replace(row, exact=False) for row in rows] if options is told else rows
            wrong = self._unlike(name, loose, options)
            if wrong is not None:
                return f"{name}: {wrong}"
        return self._wrong_sides(plain) or self._taken_for_done(rows, settings)

    def _told(self, rows: Sequence[_Row], plain: PrepareOptions) -> PrepareOptions | None:
        """A system prompt and options for rows without, as far as the template takes them."""
        chat, more = rows[0].given["messages"], dict[str, Any]()
        if _takes(self._tokenizer, [{"role": "system", "content": _SYSTEM}, *chat], plain.template_options):
            more["system_prompt"] = f"{_SYSTEM} Or none."
        option = an_option(self._tokenizer, chat[:1])
        if option and _takes(self._tokenizer, chat, {**plain.template_options, **option}):
            more["template_options"] = {**plain.template_options, **option}
        return plain.model_copy(update=more) if more else None

    # What a row is to become.

    def _rendered(self, row: _Row, options: PrepareOptions) -> tuple[list[int], Masks]:
        """Ids of what the template renders, and what of it is supervised."""
        if options.system_prompt is not None and row.turns[0][0] != "system":
            row = replace(row, turns=(("system", options.system_prompt, False), *row.turns))
        said = [{"role": role, "content": text} for role, text, _ in row.turns]
        if row.thought:
            said[-1]["reasoning_content"] = row.thought
        text: str = self._tokenizer.apply_chat_template(
            said, tokenize=False, **{**options.template_options, **row.options}
        )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        mask: Masks = [False if row.exact else None] * len(ids)
        start, answers = 0, [n for n, (role, _, _) in enumerate(row.turns) if role == "assistant"]
        for number, message in enumerate(said):
            for part, learned in (("reasoning_content", options.mask.reasoning), ("content", True)):
                content = message.get(part, "").strip()
                if not content:
                    continue
                if content not in text[start:]:
                    raise NotApplicable(f"this template shows {content!r} otherwise than it is given")
                start = text.index(content, start)
                end = start + len(content)
                inside = [i for i, (a, b) in enumerate(offsets) if start <= a < b <= end]
                start, last = end, number == answers[-1]
                learns = learned and row.turns[number][2] and (last or options.mask.supervise != "last")
                if number in answers and learns and row.exact:
                    before, after = self._marks[number == len(said) - 1]
                    inside = [*range(inside[0] - before, inside[-1] + 1 + after * (not (row.cut and last)))]
                for i in inside:
                    mask[i] = number in answers and learns
                if row.cut and last and number in answers:
                    mask[inside[-1] + 1 :] = [False] * (len(ids) - inside[-1] - 1)
        return ids, mask

    def _wanted(self, row: _Row, options: PrepareOptions) -> tuple[list[int], Masks] | str:
        """What is kept of a row, or why it is not."""
        if row.dropped:
            return row.dropped
        if row.tokens is None:
            ids, mask = self._rendered(row, options)
        else:
            ids, mask = list(row.tokens[0]), [bool(one) for one in row.tokens[1]]
            if options.mask.supervise == "last":
                end = len(mask) - mask[::-1].index(True)
                begin = max([0, *(i + 1 for i in range(end) if not mask[i])])
                mask = [begin <= i < end for i in range(len(ids))]
        if options.mask.supervise == "all":
            mask = [True] * len(ids)
        if not any(mask):
            return "nothing_supervised"
        if len(ids) > options.max_length:
            part = slice(0, options.max_length) if options.truncation == "right" else slice(-options.max_length, None)
            ids, mask = ids[part], mask[part]
            if not any(mask):
                return "all_supervision_truncated"
        return "too_few_supervised_tokens" if mask.count(True) < options.min_supervised else (ids, mask)

    def _learn_marks(self, rows: Sequence[_Row], plain: PrepareOptions) -> str | None:
        """Tokens before and behind answers that `prepare` supervises with them, within what can be right."""
        made = self._prepared("learned", [json.dumps(row.given) for row in rows[:2]], plain)
        for place, row in enumerate(rows[:2]):
            ids, mask = self._rendered(replace(row, exact=False), plain)
            text = text_of(made, place) if place < len(made) else None
            if text is None or text.input_ids.tolist() != ids:
                return f"a plain row is not the {len(ids)} tokens that the template gives"
            found = text.loss_mask.tolist()
            spans = [i for i, wanted in enumerate(mask) if wanted and not (i and mask[i - 1])]
            for number, first in enumerate(spans):
                last = next(i for i in range(first, len(mask)) if i + 1 == len(mask) or not mask[i + 1])
                begin, end = first, last + 1
                while begin and found[begin - 1]:
                    begin -= 1
                while end < len(found) and found[end]:
                    end += 1
                if not all(found[first : last + 1]) or first - begin + end - last - 1 > _MARKS:
                    where = f"supervised from token {begin} to {end - 1}, it is {first} to {last}"
                    return f"answer {number + 1} of a plain row is {where}"
                if last + 1 < len(ids) and ids[last + 1] in self._stops and not found[last + 1]:
                    return "the token that ends an answer is not supervised"
                self._marks[number == len(spans) - 1] = (first - begin, end - last - 1)
        return None

    # The folder.

    def _prepared(self, name: str, lines: Sequence[str], options: PrepareOptions) -> PreparedDataset:
        """The real one; the last line has no end."""
        file = self._place / f"{name}.jsonl"
        file.write_text("\n".join(lines), encoding="utf-8")
        prepare_module.prepare(self._tokenizer, [str(file)], self._place / name, options)
        return PreparedDataset.open(self._place / name)

    def _outcome(self, rows: Sequence[_Row], options: PrepareOptions) -> tuple[list[_Kept], dict[str, tuple[int, int]]]:
        """Rows that are kept, and how many are dropped for each reason, with the line of the first."""
        kept, dropped, seen = list[_Kept](), dict[str, tuple[int, int]](), set[str]()
        for line, row in enumerate(rows, 1):
            content = json.dumps(row.given, sort_keys=True)
            wanted = self._wanted(row, options)
            if content in seen and options.deduplicate:
                wanted = "duplicate"
            seen.add(content)
            if isinstance(wanted, str):
                count, first = dropped.get(wanted, (0, line))
                dropped[wanted] = (count + 1, first)
            else:
                kept.append(_Kept(row, line, *wanted))
        return kept, dropped

    def _unlike(self, name: str, rows: Sequence[_Row], options: PrepareOptions) -> str | None:
        """How the folder of all rows differs from what it should hold, in words."""
        lines = [row.given if isinstance(row.given, str) else json.dumps(row.given) for row in rows]
        made = self._prepared(name.replace(" ", ""), lines, options)
        kept, dropped = self._outcome(rows, options)
        wrong = _unlike_rows(made, kept, str(made.folder.with_suffix(".jsonl")))
        if wrong is not None:
            return wrong
        masks = [text_of(made, i).loss_mask for i in range(len(made))]
        chats = [one.row for one in kept if one.row.tokens is None]
        supervised, tokens = sum(int(mask.sum()) for mask in masks), sum(len(one.ids) for one in kept)
        counted = {
            "rows_in": len(rows),
            "rows_out": len(kept),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens,
            "duplicate_share": dropped.get("duplicate", (0, 0))[0] / len(rows),
            "columns_not_read": {
                "id": sum("id" in row.given for row in rows if isinstance(row.given, dict)) / len(rows)
            },
            "heldout_prompts": 0,
            "turns": {"text": sum(role == "assistant" for row in chats for role, _, _ in row.turns)},
            "template_options": dict(Counter(json.dumps(dict(row.options), sort_keys=True) for row in chats)),
        }
        for key, value in counted.items():
            if made.report.get(key) != value:
                return f"the report says {key} {made.report.get(key)}, counted again {value}"
        found = {reason: (one["count"], one["first_line"]) for reason, one in made.report["dropped"].items()}
        if found != dropped:
            return f"dropped are (rows, first line) {found}, by their fields {dropped}"
        cut = sum(row.cut for row in chats)
        if made.report["flagged"].get("answer_cut", {"count": 0})["count"] != cut:
            return f"{made.report['flagged'].get('answer_cut')} are noted as cut, {cut} are"
        told = {
            "template_options": options.template_options,
            "supervise": options.mask.supervise,
            "reasoning": options.mask.reasoning,
            "max_length": options.max_length,
            "truncation": options.truncation,
            "max_id": max(max(one.ids) for one in kept),
        }
        other = next((key for key, value in told.items() if made.meta.get(key) != value), None)
        return None if other is None else f"the folder says {other} {made.meta.get(other)}, it is {told[other]}"

    def _wrong_sides(self, plain: PrepareOptions) -> str | None:
        """Which conversations `--heldout` keeps out: prompts with all their rows, whatever order or answers."""
        words = (
            ("Say who.", "Say  WHO. ", "say who."),
            ("Go on", "go  on", "Go on "),
            ("Why so", " why SO"),
            ("What else",),
        )
        rows = [
            _plain_row([(said, f"Because {group} {number}")]) for number in range(3) for group in words
            for said in group[number : number + 1]
        ]  # fmt: skip
        answered = [_plain_row([(row.turns[0][1], f"Since {n}")]) for n, row in enumerate(rows)]
        options, sides = plain.model_copy(update={"heldout": _HELD_OUT}), []
        for name, part in (("sides", rows), ("turned", answered[::-1])):
            made = self._prepared(name, [json.dumps(row.given) for row in part], options)
            place = made.folder / HELDOUT_FOLDER
            if not place.is_dir():
                return f"--heldout {_HELD_OUT} keeps nothing out"
            kept, _ = self._outcome(part, options)
            held = PreparedDataset.open(place)
            prompts = {kept[int(line) - 1].row.prompt for line in held.rows["line"]}
            if len(prompts) != _HELD_OUT or made.report["heldout_prompts"] != _HELD_OUT:
                told = made.report["heldout_prompts"]
                return f"--heldout {_HELD_OUT} keeps {len(prompts)} prompts out, the report says {told}"
            for folder, inside in ((held, True), (made, False)):
                mine = [one for one in kept if (one.row.prompt in prompts) == inside]
                wrong = _unlike_rows(folder, mine, str(made.folder.with_suffix(".jsonl")))
                if wrong is not None:
                    return f"--heldout, {'held out' if inside else 'trained on'}: {wrong}"
            asked = [json.loads(line) for line in (place / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()]
            firsts = [next(one.row for one in kept if one.row.prompt == prompt) for prompt in prompts]
            if sorted(map(str, asked)) != sorted(str({"turns": [row.turns[0][1]]}) for row in firsts):
                return f"{PROMPTS_FILE} asks {asked}, what is held out asks {[row.turns[0][1] for row in firsts]}"
            sides.append(prompts)
        if sides[0] != sides[1]:
            return "--heldout chooses other prompts if the rows have another order or other answers"
        return None

    def _taken_for_done(self, rows: Sequence[_Row], settings: Mapping[str, PrepareOptions]) -> str | None:
        """A folder that is there already: the same call leaves it, and any other is refused."""
        file, out = self._place / "plain.jsonl", self._place / "plain"
        before, plain = {path: path.read_bytes() for path in out.glob("*.*")}, settings["plain"]
        report = prepare_module.prepare(self._tokenizer, [str(file)], out, plain)
        if report != json.loads((out / "report.json").read_text(encoding="utf-8")):
            return "the same call again gives another report"
        others = {name: options for name, options in settings.items() if name != "plain"}
        others |= {"--heldout 1": plain.model_copy(update={"heldout": 1}), "another file": plain}
        for name, options in others.items():
            if name == "another file":
                file.write_text(json.dumps(rows[0].given), encoding="utf-8")
            try:
                prepare_module.prepare(self._tokenizer, [str(file)], out, options)
            except DataError:
                continue
            return f"a folder that was prepared without it is taken as it is, or written over, with {name}"
        changed = [path.name for path, content in before.items() if not path.is_file() or path.read_bytes() != content]
        return f"a call that does no work changes {changed}" if changed else None


def _unlike_rows(made: PreparedDataset, kept: Sequence[_Kept], source: str) -> str | None:
    """How the rows of a folder differ from those that it should hold, in words."""
    lines = [int(line) for line in made.rows["line"]]
    if lines != [one.line for one in kept]:
        return f"lines {lines} are kept, by their fields {[one.line for one in kept]}"
    prompts = dict[Any, int]()
    for place, one in enumerate(kept):
        what = f"line {one.line}, {str(one.row.given)[:90]}.."
        text = text_of(made, place)
        ids, mask = text.input_ids.tolist(), text.loss_mask.tolist()
        if ids != one.ids:
            first = next((i for i, (a, b) in enumerate(zip(ids, one.ids, strict=False)) if a != b), len(one.ids))
            return f"{what}: its {len(ids)} tokens are not the {len(one.ids)} of the template, from {first} on"
        off = [i for i, wanted in enumerate(one.mask) if wanted is not None and wanted != mask[i]]
        if off:
            return f"{what}: token {off[0]} is {'not ' * (not mask[off[0]])}supervised ({len(off)} are wrong)"
        beside = sum(found for found, wanted in zip(mask, one.mask, strict=True) if wanted is None)
        if beside > _MARKS * (1 + bool(one.row.thought)) * sum(role == "assistant" for role, _, _ in one.row.turns):
            return f"{what}: {beside} supervised tokens belong to no answer"
        if made.origin(place) != (source, one.line) or int(made.rows["supervised"][place]) != sum(mask):
            return f"{what}: it passes for {made.origin(place)} with {made.rows['supervised'][place]} supervised tokens"
        key = one.row.prompt if one.row.tokens is None else tuple(ids[: mask.index(True)])
        if prompts.setdefault(key, int(made.prompt_hashes[place])) != int(made.prompt_hashes[place]):
            return f"{what}: passes for another prompt than an earlier row that asks the same"
    if len(set(prompts.values())) != len(prompts):
        return "prompts that differ pass for the same"
    return None


# The rows.


def _plain_row(pairs: Sequence[tuple[str, str]], flags: Sequence[Any] = (), **more: Any) -> _Row:
    """Questions with their answers; a flag of an answer is what its message has beside its text."""
    messages, turns = list[dict[str, Any]](), list[Turn]()
    for number, (said, answer) in enumerate(pairs):
        flag = flags[number] if number < len(flags) else {}
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer, **flag}]
        turns += [("user", said, False), ("assistant", answer, all(flag.values()))]
    return _Row({"messages": messages, **more}, tuple(turns))


def _turns(said: str, answer: str) -> tuple[Turn, ...]:
    return ("user", said, False), ("assistant", answer, True)


def _rows(tokenizer: Any, given: Mapping[str, Any]) -> list[_Row]:
    """One of each kind; the first two are plain."""
    two = (("Name a colour.", "Blue is one:  the sky"), ("And a fruit?", "Plums.\n\nAlso figs"))
    one, asks = _plain_row([("Say why.", "It is so")]), _plain_row([("Ask me", "This was told to all who came by")])
    user, cut = {"role": "user", "content": "More?"}, _plain_row([("Tell me all", "There was once a")])
    option = {} if given else an_option(tokenizer, [{"role": "user", "content": "a"}])
    ids = tuple(tokenizer("Count, and then go on from here")["input_ids"])[:12]
    half = tuple(int(i in (1, 2, len(ids) - 2, len(ids) - 1)) for i in range(len(ids)))
    labels = [token if on else -100 for token, on in zip(ids, half, strict=True)]
    rows = [
        one,
        _plain_row(two),
        _plain_row([("say  WHY. ", "Nobody told me")], id=7),
        one,
        _plain_row(two, [{"train": False}]),
        _plain_row([("Name a river.", "Rhine"), ("One more?", "Not now")], [{}, {"weight": 0}]),
        _plain_row([("Name a lake.", "Garda"), ("One more?", "Como")], [{"weight": 1}, {"weight": 0.5}]),
        replace(_plain_row([("Leave it", "Left")], weight=0), dropped="row_not_to_be_learned"),
        replace(_plain_row([("Leave it", "Left")], train=False), dropped="row_not_to_be_learned"),
        _plain_row([("Weigh it", "One kilo")], weight=2.0, id=8),
        replace(cut, given={**cut.given, "finish_reason": "length"}, cut=True),
        _Row({"messages": [*asks.given["messages"], user]}, (*asks.turns, ("user", "More?", False)), exact=False),
        _Row({"prompt": "In a pair", "completion": "As well"}, _turns("In a pair", "As well")),
        _Row({"instruction": "Add", "input": "1 and 2", "output": "Three"}, _turns("Add\n\n1 and 2", "Three")),
        _Row({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, _turns("Hi", "Ho")),
        _Row({"input_ids": ids, "loss_mask": half}, tokens=(ids, half)),
        _Row({"input_ids": ids[::-1], "labels": labels[::-1]}, tokens=(ids[::-1], half[::-1])),
        _Row("{not a row", dropped="not_json"),
        _Row({"messages": [user]}, dropped="no_assistant"),
    ]  # fmt: skip
    if _takes(tokenizer, [{"role": "system", "content": _SYSTEM}, *one.given["messages"]], given):
        for place, key in enumerate(("system", "messages")):
            row = _plain_row([(f"Be short {place}", "Yes")])
            head = {"role": "system", "content": _SYSTEM}
            more = {"system": _SYSTEM} if key == "system" else {"messages": [head, *row.given["messages"]]}
            rows.append(replace(row, given={**row.given, **more}, turns=(("system", _SYSTEM, False), *row.turns)))
    if option and _takes(tokenizer, one.given["messages"], option):
        row = _plain_row([("With an option", "Here it is, and it has to be long")], chat_template_kwargs=option)
        rows.append(replace(row, options=option, exact=False))
    thinking = _plain_row([("Think first", "Teal, and that has to be long")], [{"reasoning_content": "Sea or sky"}])
    if _takes(tokenizer, thinking.given["messages"], given, "Sea or sky"):
        rows.append(replace(thinking, thought="Sea or sky", exact=False))
    return [*rows, _plain_row([("Say it", "No")]), _plain_row([("The last one", "Has no end of line")])]


def _takes(tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any], shown: str = "") -> bool:
    """Whether the template takes such messages, and shows a text of them."""
    try:
        return shown in str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except TEMPLATE_FAULTS:
        return False
