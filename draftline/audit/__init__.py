"""Will what is being trained be what is served? Checks on the live objects of a run, and on finished checkpoints."""

from draftline.audit import (
    data,
    drafter,
    evaluation,
    exported,
    figures,
    finished,
    losses,
    optimiser,
    plan,
    prepared,
    sampling,
    served,
    target,
    whole,
)
from draftline.audit.report import CHECKS, AuditReport, Finding, run_audit
from draftline.audit.subject import AuditSubject, PreparedData

CHECK_MODULES = (
    *(
        target,
        data,
        prepared,
        drafter,
        losses,
        optimiser,
        exported,
        evaluation,
        sampling,
        figures,
        served,
        whole,
        plan,
        finished,
    ),
)
"""Importing them registers their checks."""

__all__ = ["CHECKS", "CHECK_MODULES", "AuditReport", "AuditSubject", "Finding", "PreparedData", "run_audit"]
