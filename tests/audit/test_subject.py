"""Settings of a run to come, and the folder of a run, as subjects."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from draftline.audit import run_audit
from draftline.audit.life import MemoryConversations
from draftline.audit.report import audit_run_folder
from draftline.audit.subject import prepared_data, subject_of_run_folder, subject_to_come
from draftline.config import load_run_config
from draftline.data.split import RunData
from draftline.errors import CheckpointError, DataError
from draftline.run import train
from tests.engine.tiny_target import tiny_samples, tiny_target
from tests.run.small_run import SETTINGS, small_run
from tests.zoo.pipeline import Recipe, World


def test_a_run_to_come_is_audited_with_its_own_drafter() -> None:
    config = load_run_config(None, [*SETTINGS, "loss.decay_gamma=9"])
    audited = subject_to_come(config, tiny_target())
    assert audited.draft_model.config.block_size == 4
    report = run_audit(audited, select=["DRF001", "LOS003", "DAT"])
    assert [finding.code for finding in report.findings] == ["LOS003"]
    assert {result.status for result in report.checks if result.code.startswith("DAT0")} == {"ok", "skipped"}


def test_a_run_folder_is_audited_with_its_trained_weights(tmp_path: Path) -> None:
    small_run(tmp_path / "run", "train.max_steps=5")
    report = audit_run_folder(tmp_path / "run", tiny_target(), select=["DRF001", "DRF009", "EXP001"])
    assert [(result.code, result.status) for result in report.checks] == [
        ("DRF001", "ok"),
        ("DRF009", "ok"),
        ("EXP001", "ok"),
    ]


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no checkpoint; name one that"):
        audit_run_folder(tmp_path)


@pytest.mark.parametrize("alone", [False, True], ids=["run", "checkpoint"])
def test_a_run_is_not_audited_on_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    world = World.of(Recipe(data="rows", settings={"train": {"max_steps": 2}}), monkeypatch, tmp_path / "world")
    folder = tmp_path / "run"
    train(world.assemble(), folder)
    if alone:
        folder = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    report = audit_run_folder(folder, world.target, select=["DRF001"])
    assert [result.status for result in report.checks] == ["ok"]
    shutil.rmtree(tmp_path / "world")
    world.rows.pop()
    world.data()
    with pytest.raises(DataError, match="holds other data now"):
        audit_run_folder(folder, world.target, select=["DRF001"])


def test_conversations_are_taken_from_all_of_the_data() -> None:
    conversations = MemoryConversations(tiny_samples(24, seed=5) * 20, "many")
    ids = np.arange(480)
    found = prepared_data(RunData(conversations, ids, conversations, ids[:3]))
    assert (len(found.samples), len(found.heldout), found.num_samples) == (200, 3, 480)
    assert found.num_tokens == conversations.lengths.sum()
    assert len(found.samples[-1]) == conversations.lengths[479]


def test_an_extended_run_is_examined_with_its_extensions(tmp_path: Path) -> None:
    """Its best checkpoint may be older than they are."""
    out = tmp_path / "run"
    words = ("train.epochs=1", "train.eval_every=1000")
    small_run(out, *words)
    small_run(out, *words, "train.extensions=[1]", resume=True)
    (out / "best").unlink()
    (out / "best").symlink_to((out / "checkpoints" / "step-000006").relative_to(out))
    run = subject_of_run_folder(out, tiny_target()).run
    assert run.config.train.extensions == (1,)
    assert len(run.drafter.seams) == 1
