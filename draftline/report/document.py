"""All that is known of a run as one HTML page: what its folder says, whole or not, and what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from draftline.config import RunConfig, flatten
from draftline.data.accounting import META_FILE, REPORT_FILE
from draftline.page.chart import Bars, hue, number
from draftline.page.frame import render
from draftline.report import curves
from draftline.report.results import PARTS_HEAD, Evaluation, TableRow, named_rows, read_evaluation, read_verdict
from draftline.train.run_folder import RunFolder

REPORT_SECTIONS = (
    ("curves", "Curves"),
    ("positions", "By slot"),
    ("speed", "Speed"),
    ("evaluation", "Decoded"),
    ("samples", "Answers"),
    ("audit", "Audit"),
    ("data", "Data"),
    ("configuration", "Configuration"),
    ("environment", "Environment"),
)


@dataclass(frozen=True)
class DataSummary:
    """What is shown of the data.

    Attributes:
        absent: why nothing is shown; empty if something is.
        figures: name and value.
        reasons: rows that were dropped or flagged: reason, what was done, count, first place.
        lengths: conversations by their length in tokens.
    """

    absent: str
    figures: list[TableRow]
    reasons: list[TableRow]
    lengths: Bars | None


def report_page(
    folder: Path,
    evaluations: Sequence[Path] = (),
    audit: Path | None = None,
    follow: tuple[str, str] | None = None,
) -> str:
    """The page of the run in a folder.

    Args:
        evaluations: files that `draftline evaluate --json` wrote for the run's drafter.
        audit: file that `draftline audit --json` wrote; without it the one that the run was started with.
        follow: see `page.frame.render`.

    Raises:
        CheckpointError: the folder is not a run.
        DataError: an evaluation or audit cannot be read, or is of another drafter.
    """
    run = RunFolder.open(folder)
    decoded = [read_evaluation(path, run) for path in evaluations]
    changed, settings = configuration(run)
    context = {
        "run": run,
        "made": moment(run.now),
        "written": moment(run.last_written),
        "cards": cards(run, decoded),
        "learning": curves.learning(run.metrics, run.seams),
        "heldout": curves.heldout_table(run.metrics),
        "positions": curves.positions(run.metrics),
        "speed": curves.speed(run.speed),
        "queue": curves.queue(run.speed),
        "evaluations": decoded,
        "parts_head": PARTS_HEAD,
        "verdict": read_verdict(run, audit),
        "data": read_data_summary(run),
        "changed": changed,
        "settings": settings,
        "drafter": drafter_shape(run),
        "environment": environment(run),
        "sessions": sessions(run),
    }
    title = "/".join(folder.resolve().parts[-2:])
    return render("report.html", title=title, sections=REPORT_SECTIONS, context=context, follow=follow)


def cards(run: RunFolder, evaluations: Sequence[Evaluation]) -> list[tuple[str, str, str]]:
    """The figures that one looks for first: name, value, remark."""
    seams = "".join(f", extended after {step:,}" for step in run.seams)
    total = f"of {run.total_steps:,}{seams}" if run.total_steps is not None else ""
    tokens = run.metrics["tokens"].values
    entries = [
        ("step", f"{run.step:,}", total),
        ("time", duration(run.seconds), f"{tokens[-1]:,.0f} tokens" if len(tokens) else ""),
    ]
    for key, name, remark in (
        ("heldout_accuracy", "held-out accuracy", "last evaluation"),
        ("heldout_streak", "held-out streak", "random anchors, without bonus"),
        ("heldout_teacher_forced_acceptance_length", "teacher-forced acceptance length", "with bonus"),
    ):
        values = run.metrics[key].values
        if len(values):
            entries.append((name, number(float(values[-1])), remark))
    for one in evaluations:
        if one.acceptance_length is not None:
            remark = "" if one.interval is None else "95 %: {:.2f} to {:.2f}".format(*one.interval)
            entries.append(("acceptance length, decoded", number(one.acceptance_length), remark))
    return entries


def configuration(run: RunFolder) -> tuple[list[TableRow], list[TableRow]]:
    """Settings that differ from the published recipe, with its value beside them; and all settings."""
    ours, published = flatten(run.settings), flatten(RunConfig().model_dump(mode="json"))
    changed = [
        [key, _text(value), _text(published[key])]
        for key, value in ours.items()
        if key in published and value != published[key] and key != "target.name"  # a recipe is for any target
    ]
    return changed, [[key, _text(value)] for key, value in ours.items()]


def environment(run: RunFolder) -> list[TableRow]:
    """What the run ran on, and what identifies its code, target and data; nothing without run.json."""
    identity = run.identity
    if not identity:
        return []
    code, machine = identity.get("code", {}), identity.get("machine", {})
    changes = f", with changes {str(code['diff_sha256'])[:12]}" if code.get("diff_sha256") else ""
    found = {
        "code": f"{code['commit']}{changes}" if code.get("commit") else "not a checkout",
        "versions": "\n".join(f"{name} {version}" for name, version in identity.get("versions", {}).items()),
        "Python": identity.get("python"),
        "system": machine.get("system"),
        "devices": "\n".join(map(str, machine.get("devices") or [])),
        "target's weights": identity.get("target"),
        "data": identity.get("data", {}).get("fingerprint"),
    }
    return named_rows({name: value for name, value in found.items() if value})


def sessions(run: RunFolder) -> list[TableRow]:
    """One row per time the run was started or continued."""
    return [
        [
            str(session.get("started", "")),
            str(session.get("first_step", "")),
            f"{session.get('cores', '?')} / {session.get('threads_per_loop', '?')}",
            " ".join(map(str, session.get("command") or [])),
        ]
        for session in run.identity.get("sessions", [])
    ]


def drafter_shape(run: RunFolder) -> list[TableRow]:
    """The drafter's sizes."""
    return [[key.replace("_", " "), _text(value)] for key, value in run.identity.get("drafter", {}).items()]


def duration(seconds: float) -> str:
    """`44 min 31 s`, the two largest units."""
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{seconds:.3g} s"


def moment(when: datetime) -> str:
    """A time for people."""
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def read_data_summary(run: RunFolder) -> DataSummary:
    """The summary of the folder that the run's settings name; its absence, or that it holds other data now, is said."""
    place = run.settings.get("data", {}).get("path")
    if place is None:
        return _absent("The run's settings name no prepared folder.")
    folder = Path(str(place))
    try:
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        figures, reasons, lengths = _figures(run, report, meta), _reasons(report), _lengths(report)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return _absent(f"The prepared folder {folder} is not here any more, damaged, or named from elsewhere.")
    trained_on = str(run.identity.get("data", {}).get("fingerprint", "")).partition("+")[0]
    if trained_on and meta.get("fingerprint") != trained_on:
        return _absent(f"The prepared folder {folder} holds other data now than this run was trained on.")
    return DataSummary("", figures, reasons, lengths)


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _absent(reason: str) -> DataSummary:
    return DataSummary(reason, [], [], None)


def _figures(run: RunFolder, report: Mapping[str, Any], meta: Mapping[str, Any]) -> list[TableRow]:
    data = run.identity.get("data", {})
    share = report.get("supervised_share")
    found = {
        "conversations trained on": data.get("conversations"),
        "conversations held out": data.get("heldout_conversations"),
        "rows read": report.get("rows_in"),
        "rows kept": report.get("rows_out"),
        "tokens": report.get("tokens"),
        "supervised tokens": report.get("supervised_tokens"),
        "supervised share": None if share is None else f"{share:.1%}",
        "supervised are": report.get("supervising"),
        "duplicate share": None if report.get("duplicate_share") is None else f"{report['duplicate_share']:.1%}",
        "reasoning": _counts(report.get("thinking", {})),
        "scripts": _counts(report.get("scripts", {})),
        "turns": _counts(report.get("turns", {})),
        "longest allowed": None if "max_length" not in meta else f"{number(meta['max_length'])} tokens",
        "files": "\n".join(meta.get("sources", [])[:8]),
    }
    return named_rows({name: value for name, value in found.items() if value})


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def _reasons(report: Mapping[str, Any]) -> list[TableRow]:
    return [
        [reason.replace("_", " "), done, number(entry["count"]), f"{entry['first_file']} line {entry['first_line']}"]
        for done, entries in (("dropped", report.get("dropped", {})), ("kept, flagged", report.get("flagged", {})))
        for reason, entry in entries.items()
    ]


def _lengths(report: Mapping[str, Any]) -> Bars | None:
    counts = report.get("lengths", {})
    if not counts:
        return None
    names = sorted(counts, key=lambda name: (name.startswith(">"), int(name.split()[-1])))
    groups = [("conversations", hue(0), [counts[name] for name in names])]
    return Bars("Conversations by length", names, groups, x_name="tokens")
