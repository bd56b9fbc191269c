"""Assemble a training run from its settings: the only place, with the engines, that knows both halves.

settings -> data, target -> drafter's shape -> run folder -> drafter (or checkpoint) -> engine -> loop
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from draftline.config import DFlashConfig, RunConfig, sent_beside_states
from draftline.data.cache import tokenizer_hash
from draftline.data.dataset import PreparedDataset
from draftline.data.sampler import IntArray, Sampler, heldout_rows
from draftline.data.split import Conversations, RunData, choose_conversations
from draftline.data.vocabulary import ReducedVocabulary, count_supervised, coverage_of, reduce_vocabulary
from draftline.draft.model import DFlashDraftModel
from draftline.engine.cores import available_cores, intra_op_threads, threads_per_loop
from draftline.engine.inline import InlineEngine
from draftline.engine.replicas import frozen_target, loop_targets
from draftline.engine.rows import CaptureLoop, make_rows
from draftline.engine.signals import stop_on_signals
from draftline.engine.threads import ThreadsEngine
from draftline.errors import ConfigError, DataError
from draftline.evaluate.acceptance import Acceptance, teacher_forced_walk
from draftline.formats.beginning import drafter_to_continue, set_first_weights
from draftline.progress import counting
from draftline.records import Sample, StepMetrics
from draftline.storage import without_nan
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target, load_target, resolve_device, stop_token_ids, weights_fingerprint
from draftline.train.checkpoint import CheckpointStore, TrainState, read_checkpoint
from draftline.train.drafter import HELDOUT_SEED, Drafter
from draftline.train.estimate import check_disk, estimate_run
from draftline.train.log import Record, RunLog, metrics_record, open_display
from draftline.train.loop import DrafterTrainLoop, LoopParts
from draftline.train.run_folder import RunFolder
from draftline.transfer.stage import DeviceStage, PipelineStatistics, RowSource, to_device
from draftline.transfer.store import StatesStore, fill_store, folder_name, loop_identity

HELDOUT_FOLDER = "heldout"
"""Where `draftline prepare` puts what it keeps out, inside the prepared folder."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        folder: the run folder.
        step: optimiser steps done.
        tokens: row positions seen.
        seconds: wall-clock time, earlier sessions included.
        best_step: step of the best checkpoint by held-out streak.
        heldout: figures of the last evaluation of this session, empty if there was none.
    """

    folder: Path
    step: int
    tokens: int
    seconds: float
    best_step: int | None
    heldout: Record

    def to_json(self) -> Record:
        """Plain values, None where there was nothing to divide by."""
        return without_nan({**asdict(self), "folder": str(self.folder)})


class Engine(RowSource, AbstractContextManager["Engine"], Protocol):
    """Makes rows while its block runs."""

    def statistics(self) -> PipelineStatistics: ...


@dataclass(frozen=True)
class Examination:
    """What a gate found in a run that it lets start.

    Attributes:
        allowed: codes of findings that the run starts in spite of.
        report: everything, as `draftline audit --json` writes it.
    """

    allowed: Sequence[str]
    report: Mapping[str, Any]


Gate = Callable[[RunConfig, Target], Examination]
"""Examines a run before its first step: raises to stop it."""


def train_run(config: RunConfig, out: Path, *, resume: bool = False, gate: Gate | None = None) -> RunResult:
    """Train a drafter, or continue to; everything is written into the folder `out`.

    What `gate` found is written to `audit.json`, what it let pass also to `run.json`. A run that is continued has
    passed it before its first step.

    Raises:
        ConfigError: a setting cannot be met, or contradicts the run that is to be continued.
        StorageError: `out` is in use, or the disk is full.
        DataError, TargetError, CheckpointError: see their modules.
        Interrupted: Ctrl-C or SIGTERM; the state was saved.
        PipelineError: a target loop failed; the state was saved.
    """
    RunFolder(out).check_usable(config, resume)
    if config.data.path is None:
        raise ConfigError("data.path is not set: give the folder that `draftline prepare` wrote")
    training = PreparedDataset.open(config.data.path)
    heldout_path = config.data.heldout_path or config.data.path / HELDOUT_FOLDER
    heldout = PreparedDataset.open(heldout_path) if config.data.heldout_path or heldout_path.exists() else None
    data, target = choose_conversations(config, training, heldout), load_target(config.target)
    for prepared in (training, heldout):
        if prepared is not None:
            _check_tokenizer(prepared, target)
    examination = gate(config, target) if gate is not None and not RunFolder(out).exists else None
    return train_on(config, out, data, target, resume, examination)


def train_on(
    config: RunConfig,
    out: Path,
    data: RunData,
    target: Target,
    resume: bool,
    examination: Examination | None = None,
) -> RunResult:
    """The same with data and target already in memory, and a folder that `RunFolder.check_usable` has let pass."""
    RunFolder(out).check_same_target(weights_fingerprint(target.model))
    _check_data_fits(data, target)
    config = _with_threads(config, out)
    continued = drafter_to_continue(config.drafter, target)
    if continued is None:
        shape = resolve_drafter_config(target, config.drafter, data.training.used_token_ids())
    else:
        shape = continued.config
    longest = max(int(conversations.lengths.max(initial=0)) for conversations in (data.training, data.heldout))
    estimate = estimate_run(config, shape, target.dtype.itemsize, longest)
    _say(estimate.sentence())
    check_disk(out, estimate)
    run = TrainingRun(config, out, data, target, shape, continued)
    if resume:
        run.restore()
    return run.train(examination)


def choose_vocabulary(
    config: RunConfig,
    shape: DFlashConfig,
    conversations: Conversations,
    sample_ids: IntArray,
    target: Target,
    continued: DFlashDraftModel | None = None,
) -> ReducedVocabulary | None:
    """The tokens that the drafter of a run can say, none if it can say all: a function of data and target.

    Args:
        conversations, sample_ids: what is trained on.
        continued: the drafter that is trained further; what it can say stays.

    Raises:
        ConfigError: other settings have no meaning for a reduced vocabulary, or it is too small.
    """
    if shape.draft_vocab_size is None:
        return None
    if config.loss.labels == "data":
        raise ConfigError(
            f"loss.labels = data has no label for tokens outside drafter.draft_vocab_size = {shape.draft_vocab_size}: "
            "set loss.labels=target, or leave drafter.draft_vocab_size out"
        )
    sent_beside_states(config)
    counts_V = count_supervised(conversations, sample_ids, target.vocab_size)
    if continued is not None and continued.kept_ids is not None:
        return ReducedVocabulary(continued.kept_ids, coverage_of(counts_V, continued.kept_ids))
    always = stop_token_ids(target.model, target.tokenizer) if target.tokenizer is not None else frozenset()
    return reduce_vocabulary(counts_V, shape.draft_vocab_size, always)


class TrainingRun:
    """The parts of one run, and where it stands.

    Arguments:
        folder: run folder; nothing is written before `train`.
        continued: the drafter whose weights and vocabulary the run starts from; none: it begins its own.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        data: RunData,
        target: Target,
        shape: DFlashConfig,
        continued: DFlashDraftModel | None = None,
    ) -> None:
        self._config, self._folder, self._data, self._target, self._shape = config, folder, data, target, shape
        self._device = drafter_device(config.train.device)
        self._sampler = Sampler(
            sample_ids=data.training_ids,
            lengths=data.training.lengths[data.training_ids],
            tokens_per_row=config.train.tokens_per_row,
            rows_per_step=config.train.rows_per_step,
            epochs=config.train.epochs,
            max_steps=config.train.max_steps,
            seed=config.train.seed,
        )
        self._vocabulary = choose_vocabulary(config, shape, data.training, data.training_ids, target, continued)
        kept_ids = None if self._vocabulary is None else self._vocabulary.kept_ids
        self._drafter = Drafter(
            config=config,
            shape=shape,
            total_steps=self._sampler.total_steps,
            frozen=frozen_target(target, self._device, kept_ids),
            device=self._device,
        )
        set_first_weights(self._drafter.model, config.drafter, target, continued)
        self._checkpoints = CheckpointStore(folder, config.train.keep_last)
        self._state = TrainState(StepMetrics.zero(shape.block_size))
        self._stores: dict[str, StatesStore] = {}
        self._heldout: Record = {}

    def restore(self) -> None:
        """Continue from the newest checkpoint; without one, start at the beginning.

        Raises:
            CheckpointError: it is damaged, or of another run.
            ConfigError: a setting contradicts it.
        """
        newest = self._checkpoints.newest()
        if newest is None:
            _say(f"{self._folder} has no checkpoint yet: starting at step 0")
            return
        checkpoint = read_checkpoint(newest)
        RunFolder(self._folder).check_same_run(checkpoint, self._config, self._shape, self._data.fingerprint)
        self._drafter.restore(checkpoint, newest)
        self._state = checkpoint.state
        self._checkpoints.tidy(self._state)
        _say(f"continuing after step {self._state.step} of {self._sampler.total_steps}")

    def train(self, examination: Examination | None = None) -> RunResult:
        """Run the loops to the end; `examination` is what was found before this session."""
        loops, cores, threads = len(self._target_devices()), available_cores(), self._config.pipeline.threads_per_loop
        assert threads is not None, "train_on settles it"
        _say(f"{cores} core(s), {loops} target loop(s): {threads} thread(s) for each of them and for the drafter")
        if threads > 1 and threads * (loops + 1) > cores:
            _say("that is more threads than cores: lower pipeline.threads_per_loop if the run is slow")
        if self._vocabulary is not None:
            _say(self._vocabulary.sentence())
        session = {"first_step": self._state.step, "cores": cores, "threads_per_loop": threads}
        self._write_identity(session, examination)
        with ExitStack() as stack:
            stack.enter_context(intra_op_threads(threads))
            engine = self._engine(threads)
            self._source(self._data.heldout, self._target)  # what fills stores comes before signals wait for a step
            stop_requested = stack.enter_context(stop_on_signals())
            stack.enter_context(engine)
            log = stack.enter_context(closing(self._log(engine)))
            parts = LoopParts(self._drafter.step, self._evaluate, partial(self._save, log), stop_requested, log)
            DrafterTrainLoop(
                rows=DeviceStage(engine, self._device),
                parts=parts,
                config=self._config.train,
                total_steps=self._sampler.total_steps,
                state=self._state,
            ).run()
        state = self._state
        return RunResult(self._folder, state.step, state.tokens, state.seconds, state.best_step, self._heldout)

    def _engine(self, threads: int) -> Engine:
        samples, first = self._data.training, self._state.next_row
        plans = self._sampler.plans(first)
        if self._config.pipeline.mode == "inline":
            return InlineEngine(loop=self._source(samples, self._target), samples=samples, plans=plans)
        targets = loop_targets(self._target, self._config.target, self._target_devices())
        return ThreadsEngine(
            loops=[self._source(samples, target) for target in targets],
            samples=samples,
            plans=plans,
            first_row=first,
            queue_bytes=self._config.pipeline.queue_bytes,
            destination=self._device,
            intra_op_threads=threads,
        )

    def _target_devices(self) -> Sequence[str]:
        """Device of each target loop; in mode `inline` there is one loop, in the drafter's thread."""
        pipeline = self._config.pipeline
        count = pipeline.target_loops if pipeline.mode == "threads" else 1
        devices = pipeline.target_devices or (str(self._target.device),) * count
        if len(devices) != count:
            raise ConfigError(f"pipeline.target_devices names {len(devices)} devices for {count} target loop(s)")
        return devices

    def _source(self, conversations: Conversations, target: Target) -> CaptureLoop:
        """What gives the states of conversations: the target, or a store that it has filled."""
        pipeline = self._config.pipeline
        send = sent_beside_states(self._config)
        loop = TargetForwardLoop(target, self._shape.target_layer_ids, send, pipeline.target_batch_tokens)
        if pipeline.states_path is None:
            return loop
        data = conversations.fingerprint
        if data not in self._stores:
            folder = pipeline.states_path / folder_name(data)
            store = StatesStore(folder, loop_identity(loop, data), conversations.lengths)
            with counting("capturing") as on_progress:
                fill_store(store, loop, conversations, on_progress)
            self._stores[data] = store
        return self._stores[data]

    def _evaluate(self) -> Record:
        """Figures on held-out conversations, empty if there are none."""
        heldout, ids = self._data.heldout, self._data.heldout_ids
        plans = heldout_rows(ids, heldout.lengths[ids], self._config.train.tokens_per_row)
        rows = make_rows(plans, heldout, self._source(heldout, self._target))
        parts = (self._drafter.measure(to_device(row, self._device)) for row in rows)
        metrics = StepMetrics.total(parts, self._shape.block_size)
        if plans:
            self._heldout = metrics_record(metrics, self._config.loss)
            self._heldout["teacher_forced_acceptance_length"] = self._walk()
        return self._heldout

    def _walk(self) -> float:
        """Teacher-forced acceptance length over some held-out answers; NaN where the devices differ."""
        if self._target.device != self._device:
            return math.nan
        ids = self._data.heldout_ids[: self._config.train.eval_walks].tolist()
        answers = [split_last_answer(self._data.heldout[sample_id]) for sample_id in ids]
        walks = teacher_forced_walk(
            self._target,
            self._drafter.model,
            [(prompt, answer) for prompt, answer in answers if len(answer) > 1],
            self._config.pipeline.target_batch_tokens,
        )
        return Acceptance.total(walks).length

    def _save(self, log: RunLog, state: TrainState) -> None:
        """Write a checkpoint, unless nothing has been learned yet."""
        if state.step:
            log.sync()
            self._checkpoints.save(self._drafter.checkpoint(state, self._data.fingerprint))

    def _log(self, engine: Engine) -> RunLog:
        return RunLog(
            run=RunFolder(self._folder),
            state=self._state,
            learning_rate=self._drafter.learning_rate,
            loss=self._config.loss,
            statistics=engine.statistics,
            display=open_display(self._state.step, self._sampler.total_steps),
        )

    def _write_identity(self, session: dict[str, Any], examination: Examination | None) -> None:
        if examination is not None and examination.allowed:
            session = {**session, "allowed": list(examination.allowed)}
        data: dict[str, Any] = {
            "fingerprint": self._data.fingerprint,
            "conversations": len(self._data.training_ids),
            "heldout_conversations": len(self._data.heldout_ids),
            "heldout_anchors_seed": HELDOUT_SEED,
            "rows": self._sampler.total_rows,
            "steps": self._sampler.total_steps,
        }
        if self._vocabulary is not None:
            data["draft_vocab_coverage"] = self._vocabulary.coverage
        target = weights_fingerprint(self._target.model)
        run = RunFolder(self._folder)
        run.begin_session(self._config, self._shape, target, data, session)
        if examination is not None:
            run.write_audit(examination.report)


def drafter_device(name: str) -> torch.device:
    """`auto` is the last accelerator (the first is the target's) if there is one, else the CPU."""
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.device_count() - 1)
    return resolve_device(name)


def split_last_answer(sample: Sample) -> tuple[list[int], list[int]]:
    """Ids before the last answer of a conversation, and of that answer; both empty if there is no answer."""
    supervised = sample.loss_mask.tolist()
    end = len(supervised) - supervised[::-1].index(True) if any(supervised) else 0
    start = end
    while start and supervised[start - 1]:
        start -= 1
    ids = sample.input_ids.tolist()
    return ids[:start], ids[start:end]


def _with_threads(config: RunConfig, out: Path) -> RunConfig:
    """Settle the number of threads: the one wished for, else that of the run so far, else what the cores suggest."""
    saved = RunFolder(out).config()
    wanted = config.pipeline.threads_per_loop or (saved.pipeline.threads_per_loop if saved is not None else None)
    threads = threads_per_loop(available_cores(), wanted)
    pipeline = config.pipeline.model_copy(update={"threads_per_loop": threads})
    return config.model_copy(update={"pipeline": pipeline})


def _check_tokenizer(prepared: PreparedDataset, target: Target) -> None:
    """Token ids mean nothing without the tokenizer that made them, and a chat template decides where answers are."""
    if target.tokenizer is not None and prepared.meta["tokenizer_hash"] != tokenizer_hash(target.tokenizer):
        raise DataError(
            f"{prepared.folder} was prepared with another tokenizer or chat template than that of {target.name}: "
            "prepare the data with this target"
        )


def _check_data_fits(data: RunData, target: Target) -> None:
    longest = max(int(conversations.lengths.max(initial=0)) for conversations in (data.training, data.heldout))
    limit = target.config.max_position_embeddings
    if longest > limit:
        raise DataError(
            f"the longest conversation has {longest} tokens, target {target.name} reads {limit}: "
            f"prepare the data again with --max-length {limit}"
        )
    highest = max(len(conversations.used_token_ids()) for conversations in (data.training, data.heldout)) - 1
    if highest >= target.vocab_size:
        raise DataError(
            f"the data has token {highest}, target {target.name} knows 0..{target.vocab_size - 1}: "
            "prepare the data with this target"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
