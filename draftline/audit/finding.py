"""What a check is, and what it says when it finds something.

Every check is one function of a `Probe`, registered under a code that never changes its meaning. It examines one
stage of the pipeline with inputs of its own making, so that a fault upstream is reported once, where it is, and not
again by everything that follows. Where a check cannot be isolated it names the codes it `needs`, and is skipped if
one of them found an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from draftline.audit.probe import Probe

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
