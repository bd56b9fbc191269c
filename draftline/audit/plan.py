"""RUN014 to RUN016: what a short life cannot show, because sizes are reduced in it, examined at full size.

The whole plan of the run against the written order; the draw with the whole budget of anchors; what the drafter begins
with; and rows on their way through the configured engine, many at a time while the drafter is slow, bit for bit.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftline.audit import formats, oracle, oracle_update
from draftline.audit.comparison import text_of
from draftline.audit.life import MemoryConversations
from draftline.audit.probe import Probe
from draftline.audit.reference import role_ids
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.config import DrafterConfig
from draftline.data.dataset import PreparedDataset
from draftline.data.sampler import RowPlan, Sampler
from draftline.data.split import RunData
from draftline.draft.loss import StepMetrics
from draftline.records import PackedBatch, Sample
from draftline.run import Run
from draftline.train.log import metrics_record
from draftline.train.run_folder import RunFolder
from draftline.transfer.pack import make_row
from draftline.transfer.stage import DeviceStage, to_device
from draftline.transfer.store import StatesStore, loop_identity

_MOST_ROWS, _MOST_RATES, _MOST_COUNTED = 200_000, 10_000, 50_000_000
"""Rows of a plan and rates that are compared one by one; supervised tokens that are counted again."""

_PASSES = (0, 1, 2, 3, 5, 11, 1000)
"""In which conversations are drawn from."""

_WAITING, _WAITING_TOKENS = 20, 12
"""Rows that wait for a slow drafter, and tokens of each: what is lost among many rows shows in short ones."""


@check("RUN014", "the run's plan at full size is not that of the recipe")
def whole_plan(probe: Probe) -> Problem | None:
    run = _to_come(probe)
    return (
        _wrong_sides(run) or _wrong_rows(run) or _wrong_rates(run) or _wrong_draw(run) or _wrong_evaluation(run, probe)
    )


@check("RUN015", "the drafter does not begin as its settings say", needs=("DRF001", "DRF012", "DRF013", "TGT011"))
def beginning(probe: Probe) -> Problem | None:
    run = _to_come(probe)
    return (
        _wrong_precision(run)
        or formats.wrong_products(run, probe.row)
        or _wrong_shape(run)
        or _wrong_tokens(run)
        or _wrong_weights(run)
    )


@check("RUN016", "rows change on their way to the drafter", needs=("TGT007", "DAT001"))
def transfer(probe: Probe) -> Problem | None:
    run = _to_come(probe)
    return _changed_in_engine(run, probe) or _changed_in_store(run, probe)


def _to_come(probe: Probe) -> Run:
    if probe.subject.trained:
        raise NotApplicable("the run has been lived already; a plan is for a run to come")
    return probe.subject.run


# The plan.


def _wrong_sides(run: Run) -> Problem | None:
    """Which conversations are trained on, and which are held out."""
    training, config = run.data.training, run.config
    if run.data.heldout is training:
        if not isinstance(training, PreparedDataset):
            return None
        wanted, kept = oracle.held_out(
            np.load(training.folder / "rows.npy")["prompt_hash"], config.data.heldout_fraction
        )
    else:
        wanted, kept = list(range(len(training))), list(range(len(run.data.heldout)))
    kept = kept[: config.train.eval_conversations]
    for name, found, right in (
        ("trained on", run.data.training_ids.tolist(), wanted),
        ("held out", run.data.heldout_ids.tolist(), kept),
    ):
        if found != right:
            return Problem(
                f"{len(found)} conversations are {name}, by the recipe {len(right)}; first in which they differ: "
                f"{sorted(set(found) ^ set(right))[:4]}",
                "all of the prepared folder; a share of the prompts, or a folder of their own, is held out",
            )
    return None


def _wrong_rows(run: Run) -> Problem | None:
    ids = run.data.training_ids.tolist()
    lengths = [int(length) for length in run.data.training.lengths[run.data.training_ids]]
    planned = oracle.plan_run(ids, lengths, run.config.train)
    steps = planned[-1].step + 1
    if (run.sampler.total_rows, run.sampler.total_steps) != (len(planned), steps):
        return Problem(
            f"{run.sampler.total_rows} rows in {run.sampler.total_steps} steps are planned, by the recipe "
            f"{len(planned)} in {steps}",
            "epochs passes over all conversations, or max_steps times rows_per_step rows, then the extensions",
        )
    for found, wanted in islice(zip(run.sampler.plans(), planned, strict=True), _MOST_ROWS):
        ours = (found.sequence_number, found.step, found.last_of_step, found.epoch, found.sample_ids)
        theirs = (wanted.sequence_number, wanted.step, wanted.last_of_step, wanted.epoch, wanted.sample_ids)
        if ours != theirs:
            return Problem(
                f"(row, step, last of it, pass, conversations) is {ours}, by the recipe {theirs}",
                "rows of at most train.tokens_per_row tokens, in the order of the pass",
            )
    return None


def _wrong_rates(run: Run) -> Problem | None:
    """The learning rate of every update of the whole run."""
    total, optim = run.sampler.total_steps, run.config.optim
    ids = run.data.training_ids
    seams = oracle.seams(ids.tolist(), run.data.training.lengths[ids].tolist(), run.config.train)
    for step in np.unique(np.linspace(0, total - 1, min(total, _MOST_RATES)).astype(int)).tolist():
        found, wanted = run.drafter.learning_rate(step), oracle_update.rate_of_run(step, total, seams, optim)
        if not math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-15):
            return Problem(
                f"update {step} of {total} has the rate {found:.6g}, by the recipe {wanted:.6g}",
                f"warm up over optim.warmup_fraction of all steps, then follow optim.schedule = {optim.schedule}",
            )
    return None


def _wrong_draw(run: Run) -> Problem | None:
    """Anchors of some whole conversations, with the whole budget."""
    train = run.config.train
    lengths = run.data.training.lengths[run.data.training_ids]
    longest = run.data.training_ids[np.argsort(lengths, kind="stable")[-3:]]
    texts = {int(i): text_of(run.data.training, int(i)) for i in longest}
    sizes = torch.tensor([len(text.input_ids) for text in texts.values()])
    row = PackedBatch(
        sequence_number=0,
        step=0,
        last_of_step=True,
        epoch=0,
        sample_ids=tuple(texts),
        input_ids=torch.cat([text.input_ids for text in texts.values()])[None],
        loss_mask=torch.cat([text.loss_mask for text in texts.values()])[None],
        document_ids=torch.arange(len(sizes)).repeat_interleave(sizes)[None],
        position_ids=torch.cat([torch.arange(int(size)) for size in sizes])[None],
        hidden_states_packed=torch.zeros(1, int(sizes.sum()), 0),
        target_ids=torch.zeros(1, int(sizes.sum()), dtype=torch.int64),
    )
    draws = [("train.seed", train.seed, epoch) for epoch in _PASSES]
    for name, seed, epoch in [*draws, ("the seed of evaluations", oracle.HELDOUT_SEED, 0)]:
        row = replace(row, epoch=epoch)
        found, wanted, start = run.drafter.anchors(row, seed).tolist(), list[int](), 0
        for i, text in texts.items():
            wanted += [start + a for a in oracle.draw_anchors(text.loss_mask, i, row.epoch, seed, train.num_anchors)]
            start += len(text.input_ids)
        if found != wanted:
            return Problem(
                f"of conversations {list(texts)}, {len(found)} anchors are drawn with {name} in pass {epoch}, "
                f"by the recipe {len(wanted)}{'' if len(found) != len(wanted) else ', others'}",
                f"up to train.num_anchors = {train.num_anchors} of each conversation, by (seed, pass, sample id)",
            )
    return None


def _wrong_evaluation(run: Run, probe: Probe) -> Problem | None:
    """An evaluation of many short rows, against the same rows measured one by one."""
    many = _many_rows(run, probe)
    few = many.config.train.model_copy(update={"num_anchors": 2, "eval_walks": 0})  # neither is looked at here
    config, ids, drafter = many.config.model_copy(update={"train": few}), many.data.training_ids, run.drafter.twin()
    drafter.config = config
    data = RunData(many.data.training, ids, many.data.training, ids)
    many = replace(many, config=config, drafter=drafter, data=data)
    loop, parts = many.capture_loop(), []
    for planned in oracle.plan_heldout(ids.tolist(), many.data.heldout.lengths[ids].tolist(), 2):
        plan = RowPlan(planned.sequence_number, planned.step, planned.last_of_step, planned.epoch, planned.sample_ids)
        parts.append(many.drafter.measure(to_device(make_row(plan, many.data.heldout, loop), many.drafter.device)))
    wanted = metrics_record(StepMetrics.total(parts, many.shape.block_size), many.config.loss)
    found = many.evaluate()
    for name in ("loss", "accuracy", "streak"):
        ours, theirs = float(found.get(name, math.nan)), float(wanted[name])
        if not (math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-6) or (ours != ours and theirs != theirs)):
            return Problem(
                f"over {len(parts)} held-out rows, {name} is {ours:.6g}, row by row it is {theirs:.6g}",
                "an evaluation reads every held-out row, once",
            )
    return None


# The beginning.


def _wrong_precision(run: Run) -> Problem | None:
    """The formats in which target and drafter compute."""
    wanted = run.config.target.dtype
    if wanted != "auto" and run.target.dtype != getattr(torch, wanted):
        return Problem(f"the target computes in {run.target.dtype}, target.dtype is {wanted}", "load it as configured")
    precision, device = run.config.train.precision, run.drafter.device
    low = precision == "bfloat16" or (precision == "auto" and device.type != "cpu")
    with run.drafter.precision():
        one = torch.ones(2, 2, device=device)
        found = (one @ one).dtype
    if found != (torch.bfloat16 if low else torch.float32):
        return Problem(f"the drafter's products are {found}, train.precision is {precision}", "autocast as configured")
    return None


def _wrong_shape(run: Run) -> Problem | None:
    """What the settings, or the target, say of the drafter's shape; what they leave open is checked by DRF012."""
    settings, shape, depth = run.config.drafter, run.shape, run.target.num_layers
    if settings.init_from is not None:
        return None
    ids = settings.target_layer_ids or _usual_layers(depth, settings.num_captured_layers)
    sliding = settings.num_sliding_layers
    kinds = ("sliding_attention",) * sliding + ("full_attention",) * (settings.num_layers - sliding)
    pairs = {
        "num_hidden_layers": (shape.num_hidden_layers, settings.num_layers),
        "block_size": (shape.block_size, settings.block_size),
        "target_layer_ids": (shape.target_layer_ids, ids),
        "sample_from_anchor": (shape.sample_from_anchor, settings.sample_from_anchor),
        "layer_types": (shape.layer_types, kinds),
        "sliding_window": (shape.sliding_window, settings.sliding_window),
        "draft_vocab_size": (shape.draft_vocab_size, settings.draft_vocab_size),
    } | {name: (getattr(shape, name), getattr(settings, name)) for name in _given(settings)}
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            return Problem(f"{name} is {found}, the settings say {wanted}", f"drafter.{name} as configured")
    return None


def _given(settings: DrafterConfig) -> list[str]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "mask_token_id")
    return [name for name in names if getattr(settings, name) is not None]


def _usual_layers(depth: int, count: int) -> tuple[int, ...]:
    """Section 2 of the recipe."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))


def _wrong_tokens(run: Run) -> Problem | None:
    kept = run.drafter.model.kept_ids
    supervised = int(run.data.training.lengths[run.data.training_ids].sum())
    if kept is None or run.config.drafter.init_from is not None or supervised > _MOST_COUNTED:
        return None
    stops = role_ids(run.target, "eos") if run.target.tokenizer is not None else set()
    texts = (text_of(run.data.training, int(i)) for i in run.data.training_ids)
    pairs = [(text.input_ids, text.loss_mask) for text in texts]
    wanted = oracle.kept_tokens(pairs, len(kept), run.target.vocab_size, stops)
    if kept.tolist() == wanted:
        said = torch.cat([ids[mask] for ids, mask in pairs])
        covered = float(torch.isin(said, kept.cpu()).double().mean())
        told = None if run.vocabulary is None else run.vocabulary.coverage
        if told is None or not math.isclose(told, covered, rel_tol=1e-9):
            return Problem(
                f"{told} of the answers' tokens are said to be among those it can say, counted again {covered:.6f}",
                "supervised tokens of all that is trained on, over all of them",
            )
        return None
    other = sorted(set(kept.tolist()) ^ set(wanted))
    return Problem(
        f"{len(other) // 2} of {len(wanted)} tokens that it can say are not those of the recipe, first {other[:4]}",
        "the most frequent supervised tokens of all that is trained on, and those that end an answer",
    )


def _wrong_weights(run: Run) -> Problem | None:
    settings = run.config.drafter
    found = {name: p.detach().cpu() for name, p in run.drafter.model.named_parameters()}
    if settings.init_from is not None:
        wanted, source = _stored(settings.init_from), str(settings.init_from)
    else:
        wanted, source = oracle.first_weights(run.shape, run.config.train.seed), "the seed"
        if settings.start_from == "target_layers":
            wanted, source = oracle.weights_of_target(wanted, run.target.model), "the target's last layers"
    for name, weight in wanted.items():
        if name in found and not torch.equal(found[name], weight.float()):
            return Problem(f"{name} does not begin with the weights of {source}", "see section 4 of the recipe")
    return None


def _stored(folder: Path) -> Mapping[str, Tensor]:
    """Weights by z-lab's names of a run or an export; nothing where a folder has others."""
    run = RunFolder(folder)
    places = [place for place in (run.checkpoint("best"), run.checkpoint("last"), folder) if place is not None]
    files = [place / name for place in places for name in ("drafter.safetensors", "model.safetensors")]
    file = next((file for file in files if file.is_file()), None)
    return {} if file is None else load_file(file)


# The way.


def _changed_in_engine(run: Run, probe: Probe) -> Problem | None:
    """Rows through the configured engine and the stage, while nothing takes them, against the same rows made alone."""
    small = _many_rows(run, probe)
    pipeline = run.config.pipeline
    with small.engine(0) as engine:
        if pipeline.mode != "inline":
            deadline = time.monotonic() + 10.0
            waiting = -1
            while time.monotonic() < deadline and waiting != engine.statistics().queue_rows:
                waiting = engine.statistics().queue_rows
                time.sleep(0.25)
        stage = DeviceStage(engine, run.drafter.device)
        rows = [next(stage) for _ in range(small.sampler.total_rows)]
    loop = small.capture_loop()
    exact = 0.0 if run.target.device.type == "cpu" else 1e-6
    for plan, row in zip(small.sampler.plans(), rows, strict=True):
        alone = make_row(plan, small.data.training, loop)
        for name, tensor in alone.tensors().items():
            given = row.tensors().get(name)
            if given is None or given.dtype != tensor.dtype or not _same(given, tensor, exact):
                kind = "missing" if given is None else str(given.dtype).removeprefix("torch.")
                return Problem(
                    f"row {plan.sequence_number} of {len(rows)} that waited: its {name} ({kind}) is not what was made",
                    "hand rows on as they are: no cast, no buffer that a later row writes into",
                )
    return None


def _same(found: Tensor, wanted: Tensor, exact: float) -> bool:
    if found.shape != wanted.shape:
        return False
    if not exact:
        return torch.equal(found.cpu(), wanted.cpu())
    return torch.allclose(found.cpu().double(), wanted.cpu().double(), rtol=exact, atol=exact)


def _many_rows(run: Run, probe: Probe) -> Run:
    """The run over many rows of one short conversation each."""
    generator = probe.generator(21)
    samples = [
        Sample(i, probe.random_ids(_WAITING_TOKENS - i % 5, generator), torch.arange(_WAITING_TOKENS - i % 5) >= 4)
        for i in range(_WAITING)
    ]
    conversations = MemoryConversations(samples, "waiting")
    ids = np.arange(_WAITING)
    train = run.config.train.model_copy(
        update={"tokens_per_row": 2, "rows_per_step": 1, "epochs": 1, "max_steps": None, "extensions": ()}
    )
    pipeline = run.config.pipeline.model_copy(update={"states_path": None})
    sampler = Sampler(
        sample_ids=ids,
        lengths=conversations.lengths,
        tokens_per_row=train.tokens_per_row,
        rows_per_step=train.rows_per_step,
        epochs=train.epochs,
        max_steps=train.max_steps,
        seed=train.seed,
    )
    config = run.config.model_copy(update={"train": train, "pipeline": pipeline})
    return replace(run, config=config, data=RunData(conversations, ids, conversations, ids[:0]), sampler=sampler)


def _changed_in_store(run: Run, probe: Probe) -> Problem | None:
    """States that were kept on disk come back bit for bit, or as near as the format they are kept in allows."""
    loop = run.capture_loop()
    samples = [replace(sample, sample_id=i) for i, sample in enumerate(probe.samples)]
    captured, kept = loop.capture(samples), oracle.kept_narrow(run.config)
    with tempfile.TemporaryDirectory() as scratch:
        lengths = np.array([len(sample) for sample in samples])
        for session in (0, 1):  # written in one session, read in the next
            identity = loop_identity(loop, "probe", kept)
            store = StatesStore(Path(scratch) / "states", identity, lengths, 1)
            if session == 0:
                for shard in range(store.num_shards):
                    store.write(shard, [captured[i] for i in store.members(shard)])
        for item, read in zip(captured, store.capture(samples), strict=True):
            for name, given, wanted in _tensors(read, item):
                narrow = 0.0 if kept is None or not name.startswith("hidden") else oracle.ROUNDING_OF_KEPT[kept]
                if given is None or not _kept_as(given, wanted, narrow):
                    return Problem(
                        f"{name} of a conversation comes back from the disk as other numbers", "keep the bytes"
                    )
    return None


def _kept_as(found: Tensor, wanted: Tensor, rounding: float) -> bool:
    """Bit for bit, or each number off by so much of itself, or by as much of the largest as the smallest steps are."""
    if not rounding or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return _same(found, wanted, 0.0)
    ours, theirs = found.double(), wanted.double()
    return bool(((ours - theirs).abs() <= rounding * theirs.abs() + 2e-5 * theirs.abs().max()).all())


def _tensors(read: object, item: object) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    for name in ("hidden_states_SLD", "target_ids_S", "verifier_last_hidden_SD"):
        wanted: Tensor | None = getattr(item, name)
        if wanted is not None:
            yield name, getattr(read, name), wanted
