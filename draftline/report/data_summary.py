"""What `draftline prepare` counted in the data of a run, if the prepared folder is still there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.data.accounting import META_FILE, REPORT_FILE
from draftline.page.axis import number
from draftline.page.chart import Bars, hue
from draftline.report.run_folder import Row
from draftline.train.run_folder import RunFolder


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
    figures: list[Row]
    reasons: list[Row]
    lengths: Bars | None


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


def _absent(reason: str) -> DataSummary:
    return DataSummary(reason, [], [], None)


def _figures(run: RunFolder, report: Mapping[str, Any], meta: Mapping[str, Any]) -> list[Row]:
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
    return [[name, number(v) if isinstance(v, int | float) else str(v)] for name, v in found.items() if v]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def _reasons(report: Mapping[str, Any]) -> list[Row]:
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
