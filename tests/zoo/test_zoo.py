"""Every planted fault is reported under its own code; the clean pipelines it is planted in give nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from draftline.audit import run_audit
from tests.zoo import faults_drafter, faults_serving, faults_target, faults_training
from tests.zoo.fault import ZOO, Fault
from tests.zoo.pipeline import subject

ENTRIES = (faults_target, faults_drafter, faults_training, faults_serving)
ROWS: list[tuple[str, str, str, str, float]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print the zoo's table when it is done."""
    yield
    width = max((len(row[0]) for row in ROWS), default=0)
    print(f"\n{'fault':{width}}  kind  expected  seconds  found")
    for name, kind, expected, found, seconds in ROWS:
        print(f"{name:{width}}  {kind:4}  {expected:8}  {seconds:7.2f}  {found}")


@pytest.mark.parametrize("planted", ZOO, ids=[f"{one.code}-{one.name}" for one in ZOO])
def test_the_audit_reports_each_planted_fault(planted: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = planted.plant(subject(planted.recipe), monkeypatch)
    started = time.perf_counter()
    report = run_audit(faulty)
    found = [finding.code for finding in report.findings]
    crashed = [result.code for result in report.checks if result.status == "crashed"]
    ROWS.append(
        (
            planted.name,
            planted.kind,
            planted.code,
            " ".join(found + [f"({c})" for c in crashed]),
            time.perf_counter() - started,
        )
    )
    assert planted.code in found
