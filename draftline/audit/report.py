"""What a check is and what it says: how it is run on a subject, and how what it finds is shown.

Every check is one function of a `Probe`, registered under a code that never changes its meaning. It examines one
stage of the pipeline with inputs of its own making, so that a fault upstream is reported once, where it is, and not
again by everything that follows. Where a check cannot be isolated it names the codes it `needs`, and is skipped if
one of them found an error.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape

from draftline.audit.probe import Probe
from draftline.audit.subject import (
    AuditSubject,
    NotApplicable,
    subject_of_drafter,
    subject_of_run_folder,
    subject_to_come,
)
from draftline.config import RunConfig
from draftline.errors import CheckpointError, ConfigError, DraftlineError, TargetError
from draftline.formats.dialects import describe
from draftline.formats.files import read_files
from draftline.formats.folder import read_config
from draftline.formats.load import load_drafter
from draftline.options import Given
from draftline.targets.borrowed import LayersNotLoaded
from draftline.targets.model import Target, load_target
from draftline.train.run_folder import checkpoint_folder

Severity = Literal["error", "warning"]
Status = Literal["ok", "found", "skipped", "crashed"]

AREAS = {
    "TGT": "target and captured states",
    "DAT": "data and packing",
    "DRF": "drafter",
    "LOS": "labels and loss",
    "OPT": "optimiser and checkpoints",
    "EXP": "exported drafter",
    "EVL": "decoding and metrics",
    "RUN": "the run as a whole",
    "PRF": "proof of an exported drafter",
}
"""In the order in which they are checked: each needs only what comes before it."""

UNUSABLE = ("EXP013", "the folder cannot be used with this target as it stands")
"""Code and title of the finding about a folder whose drafter cannot be built at all."""

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
class Problem:
    """What a check returns when something is wrong.

    Attributes:
        evidence: what was measured, with numbers.
        fix: a command or a configuration line.
        severity: an error makes the drafter useless or the run wrong; a warning may be meant.
    """

    evidence: str
    fix: str
    severity: Severity = "error"


@dataclass(frozen=True)
class Finding:
    """A problem with the code and title of the check that found it."""

    code: str
    severity: Severity
    title: str
    evidence: str
    fix: str


@dataclass(frozen=True)
class Check:
    """A registered check.

    Attributes:
        title: the fault, as a statement that holds when the check finds something.
        needs: codes of checks that must not have found an error, or this one would only repeat them.
    """

    code: str
    title: str
    function: Callable[[Probe], Problem | None]
    needs: tuple[str, ...]

    def finding(self, problem: Problem) -> Finding:
        """The finding for a problem."""
        return Finding(self.code, problem.severity, self.title, problem.evidence, problem.fix)


@dataclass(frozen=True)
class CheckResult:
    """How one check went.

    Attributes:
        status: `ok`, `found`, `skipped` (something it needs is missing or wrong), `crashed` (it could not run).
        reason: why it was skipped, or what it raised.
    """

    code: str
    status: Status
    seconds: float
    reason: str = ""


CHECKS: dict[str, Check] = {}
"""All registered checks by code."""


def check(
    code: str, title: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Probe], Problem | None]], Callable[[Probe], Problem | None]]:
    """Register a function as the check for `code`."""

    def register(function: Callable[[Probe], Problem | None]) -> Callable[[Probe], Problem | None]:
        assert code not in CHECKS, f"two checks are called {code}"
        assert code[:3] in AREAS, f"{code} belongs to no area"
        CHECKS[code] = Check(code, title, function, needs)
        return function

    return register


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
    def not_examined(self) -> list[str]:
        """Codes of the checks that could not run, because what they call raised."""
        return [result.code for result in self.checks if result.status == "crashed"]

    @property
    def exit_status(self) -> int:
        """0 clean, 1 findings of severity error, 2 a check could not run."""
        if self.errors():
            return 1
        return 2 if self.not_examined else 0

    def errors(self, allow: Collection[str] = ()) -> list[Finding]:
        """Findings of severity error whose code is not allowed."""
        return [f for f in self.findings if f.severity == "error" and f.code not in allow]

    def to_json(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [
                {
                    "code": c.code,
                    "area": AREAS[c.code[:3]],
                    "looks_for": CHECKS[c.code].title,
                    "status": c.status,
                    "reason": c.reason,
                    "seconds": round(c.seconds, 3),
                }
                for c in self.checks
            ],
        }

    def render(self, console: Console) -> None:
        """Print the findings, what did not run and why, the notes and one line of summary; readable without colour."""
        for finding in self.findings:
            style = "bold red" if finding.severity == "error" else "bold yellow"
            _print(console, finding.severity.upper(), f"{finding.code}  {finding.title}", style)
            _print(console, "", f"found: {finding.evidence}")
            _print(console, "", f"fix:   {finding.fix}")
        for result in self.checks:
            if result.status == "crashed":
                _print(console, "CRASHED", f"{result.code}  not examined: {CHECKS[result.code].title}", "bold red")
                _print(console, "", f"it raised: {result.reason}")
        for note in self.notes:
            _print(console, "note", note)
        for reason in dict.fromkeys(result.reason for result in self.checks if result.status == "skipped"):
            codes = [result.code for result in self.checks if (result.status, result.reason) == ("skipped", reason)]
            _print(console, "skipped", f"{', '.join(codes)}: {reason}")
        console.print(self.summary(), highlight=False, soft_wrap=True)

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


def _print(console: Console, head: str, text: str, style: str = "") -> None:
    """A head of eight columns and a text: wrapped beside the head in a terminal, on one line in a file or pipe."""
    lines = textwrap.wrap(text, max(20, console.width - 8), break_long_words=False) if console.is_terminal else [text]
    for index, line in enumerate(lines):
        shown = f"{head if index == 0 else '':7}"
        shown = f"[{style}]{shown}[/]" if style else shown
        console.print(f"{shown} {escape(line)}", highlight=False, soft_wrap=True)


NO_LAYERS = (
    "the target's layers are not loaded, because its states are read from disk; `draftline capture` has examined them, "
    "and `draftline audit` without --states examines the rest"
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
        ConfigError: a word is neither a code nor an area, or no check is left.
    """
    for word in (*select, *ignore):
        if word not in CHECKS and word not in AREAS:
            raise ConfigError(
                f"{word!r} is not a check: known are the areas {', '.join(AREAS)} and codes such as TGT001"
            )
    areas = list(AREAS)
    in_order = sorted(CHECKS.values(), key=lambda one: (areas.index(one.code[:3]), one.code))
    chosen = [one for one in in_order if _matches(one, select or AREAS) and not _matches(one, ignore)]
    if not chosen:
        raise ConfigError(f"no check is left: {', '.join(select or AREAS)} without {', '.join(ignore)}; ignore less")
    return chosen


def _matches(one: Check, words: Iterable[str]) -> bool:
    return any(word in (one.code, one.code[:3]) for word in words)


def _run_check(one: Check, probe: Probe, faulty: Collection[str]) -> tuple[CheckResult, Finding | None]:
    blocking = [code for code in one.needs if code in faulty]
    if blocking:
        return CheckResult(one.code, "skipped", 0.0, f"{', '.join(blocking)} would show here again"), None
    started = time.perf_counter()
    try:
        problem = one.function(probe)
    except LayersNotLoaded:
        return CheckResult(one.code, "skipped", time.perf_counter() - started, NO_LAYERS), None
    except NotApplicable as absent:
        return CheckResult(one.code, "skipped", time.perf_counter() - started, str(absent)), None
    except _CRASHES as error:
        if not probe.subject.target.has_layers and "meta tensor" in str(error):  # torch's word for what is not there
            return CheckResult(one.code, "skipped", time.perf_counter() - started, NO_LAYERS), None
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return CheckResult(one.code, "crashed", time.perf_counter() - started, reason), None
    seconds = time.perf_counter() - started
    if problem is None:
        return CheckResult(one.code, "ok", seconds), None
    return CheckResult(one.code, "found", seconds), one.finding(problem)


def audit_run_config(
    config: RunConfig, target: Target | None = None, select: Collection[str] = (), ignore: Collection[str] = ()
) -> AuditReport:
    """Audit a run before it starts, on the target, data and drafter that it will use.

    Args:
        target: the run's target, if it is loaded already.

    Raises:
        ConfigError, DataError, TargetError: the run itself could not start.
    """
    target = target or load_target(config.target)
    return run_audit(subject_to_come(config, target), select, ignore)


def audit_run_folder(
    folder: Path, target: Target | None = None, select: Collection[str] = (), ignore: Collection[str] = ()
) -> AuditReport:
    """Audit a run that has written a checkpoint, see `subject_of_run_folder` for what is opened and what it raises."""
    return run_audit(subject_of_run_folder(folder, target), select, ignore)


def audit_checkpoint(
    folder: Path,
    target: Target,
    given: Given | None = None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> AuditReport:
    """Audit a finished drafter, of ours or of another trainer, against a target.

    What is examined is the folder as it lies there: which conventions it follows, what each serving engine makes of
    them, and whether the drafter does what it says on this target.

    Args:
        given: facts that the folder leaves out.

    Raises:
        CheckpointError: the folder holds no configuration of a drafter.
    """
    if checkpoint_folder(folder) is not None:
        return audit_run_folder(folder, target, select, ignore)
    tree, notes, given = read_config(folder), list[str](), given or Given()
    if tree.get("num_target_layers") is None:  # the target can be asked; that the key is missing is EXP002's to report
        given = given.model_copy(update={"num_target_layers": target.num_layers})
    try:
        notes = describe(read_files(folder))
        loaded = load_drafter(folder, given, target)
    except (CheckpointError, TargetError) as error:
        fix = "fix what it names; `draftline import` takes facts that are missing; or name the target it was made for"
        return AuditReport([_unusable(str(error), fix)], [], notes)
    broken = [name for name, weight in loaded.draft_model.named_parameters() if not weight.isfinite().all()]
    if broken:
        evidence = f"{len(broken)} tensors have values that are not finite, first {broken[0]}"
        return AuditReport([_unusable(evidence, "take an earlier checkpoint")], [], notes)
    report = run_audit(subject_of_drafter(folder, loaded, target), select, ignore)
    return AuditReport(report.findings, report.checks, [*notes, *loaded.notes, *report.notes])


def _unusable(evidence: str, fix: str) -> Finding:
    code, title = UNUSABLE
    return Finding(code, "error", title, evidence, fix)
