"""AdamW over exactly the drafter's parameters, in float32, with a rate that is a function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from draftline.config import OptimConfig
from draftline.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps per parameter: both moments and the number of its updates (one float32 scalar)."""


def build_optimizer(draft_model: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over every parameter of the drafter, which must be float32.

    In bfloat16 an update smaller than 2^-9 of a weight is rounded away: norm weights, which start at 1, would stay
    there for the whole run while the loss falls.
    """
    for name, parameter in draft_model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"drafter parameter {name} is {parameter.dtype}, expected float32 master weights")
    optimizer = AdamW(
        draft_model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )
    check_parameters(optimizer, draft_model)
    return optimizer


def check_parameters(optimizer: Optimizer, draft_model: nn.Module) -> None:
    """Assert that the optimiser moves the drafter's trainable parameters, all of them and nothing else.

    A frozen target that slips in costs its size three times over in optimiser state, and would be trained.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted = {id(p): name for name, p in draft_model.named_parameters() if p.requires_grad}
    missing = [name for key, name in wanted.items() if key not in held]
    foreign = len(held - wanted.keys())
    if missing or foreign:
        raise ValueError(f"the optimiser lacks {missing} of the drafter and holds {foreign} tensors that are not its")


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """Rate of the update number `step`, from 0: a linear rise, then half a cosine down to the final share.

    The rise starts above 0, so that no update is lost, and the last update has exactly the final share. The rate has
    no state: after a resume it follows from the step alone.
    """
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use a rate from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: Optimizer, draft_model: nn.Module) -> dict[str, Tensor]:
    """Everything the optimiser remembers, as `<parameter>.<moment>`; parameters never updated have no entry."""
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in draft_model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def restore_optimizer(optimizer: Optimizer, draft_model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave, on the device of each parameter.

    Raises:
        CheckpointError: a tensor belongs to no parameter, is missing, or has another shape or dtype.
    """
    left = dict(tensors)
    for name, parameter in draft_model.named_parameters():
        found = {moment: left.pop(f"{name}.{moment}") for moment in MOMENTS if f"{name}.{moment}" in left}
        if not found:
            continue
        fits = len(found) == len(MOMENTS) and all(
            found[m].shape == parameter.shape and found[m].dtype == parameter.dtype for m in ("exp_avg", "exp_avg_sq")
        )
        if not fits:
            raise CheckpointError(f"the optimiser state of {name} does not fit the drafter: use another checkpoint")
        optimizer.state[parameter] = {
            "step": found["step"],
            "exp_avg": found["exp_avg"].to(parameter.device),
            "exp_avg_sq": found["exp_avg_sq"].to(parameter.device),
        }
    if left:
        raise CheckpointError(f"optimiser state {min(left)} belongs to no parameter of the drafter: use its own run")
