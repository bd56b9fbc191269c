"""The audit in a test suite of one's own: it fails when what is trained would not be what is served.

    MY_TARGET=tiny MY_DATA=data pytest examples/test_my_drafter.py

`MY_DATA` is a folder of `draftline prepare`. Put the settings of your own run in the place of these.
"""

from __future__ import annotations

import os
from pathlib import Path

from draftline import RunConfig, audit_run_config
from draftline.config import DataConfig, TargetConfig

SELECT = tuple(os.environ.get("MY_CHECKS", "").split())
"""Codes or areas, such as `TGT DRF002`; none are all."""


def test_my_run_trains_what_will_be_served() -> None:
    config = RunConfig(
        target=TargetConfig(name=os.environ["MY_TARGET"]),
        data=DataConfig(path=Path(os.environ["MY_DATA"])),
    )
    report = audit_run_config(config, select=SELECT)
    assert not report.errors(), [f"{finding.code}: {finding.evidence}" for finding in report.errors()]
    assert not report.not_examined
