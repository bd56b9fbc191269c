"""What a run adds to the bare step."""

from __future__ import annotations

from pathlib import Path

import torch

from draftline.config import DataConfig, RunConfig, TargetConfig, TrainConfig
from draftline.draft.loss import StepMetrics
from draftline.train.step import Drafter
from tests.draft.layouts import TinyTarget, drafter_config, make_row

TARGET = TinyTarget()
ROW = make_row([40, 60], torch.ones(100, dtype=torch.bool))


def drafter(seed: int) -> Drafter:
    config = RunConfig(
        target=TargetConfig(name="tiny"),
        data=DataConfig(path=Path("data")),
        train=TrainConfig(seed=seed, num_anchors=5),
    )
    return Drafter(
        config=config, shape=drafter_config(), total_steps=10, frozen=TARGET.frozen(), device=torch.device("cpu")
    )


def measured(seed: int) -> StepMetrics:
    one = drafter(seed)
    one.model.init_weights(torch.Generator().manual_seed(7))
    return one.measure(ROW)


def test_runs_of_different_seeds_are_asked_the_same_held_out_questions() -> None:
    one, other = measured(seed=1), measured(seed=2)
    for name, value in vars(one).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(getattr(other, name))), name
