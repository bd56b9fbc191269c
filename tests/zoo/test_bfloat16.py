"""The zoo where people train: target and drafter in bfloat16. What rounding hides is listed here with its reason.

As in the quick suite, the checks of the fault's own area are asked. `pytest -m slow tests/zoo/test_bfloat16.py` plants
every fault; the quick suite takes a sample.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.zoo.fault import Fault
from tests.zoo.pipeline import in_precision
from tests.zoo.test_zoo import IDS, ZOO, Record, audited

NOT_FOUND: dict[str, str] = {
    "the store keeps states in half precision": "numbers of this size in bfloat16 are numbers in half precision, too",
}
"""Faults that no check reports in bfloat16, and why."""

_BY_BYTES = ("RUN016", "eight bits differ by as little as rounding in bfloat16 explains; the bytes are not the same")

OTHERWISE: dict[str, tuple[str, str]] = {
    "states go through eight bits on their way to the drafter's device": _BY_BYTES,
    "the queue keeps states in eight bits": _BY_BYTES,
    "the store keeps states in eight bits": _BY_BYTES,
    "the last target loop runs the target in half precision": (
        "RUN016",
        "half precision differs by as little as rounding in bfloat16 explains; its bytes are not those of the others",
    ),
    "cross entropy in bfloat16": ("LOS010", "what it loses lies within the rounding of logits in bfloat16"),
}
"""Faults that are reported under another code than in float32, and why."""


def check(planted: Fault, patch: pytest.MonkeyPatch, folder: Path, record: Record) -> None:
    faulty = replace(planted, recipe=in_precision(planted.recipe, "bfloat16", "bfloat16"))
    report = audited(faulty, patch, folder, record, (planted.code[:3],))
    wanted, _ = OTHERWISE.get(planted.name, (planted.code, ""))
    assert (wanted in [finding.code for finding in report.findings]) == (planted.name not in NOT_FOUND)


@pytest.mark.parametrize("planted", ZOO[::23], ids=IDS[::23])
def test_some_faults_are_found_in_bfloat16(
    planted: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record
) -> None:
    check(planted, monkeypatch, tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("planted", ZOO, ids=IDS)
def test_faults_are_found_in_bfloat16(
    planted: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Record
) -> None:
    check(planted, monkeypatch, tmp_path, record_property)


def test_at_least_95_of_100_faults_are_found() -> None:
    names = {planted.name for planted in ZOO}
    assert NOT_FOUND.keys() | OTHERWISE.keys() <= names, "the table names faults that the zoo does not have"
    assert len(NOT_FOUND) <= 0.05 * len(ZOO)
