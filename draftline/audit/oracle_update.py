"""The reference run's rates and updates: AdamW and Muon by their formulas, in float64, one tensor at a time.

Like `oracle.py` it follows `docs/concepts/semantics.md`, section 5, and shares no code with the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.config import OptimConfig

_ADAM_EPS, _MUON_EPS = 1e-8, 1e-7


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """AdamW's rate of the update number `step`, from 0."""
    warmup = round(optim.warmup_fraction * total_steps)
    if step < warmup:
        return optim.learning_rate * (step + 1) / (warmup + 1)
    if optim.schedule == "cosine":
        share = (step - warmup) / max(1, total_steps - 1 - warmup)
        above = (1 + math.cos(math.pi * share)) / 2
    elif optim.schedule == "constant" or total_steps == 1:
        above = 1.0
    else:
        fraction = optim.decay_fraction if optim.decay_fraction is not None else 1 / 5
        length = min(max(round(fraction * total_steps), 1), total_steps - warmup)
        first = total_steps - length  # of the updates that fall, the last of which has the final share
        above = 1.0 if step < first else 1 - (step - first + 1) / length
    return optim.learning_rate * (optim.final_fraction + (1 - optim.final_fraction) * above)


def rate_of_run(step: int, total_steps: int, seams: Sequence[int], optim: OptimConfig) -> float:
    """The same of a run of which extensions begin where `seams` steps are done (section 5, rate of an extension)."""
    borders = [0, *seams, total_steps]
    part = max(i for i, border in enumerate(borders[:-1]) if border <= step)
    t, length = step - borders[part], borders[part + 1] - borders[part]
    if part == 0:
        return learning_rate(t, length, optim)
    warmup = round(optim.warmup_fraction * length)
    if optim.schedule == "cosine" and t < warmup:
        lowest = optim.final_fraction * optim.learning_rate
        return lowest + (optim.learning_rate - lowest) * (t + 1) / (warmup + 1)
    if optim.schedule == "cosine":
        return learning_rate(t, length, optim)
    return learning_rate(t, length, optim.model_copy(update={"warmup_fraction": 0.0}))


def goes_by_muon(weight: Tensor, optim: OptimConfig) -> bool:
    """Whether Muon moves a parameter: those with two dimensions are `fc` and the matrices of the layers."""
    return optim.name == "muon" and weight.ndim == 2


def rate_of(weight: Tensor, rate: float, optim: OptimConfig) -> float:
    """The rate at which a parameter moves where AdamW's is `rate`."""
    if not goes_by_muon(weight, optim) or optim.muon_learning_rate is None:
        return rate
    return rate * optim.muon_learning_rate / optim.learning_rate


@dataclass(frozen=True, eq=False)
class Moment:
    """What is remembered of one parameter: running means of gradient and squared gradient, and its updates.

    Muon has the first alone: `square` stays 0.
    """

    mean: Tensor
    square: Tensor
    updates: int

    @staticmethod
    def zero(weight: Tensor) -> Moment:
        """Before the first update."""
        return Moment(torch.zeros_like(weight), torch.zeros_like(weight), 0)


def moments_of(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Moment]:
    """Moments in float64 from a checkpoint's `<parameter>.exp_avg`, `.exp_avg_sq` and `.step`, or `.momentum_buffer`.

    Zero where none is. How often Muon has moved does not matter, and is not kept.
    """
    found = {name: Moment.zero(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        if f"{name}.step" in tensors:
            mean, square = (tensors[f"{name}.{part}"].double().cpu() for part in ("exp_avg", "exp_avg_sq"))
            found[name] = Moment(mean, square, int(tensors[f"{name}.step"]))
        elif f"{name}.momentum_buffer" in tensors:
            found[name] = Moment(tensors[f"{name}.momentum_buffer"].double().cpu(), torch.zeros_like(weight), 0)
    return found


def moved(weight: Tensor, gradient: Tensor, moment: Moment, rate: float, optim: OptimConfig) -> tuple[Tensor, Moment]:
    """One update of one parameter by its clipped gradient, as the settings have it.

    Args:
        rate: AdamW's of this step.
    """
    if goes_by_muon(weight, optim):
        return muon(weight, gradient, moment, rate_of(weight, rate, optim), optim)
    return adamw(weight, gradient, moment, rate, optim)


def adamw(weight: Tensor, gradient: Tensor, moment: Moment, rate: float, optim: OptimConfig) -> tuple[Tensor, Moment]:
    """One update of one parameter (Loshchilov and Hutter, arXiv 1711.05101)."""
    updates = moment.updates + 1
    mean = optim.beta1 * moment.mean + (1 - optim.beta1) * gradient
    square = optim.beta2 * moment.square + (1 - optim.beta2) * gradient.square()
    direction = mean / (1 - optim.beta1**updates) / ((square / (1 - optim.beta2**updates)).sqrt() + _ADAM_EPS)
    return weight - rate * optim.weight_decay * weight - rate * direction, Moment(mean, square, updates)


def muon(weight: Tensor, gradient: Tensor, moment: Moment, rate: float, optim: OptimConfig) -> tuple[Tensor, Moment]:
    """One update of one matrix (Keller Jordan, with the scale of Moonshot, arXiv 2502.16982)."""
    mu = optim.muon_momentum
    mean = mu * moment.mean + (1 - mu) * gradient
    x = mu * mean + (1 - mu) * gradient if optim.muon_nesterov else mean
    x = x / max(float(x.square().sum().sqrt()), _MUON_EPS)
    for _ in range(optim.muon_ns_steps):
        square = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        cubed, fifth = (square @ x, square @ square @ x) if len(x) <= x.shape[1] else (x @ square, x @ square @ square)
        x = 3.4445 * x - 4.7750 * cubed + 2.0315 * fifth
    kept = weight - rate * optim.muon_weight_decay * weight
    return kept - rate * 0.2 * math.sqrt(max(weight.shape)) * x, Moment(mean, moment.square, moment.updates)
