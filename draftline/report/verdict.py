"""What the audit found, from the JSON that `draftline audit --json` and `draftline train` write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import DataError
from draftline.page.axis import number
from draftline.report.run_folder import Row
from draftline.train.run_folder import AUDIT_FILE, RunFolder

OUTCOMES = {"ok": "not found", "found": "found", "skipped": "skipped", "crashed": "could not run"}
"""What a check may say of the fault that it looks for."""


@dataclass(frozen=True)
class Verdict:
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
    areas: list[Row]
    open: list[Row]
    checks: list[Row]

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


def read_verdict(run: RunFolder, given: Path | None) -> Verdict | None:
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
    return Verdict(
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


def _areas(checks: Sequence[_Check]) -> list[Row]:
    """One row per area, in the order of the audit."""
    rows = []
    for area in dict.fromkeys(check.area for check in checks):
        here = [check for check in checks if check.area == area]
        counts = [sum(check.status == status for check in here) for status in OUTCOMES]
        rows.append([area, *map(str, counts), number(sum(check.seconds for check in here))])
    return rows
