"""Rates against the closed form, the parameter check, and the optimiser's state by name."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from draftline.config import OptimConfig
from draftline.errors import CheckpointError
from draftline.train.optim import (
    build_optimizer,
    check_parameters,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from tests.train.tiny_drafter import tiny_drafter, update


def test_rate_rises_linearly_and_falls_as_half_a_cosine() -> None:
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.2)
    rates = [learning_rate(step, 101, config) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 45 / 90)))
    assert rates[100] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_run_of_very_few_steps_still_learns(total: int) -> None:
    assert learning_rate(0, total, OptimConfig()) == OptimConfig().learning_rate


def test_the_optimiser_holds_the_drafter_and_nothing_else() -> None:
    model, frozen = tiny_drafter(), nn.Linear(3, 3)
    optimizer = build_optimizer(model, OptimConfig())
    check_parameters(optimizer, model)
    optimizer.add_param_group({"params": list(frozen.parameters())})
    with pytest.raises(ValueError, match="2 tensors that are not its"):
        check_parameters(optimizer, model)
    with pytest.raises(ValueError, match=r"lacks \['fc.weight'\]"):
        check_parameters(torch.optim.AdamW([p for n, p in model.named_parameters() if n != "fc.weight"]), model)


def test_bfloat16_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 master weights"):
        build_optimizer(tiny_drafter().to(torch.bfloat16), OptimConfig())


def test_float32_master_weights_move_where_bfloat16_weights_stay() -> None:
    """What `build_optimizer` refuses, and why: updates of 1e-3 vanish at a bfloat16 weight of 1."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.full_like(weight, 0.01)
            optimizer.step()
        moved[dtype] = 1.0 - weight.item()
    assert moved[torch.float32] == pytest.approx(0.1, rel=1e-3)
    assert moved[torch.bfloat16] == 0.0


def test_restored_optimiser_continues_bit_for_bit() -> None:
    whole, half = tiny_drafter(), tiny_drafter()
    optimizers = [build_optimizer(model, OptimConfig()) for model in (whole, half)]
    for model, optimizer in zip((whole, half), optimizers, strict=True):
        for seed in range(3):
            update(model, optimizer, seed)
    resumed = tiny_drafter(seed=9)
    resumed.load_state_dict(half.state_dict())
    optimizer = build_optimizer(resumed, OptimConfig())
    restore_optimizer(optimizer, resumed, {k: t.clone() for k, t in optimizer_tensors(optimizers[1], half).items()})
    for model, continued in ((whole, optimizers[0]), (resumed, optimizer)):
        set_learning_rate(continued, 1e-4)
        for seed in range(3, 6):
            update(model, continued, seed)
    for (name, left), right in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


def test_foreign_incomplete_or_cast_optimiser_state_is_refused() -> None:
    model = tiny_drafter()
    optimizer = build_optimizer(model, OptimConfig())
    update(model, optimizer, 0)
    tensors = optimizer_tensors(optimizer, model)
    with pytest.raises(CheckpointError, match=r"other\.step belongs to no parameter"):
        restore_optimizer(optimizer, model, {**tensors, "other.step": torch.zeros(())})
    with pytest.raises(CheckpointError, match=r"fc\.weight does not fit"):
        restore_optimizer(optimizer, model, {k: t for k, t in tensors.items() if k != "fc.weight.exp_avg"})
    with pytest.raises(CheckpointError, match=r"fc\.weight does not fit"):
        restore_optimizer(optimizer, model, {**tensors, "fc.weight.exp_avg": tensors["fc.weight.exp_avg"].bfloat16()})
