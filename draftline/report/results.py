"""What `draftline evaluate --json` measured and `draftline audit --json` found, as rows, bars and coloured answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.config import DFlashConfig, flatten
from draftline.errors import DataError
from draftline.page.chart import Bars, hue, number
from draftline.train.run_folder import AUDIT_FILE, RunFolder

TableRow = list[str]

SHOWN_ANSWERS = 6

PARTS_HEAD = ("part", "acceptance length", "95 % interval", "prompts", "forwards")

OUTCOMES = {"ok": "not found", "found": "found", "skipped": "skipped", "crashed": "could not run"}
"""What a check may say of the fault that it looks for."""


@dataclass(frozen=True)
class Piece:
    """One output token: its text, and which drafted token it was; 0 is the target's own."""

    text: str
    slot: int


@dataclass(frozen=True)
class ShownAnswer:
    """One answered turn.

    Attributes:
        asked: what the user said, empty where the file does not say.
        place: file, line and turn of the prompt.
        pieces: the output, token by token.
        accepted: drafted tokens that stood, per forward of the target.
        length: output tokens per forward after the first token, bonus included.
    """

    asked: str
    place: str
    pieces: list[Piece]
    accepted: list[int]
    length: float


@dataclass(frozen=True)
class Evaluation:
    """One file of results.

    Attributes:
        name: of the file.
        acceptance_length: decoded, bonus included; None where no answer had a second token.
        interval: of it, None likewise.
        drafter: what it is of: folders and fingerprints; empty where an earlier version wrote the file.
        figures: name and value.
        settings: how the prompts were put and answered; empty where an earlier version wrote the file.
        warnings: what makes the numbers doubtful.
        parts: title and rows of each breakdown that has more than one part.
        charts: acceptance by position, and how often how many stood.
        answers: some of them, from the one with the most tokens per forward to the one with the fewest.
        of_answers: how many there were.
        absent: why there are no answers, empty if there are.
        slots: drafted tokens per forward.
    """

    name: str
    acceptance_length: float | None
    interval: tuple[float, float] | None
    drafter: list[TableRow]
    figures: list[TableRow]
    settings: list[TableRow]
    warnings: list[str]
    parts: list[tuple[str, list[TableRow]]]
    charts: list[Bars]
    answers: list[ShownAnswer]
    of_answers: int
    absent: str
    slots: int


def read_evaluation(path: Path, run: RunFolder) -> Evaluation:
    """One file of results, if it can be of the run's drafter.

    Raises:
        DataError: it is not such a file, or of a drafter with another number of drafted tokens or vocabulary.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        evaluation = _evaluation(path, content)
        ids = max((max(turn["output_ids"], default=0) for turn in content["per_prompt"]), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not an evaluation: give what `draftline evaluate --json` wrote") from error
    if (known := run.identity.get("target")) and content.get("target_weights", known) != known:
        evaluation.warnings.append(
            f"The fingerprint of the target's weights is {str(content['target_weights'])[:12]} here, in the run "
            f"{str(known)[:12]}: another target, or the same in another number format"
        )
    if (shape := run.drafter) is not None:
        checked = content.get("settings", {}).get("num_speculative_tokens")
        _check_drafter(path, run.path, shape, evaluation.slots, checked, ids)
    return evaluation


def _check_drafter(
    path: Path, folder: Path, shape: DFlashConfig, slots: int, checked: int | None, highest_id: int
) -> None:
    """`checked` is the number of drafted tokens that was asked for, if any."""
    if slots != (checked or shape.num_speculative_tokens):
        raise DataError(
            f"{path} is of a drafter with {slots} drafted tokens, that of {folder} has {shape.num_speculative_tokens}: "
            "evaluate the drafter of this run"
        )
    if highest_id >= shape.vocab_size:
        raise DataError(
            f"{path} has token {highest_id}, the target of {folder} knows 0..{shape.vocab_size - 1}: "
            "evaluate the drafter of this run"
        )


def _evaluation(path: Path, content: Mapping[str, Any]) -> Evaluation:
    rates = content["acceptance_rate_by_position"]
    length, (low, high) = content["acceptance_length"], content["acceptance_length_interval"]
    turns = content["per_prompt"]
    told = [turn for turn in turns if "text_pieces" in turn]
    answers = sorted((_answer(turn) for turn in told), key=lambda answer: -answer.length)
    earlier = f"{path.name} holds no text of the answers (an earlier version wrote it)"
    return Evaluation(
        name=path.name,
        acceptance_length=None if length is None else float(length),
        interval=None if low is None else (float(low), float(high)),
        drafter=_identity(content),
        figures=_figures(content),
        settings=_settings(content),
        warnings=[str(warning) for warning in content.get("warnings", [])],
        parts=_parts(content),
        charts=_charts(content),
        answers=_spread(answers),
        of_answers=len(turns),
        absent="" if told else f"{earlier}: run `draftline evaluate --json` again.",
        slots=len(rates),
    )


def _figures(content: Mapping[str, Any]) -> list[TableRow]:
    counts = content.get("counts", {})
    equal = content["greedy_equal"]
    found: dict[str, Any] = {
        "acceptance length (with bonus), decoded": content["acceptance_length"] or "–",
        "95 % interval, by prompt": _interval(content["acceptance_length_interval"]),
        "mean over prompts": content.get("acceptance_length_macro"),
        "from the training forward": content["teacher_forced_acceptance_length"],
        "outputs equal to plain greedy decoding": None if equal is None else f"{equal:.1%}",
        "prompts": content["prompts"],
        "drafted tokens": counts.get("drafted_tokens"),
        "verified tokens": counts.get("verified_tokens"),
        "accepted tokens": counts.get("accepted_tokens"),
        "tokens per second with the drafter": content["tokens_per_second"],
        "tokens per second without": content["baseline_tokens_per_second"],
        "speed-up": content["speedup"],
    }
    return named_rows(found)


def _identity(content: Mapping[str, Any]) -> list[TableRow]:
    names = {
        "drafter": "drafter",
        "drafter_weights": "fingerprint of its weights",
        "target": "target",
        "target_weights": "fingerprint of its weights as loaded",
    }
    return named_rows({name: content.get(key) for key, name in names.items()})


def _settings(content: Mapping[str, Any]) -> list[TableRow]:
    names = ("target_dtype", "settings", "mode", "trained_mode")
    flat = flatten({name: content[name] for name in names if content.get(name) is not None})
    return [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in flat.items()]


def _parts(content: Mapping[str, Any]) -> list[tuple[str, list[TableRow]]]:
    """Rows for `PARTS_HEAD`."""
    titles = {
        "by_file": "By file of prompts",
        "by_output_length": "By length of the answer, tokens",
        "by_output_position": "By place in the answer, tokens",
    }
    return [
        (title, [_part(part) for part in content[key]])
        for key, title in titles.items()
        if len(content.get(key, ())) > 1
    ]


def _part(part: Mapping[str, Any]) -> TableRow:
    length = part["acceptance_length"]
    return [
        part["name"],
        "–" if length is None else number(length),
        _interval(part["acceptance_length_interval"]),
        number(part["prompts"]),
        number(part["forwards"]),
    ]


def _interval(ends: Sequence[float | None]) -> str:
    low, high = ends
    return "–" if low is None or high is None else f"{number(low)} to {number(high)}"


def _charts(content: Mapping[str, Any]) -> list[Bars]:
    rates, conditional = content["acceptance_rate_by_position"], content["conditional_acceptance_rate_by_position"]
    histogram = content["accepted_histogram"]
    groups = [("all tokens up to here stood", hue(0), rates), ("stood, if all before stood", hue(1), conditional)]
    forwards = [("forwards of the target", hue(2), histogram)]
    return [
        Bars("Acceptance by position", [str(k) for k in range(1, len(rates) + 1)], groups, x_name="drafted token"),
        Bars("Accepted per forward", [str(k) for k in range(len(histogram))], forwards, x_name="accepted tokens"),
    ]


def token_slots(output_length: int, accepted_per_forward: Sequence[int]) -> list[int]:
    """Which drafted token each token of an output was: 1, 2, .. K, or 0 for one that the target chose itself.

    The first token comes from the prompt's own forward. Every later forward gives its accepted tokens and one of the
    target's; the last forward may be cut short by the end of the output.
    """
    slots = [0]
    for accepted in accepted_per_forward:
        slots += [*range(1, accepted + 1), 0]
    return slots[:output_length]


def _answer(turn: Mapping[str, Any]) -> ShownAnswer:
    texts, accepted = turn["text_pieces"], turn["accepted_per_forward"]
    slots = token_slots(len(texts), accepted)
    return ShownAnswer(
        asked=turn["asked"],
        place=f"{Path(turn['file']).name} line {turn['number']}, turn {turn['turn']}",
        pieces=[Piece(text, slot) for text, slot in zip(texts, slots, strict=True)],
        accepted=accepted,
        length=(len(texts) - 1) / len(accepted) if accepted else 1.0,
    )


def _spread(answers: list[ShownAnswer]) -> list[ShownAnswer]:
    """The first, the last and some between at equal distances."""
    if len(answers) <= SHOWN_ANSWERS:
        return answers
    return [answers[round(i * (len(answers) - 1) / (SHOWN_ANSWERS - 1))] for i in range(SHOWN_ANSWERS)]


@dataclass(frozen=True)
class AuditVerdict:
    """One audit.

    Attributes:
        source: where it was read, and what it says of: the run before its start, or what `--audit` names.
        findings: as the audit wrote them: `code`, `severity`, `title`, `evidence`, `fix`.
        allowed: codes with which the run was started in spite of them.
        areas: rows of area, and how many of its checks had each of the outcomes, and seconds.
        open: rows of code, what it looks for, outcome and reason, of checks that could not look.
        checks: rows of code, what it looks for, outcome and seconds, of all.
    """

    source: str
    findings: list[dict[str, str]]
    allowed: list[str]
    areas: list[TableRow]
    open: list[TableRow]
    checks: list[TableRow]

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        errors = sum(finding["severity"] == "error" for finding in self.findings)
        passed = sum(int(row[1]) for row in self.areas)
        return f"{errors} errors, {len(self.findings) - errors} warnings; {passed} checks passed."


@dataclass(frozen=True)
class _Check:
    """One entry of `checks`; area and words are missing where an earlier version wrote the file."""

    code: str
    area: str
    looks_for: str
    status: str
    reason: str
    seconds: float

    @staticmethod
    def of(entry: Mapping[str, Any]) -> _Check:
        code = str(entry["code"])
        return _Check(
            code=code,
            area=str(entry.get("area", code[:3])),
            looks_for=str(entry.get("looks_for", "")),
            status=str(entry["status"]),
            reason=str(entry.get("reason", "")),
            seconds=float(entry["seconds"]),
        )


def read_verdict(run: RunFolder, given: Path | None) -> AuditVerdict | None:
    """The audit in `given`; without it the one that `draftline train` left in the run's folder, None if there is none.

    Raises:
        DataError: the file is not a result of an audit.
        CheckpointError: that of the run is damaged.
    """
    if given is None and run.audit is None:
        return None
    path = run.audit_path if given is None else given
    try:
        content: Any = run.audit if given is None else json.loads(given.read_text(encoding="utf-8"))
        checks = [_Check.of(entry) for entry in content["checks"]]
        findings = [
            {key: str(f[key]) for key in ("code", "severity", "title", "evidence")}
            | {"fix": str(f.get("fix", f.get("mend")))}
            for f in content["findings"]  # audits of version 0.1 say "mend"
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a result of an audit: give what `draftline audit --json` wrote") from error
    source = f"Before the first step ({AUDIT_FILE} of the run)." if given is None else f"From {given}."
    return AuditVerdict(
        source=source,
        findings=findings,
        allowed=list(run.allowed),
        areas=_areas(checks),
        open=[
            [c.code, c.looks_for, OUTCOMES.get(c.status, c.status), c.reason]
            for c in checks
            if c.status not in ("ok", "found")
        ],
        checks=[[c.code, c.looks_for, OUTCOMES.get(c.status, c.status), number(c.seconds)] for c in checks],
    )


def _areas(checks: Sequence[_Check]) -> list[TableRow]:
    """One row per area, in the order of the audit."""
    rows = []
    for area in dict.fromkeys(check.area for check in checks):
        here = [check for check in checks if check.area == area]
        counts = [sum(check.status == status for check in here) for status in OUTCOMES]
        rows.append([area, *map(str, counts), number(sum(check.seconds for check in here))])
    return rows


def named_rows(found: Mapping[str, Any]) -> list[TableRow]:
    """Names and values of what is known: numbers as in every table, words as they are."""
    known = {name: value for name, value in found.items() if value is not None}
    return [[name, value if isinstance(value, str) else number(value)] for name, value in known.items()]
