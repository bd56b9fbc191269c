"""The arithmetic against published figures, and against torch's own count of what a forward multiplies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, Qwen3Config

from draftline.config import OptimConfig, PipelineConfig, RunConfig, TrainConfig
from draftline.draft.attention import BlockLayout, DenseAttention
from draftline.draft.block import supervised_slots
from draftline.draft.model import DFlashDraftModel
from draftline.plan.sizes import TargetSizes, described_target
from draftline.plan.work import (
    Conversations,
    Workload,
    choose_mode,
    drafter_operations,
    target_operations,
    update_operations,
)
from draftline.plan.work import supervised_slots as counted_slots
from draftline.targets.drafter_shape import resolve_drafter_config
from tests.engine.tiny_target import tiny_target
from tests.train.tiny_drafter import tiny_config

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
GPT_OSS_20B = GptOssConfig(num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4)


def conversations(length: int, supervised: int) -> Conversations:
    return Conversations(np.array([length]), np.array([supervised]))


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that holds nothing but a configuration."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    QWEN3_8B.save_pretrained(folder)
    return str(folder)


def test_qwen3_8b_costs_what_was_counted_by_others(qwen3_8b: str) -> None:
    """45.5 TFLOP for 3,072 tokens; 81.5 TFLOP for the drafter, counted there with a third product in the head."""
    config = RunConfig(target={"name": qwen3_8b}, drafter={"block_size": 16}, loss={"kl": 1.0, "ce": 0.0})  # type: ignore[arg-type]
    target = described_target(config.target)
    sizes, shape = TargetSizes.of(target), resolve_drafter_config(target, config.drafter, None)
    assert sizes.parameters == pytest.approx(8.19e9, rel=0.01)
    assert target_operations(sizes, config, conversations(3072, 3072)) == pytest.approx(45.5e12, rel=0.02)
    label_only = RunConfig(target=config.target, drafter=config.drafter)
    drafter = drafter_operations(shape, label_only, sizes, conversations(3072, 3072))
    head = 2.0 * 512 * 16 * sizes.head
    assert drafter + head == pytest.approx(81.5e12, rel=0.05)


def test_experts_count_as_often_as_a_token_goes_to_them(tmp_path: Path) -> None:
    GPT_OSS_20B.save_pretrained(str(tmp_path))
    sizes = TargetSizes.of(described_target(RunConfig(target={"name": str(tmp_path)}).target))  # type: ignore[arg-type]
    assert sizes.parameters == pytest.approx(20.9e9, rel=0.01)
    active = sizes.used + sizes.head  # 3.6B as published, in which the table counts once
    assert active == pytest.approx(3.6e9, rel=0.05)
    assert sizes.reach.count(None) == sizes.reach.count(128) == 12


def test_a_drafter_costs_what_torch_counts() -> None:
    """Dense attention multiplies with every key; ours counts those that are seen, so only the rest is compared."""
    shape = tiny_config()
    model, target = DFlashDraftModel(shape), TargetSizes.of(tiny_target())
    tokens, anchors = 30, torch.arange(4, 24)
    layout = BlockLayout.of_row(anchors, torch.arange(tokens), shape.block_size)
    states, slots = torch.zeros(1, tokens, 2 * 16), torch.zeros(1, len(anchors) * shape.block_size, 16)
    with FlopCounterMode(display=False) as counter:
        model(states, slots, layout, DenseAttention)
    counted = counter.get_flop_counts()["Global"]
    torch_says = sum(number for operator, number in counted.items() if "attention" not in str(operator))
    row = Conversations(np.array([tokens]), np.array([len(anchors) + 1]))
    head = 2.0 * counted_slots(shape, row, 99) * shape.head_rows * shape.hidden_size
    seen = (row.lengths - row.supervised / 2 + shape.block_size) * len(anchors)
    attention = 4.0 * seen.sum() * shape.block_size * shape.num_attention_heads * shape.head_dim
    config = RunConfig(train=TrainConfig(num_anchors=99))
    ours = drafter_operations(shape, config, target, row, learn=False) - head - attention
    assert ours == pytest.approx(torch_says, rel=1e-9)


@pytest.mark.parametrize(("length", "answer"), [(40, 20), (40, 39), (12, 3)])
def test_supervised_slots_are_those_of_the_draw(length: int, answer: int) -> None:
    shape = tiny_config()
    mask = torch.arange(length) >= length - answer
    anchors = torch.arange(length - answer, length - 1)
    drawn = supervised_slots(anchors, mask, torch.zeros(length, dtype=torch.int64), shape.block_size, False)
    assert counted_slots(shape, conversations(length, answer), 99) == int(drawn.sum())


def test_only_muon_multiplies_when_weights_move() -> None:
    assert update_operations(tiny_config(), OptimConfig()) == 0
    assert update_operations(tiny_config(), OptimConfig(name="muon")) > 0


def test_a_mean_length_gives_as_many_steps_as_such_data() -> None:
    config = RunConfig(train=TrainConfig(tokens_per_row=100, rows_per_step=2, epochs=3))
    work = Workload.of_mean(30, 20, 0.5, config)
    assert (work.rows, work.steps, work.passes) == (3 * 7, 11, 3)
    assert (len(work.training), len(work.heldout), work.row.tokens) == (20, 1, 90)
    assert work.evaluations(config.train.eval_every) == 1
    shorter = Workload.of_mean(30, 20, 0.5, RunConfig(train=config.train.model_copy(update={"max_steps": 7})))
    assert shorter.passes == 2


@pytest.mark.parametrize(
    ("given", "operations", "mode", "reason"),
    [
        ({"cores": 2}, 1e12, "processes", "2 cores"),
        ({"cores": 2}, 1e9, "inline", "the run is short"),
        ({"cores": 1}, 1e12, "inline", "one core"),
        ({"cores": 8, "accelerator": True}, 1e18, "inline", "one device"),
        ({"cores": 8, "accelerator": True, "two_devices": True}, 1e18, "threads", "two devices"),
    ],
)
def test_the_mode_is_chosen_by_what_is_there(given: dict[str, Any], operations: float, mode: str, reason: str) -> None:
    facts = {"two_devices": False, "accelerator": False, **given}
    assert choose_mode(PipelineConfig(), operations=operations, **facts) == (mode, reason)
    assert choose_mode(PipelineConfig(mode="threads"), operations=operations, **facts) == ("threads", "as set")
    stored = PipelineConfig(states_path=Path("states"))
    assert choose_mode(stored, operations=operations, **facts) == ("inline", "states are read from disk")
