"""RUN, for a run that has trained: what it logged, measured again with the code that is here now.

A run may have been trained by code that was wrong then, or on a machine that computes otherwise. The evidence lies in
its folder: held-out figures beside the best checkpoint, and the lines of the log that follow each checkpoint. Both are
computed again, on the same rows and anchors; what differs by more than rounding was not learned as this code learns.

And what a proof says before it travels (PRF004, with the short life): its prompts are those that it names, its answers,
blocks and gaps those of a decoder that recomputes everything, and ties are told from faults.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftline.audit.comparison import text_of
from draftline.audit.life import ANSWER_TOKENS, Life
from draftline.audit.oracle_decoding import Decoded
from draftline.audit.probe import Probe
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.config import RunConfig
from draftline.data.dataset import open_data
from draftline.data.sampler import RowPlan
from draftline.data.split import choose_conversations
from draftline.draft.loss import StepMetrics
from draftline.evaluate.replay import Departure, Replay
from draftline.formats import proof as proof_module
from draftline.formats import proof_prompts
from draftline.formats.proof import PromptSource, Proof, decoding_differences, replay_decoding
from draftline.records import PackedBatch
from draftline.run import Run, assemble
from draftline.targets.model import Target, weights_fingerprint
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


# The proof of an export.


def wrong_prompts(life: Life) -> str | None:
    """A proof asks something else than it says, in words: prompts of what was held out, before their first answers."""
    run, target = life.run, life.run.target
    found = proof_prompts.choose_prompts(life.folder, target)
    if len({tuple(ids) for ids in found.ids}) != len(found.ids) or not found.ids:
        return f"of {len(found.ids)} prompts some are the same"
    if run.config.data.path is None or run.config.pipeline.states_path is not None:
        return f"prompts of {found.source} data are asked, which no folder holds" if found.source in _OF_DATA else None
    whole = choose_conversations(run.config, *open_data(run.config))
    parts = {"held-out": (whole.heldout, whole.heldout_ids), "training": (whole.training, whole.training_ids)}
    source: PromptSource = "held-out" if len(whole.heldout_ids) else "training"
    conversations, ids = parts[source]
    if found.source != source:
        return f"{found.source} prompts are asked where there are {len(ids)} {source} conversations"
    texts = [text_of(conversations, int(i)) for i in ids[:_READ]]
    asked = [text.input_ids[: int(text.loss_mask.int().argmax())].tolist() for text in texts]
    room = min(proof_prompts.LONGEST, target.config.max_position_embeddings - _ROOM)
    some = list(dict.fromkeys(tuple(each) for each in asked if 0 < len(each) <= room))
    if not some or len(ids) > _READ:
        return None
    if any(tuple(each) not in some for each in found.ids):
        return f"a prompt is asked that no {source} conversation begins with"
    if len(found.ids) != min(proof_prompts.COUNT, len(some)):
        return f"{len(found.ids)} of {len(some)} {source} prompts are asked"
    return None


_OF_DATA: tuple[PromptSource, ...] = ("held-out", "training")
_ROOM = 64
"""Positions of the target that are left for an answer."""
_READ = 400
"""Conversations among which prompts are looked for; where there are more, some are left out."""

_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2.5e-3, torch.float64: 1e-4}
"""Distance of two logits that is a tie, relative to the largest."""


def wrong_proof(folder: Path, target: Target, prompt: list[int], wanted: Decoded, stops: Collection[int]) -> str | None:
    """What a proof of one prompt says otherwise than a decoder that recomputes everything, in words."""
    longest, proof_module.MAX_NEW_TOKENS = proof_module.MAX_NEW_TOKENS, ANSWER_TOKENS
    try:
        refused = proof_module.write_proof(folder, target, proof_module.ProofPrompts("random", [prompt]))
    finally:
        proof_module.MAX_NEW_TOKENS = longest
    proof = proof_module.read_proof(folder)
    if refused is not None or proof is None:
        return None if refused is not None else "none is written"
    (kept,), near = proof.answers, _ROUNDING[target.dtype]
    rounding = max(near, 1e-3) * kept.largest_logit
    said = {
        "prompt": (list(kept.input_ids), prompt),
        "longest answer": (proof.decoding.max_new_tokens, ANSWER_TOKENS),
        "where its prompts come from": (proof.decoding.prompts, "random"),
        "stop tokens": (set(proof.decoding.stop_token_ids), set(stops)),
        "target": (proof.target.fingerprint, weights_fingerprint(target.model)),
        "format": (proof.precision.target_dtype, str(target.dtype).partition(".")[2]),
        "forwards": (kept.target_forwards, len(kept.drafted_blocks)),
    }
    stored = load_file(folder / "model.safetensors")
    digests = {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in stored.items()}
    said["tensors"] = ({name: one.sha256 for name, one in proof.tensors.items()}, digests)
    for what, (found, right) in said.items():
        if found != right:
            return f"{what}: {found}, it is {right}"
    if (list(kept.output_ids), [list(block) for block in kept.drafted_blocks]) == (
        wanted.output_ids,
        wanted.drafted_blocks,
    ):  # else a near tie, which RUN010 judges
        pairs = [(a, b) for a, b in zip(kept.output_gaps, wanted.output_gaps, strict=True)]
        for ours, theirs in zip(kept.draft_gaps, wanted.drafted_gaps, strict=True):
            pairs += list(zip(ours, theirs, strict=True))
        off = [(a, b) for a, b in pairs if abs(a - b) > 4 * rounding + 1e-3 * abs(b)]
        if off:
            return f"a token was chosen {off[0][0]:.4g} ahead of the next best, it was {off[0][1]:.4g}"
    return _wrong_ties(proof, folder, target, near)


def _wrong_ties(proof: Proof, folder: Path, target: Target, near: float) -> str | None:
    """Departures within rounding are ties, and beyond it faults; a token that is written otherwise is one of these."""
    kept = proof.answers[0]
    for gap, faults in ((0.5 * near, 0), (2.0 * near, 1), (math.inf, 1)):
        for number in (0, None):
            place = Departure(0, number, 0, [1], [2], gap * kept.largest_logit, kept.largest_logit)
            lines = decoding_differences(proof, Replay([place], [], 1, 100, 100), target)
            if len(lines) != faults:
                return f"tokens {gap:g} of the largest logit apart give {len(lines)} differences, {faults} are right"
    lines = decoding_differences(proof, Replay([], [(0, kept.target_forwards + 1)], 1, 100, 100), target)
    if not lines:
        return "a prompt that takes another number of forwards passes for the same"
    if not kept.drafted_blocks:
        return None
    block, gaps = kept.drafted_blocks[-1], kept.draft_gaps[-1]
    other = next(token for token in range(target.vocab_size) if token not in (*block, *kept.output_ids))
    edited = kept.model_copy(update={"drafted_blocks": (*kept.drafted_blocks[:-1], (*block[:-1], other))})
    replay = replay_decoding(proof.model_copy(update={"answers": (edited,)}), folder, target)
    if gaps[-1] > 4 * near * kept.largest_logit and not decoding_differences(proof, replay, target):
        return "a drafted token is written otherwise, and the replay takes it for the same"
    return None


def _bytes(tensor: Tensor) -> bytes:
    """What a digest of a tensor is over: its format and shape in words, and its bytes."""
    name = str(tensor.dtype).partition(".")[2]
    flat = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{name} {list(tensor.shape)}\n".encode() + flat
