"""Run the checks and say what they found: a table in the terminal, JSON, and an exit status."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from draftline.audit.finding import AREAS, CHECKS, Check, CheckResult, Finding, NotApplicable
from draftline.audit.probe import Probe
from draftline.audit.subject import AuditSubject
from draftline.errors import ConfigError, DraftlineError

# What broken code raises when it is run on valid input. A check whose object does so could not run, and says so.
_CRASHES = (
    DraftlineError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
)


@dataclass(frozen=True)
class AuditReport:
    """The outcome of one audit.

    Attributes:
        findings: in the order of the checks.
        checks: one result per check that was selected.
        notes: measured figures that are no fault: sizes, agreement, estimates.
    """

    findings: list[Finding]
    checks: list[CheckResult]
    notes: list[str] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0 clean, 1 findings of severity error, 2 a check could not run."""
        if self.errors():
            return 1
        return 2 if any(result.status == "crashed" for result in self.checks) else 0

    def errors(self, allow: Collection[str] = ()) -> list[Finding]:
        """Findings of severity error whose code is not allowed."""
        return [f for f in self.findings if f.severity == "error" and f.code not in allow]

    def to_json(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [{"code": c.code, "status": c.status, "seconds": round(c.seconds, 3)} for c in self.checks],
        }

    def render(self, console: Console) -> None:
        """Print the findings, what could not run, the notes and one line of summary; readable without colour."""
        for finding in self.findings:
            style = "bold red" if finding.severity == "error" else "bold yellow"
            console.print(f"[{style}]{finding.severity.upper():7}[/] {finding.code}  {escape(finding.title)}")
            console.print(f"        found: {escape(finding.evidence)}", highlight=False)
            console.print(f"        mend:  {escape(finding.mend)}", highlight=False)
        for result in self.checks:
            if result.status == "crashed":
                console.print(f"[bold red]CRASHED[/] {result.code}  {escape(CHECKS[result.code].title)}: not examined")
                console.print(f"        it raised: {escape(result.reason)}", highlight=False)
        for note in self.notes:
            console.print(f"note    {escape(note)}", highlight=False)
        console.print(self.summary(), highlight=False)

    def summary(self) -> str:
        """One line: checks by outcome and area."""
        counts = {status: sum(c.status == status for c in self.checks) for status in ("ok", "skipped", "crashed")}
        areas = sorted({c.code[:3] for c in self.checks}, key=list(AREAS).index)
        errors = len(self.errors())
        return (
            f"audit: {errors} errors, {len(self.findings) - errors} warnings; {counts['ok']} checks passed, "
            f"{counts['skipped']} skipped, {counts['crashed']} could not run ({', '.join(areas)}; "
            f"{sum(c.seconds for c in self.checks):.1f} s)"
        )


def run_audit(
    subject: AuditSubject, select: Collection[str] = (), ignore: Collection[str] = (), seed: int = 0
) -> AuditReport:
    """Run the checks on live objects, which are left as they were.

    Args:
        select: codes or areas (`TGT`, `TGT002`) to run; none: all.
        ignore: codes or areas to leave out.
        seed: of the probes' random tokens and states.

    Raises:
        ConfigError: a selected or ignored code does not exist.
    """
    probe = Probe(subject, seed)
    findings: list[Finding] = []
    results: list[CheckResult] = []
    faulty: set[str] = set()
    # A stage may draw random numbers; the run that follows must not depend on whether it was audited.
    with torch.random.fork_rng():
        for one in chosen_checks(select, ignore):
            result, finding = _run_check(one, probe, faulty)
            results.append(result)
            if finding is not None:
                findings.append(finding)
                if finding.severity == "error":
                    faulty.add(one.code)
    return AuditReport(findings, results, list(probe.notes))


def chosen_checks(select: Collection[str], ignore: Collection[str]) -> list[Check]:
    """The registered checks that match `select` (all if empty) and not `ignore`.

    Raises:
        ConfigError: a word is neither a code nor an area.
    """
    for word in (*select, *ignore):
        if word not in CHECKS and word not in AREAS:
            raise ConfigError(f"{word!r} is no check: known are the areas {', '.join(AREAS)} and codes such as TGT001")
    areas = list(AREAS)
    in_order = sorted(CHECKS.values(), key=lambda one: (areas.index(one.code[:3]), one.code))
    return [one for one in in_order if _matches(one, select or AREAS) and not _matches(one, ignore)]


def _matches(one: Check, words: Iterable[str]) -> bool:
    return any(word in (one.code, one.code[:3]) for word in words)


def _run_check(one: Check, probe: Probe, faulty: Collection[str]) -> tuple[CheckResult, Finding | None]:
    blocking = [code for code in one.needs if code in faulty]
    if blocking:
        return CheckResult(one.code, "skipped", 0.0, f"{', '.join(blocking)} would show here again"), None
    started = time.perf_counter()
    try:
        problem = one.function(probe)
    except NotApplicable as absent:
        return CheckResult(one.code, "skipped", time.perf_counter() - started, str(absent)), None
    except _CRASHES as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return CheckResult(one.code, "crashed", time.perf_counter() - started, reason), None
    seconds = time.perf_counter() - started
    if problem is None:
        return CheckResult(one.code, "ok", seconds), None
    return CheckResult(one.code, "found", seconds), one.finding(problem)
