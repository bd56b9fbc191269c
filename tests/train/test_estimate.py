"""The estimate against counting by hand, and the refusal of a disk that is too small."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.config import PipelineConfig, RunConfig, TrainConfig
from draftline.errors import StorageError
from draftline.train import estimate as estimate_module
from draftline.train.estimate import check_disk, estimate_run
from tests.train.tiny_drafter import tiny_config, tiny_drafter


def test_bytes_are_those_counted_by_hand() -> None:
    config = RunConfig(
        train=TrainConfig(tokens_per_row=100, rows_per_step=3, keep_last=2),
        pipeline=PipelineConfig(mode="threads", queue_bytes=12345),
    )
    parameters = sum(p.numel() for p in tiny_drafter().parameters())
    estimate = estimate_run(config, tiny_config(), state_bytes=2, longest=150)
    assert estimate.parameters == parameters
    assert estimate.drafter_bytes == 16 * parameters
    assert estimate.row_bytes == 3 * 150 * 2 * 16 * 2
    assert estimate.queue_bytes == 12345
    assert estimate.disk_bytes == 4 * 12 * parameters
    assert "\n" not in estimate.sentence()


def test_a_disk_that_is_too_small_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = estimate_run(RunConfig(), tiny_config(), state_bytes=4, longest=10)
    check_disk(tmp_path / "not" / "yet" / "there", estimate)

    class Full:
        free = estimate.disk_bytes - 1

    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda _path: Full)
    with pytest.raises(StorageError, match=r"lower train\.keep_last"):
        check_disk(tmp_path / "run", estimate)
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000001" / "x").write_text("1")  # what a run has written is its own
    check_disk(tmp_path / "run", estimate)
