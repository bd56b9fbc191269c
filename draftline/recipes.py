"""Whole configurations as functions: take one, change what differs.

draftline train --recipe published --target T --data D --out RUN train.max_steps=1000
"""

from __future__ import annotations

from collections.abc import Callable

from draftline.config import (
    DrafterConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)
from draftline.errors import ConfigError


def published() -> RunConfig:
    """The recipe of the paper (arXiv 2602.06036), with blocks of 8: the defaults of every setting.

    Meant for hundreds of thousands of answers of the target itself on accelerators.
    """
    return RunConfig()


def quickstart() -> RunConfig:
    """The embedded target: a three-layer drafter in about two minutes on two cores.

    Short rows and few anchors give many small steps, which such a short run needs more than large ones; the start from
    the target's layers is worth about as much again as the time that there is.
    """
    return RunConfig(
        target=TargetConfig(name="tiny"),
        drafter=DrafterConfig(num_layers=3, block_size=8, start_from="target_layers"),
        optim=OptimConfig(learning_rate=3e-3, beta2=0.95),
        train=TrainConfig(
            max_steps=1100, num_anchors=12, tokens_per_row=512, log_every=20, eval_every=550, save_every=550
        ),
        pipeline=PipelineConfig(mode="threads"),
    )


def small_model() -> RunConfig:
    """A target of about 100M parameters on a CPU, some hundred answers: hours, not days."""
    return RunConfig(
        drafter=DrafterConfig(num_layers=3, block_size=8),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(epochs=4, num_anchors=64, tokens_per_row=512, log_every=5, eval_every=400, save_every=100),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "published": published,
    "quickstart": quickstart,
    "small-model": small_model,
}


def find_recipe(name: str) -> RunConfig:
    """A recipe by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in RECIPES:
        raise ConfigError(f"{name!r} is not a recipe: use {', '.join(RECIPES)}")
    return RECIPES[name]()
