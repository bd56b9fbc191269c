"""Rates against the closed form, Muon against torch's and against singular values, the optimiser's state by name."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from draftline.config import OptimConfig
from draftline.errors import CheckpointError
from draftline.train.optim import (
    Muon,
    build_optimizer,
    check_parameters,
    learning_rate,
    optimizer_tensors,
    orthogonalised,
    restore_optimizer,
    set_learning_rate,
)
from tests.train.tiny_drafter import tiny_drafter, update

MUON = OptimConfig(name="muon", learning_rate=1e-3, muon_learning_rate=4e-3, weight_decay=0.02)
BOTH = pytest.mark.parametrize("config", [OptimConfig(), MUON], ids=["adamw", "muon"])


def test_rate_rises_linearly_and_falls_as_half_a_cosine() -> None:
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.2)
    rates = [learning_rate(step, 101, config) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 45 / 90)))
    assert rates[100] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_wsd_stays_up_and_falls_straight_at_the_end() -> None:
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.2, schedule="wsd", decay_fraction=0.3)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[9] == pytest.approx(10 / 11)
    assert rates[10:70] == [1.0] * 60
    assert rates[70:] == pytest.approx([1 - 0.8 * (place + 1) / 30 for place in range(30)])
    usual = [learning_rate(step, 50, OptimConfig(learning_rate=1.0, schedule="wsd")) for step in range(50)]
    assert (usual.index(1.0), 49 - usual[::-1].index(1.0), usual[-1]) == (2, 39, 0.0)


def test_a_constant_rate_is_only_warmed_up() -> None:
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.5, schedule="constant")
    assert [learning_rate(step, 4, config) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_every_schedule_learns_in_a_run_of_very_few_steps(schedule: str, total: int) -> None:
    config = OptimConfig.model_validate({"schedule": schedule})
    assert learning_rate(0, total, config) == config.learning_rate


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
    optimizer = build_optimizer(model, OptimConfig())
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.fc.weight]})
    with pytest.raises(ValueError, match=r"holds \['fc.weight'\] in more than one group"):
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


def test_muon_moves_matrices_and_adamw_the_rest_each_at_its_own_rate() -> None:
    model = tiny_drafter()
    optimizer = build_optimizer(model, MUON)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, rest = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert matrices == {name for name in names.values() if "proj" in name or name == "fc.weight"}
    assert rest == {name for name in names.values() if "norm" in name}
    set_learning_rate(optimizer, 5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 5e-4]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(model, optimizer, 0)
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    same = build_optimizer(model, OptimConfig(name="muon", learning_rate=3e-3))
    assert [group["lr"] for group in same.param_groups] == [3e-3, 3e-3]


@pytest.mark.parametrize("shape", [(5,), (1, 7), (7, 1), (2, 3, 4)])
def test_muon_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    rest = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="Muon moves matrices"):
        Muon([nn.Parameter(torch.zeros(shape))], rest, OptimConfig())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.95, 0.5])
def test_muon_is_torchs_up_to_the_bfloat16_that_torch_iterates_in(nesterov: bool, momentum: float) -> None:
    config = MUON.model_copy(
        update={"muon_nesterov": nesterov, "muon_momentum": momentum, "muon_weight_decay": 0.5, "muon_ns_steps": 4}
    )
    ours, theirs = tiny_drafter(), tiny_drafter()
    optimizer = build_optimizer(ours, config)
    matrices = [p for name, p in theirs.named_parameters() if "norm" not in name]
    norms = [p for name, p in theirs.named_parameters() if "norm" in name]
    numbers = {"lr": 4e-3, "weight_decay": 0.5, "momentum": momentum, "nesterov": nesterov, "ns_steps": 4}
    muon = torch.optim.Muon(matrices, **numbers, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(norms, lr=1e-3, weight_decay=0.02)
    first = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for seed in range(5):
        update(ours, optimizer, seed)
        for parameter, grad in zip(theirs.parameters(), _gradients(theirs, seed), strict=True):
            parameter.grad = grad
        muon.step()
        adamw.step()
    for (name, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        moved = (wanted - first[name]).norm()
        assert (found - wanted).norm() < (0.02 if "norm" not in name else 1e-6) * moved, name


def test_autocast_does_not_reach_the_updates() -> None:
    one, other = tiny_drafter(), tiny_drafter()
    for model, low in ((one, True), (other, False)):
        optimizer = build_optimizer(model, MUON)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            update(model, optimizer, 0)
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name


def _gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]


@pytest.mark.parametrize("rank", [4, 24, 48])
@pytest.mark.parametrize("steps", [1, 5])
def test_each_singular_value_goes_through_the_polynomial(rank: int, steps: int) -> None:
    """Of matrices that are stacked, of a small one, and of one that is zero, in float64."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(4, 48, rank, generator=generator) @ torch.randn(4, rank, 64, generator=generator)
    wide[2] *= 1e-6
    wide[3] = 0.0
    left, values, right = torch.linalg.svd(wide.double(), full_matrices=False)
    values = values / values.square().sum(1, keepdim=True).sqrt().clamp_min(1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    wanted = (left * values[:, None]) @ right
    assert (orthogonalised(wide, steps).double() - wanted).abs().max() < 1e-3 * wanted.abs().max()


@BOTH
def test_restored_optimiser_continues_bit_for_bit(config: OptimConfig) -> None:
    whole, half = tiny_drafter(), tiny_drafter()
    optimizers = [build_optimizer(model, config) for model in (whole, half)]
    for model, optimizer in zip((whole, half), optimizers, strict=True):
        for seed in range(3):
            update(model, optimizer, seed)
    resumed = tiny_drafter(seed=9)
    resumed.load_state_dict(half.state_dict())
    optimizer = build_optimizer(resumed, config)
    restore_optimizer(optimizer, resumed, {k: t.clone() for k, t in optimizer_tensors(optimizers[1], half).items()})
    for model, continued in ((whole, optimizers[0]), (resumed, optimizer)):
        set_learning_rate(continued, 1e-4)
        for seed in range(3, 6):
            update(model, continued, seed)
    for (name, left), right in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


@BOTH
def test_foreign_incomplete_or_cast_optimiser_state_is_refused(config: OptimConfig) -> None:
    model = tiny_drafter()
    some = "fc.weight." + ("exp_avg" if config.name == "adamw" else "momentum_buffer")
    optimizer = build_optimizer(model, config)
    update(model, optimizer, 0)
    tensors = optimizer_tensors(optimizer, model)
    with pytest.raises(CheckpointError, match=r"other\.step belongs to no parameter"):
        restore_optimizer(optimizer, model, {**tensors, "other.step": torch.zeros(())})
    with pytest.raises(CheckpointError, match=r"norm\.weight does not fit"):
        restore_optimizer(optimizer, model, {k: t for k, t in tensors.items() if k != "norm.weight.exp_avg"})
    for wrong in (tensors[some].bfloat16(), tensors[some][1:]):
        with pytest.raises(CheckpointError, match=r"fc\.weight does not fit"):
            restore_optimizer(optimizer, model, {**tensors, some: wrong})


def test_the_state_of_another_optimiser_is_refused() -> None:
    model = tiny_drafter()
    kinds = {name: build_optimizer(model, OptimConfig(name=name)) for name in ("adamw", "muon")}
    for name, other in (("adamw", "muon"), ("muon", "adamw")):
        update(model, kinds[name], 0)
        with pytest.raises(CheckpointError, match="belongs to no parameter"):
            restore_optimizer(kinds[other], model, optimizer_tensors(kinds[name], model))
