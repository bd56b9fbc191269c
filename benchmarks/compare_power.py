"""How often `draftline compare` says the right word about groups of really trained runs.

    python benchmarks/compare_power.py train --data DATA --out POOL
    python benchmarks/compare_power.py judge --out POOL

DATA is prepared for the embedded target (`draftline quickstart` leaves such a folder in quickstart/data).
`train` fills POOL/KIND/seed-N with short runs of one configuration that differ in nothing but the seed; two kinds
have a fault planted:

    right     nothing
    labels    training labels one place late; measured against the right ones
    context   `fc` receives zeros, in training and in measurement

The target runs once, its states are kept in POOL/states. A run that is there already is not trained again. `judge`
draws groups of three, and of two, from the pool and counts verdicts. Groups of one trial never share
a run; different trials do, so the counts vary somewhat more than independent ones.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from draftline.compare import compare_groups
from draftline.config import RunConfig, load_run_config, quickstart_recipe
from draftline.data.dataset import PreparedDataset
from draftline.data.split import RunData, choose_conversations
from draftline.draft.model import DFlashDraftModel
from draftline.engine.process import intra_op_threads
from draftline.run import assemble, train, with_saved_threads
from draftline.targets.model import Target, load_target
from draftline.train import step as step_module
from draftline.train.run_folder import RunFolder

SETTINGS = (
    "optim.name=adamw",
    "optim.learning_rate=3e-3",
    "loss.weights=decay",
    "train.num_anchors=12",
    "data.heldout_fraction=0.15",
    "train.max_steps=400",
    "train.eval_every=400",
    "train.eval_walks=0",
    "train.log_every=100",
    "train.save_every=1000",
    "pipeline.mode=inline",
    "pipeline.threads_per_loop=1",
)
"""Changes to the quickstart recipe; the first four are what it was when the numbers were recorded. Not fewer steps:
after 100 a run is still at the plateau of token frequencies, and there even labels one place late cost an eighth of
the accuracy."""


@contextmanager
def late_labels() -> Iterator[None]:
    """Labels one place late wherever there is a gradient; measurement is without one."""
    clean: Callable[..., Tensor] = step_module.slot_labels

    def slot_labels(*words: Any, shift: int) -> Tensor:
        return clean(*words, shift=shift + int(torch.is_grad_enabled()))

    with mock.patch.object(step_module, "slot_labels", slot_labels):
        yield


@contextmanager
def empty_context() -> Iterator[None]:
    """Zeros in the place of the captured states."""
    clean = DFlashDraftModel.forward

    def forward(model: DFlashDraftModel, hidden_states: Tensor, *words: Any) -> Tensor:
        return clean(model, torch.zeros_like(hidden_states), *words)

    with mock.patch.object(DFlashDraftModel, "forward", forward):
        yield


@contextmanager
def no_fault() -> Iterator[None]:
    """The pipeline as it is."""
    yield


KINDS = {"right": no_fault, "labels": late_labels, "context": empty_context}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "judge"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--right", type=int, default=9, help="Seeds of the right configuration.")
    parser.add_argument("--wrong", type=int, default=4, help="Seeds of each faulty one.")
    parser.add_argument("--trials", type=int, default=200)
    words = parser.parse_args()
    if words.what == "train":
        train_pool(words.data, words.out, {"right": words.right, "labels": words.wrong, "context": words.wrong})
    else:
        print(json.dumps(judge_pool(words.out, words.trials), indent=2))


def train_pool(folder: Path, out: Path, seeds: dict[str, int]) -> None:
    """Train what is missing in the pool."""
    settings = [
        *SETTINGS,
        f"data.path={json.dumps(str(folder))}",
        f"pipeline.states_path={json.dumps(str(out / 'states'))}",
    ]
    config = load_run_config(None, settings, quickstart_recipe())
    target = load_target(config.target)
    data = choose_conversations(config, PreparedDataset.open(folder), None)
    with intra_op_threads(1):
        for seed in range(max(seeds.values())):
            for kind in (kind for kind, count in seeds.items() if seed < count):
                train_one(config, out / kind / f"seed-{seed}", data, target, kind, seed)


def train_one(config: RunConfig, out: Path, data: RunData, target: Target, kind: str, seed: int) -> None:
    """One run of the pool, unless it is complete."""
    if RunFolder(out).step == config.train.max_steps:
        return
    config = config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
    with KINDS[kind]():
        result = train(assemble(with_saved_threads(config, out), target, data), out, resume=True)
    print(f"{kind} {seed}: accuracy {result.heldout['accuracy']:.3f} streak {result.heldout['streak']:.3f}", flush=True)


def judge_pool(out: Path, trials: int) -> dict[str, dict[str, Any]]:
    """Verdicts on groups drawn from the pool: candidate kind and runs a side -> counts, and the mean change."""
    pool = {kind: sorted((out / kind).glob("seed-*")) for kind in KINDS}
    rng, results = np.random.default_rng(0), {}
    for kind, runs in pool.items():
        for size in (3, 2):
            verdicts: Counter[str] = Counter()
            changes = []
            for _ in range(trials):
                right = [pool["right"][k] for k in rng.permutation(len(pool["right"]))]
                wrong = right[size:] if kind == "right" else [runs[k] for k in rng.permutation(len(runs))]
                pair = compare_groups({"baseline": right[:size], "candidate": wrong[:size]}).pairs[0]
                verdicts[str(pair.verdict)] += 1
                changes.append(pair.ratio.value - 1 if pair.ratio else 0.0)
            results[f"{kind}, {size} a side"] = {**verdicts, "mean change": round(float(np.mean(changes)), 4)}
    return results


if __name__ == "__main__":
    main()
