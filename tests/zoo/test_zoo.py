"""Every planted fault is reported under its own code.

The quick suite runs the checks of the fault's own area on the first faults of every code; the slow one runs them on
all, and the whole audit on each. `pytest -s` prints the table of the zoo, see `conftest.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from draftline.audit import CHECKS, AuditReport, run_audit
from tests.zoo import (
    faults_data,
    faults_drafter,
    faults_figures,
    faults_guards,
    faults_learning,
    faults_life,
    faults_prepare,
    faults_rows,
    faults_serving,
    faults_sizes,
    faults_target,
    faults_training,
    faults_vocabulary,
)
from tests.zoo.conftest import COLUMNS
from tests.zoo.fault import ZOO, Fault
from tests.zoo.pipeline import World

ENTRIES = (
    faults_target,
    faults_data,
    faults_drafter,
    faults_training,
    faults_learning,
    faults_rows,
    faults_life,
    faults_serving,
    faults_sizes,
    faults_vocabulary,
    faults_guards,
    faults_figures,
    faults_prepare,
)
"""Importing them fills the zoo."""

IDS = [f"{planted.code}-{planted.name}" for planted in ZOO]

QUICK_OF_A_CODE = 1
"""Faults of each code in the quick suite, which all of them would make three times as long."""


def marked() -> list[ParameterSet]:
    """The zoo, slow from the second fault of a code on."""
    seen: Counter[str] = Counter()
    entries = []
    for planted, name in zip(ZOO, IDS, strict=True):
        seen[planted.code] += 1
        slow = seen[planted.code] > QUICK_OF_A_CODE
        entries.append(pytest.param(planted, id=name, marks=[pytest.mark.slow] if slow else []))
    return entries


Record = Callable[[str, str], None]


def audited(
    planted: Fault, patch: pytest.MonkeyPatch, folder: Path, record: Record, select: tuple[str, ...]
) -> AuditReport:
    """Plant a fault, audit, and note the row of the table."""
    world = World.of(planted.recipe, patch, folder)
    planted.plant(world)
    faulty = world.subject()
    started = time.perf_counter()
    report = run_audit(faulty, select)
    found = " ".join(finding.code for finding in report.findings)
    row = (planted.name, planted.kind, planted.code, f"{time.perf_counter() - started:.2f}", found)
    for name, value in zip(COLUMNS, row, strict=True):
        record(name, value)
    return report


@pytest.mark.parametrize("planted", marked())
def test_the_checks_of_its_area_report_the_fault(
    planted: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record
) -> None:
    report = audited(planted, monkeypatch, tmp_path, record_property, (planted.code[:3],))
    assert planted.code in [finding.code for finding in report.findings]


@pytest.mark.slow
@pytest.mark.parametrize("planted", ZOO, ids=IDS)
def test_the_whole_audit_reports_the_fault(
    planted: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record
) -> None:
    report = audited(planted, monkeypatch, tmp_path, record_property, ())
    assert planted.code in [finding.code for finding in report.findings]


def test_the_zoo_covers_every_check_that_can_find_something_in_it() -> None:
    # memory of a machine, and a drafter that is trained badly, are not planted in a pipeline of this size
    # and a proof belongs to a finished folder, see tests/audit/test_exported.py
    lived = {code for code in CHECKS if code.startswith(("RUN", "PRF"))}
    assert {planted.code for planted in ZOO} - lived == CHECKS.keys() - {"OPT009", "EVL006"} - lived
    assert {"F01", "F02", "F03", "F04", "F05", "F06"} <= {planted.kind for planted in ZOO}
