"""RUN, for a run that has trained: what it logged, measured again with the code that is here now.

A run may have been trained by code that was wrong then, or on a machine that computes otherwise. The evidence lies in
its folder: held-out figures beside the best checkpoint, and the lines of the log that follow each checkpoint. Both are
computed again, on the same rows and anchors; what differs by more than rounding was not learned as this code learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from draftline.audit.probe import Probe
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.config import RunConfig
from draftline.data.sampler import RowPlan
from draftline.draft.loss import StepMetrics
from draftline.records import PackedBatch
from draftline.run import Run, assemble
from draftline.train.checkpoint import TrainState, read_checkpoint
from draftline.train.log import metrics_record, whole_lines
from draftline.train.run_folder import RunFolder
from draftline.transfer.pack import make_row
from draftline.transfer.stage import to_device

_MEASURED = {"accuracy": 0.02, "streak": 0.02, "loss": 2e-3, "teacher_forced_acceptance_length": 0.02}
_REPLAYED = {"loss": 2e-3, "accuracy": 0.02, "streak": 0.02, "grad_norm": 0.01}
"""Relative difference that other kernels or another machine explain in float32; a tie moves what is counted by one."""

_LOW = 5
"""So many times as much in bfloat16."""

_MOST_STEPS, _MOST_TOKENS = 50, 60_000
"""Steps and row positions of one replay."""


@check("RUN012", "held-out figures that the run logged are not those of its checkpoint")
def logged_figures(probe: Probe) -> Problem | None:
    folder = _folder(probe)
    place = folder.checkpoint("best") or folder.checkpoint("last")
    lines = _lines(folder)
    step = None if place is None else int(place.resolve().name.partition("-")[2])
    if step not in lines or lines[step].get("heldout_accuracy") is None:
        raise NotApplicable("the run logged no evaluation of its best checkpoint")
    logged, found = lines[step], _without_stores(probe.subject.run).evaluate()
    pairs = {name: (logged.get(f"heldout_{name}"), found.get(name)) for name in _MEASURED}
    measured = (
        f"{name} logged {a:.4g}, now {b:.4g}" for name, (a, b) in pairs.items() if a is not None and b is not None
    )
    probe.notes.append(f"held-out, step {step}: {', '.join(measured)}")
    off = _furthest(pairs, _MEASURED, _factor(probe.subject.run))
    if off is None:
        return None
    name, (was, now) = off
    return Problem(
        f"step {step}: {name} was logged as {was:.4g} and measures {now:.4g} with the weights of that step",
        "the code that trained computed something else than this one: train again, or use that version to serve",
    )


@check("RUN013", "steps of the run come out otherwise when they are done again")
def replayed_steps(probe: Probe) -> Problem | None:
    folder, replays = _folder(probe), 0
    lines = _lines(folder)
    for step in (*folder.checkpoint_steps()[-2:], 0):
        target = min((line for line in lines if line > step), default=None)
        if target is None or target - step > _MOST_STEPS:
            continue
        again = _replay(probe.subject.run, folder, step, target)
        if again is None:
            continue
        replays += 1
        pairs = {name: (lines[target].get(name), again.get(name)) for name in _REPLAYED}
        off = _furthest(pairs, _REPLAYED, _factor(probe.subject.run))
        if off is not None:
            name, (was, now) = off
            return Problem(
                f"steps {step + 1} to {target}, done again from the state before: {name} was {was:.4g}, is {now:.4g}",
                "data, target, settings or code are not those that the run was trained with",
            )
    if not replays:
        raise NotApplicable("no line of the log follows a checkpoint closely enough to be done again")
    probe.notes.append(f"{replays} stretches of the run, done again, give the lines that it logged")
    return None


def _folder(probe: Probe) -> RunFolder:
    place = probe.subject.run_folder
    if place is None or not RunFolder(place).exists:
        raise NotApplicable("this is not the folder of a run")
    return RunFolder(place)


def _lines(folder: RunFolder) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for _, line in whole_lines(folder.metrics_path)} if folder.has_metrics else {}


def _without_stores(run: Run) -> Run:
    """The run with states from the target itself, one loop after the other."""
    pipeline = run.config.pipeline.model_copy(update={"states_path": None, "mode": "inline"})
    return replace(run, config=run.config.model_copy(update={"pipeline": pipeline}))


def _replay(run: Run, folder: RunFolder, step: int, target: int) -> Mapping[str, Any] | None:
    """The figures of a log line, from the checkpoint before it or from the first weights; None if it is too long."""
    made = _without_stores(run)
    config = _without_continued(made.config) if step else made.config
    start = run.drafter.model if step else None
    fresh = assemble(config, run.target, run.data, start)
    state = TrainState(StepMetrics.zero(run.shape.block_size))
    if step:
        place = folder.step_folder(step)
        checkpoint = read_checkpoint(place)
        fresh.drafter.restore(checkpoint, place)
        state = checkpoint.state
    rows, result = _rows(fresh, state.next_row), None
    with torch.random.fork_rng():
        while state.step < target:
            batches = [next(rows)]
            while not batches[-1].last_of_step:
                batches.append(next(rows))
            if state.tokens > _MOST_TOKENS + (0 if not step else checkpoint.state.tokens):
                return None
            result = fresh.drafter.step(batches)
            state.count(result.metrics, batches[-1].sequence_number + 1)
    assert result is not None, "a line follows the checkpoint"
    return {**metrics_record(state.take_window(), fresh.config.loss), "grad_norm": result.grad_norm}


def _without_continued(config: RunConfig) -> RunConfig:
    """What the drafter began from may be gone; its shape is in the checkpoint."""
    return config.model_copy(update={"drafter": config.drafter.model_copy(update={"init_from": None})})


def _rows(run: Run, first: int) -> Iterator[PackedBatch]:
    loop = run.capture_loop()

    def made(plan: RowPlan) -> PackedBatch:
        return to_device(make_row(plan, run.data.training, loop), run.drafter.device)

    return map(made, run.sampler.plans(first))


def _factor(run: Run) -> int:
    return _LOW if torch.bfloat16 in (run.target.dtype, run.drafter.dtype) else 1


def _furthest(
    pairs: Mapping[str, tuple[float | None, float | None]], allowed: Mapping[str, float], factor: int
) -> tuple[str, tuple[float, float]] | None:
    """The figure that is furthest beyond what is allowed, if any; what one side has not measured is left out."""
    off = {
        name: abs(was - now) / max(abs(was), 0.05) / (factor * allowed[name])
        for name, (was, now) in pairs.items()
        if was is not None and now is not None and was == was and now == now
    }
    name = max(off, key=off.__getitem__, default=None)
    if name is None or off[name] <= 1:
        return None
    was, now = pairs[name]
    return None if was is None or now is None else (name, (was, now))
