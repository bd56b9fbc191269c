"""What the audit found, from the JSON that `draftline audit --json` and `draftline train` write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import DataError
from draftline.page.axis import number
from draftline.report.run_folder import Row, RunFolder
from draftline.train.history import AUDIT_FILE

OTHERS = ("found", "skipped", "crashed")
"""What a check may say instead of `ok`."""


@dataclass(frozen=True)
class Verdict:
    """One audit.

    Attributes:
        source: where it was read, and what it says of: the run before its start, or what `--audit` names.
        findings: as the audit wrote them: `code`, `severity`, `title`, `evidence`, `mend`.
        allowed: codes with which the run was started in spite of them.
        areas: rows of area, checks that passed, codes that found something, were skipped, could not run, seconds.
    """

    source: str
    findings: list[dict[str, Any]]
    allowed: list[str]
    areas: list[Row]

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        errors = sum(finding["severity"] == "error" for finding in self.findings)
        passed = sum(int(row[1]) for row in self.areas)
        return f"{errors} errors, {len(self.findings) - errors} warnings; {passed} checks passed."


def read_verdict(run: RunFolder, given: Path | None) -> Verdict | None:
    """The audit in `given`; without it the one that `draftline train` left in the run's folder, None if there is none.

    Raises:
        DataError: the file is no result of an audit.
    """
    path = run.folder / AUDIT_FILE if given is None else given
    if given is None and not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checks = [(check["code"], check["status"], check["seconds"]) for check in content["checks"]]
        findings = [
            {key: str(f[key]) for key in ("code", "severity", "title", "evidence", "mend")} for f in content["findings"]
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is no result of an audit: give what `draftline audit --json` wrote") from error
    source = f"Before the first step ({AUDIT_FILE} of the run)." if given is None else f"From {given}."
    allowed = sorted({code for session in run.identity.get("sessions", []) for code in session.get("allowed", [])})
    return Verdict(source, findings, allowed, _areas(checks))


def _areas(checks: list[tuple[str, str, float]]) -> list[Row]:
    """One row per area, in the order of the audit: how many passed, and the codes of the others."""
    rows = []
    for area in dict.fromkeys(code[:3] for code, *_ in checks):
        here = [(code, status) for code, status, _ in checks if code.startswith(area)]
        others = [" ".join(code for code, status in here if status == name) or "–" for name in OTHERS]
        seconds = sum(spent for code, _, spent in checks if code.startswith(area))
        rows.append([area, str(sum(status == "ok" for _, status in here)), *others, number(seconds)])
    return rows
