"""Draftline and speculators 0.9 train the same drafter for the same processor time; both are decoded by our decoder.

    python -m benchmarks.against_speculators --recipe quickstart --target T --data DATA --heldout DATA/heldout \
        --states STATES --prompts DATA/heldout/prompts.jsonl --seconds 150 --out FOLDER [section.key=value ...]

The same target, captured states, packed rows, held-out prompts, shape and block size; one thread each, one after the
other. Time is processor time without start, evaluation and checkpoints, so another job on the machine changes neither.

Draftline runs a recipe. Speculators runs its model, loss and optimisers with the defaults of its trainer (Muon for
matrices, AdamW for the rest, D-PACE, a linear schedule with 1 % warm-up, clipping at 1) at each of three learning
rates; the best by acceptance counts. Its trainer itself needs an accelerator, so its loop is written here. Anchors a
row: as many as Draftline draws on average (`--their-anchors` sets another number; its default is 512).

Prints one JSON line per drafter, and at the end the ratio of (acceptance length - 1) with a 95 % interval paired by
prompt. Leaves z-lab folders in FOLDER, for `benchmarks/zlab_decoder.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import get_linear_schedule_with_warmup

from benchmarks.step import speculators_model
from draftline.config import RunConfig, find_recipe, load_run_config
from draftline.data.prompts import read_prompts
from draftline.draft.block import draw_anchors
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.evaluate.result import EvaluationResult
from draftline.formats.write import export_zlab
from draftline.options import EvaluationSettings
from draftline.records import PackedBatch
from draftline.run import Run, open_run
from draftline.transfer.pack import make_rows

TRIAL_STEPS = 8
"""Steps that are timed, after two that warm up, to know how many fit into the time."""


def run_of(words: argparse.Namespace, seed: int, steps: int | None) -> Run:
    """A run of the recipe, with its states at hand."""
    settings = [
        f"target.name={words.target}",
        f"data.path={words.data}",
        f"data.heldout_path={words.heldout}",
        f"pipeline.states_path={words.states}",
        "pipeline.mode=inline",
        "pipeline.send=last_hidden",
        "pipeline.threads_per_loop=1",
        "train.epochs=1000",
        f"train.seed={seed}",
        f"train.max_steps={steps or 10**6}",
        *words.settings,
    ]
    run = open_run(load_run_config(None, settings, find_recipe(words.recipe)), words.out / "no-run")
    run.fill_stores()
    return run


def rows_of(run: Run) -> Iterator[list[PackedBatch]]:
    """The rows of one step after another, as the run would see them."""
    step: list[PackedBatch] = []
    for row in make_rows(run.sampler.plans(0), run.data.training, run.source(run.data.training)):
        step.append(row)
        if row.last_of_step:
            yield step
            step = []


def train_ours(words: argparse.Namespace, seed: int) -> tuple[Run, int, float]:
    """A drafter of the recipe after the time, its steps and the seconds that they took."""

    def go(steps: int | None, until: int) -> tuple[Run, list[float]]:
        run = run_of(words, seed, steps)
        times = []
        for batches in rows_of(run):
            started = time.process_time()
            run.drafter.step(batches)
            times.append(time.process_time() - started)
            if len(times) == until:
                break
        return run, times

    _, trial = go(None, TRIAL_STEPS + 2)
    steps = max(1, round(words.seconds / float(np.mean(trial[2:]))))
    run, times = go(steps, steps)
    return run, steps, sum(times)


def train_theirs(words: argparse.Namespace, seed: int, rate: float) -> tuple[Run, int, float]:
    """The same drafter after the same time of speculators' steps; the run is only the frame around it."""
    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers

    run = run_of(words, seed, None)
    config = SimpleNamespace(
        optimizer="muon",
        lr=rate,
        muon_lr=rate,
        weight_decay=0.01,
        muon_momentum=0.95,
        muon_weight_decay=0.1,
        muon_ns_steps=5,
        muon_adjust_lr_fn="match_rms_adamw",
    )
    options = {
        "loss_config": resolve_loss_config("ce", "eager"),
        "per_position_loss_weight": "dpace",
        "dpace_alpha": 0.5,
        "max_anchors": words.their_anchors or mean_anchors(run),
    }

    def go(steps: int, until: int) -> tuple[Any, list[float]]:
        torch.manual_seed(seed)
        model = speculators_model(run.shape)
        model.load_state_dict(borrowed(run), strict=False)
        optimizers = build_optimizers(model, config)
        schedules = [get_linear_schedule_with_warmup(o, steps // 100, steps) for o in optimizers]
        times: list[float] = []
        for batches in rows_of(run):
            started = time.process_time()
            for row in batches:
                their_loss(model, row, options).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            times.append(time.process_time() - started)
            if len(times) == until:
                break
        return model, times

    _, trial = go(10**6, TRIAL_STEPS + 2)
    steps = max(1, round(words.seconds / float(np.mean(trial[2:]))))
    model, times = go(steps, steps)
    missing = run.drafter.model.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing, f"speculators' model has no {missing}"
    return run, steps, sum(times)


def their_loss(model: Any, row: PackedBatch, options: dict[str, Any]) -> torch.Tensor:
    """Loss of one row as its trainer calls it."""
    assert row.verifier_last_hidden_packed is not None
    loss: torch.Tensor = model(
        hidden_states=row.hidden_states_packed.float(),
        input_ids=row.input_ids,
        loss_mask=row.loss_mask.long(),
        verifier_last_hidden_states=row.verifier_last_hidden_packed.float(),
        document_ids=row.document_ids,
        position_ids=row.position_ids,
        **options,
    )[1]
    return loss


def borrowed(run: Run) -> dict[str, torch.Tensor]:
    """What its model reads of the target."""
    head, table = run.target.head, run.target.model.get_input_embeddings()
    return {
        "embed_tokens.weight": table.weight.float(),
        "lm_head.weight": head.lm_head.weight.float(),
        "verifier_lm_head.weight": head.lm_head.weight.float(),
        "verifier_norm.weight": run.target.final_norm.weight.float(),
    }


def mean_anchors(run: Run) -> int:
    """Anchors that Draftline draws per row, on average over the first rows."""
    rows = [row for _, step in zip(range(16), rows_of(run), strict=False) for row in step]
    counts = [len(draw_anchors(row, run.config.train.num_anchors, run.config.train.seed)) for row in rows]
    return round(float(np.mean(counts)))


def measure(run: Run, words: argparse.Namespace, name: str) -> EvaluationResult:
    """Decode the held-out prompts, and leave a folder for z-lab's decoder."""
    model: DFlashDraftModel = run.drafter.model.eval()
    prompts = read_prompts([str(words.prompts)], words.limit)
    result = evaluate_prompts(run.target, model, prompts, EvaluationSettings(max_new_tokens=words.max_new_tokens))
    export_zlab(model, words.out / name, "float32")
    (words.out / f"{name}.json").write_text(json.dumps(result.to_json()))
    return result


def gains(result: EvaluationResult) -> np.ndarray:
    """[prompts, 2]: tokens that drafting gave beyond one a forward, and forwards; by prompt."""
    by_prompt: dict[tuple[str, int], np.ndarray] = {}
    for turn in result.per_prompt:
        key = (turn.file, turn.number)
        counts = np.array([len(turn.output_ids) - 1 - turn.target_forwards, turn.target_forwards], dtype=float)
        by_prompt[key] = by_prompt.get(key, np.zeros(2)) + counts
    return np.stack(list(by_prompt.values()))


def ratio(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """(acceptance length - 1) of ours over theirs, seeds together, and a 95 % interval over prompts drawn again."""

    def value(pick: np.ndarray) -> float:
        a, b = (np.sum([table[pick].sum(0) for table in tables], axis=0) for tables in (ours, theirs))
        return float((a[0] / a[1]) / (b[0] / b[1]))

    prompts, generator = len(ours[0]), np.random.default_rng(0)
    drawn = [value(generator.integers(prompts, size=prompts)) for _ in range(2000)]
    return value(np.arange(prompts)), *(float(q) for q in np.quantile(drawn, [0.025, 0.975]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "data", "heldout", "states", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path if name == "out" else str, required=True)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seconds", type=float, required=True, help="processor time of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="tried for speculators")
    parser.add_argument("--their-anchors", type=int, help="a row; as many as Draftline draws if left out")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("settings", nargs="*")
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    found: dict[tuple[str, float], list[EvaluationResult]] = {}
    for seed in words.seeds:
        for kind, rate in [("draftline", 0.0), *(("speculators", rate) for rate in words.rates)]:
            run, steps, seconds = train_ours(words, seed) if rate == 0 else train_theirs(words, seed, rate)
            result = measure(run, words, f"{kind}-{rate:g}-{seed}")
            found.setdefault((kind, rate), []).append(result)
            line = {"program": kind, "rate": rate or recipe_rate(run.config), "seed": seed, "steps": steps}
            print(json.dumps({**line, "seconds": round(seconds), "acceptance": result.acceptance_length}), flush=True)
    ours = [gains(result) for result in found.pop(("draftline", 0.0))]
    best = max(found, key=lambda key: float(np.mean([result.acceptance_length for result in found[key]])))
    value, low, high = ratio(ours, [gains(result) for result in found[best]])
    print(json.dumps({"best rate of speculators": best[1], "ratio": value, "low": low, "high": high}))


def recipe_rate(config: RunConfig) -> float:
    """The rate of the matrices."""
    muon = config.optim.muon_learning_rate if config.optim.name == "muon" else None
    return muon or config.optim.learning_rate


if __name__ == "__main__":
    main()
