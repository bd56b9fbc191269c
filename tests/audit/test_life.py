"""The short life: what is reduced, and that it is the run's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftline.audit.life import (
    PASSES,
    ROWS_PER_STEP,
    STEPS,
    STOPS,
    MemoryConversations,
    RecordedStep,
    drawn_data,
    export_earliest,
    live,
    shrink,
)
from draftline.audit.oracle import plan_run
from draftline.config import load_run_config
from draftline.data.split import RunData
from draftline.run import Run, assemble
from tests.engine.tiny_target import tiny_samples, tiny_target
from tests.run.small_run import SETTINGS, small_data


def small(*words: str) -> Run:
    return assemble(load_run_config(None, [*SETTINGS, *words]), tiny_target(), small_data(words=words))


def test_passes_end_where_a_step_crosses_them_and_where_the_run_is_stopped(tmp_path: Path) -> None:
    run = small()
    config, data, said = shrink(run, tmp_path)
    lengths = data.training.lengths[data.training_ids].tolist()
    rows = plan_run(data.training_ids.tolist(), lengths, config.train)
    assert len(rows) == STEPS * ROWS_PER_STEP
    assert [sum(row.epoch == epoch for row in rows) for epoch in range(PASSES)] == [3, 3, 3]
    assert rows[STOPS[-1] * ROWS_PER_STEP].epoch == 2
    assert "train.epochs" not in said
    assert "train.save_every 5 -> 4" in said
    assert data.training is run.data.training


def test_what_the_life_does_not_name_as_reduced_is_as_configured(tmp_path: Path) -> None:
    run = small("pipeline.mode=threads", "pipeline.send=last_hidden", "loss.denominator=weights")
    config, _, said = shrink(run, tmp_path)
    before, after = run.config.model_dump(), config.model_dump()
    reduced = ("train", "optim")
    changed = {f"{part}.{key}" for part in reduced for key, old in before[part].items() if old != after[part][key]}
    assert changed == {word.split()[0] for word in said.partition("; ")[2].split(", ")}
    assert {key: value for key, value in before.items() if key not in reduced} == {
        key: value for key, value in after.items() if key not in reduced
    }


def test_a_run_with_states_on_disk_lives_on_a_copy_of_the_few(tmp_path: Path) -> None:
    config, data, _ = shrink(small(f"pipeline.states_path={tmp_path / 'all'}"), tmp_path / "life")
    assert config.pipeline.states_path == tmp_path / "life" / "states"
    assert len(data.training) == len(data.training_ids) < 12
    assert [data.training[i].sample_id for i in range(len(data.training))] == list(range(len(data.training)))


def test_one_long_conversation_is_among_those_that_are_read(tmp_path: Path) -> None:
    samples = [*tiny_samples(20, seed=5)]
    conversations = MemoryConversations(samples, "many")
    data = RunData(conversations, np.arange(18), conversations, np.arange(18, 20))
    run = assemble(load_run_config(None, SETTINGS), tiny_target(), data)
    _, few, _ = shrink(run, tmp_path)
    assert conversations.lengths[few.training_ids].max() == conversations.lengths[:18].max()


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_every_step_is_seen_with_what_it_was_given(mode: str) -> None:
    run, seen = small(f"pipeline.mode={mode}"), list[RecordedStep]()
    before = {name: tensor.clone() for name, tensor in run.drafter.model.state_dict().items()}
    with live(run, lambda _run, step: seen.append(step)) as life:
        assert (life.folder / "last").exists()
        folder, step = export_earliest(life, "bfloat16")
        assert (folder / "model.safetensors").exists()
        assert step < STEPS
    assert not life.folder.exists()
    assert [step.step for step in seen] == list(range(STEPS))
    assert [step.step for step in seen if step.resumed] == list(STOPS)
    for step in seen:
        assert len(step.batches) == ROWS_PER_STEP
        assert step.updates == 1
        assert [len(given.anchors) > 0 for given in step.inputs] == [True] * len(step.inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.drafter.model.state_dict().items())
    assert "step" not in vars(run.drafter)


def test_a_life_leaves_the_random_numbers_where_they_were() -> None:
    run = small()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with live(run, lambda _run, _step: None):
        pass
    assert torch.equal(torch.rand(3), wanted)


def test_drawn_conversations_leave_the_mask_alone() -> None:
    data = drawn_data(tiny_target(), mask_token_id=3)
    assert not any((data.training[i].input_ids == 3).any() for i in range(len(data.training)))
    assert set(data.training_ids) & set(data.heldout_ids) == set()
