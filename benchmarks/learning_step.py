"""What a step costs with other optimisers, weights and losses, over AdamW with decay, at a recipe's own sizes.

    python benchmarks/learning_step.py --recipe quickstart [--target tiny] [--tokens 128] [--rounds 5] [--threads 1]
    python benchmarks/learning_step.py --recipe small-model --target smollm2

Conversations of random tokens, a quarter of each asked and the rest supervised, fill rows as the recipe says; the
target reads them once. Time is that of the processor, of the drafter's step and of the whole step with the target's
forward; the variants take turns, and the median over the rounds is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from draftline.audit.life import MemoryConversations
from draftline.config import RECIPES, RunConfig, find_recipe
from draftline.data.split import RunData
from draftline.records import PackedBatch, Sample
from draftline.run import Run, assemble
from draftline.targets.model import Target, load_target
from draftline.transfer.pack import make_row

VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "AdamW, decay": {},
    "AdamW, D-PACE": {"loss": {"weights": "dpace"}},
    "Muon, decay": {"optim": {"name": "muon"}},
    "Muon, D-PACE": {"optim": {"name": "muon"}, "loss": {"weights": "dpace"}},
    "AdamW, 0.1 CE + 0.9 TV": {"loss": {"ce": 0.1, "tv": 0.9}},
}
"""By name, the settings that differ from the recipe's; the first is what the others are held against."""


def variant(config: RunConfig, changes: dict[str, dict[str, object]]) -> RunConfig:
    """A recipe with other settings, whose target's last states are sent: a row serves every variant then."""
    changes = {**changes, "pipeline": {"send": "last_hidden", "mode": "inline"}}
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def random_data(target: Target, rows: int, tokens_per_row: int, tokens: int) -> RunData:
    """Conversations for some rows."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, tokens_per_row // tokens) * rows
    samples = [
        Sample(i, torch.randint(5, 900, (tokens,), generator=generator), torch.arange(tokens) >= tokens // 4)
        for i in range(count)
    ]
    conversations = MemoryConversations(samples, "random")
    assert target.vocab_size > 900, "the tokens are ordinary ones"
    return RunData(conversations, np.arange(count), conversations, np.arange(0))


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def first_rows(run: Run) -> list[PackedBatch]:
    """The rows of the first step."""
    loop = run.capture_loop()
    plans = [plan for plan in run.sampler.plans() if plan.step == 0]
    return [make_row(plan, run.data.training, loop) for plan in plans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True)
    parser.add_argument("--target", default="tiny")
    for name, default in (("tokens", 128), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    recipe = find_recipe(options.recipe)
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"name": options.target})})
    target = load_target(recipe.target)
    data = random_data(target, recipe.train.rows_per_step, recipe.train.tokens_per_row, options.tokens)
    runs = {name: assemble(variant(recipe, changes), target, data) for name, changes in VARIANTS.items()}
    plain = next(iter(runs.values()))
    rows = first_rows(plain)
    slots = plain.drafter.step(rows).metrics.slots
    print(f"{options.recipe}, {options.target}: {sum(r.input_ids.numel() for r in rows)} tokens, {slots} slots a step")

    taken: dict[str, list[float]] = {name: [] for name in runs}
    captured: list[float] = []
    for _ in range(options.rounds + 1):  # the first warms up
        captured.append(seconds_of(lambda: first_rows(plain)))
        for name, run in runs.items():
            taken[name].append(seconds_of(lambda run=run: run.drafter.step(rows)))  # type: ignore[misc]
    forward = statistics.median(captured[1:])
    base = statistics.median(taken[next(iter(runs))][1:])
    print(f"target's forward {forward:.3f} s")
    print(f"{'':24} {'drafter, s':>12} {'ratio':>8} {'whole step, s':>15} {'ratio':>8}")
    for name, seconds in taken.items():
        median = statistics.median(seconds[1:])
        whole = (median + forward) / (base + forward)
        print(f"{name:24} {median:12.3f} {median / base:8.2f} {median + forward:15.3f} {whole:8.2f}")


if __name__ == "__main__":
    main()
