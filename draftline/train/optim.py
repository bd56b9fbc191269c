"""What moves the drafter's parameters, in float32: AdamW, or Muon for its matrices and AdamW for the rest.

Muon orthogonalises the running mean of a matrix's gradients by a polynomial of its singular values (Newton-Schulz), so
that every direction moves alike. It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, but matrices of one
shape are orthogonalised together, in the way that is fast on the device. The rate is a function of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from draftline.config import OptimConfig
from draftline.errors import CheckpointError
from draftline.train.shards import like, whole

ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps per parameter: both moments and the number of its updates (one float32 scalar)."""
MUON_STATE = ("momentum_buffer",)
"""What Muon keeps per matrix: the running mean of its gradients."""

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of s -> s (a + b s^2 + c s^4), which brings singular values near 1 (Keller Jordan)."""
_SMALLEST_NORM = 1e-7
_RMS_OF_ADAMW = 0.2
"""An orthogonal matrix times this and the root of its longer side has entries as large as AdamW's updates (arXiv
2502.16982)."""


def build_optimizer(draft_model: nn.Module, config: OptimConfig) -> Optimizer:
    """The configured optimiser over every parameter of the drafter, which must be float32.

    In bfloat16 an update smaller than 2^-9 of a weight is rounded away: norm weights, which start at 1, would stay
    there for the whole run while the loss falls.
    """
    for name, parameter in draft_model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"drafter parameter {name} is {parameter.dtype}, expected float32 master weights")
    named = dict(draft_model.named_parameters())
    matrices = [p for name, p in named.items() if config.name == "muon" and is_orthogonalised(name, p)]
    held = {id(matrix) for matrix in matrices}
    adamw = AdamW(
        [p for p in named.values() if id(p) not in held],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    optimizer = adamw if config.name == "adamw" else Muon(matrices, adamw, config)
    check_parameters(optimizer, draft_model)
    return optimizer


def is_orthogonalised(name: str, parameter: Tensor) -> bool:
    """Whether Muon moves a parameter: a matrix of `fc` or inside a layer, which maps hidden states to hidden states."""
    return name.startswith(("fc.", "layers.")) and parameter.ndim == 2 and min(parameter.shape) > 1


class Muon(Optimizer):
    """Muon for matrices, and AdamW for the rest, as one optimiser.

    Args:
        matrices: [m, n] parameters, neither side 1.
        rest: AdamW over all others.
        config: the rates, momentum and decay of both.

    Raises:
        ValueError: one of `matrices` is none.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], rest: AdamW, config: OptimConfig) -> None:
        for matrix in matrices:
            if matrix.ndim != 2 or min(matrix.shape) == 1:
                raise ValueError(f"Muon moves matrices, one has the shape {list(matrix.shape)}: leave it to AdamW")
        rate = config.muon_learning_rate or config.learning_rate
        numbers = {
            "lr": rate,
            "rate_factor": rate / config.learning_rate,
            "weight_decay": config.muon_weight_decay,
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "ns_steps": config.muon_ns_steps,
        }
        super().__init__([{"params": list(matrices)}], numbers)
        self._rest = rest
        rest.state = self.state
        self.param_groups += rest.param_groups  # the same records: a rate that is set here is AdamW's as well

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move everything that has a gradient; `closure` is not called."""
        del closure
        self._rest.step()
        group = self.param_groups[0]
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_shape.setdefault((min(matrix.shape), max(matrix.shape)), []).append(matrix)
        for matrices in by_shape.values():
            with torch.autocast(matrices[0].device.type, enabled=False):  # a step of the drafter may run inside of it
                self._move(matrices, group)
        return None

    def _move(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One update of matrices that have one shape when they lie on their longer side.

        Where ranks keep shares, each puts the gradients together and orthogonalises whole matrices, as all do.
        """
        wide = []
        for matrix in matrices:
            assert matrix.grad is not None, "only those with a gradient are moved"
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            mean = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
            update = whole(matrix.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean)
            wide.append(update if update.shape[0] <= update.shape[1] else update.T)
        directions = orthogonalised(torch.stack(wide), group["ns_steps"])
        for matrix, direction in zip(matrices, directions, strict=True):
            scale = _RMS_OF_ADAMW * math.sqrt(max(matrix.shape))
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            upright = matrix.shape[0] > matrix.shape[1]
            matrix.add_(like(direction.T if upright else direction, matrix), alpha=-group["lr"] * scale)


def orthogonalised(wide_Bmn: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations of matrices with m <= n: their singular values go to about 1, [B, m, n].

    On an accelerator as they are written, in bfloat16, as in torch. On a CPU bfloat16 is no gain; the iterations are a
    polynomial in X X^T, and evaluated at its eigenvalues they take less than half of the time.
    """
    a, b, c = _NEWTON_SCHULZ
    norm_B11 = wide_Bmn.flatten(1).norm(dim=1)[:, None, None].clamp_min(_SMALLEST_NORM)
    if wide_Bmn.device.type != "cpu":
        x_Bmn = (wide_Bmn / norm_B11).bfloat16()
        for _ in range(steps):
            gram_Bmm = x_Bmn @ x_Bmn.mT
            x_Bmn = torch.baddbmm(x_Bmn, torch.baddbmm(gram_Bmm, gram_Bmm, gram_Bmm, beta=b, alpha=c), x_Bmn, beta=a)
        return x_Bmn.to(wide_Bmn.dtype)
    x_Bmn = wide_Bmn / norm_B11
    squares_Bm, vectors_Bmm = torch.linalg.eigh(x_Bmn @ x_Bmn.mT)
    factor_Bm = torch.ones_like(squares_Bm)
    for _ in range(steps):
        growth_Bm = a + b * squares_Bm + c * squares_Bm.square()
        factor_Bm, squares_Bm = factor_Bm * growth_Bm, squares_Bm * growth_Bm.square()
    return (vectors_Bmm * factor_Bm[:, None]) @ vectors_Bmm.mT @ x_Bmn


def check_parameters(optimizer: Optimizer, draft_model: nn.Module) -> None:
    """Assert that each of the drafter's trainable parameters is in one group of the optimiser, and nothing else is.

    A frozen target that slips in costs its size three times over in optimiser state, and would be trained.
    """
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    wanted = {id(p): name for name, p in draft_model.named_parameters() if p.requires_grad}
    missing = [name for key, name in wanted.items() if key not in held]
    foreign = len(set(held) - wanted.keys())
    if missing or foreign:
        raise ValueError(f"the optimiser lacks {missing} of the drafter and holds {foreign} tensors that are not its")
    twice = [name for key, name in wanted.items() if held.count(key) > 1]
    if twice:
        raise ValueError(f"the optimiser holds {twice} in more than one group")


_WSD_DECAY = 0.2
"""Share of the steps in which the rate of `wsd` falls, where nobody says otherwise."""


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """AdamW's rate of the update number `step`, from 0: a linear rise, then what the schedule says.

    The rise starts above 0, so that no update is lost, and the last update has exactly the final share. The rate has
    no state: after a resume it follows from the step alone.
    """
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    left = _share_left(step, warmup, total_steps, config)
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * left)


def extension_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """AdamW's rate of the update number `step`, from 0, of an extension of so many steps behind the end of a run.

    A cosine rises again, from where it ended, and falls over the extension; the other schedules go on at the highest
    rate at once, and `wsd` falls at the end of the extension.
    """
    warmup = round(config.warmup_fraction * total_steps) if config.schedule == "cosine" else 0
    above = (step + 1) / (warmup + 1) if step < warmup else _share_left(step, warmup, total_steps, config)
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * above)


def _share_left(step: int, warmup: int, total_steps: int, config: OptimConfig) -> float:
    """How far above its end the rate is, 1 after the rise and 0 at the last update of a schedule that falls."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, total_steps - 1 - warmup)
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    decay = _WSD_DECAY if config.decay_fraction is None else config.decay_fraction
    falling = min(max(1, round(decay * total_steps)), total_steps - warmup)
    if total_steps == 1:
        return 1.0
    return min(1.0, (total_steps - 1 - step) / falling)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use a rate of AdamW from the next update on, and for matrices of Muon its constant multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_factor"] if "rate_factor" in group else rate


def optimizer_tensors(optimizer: Optimizer, draft_model: nn.Module) -> dict[str, Tensor]:
    """Everything the optimiser remembers, as `<parameter>.<what>`; parameters never updated have no entry."""
    return {
        f"{name}.{what}": optimizer.state[parameter][what]
        for name, parameter in draft_model.named_parameters()
        if parameter in optimizer.state
        for what in _kept(optimizer, parameter)
    }


def restore_optimizer(optimizer: Optimizer, draft_model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, on the device of each parameter.

    Raises:
        CheckpointError: a tensor belongs to no parameter, is missing, or has another shape or dtype.
    """
    left = dict(tensors)
    for name, parameter in draft_model.named_parameters():
        kept = _kept(optimizer, parameter)
        found = {what: left.pop(f"{name}.{what}") for what in kept if f"{name}.{what}" in left}
        if not found:
            continue
        fits = len(found) == len(kept) and all(
            tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
            for what, tensor in found.items()
            if what != "step"
        )
        if not fits:
            raise CheckpointError(f"the optimiser state of {name} does not fit the drafter: use another checkpoint")
        optimizer.state[parameter] = {
            what: tensor if what == "step" else tensor.to(parameter.device) for what, tensor in found.items()
        }
    if left:
        raise CheckpointError(f"optimiser state {min(left)} belongs to no parameter of the drafter: use its own run")


def _kept(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """What the optimiser remembers of a parameter."""
    muon = isinstance(optimizer, Muon) and any(parameter is matrix for matrix in optimizer.param_groups[0]["params"])
    return MUON_STATE if muon else ADAMW_STATE
