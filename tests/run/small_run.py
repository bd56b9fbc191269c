"""A whole run that takes a second: random target, random conversations, one drafter layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftline.audit.life import MemoryConversations
from draftline.config import load_run_config
from draftline.data.split import RunData, choose_conversations
from draftline.records import Sample
from draftline.run import Examination, RunResult, assemble, train, with_saved_threads
from draftline.train.run_folder import RunFolder
from tests.engine.tiny_target import tiny_samples, tiny_target

SETTINGS = (
    "drafter.num_layers=1",
    "drafter.block_size=4",
    "drafter.target_layer_ids=[0,2]",
    "drafter.mask_token_id=38",
    "optim.learning_rate=0.01",
    "train.tokens_per_row=40",
    "train.rows_per_step=2",
    "train.num_anchors=4",
    "train.epochs=3",
    "train.log_every=3",
    "train.eval_every=7",
    "train.save_every=5",
    "data.heldout_fraction=0.2",
)
"""With 24 conversations: 3 passes of 11 to 13 rows, 18 steps, so that steps, passes, lines, evaluations and checkpoints
all end at different places."""


def small_data(samples: Sequence[Sample] | None = None, words: Sequence[str] = ()) -> RunData:
    """What is trained on and what is held out."""
    conversations = MemoryConversations(tiny_samples(24, seed=5) if samples is None else samples, "memory")
    return choose_conversations(load_run_config(None, [*SETTINGS, *words]), conversations, None)


def small_run(
    out: Path,
    *words: str,
    resume: bool = False,
    samples: Sequence[Sample] | None = None,
    examination: Examination | None = None,
) -> RunResult:
    """Train in this process."""
    config = load_run_config(None, [*SETTINGS, *words])
    RunFolder(out).check_usable(config, resume)
    run = assemble(with_saved_threads(config, out), tiny_target(), small_data(samples, words))
    return train(run, out, resume=resume, examination=examination)


def read_lines(out: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what the clock decides."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_same_run(left: Path, right: Path) -> None:
    """Weights, moments, generators, lines, and which checkpoints there are."""
    for name in ("drafter", "optimizer", "random"):
        tensors, others = (load_file(out / "last" / f"{name}.safetensors") for out in (left, right))
        assert tensors.keys() == others.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, others[key]), (name, key)
    assert read_lines(left) == read_lines(right)
    for name in ("last", "best"):
        assert (left / name).readlink() == (right / name).readlink()
    names = [sorted(path.name for path in (out / "checkpoints").iterdir()) for out in (left, right)]
    assert names[0] == names[1]
