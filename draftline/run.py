"""Assemble a training run and train: the only place, with the engines, that knows both halves.

assemble(config, target, data) -> Run      everything that a run uses, once; an audit examines the same object
open_run(config, folder) -> Run            the same, from settings alone
train(run, folder) -> RunResult            run folder -> checkpoint? -> engine -> loop
train_run(config, folder) -> RunResult     the last two
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftline.config import DFlashConfig, RunConfig, flatten, sent_beside_states
from draftline.data.dataset import PreparedDataset, open_data
from draftline.data.sampler import Deal, Sampler, heldout_rows
from draftline.data.split import Conversations, RunData, choose_conversations
from draftline.data.template import tokenizer_hash
from draftline.draft.block import FrozenTarget
from draftline.draft.loss import StepMetrics
from draftline.draft.model import DFlashDraftModel
from draftline.draft.vocabulary import ReducedVocabulary, count_supervised, coverage_of, reduce_vocabulary
from draftline.engine.capture import fill_states, open_stores
from draftline.engine.inline import InlineEngine
from draftline.engine.process import available_cores, intra_op_threads, stop_on_signals, threads_per_loop
from draftline.engine.processes import ProcessesEngine
from draftline.engine.threads import ThreadsEngine, loop_targets
from draftline.engine.worker import WorkerTerms
from draftline.errors import ConfigError, DataError
from draftline.evaluate.acceptance import Acceptance, split_last_answer, teacher_forced_walk
from draftline.formats.beginning import drafter_to_continue, set_first_weights
from draftline.formats.write import refuse_unwritable
from draftline.plan.sizes import TargetSizes
from draftline.plan.work import Workload, choose_mode, target_operations
from draftline.progress import say
from draftline.records import CapturedSample, Sample
from draftline.session import begin_session
from draftline.storage import without_nan
from draftline.targets.borrowed import Borrowed, load_borrowed
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target, load_target, resolve_device, stop_token_ids
from draftline.train.checkpoint import CheckpointStore, TrainState, shared_checkpoint
from draftline.train.log import Display, NoDisplay, Record, RunLog, SilentLog, StepLog, metrics_record, open_display
from draftline.train.loop import DrafterTrainLoop
from draftline.train.ranks import ALONE, Ranks
from draftline.train.run_folder import RunFolder, code_identity
from draftline.train.step import Drafter
from draftline.train.trackers import Trackers
from draftline.transfer.pack import CaptureLoop, make_rows
from draftline.transfer.stage import DeviceStage, PipelineStatistics, RowSource, to_device
from draftline.transfer.store import (
    StatesStore,
    as_setting,
    folder_name,
    how_kept,
    is_complete,
)


class RunEngine(RowSource, AbstractContextManager["RunEngine"], Protocol):
    """Makes rows while its block runs."""

    def statistics(self) -> PipelineStatistics: ...


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that one run uses. What trains, evaluates and saves calls these, and so does the audit.

    Attributes:
        config: settings, with the mode of the pipeline and the number of threads settled.
        data: conversations, and which of them are trained on.
        target: the frozen model.
        drafter: weights and optimiser, at the first step.
        sampler: rows of the whole run, in order.
        vocabulary: tokens that the drafter can say; none: all.
        stores: captured states on disk that this session has opened, by fingerprint of their data.
        overlap: mode of the pipeline and why it is that, in words.
    """

    config: RunConfig
    data: RunData
    target: Target
    drafter: Drafter
    sampler: Sampler
    vocabulary: ReducedVocabulary | None = None
    stores: dict[str, StatesStore] = field(default_factory=dict)
    overlap: str = ""

    @property
    def shape(self) -> DFlashConfig:
        """Of the drafter."""
        return self.drafter.model.config

    @property
    def threads(self) -> int:
        """Intra-op threads of every loop."""
        assert self.config.pipeline.threads_per_loop is not None, "assemble settles it"
        return self.config.pipeline.threads_per_loop

    def capture_loop(self, target: Target | None = None) -> TargetForwardLoop:
        """A loop that captures what the drafter reads and is taught, on the run's target or a copy of it."""
        pipeline = self.config.pipeline
        layers, send = self.shape.target_layer_ids, sent_beside_states(self.config)
        return TargetForwardLoop(target or self.target, layers, send, pipeline.target_batch_tokens)

    def source(self, conversations: Conversations, target: Target | None = None) -> CaptureLoop:
        """What gives the states of conversations: the target, or a store; `fill_stores` comes first."""
        if self.config.pipeline.states_path is None:
            return self.capture_loop(target)
        return self.stores[conversations.fingerprint]

    def fill_stores(
        self, writers: int = 1, *, repair: bool = False, folder: Path | None = None, say: Callable[[str], None] = say
    ) -> None:
        """Capture all conversations, once, where states are kept on disk; may run the target for hours.

        Args:
            writers: processes that do it; with one, this one does.
            repair: also look at what is there, and capture again what is damaged.
            folder: gets the stacks of a writer that hangs.
            say: gets a line about what is captured, and about each writer that is replaced.

        Raises:
            CheckpointError: the folder holds other states, or damaged ones.
            StorageError: they do not fit on the disk, or another process fills the folder.
        """
        pipeline = self.config.pipeline
        if pipeline.states_path is None:
            return
        loop, both = self.capture_loop(), (self.data.training, self.data.heldout)
        new = open_stores(pipeline, loop, [one for one in both if one.fingerprint not in self.stores])
        self.stores.update({samples.fingerprint: store for store, samples in new.items()})
        settings = WorkerTerms(self.threads, self.target.device.type, pipeline.patience, folder, say)
        fill_states(new, loop, writers=writers, repair=repair, settings=settings)
        if self.target.has_layers and Borrowed.read(pipeline.states_path) is None:
            Borrowed.of(self.target).write(pipeline.states_path)

    def target_devices(self) -> Sequence[str]:
        """Device of each target loop; in mode `inline` there is one loop, in the drafter's thread."""
        pipeline = self.config.pipeline
        count = 1 if pipeline.mode == "inline" else pipeline.target_loops
        devices = pipeline.target_devices or (str(self.target.device),) * count
        if len(devices) != count:
            raise ConfigError(f"pipeline.target_devices names {len(devices)} devices for {count} target loop(s)")
        return devices

    def deal(self, ranks: Ranks) -> Deal:
        """The rows of one of the ranks that train."""
        sampler, rows = self.sampler, self.config.train.rows_per_step
        return Deal(sampler.total_rows, rows, ranks.rank, ranks.count, tuple(sampler.parts))

    def engine(
        self,
        first_row: int,
        folder: Path | None = None,
        say: Callable[[str], None] = say,
        ranks: Ranks = ALONE,
    ) -> RunEngine:
        """Makes the rows of a rank from a place of the order on, in the configured mode.

        Args:
            folder: gets the stacks of a target loop that hangs.
            say: gets a line about each loop that is replaced.
        """
        pipeline, samples = self.config.pipeline, self.data.training
        plans = self.deal(ranks).plans(self.sampler.plans(first_row))
        if pipeline.mode == "inline":
            return InlineEngine(loop=self.source(samples), samples=samples, plans=plans)
        targets = loop_targets(self.target, self.config.target, self.target_devices())
        engine = ProcessesEngine if pipeline.mode == "processes" else ThreadsEngine
        return engine(
            loops=[self.source(samples, target) for target in targets],
            samples=samples,
            plans=plans,
            first_row=first_row if ranks.count == 1 else 0,
            queue_bytes=pipeline.queue_bytes,
            destination=self.drafter.device,
            worker=WorkerTerms(self.threads, self.target.device.type, pipeline.patience, folder, say),
        )

    def evaluate(self) -> Record:
        """Figures on held-out conversations, empty if there are none."""
        heldout, ids = self.data.heldout, self.data.heldout_ids
        plans = heldout_rows(ids, heldout.lengths[ids], self.config.train.tokens_per_row)
        if not plans:
            return {}
        rows = make_rows(plans, heldout, self.source(heldout))
        parts = (self.drafter.measure(to_device(row, self.drafter.device)) for row in rows)
        figures = metrics_record(StepMetrics.total(parts, self.shape.block_size), self.config.loss)
        return {**figures, "teacher_forced_acceptance_length": self._walk()}

    def _walk(self) -> float:
        """Teacher-forced acceptance length over some held-out answers; NaN where the devices differ."""
        if self.target.device != self.drafter.device:
            return math.nan
        ids = self.data.heldout_ids[: self.config.train.eval_walks].tolist()
        answers = {i: answer for i in ids if len((answer := split_last_answer(self.data.heldout[i]))[1]) > 1}
        walked, states = list(answers), self.stores.get(self.data.heldout.fingerprint)

        def kept(samples: Sequence[Sample]) -> list[CapturedSample]:
            assert states is not None, "asked only where states are kept"
            whole = [self.data.heldout[walked[sample.sample_id]] for sample in samples]
            return states.beginnings(whole, samples, self.target.head.target_ids)

        walks = teacher_forced_walk(
            self.target,
            self.drafter.model,
            list(answers.values()),
            self.config.pipeline.target_batch_tokens,
            None if states is None else kept,
        )
        return Acceptance.total(walks).length


def assemble(config: RunConfig, target: Target, data: RunData, start: DFlashDraftModel | None = None) -> Run:
    """Put together what a run uses; nothing is written, and only the drafter's weights are made.

    Args:
        start: whose shape, weights and vocabulary the drafter has; none: what the settings say.

    Raises:
        ConfigError: a setting cannot be met.
        DataError: the data does not fit the target.
        CheckpointError, TargetError: the drafter to train further cannot be used.
    """
    _check_data_fits(data, target)
    threads = threads_per_loop(available_cores(), config.pipeline.threads_per_loop)
    config = _with_threads(config, threads)
    continued = start or drafter_to_continue(config.drafter, target)
    if continued is None:
        shape = resolve_drafter_config(target, config.drafter, data.training.used_token_ids())
        refuse_unwritable(shape)
    else:
        shape = continued.config
    vocabulary = _choose_vocabulary(config, shape, data, target, continued)
    sampler = Sampler(
        sample_ids=data.training_ids,
        lengths=data.training.lengths[data.training_ids],
        tokens_per_row=config.train.tokens_per_row,
        rows_per_step=config.train.rows_per_step,
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
        seed=config.train.seed,
    )
    for passes in config.train.extensions:
        sampler.extend(passes)
    device = drafter_device(config.train.device)
    config, overlap = _settle_pipeline(config, target, data, device)
    kept_ids = None if vocabulary is None else vocabulary.kept_ids
    drafter = Drafter(
        config=config,
        shape=shape,
        total_steps=sampler.total_steps,
        seams=sampler.seams,
        frozen=frozen_target(target, device, kept_ids),
        device=device,
    )
    set_first_weights(drafter.model, config.drafter, target, continued)
    return Run(config, data, target, drafter, sampler, vocabulary, overlap=overlap)


def _settle_pipeline(config: RunConfig, target: Target, data: RunData, device: torch.device) -> tuple[RunConfig, str]:
    """The settings with the mode of the pipeline and the format of states on disk, and a word about the mode.

    Raises:
        ConfigError: there is nothing for a process to do.
        CheckpointError: what the states on disk are cannot be read.
    """
    pipeline, work = config.pipeline, Workload.of_data(data, config)
    if pipeline.mode == "processes" and pipeline.states_path is not None:
        raise ConfigError(
            f"pipeline.mode = processes has no target to run where states are read from {pipeline.states_path}: "
            "leave it out, or pipeline.states_path"
        )
    mode, reason = choose_mode(
        pipeline,
        two_devices=device != target.device,
        accelerator={device.type, target.device.type} != {"cpu"},
        cores=available_cores(),
        operations=work.passes * target_operations(TargetSizes.of(target), config, work.training),
    )
    kept = pipeline.states_dtype
    if pipeline.states_path is not None:
        own = str(target.dtype).removeprefix("torch.")
        kept = as_setting(how_kept(pipeline.states_path / folder_name(data.training.fingerprint), kept), own)
    settled = pipeline.model_copy(update={"mode": mode, "states_dtype": kept})
    return config.model_copy(update={"pipeline": settled}), f"pipeline: {mode} ({reason})"


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


@dataclass(frozen=True)
class Examination:
    """What was found in a run that starts all the same.

    Attributes:
        allowed: codes of findings that the run starts in spite of.
        report: everything, as `draftline audit --json` writes it.
    """

    allowed: Sequence[str]
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Watcher:
    """Who follows a run and may stop it: by default a person at a terminal.

    Attributes:
        say: one line about the run.
        display: progress, from the step at which the run stands and all steps.
        stopping: a block that gives the function which says whether a stop was asked for.
    """

    say: Callable[[str], None] = say
    display: Callable[[int, int], Display] = open_display
    stopping: Callable[[], AbstractContextManager[Callable[[], bool]]] = stop_on_signals


def open_run(config: RunConfig, folder: Path, *, resume: bool = False, ranks: Ranks = ALONE) -> Run:
    """Load what the settings name and assemble it, for a run that is to be written into `folder`.

    Args:
        ranks: who trains; all have to open the same run.

    Raises:
        ConfigError: a setting cannot be met, or contradicts the run that is to be continued, or ranks differ.
        StorageError: `folder` is in use.
        DataError, TargetError, CheckpointError: see their modules.
    """
    ranks.check_settings(config, code_identity())
    ranks.first(partial(RunFolder(folder).check_usable, config, resume))
    target, data = _load(config)
    ranks.compare({"a target with weights": target.fingerprint, "data": data.fingerprint})
    saved = ranks.first(partial(with_saved_threads, config, folder))
    run = assemble(_with_threads(config, saved.pipeline.threads_per_loop), target, data)
    ranks.compare({"a drafter with first weights": run.drafter.checksum()})
    return run


def load_run(config: RunConfig) -> Run:
    """Load what the settings name and assemble it, without a folder; raises as `open_run`."""
    return assemble(config, *_load(config))


def _load(config: RunConfig) -> tuple[Target, RunData]:
    """Target and data. Where the states of all conversations are on disk, only what the drafter borrows is loaded."""
    training, heldout = open_data(config)
    prepared = [one for one in (training, heldout) if one is not None]
    states, known = config.pipeline.states_path, None
    if states is not None and config.drafter.start_from != "target_layers":
        whole = all(is_complete(states / folder_name(one.fingerprint)) for one in prepared)
        known = Borrowed.read(states) if whole else None
    target = load_target(config.target) if known is None else load_borrowed(config.target, known)
    for one in prepared:
        _check_tokenizer(one, target)
    return target, choose_conversations(config, training, heldout)


def train(
    run: Run,
    folder: Path,
    *,
    resume: bool = False,
    examination: Examination | None = None,
    watcher: Watcher | None = None,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Train an assembled run in a folder that `RunFolder.check_usable` has let pass.

    Args:
        resume: continue from the newest checkpoint in the folder, if there is one.
        examination: what was found before this session; kept in `audit.json`, what was allowed also in `run.json`.
        watcher: who follows the run; none: a person at a terminal, on the first rank.
        ranks: who trains; only the first of them reads and writes in the folder.

    Raises:
        CheckpointError, ConfigError: on resume, what is in the folder is damaged, or belongs to another run.
        StorageError: the disk is full.
        Interrupted: Ctrl-C or SIGTERM; the state was saved.
        PipelineError: a target loop failed; the state was saved.
    """
    watcher = watcher or _watcher(ranks)
    ranks.sharded = ranks.count > 1 and run.config.train.sharding == "fsdp"
    checkpoints = CheckpointStore(folder, run.config.train.keep_last)
    beginning = partial(begin_session, run, folder, watcher, ranks, resume, examination)
    checkpoint = shared_checkpoint(ranks, beginning)
    if checkpoint is not None and not ranks.leads:
        run.drafter.restore(checkpoint, folder)
    state = TrainState(StepMetrics.zero(run.shape.block_size)) if checkpoint is None else checkpoint.state
    run.drafter.join(ranks)
    with ExitStack() as stack:
        stack.enter_context(intra_op_threads(run.threads))
        _fill_stores(run, ranks, folder, watcher)  # before signals wait for a step
        engine = run.engine(state.next_row, folder, watcher.say, ranks)
        stop_requested = stack.enter_context(watcher.stopping())
        stack.enter_context(engine)
        log = _open_log(run, folder, state, engine, watcher, ranks) if ranks.leads else SilentLog()
        stack.enter_context(closing(log))
        loop = DrafterTrainLoop(
            drafter=run.drafter,
            rows=DeviceStage(engine, run.drafter.device),
            deal=run.deal(ranks),
            total_steps=run.sampler.total_steps,
            state=state,
            log=log,
            evaluate=partial(_evaluate, run, ranks),
            save=partial(_save, run, checkpoints, log, ranks),
            rescue=_rescue(ranks, partial(_save, run, checkpoints, log, ALONE)),
            stop_requested=stop_requested,
        )
        loop.run()
    return RunResult(folder, state.step, state.tokens, state.seconds, state.best_step, loop.heldout)


def train_run(config: RunConfig, folder: Path, *, resume: bool = False) -> RunResult:
    """Train a drafter, or continue to; everything is written into `folder`. Raises as `open_run` and `train`."""
    return train(open_run(config, folder, resume=resume), folder, resume=resume)


def _watcher(ranks: Ranks) -> Watcher:
    """A person at a terminal, who hears the first rank alone."""
    stopping = partial(stop_on_signals, ranks)
    if ranks.leads:
        return Watcher(stopping=stopping)
    return Watcher(lambda _text: None, lambda _step, _steps: NoDisplay(), stopping)


def _statistics(engine: RunEngine, ranks: Ranks) -> PipelineStatistics:
    """Of this rank's engine, with the tokens of all: the others' do as much, and the state counts tokens of all too."""
    own = engine.statistics()
    return replace(own, target_tokens=own.target_tokens * ranks.count)


def _open_log(run: Run, folder: Path, state: TrainState, engine: RunEngine, watcher: Watcher, ranks: Ranks) -> StepLog:
    settings = flatten(run.config.model_dump(mode="json"))
    return RunLog(
        run=RunFolder(folder),
        state=state,
        learning_rate=run.drafter.learning_rate,
        loss=run.config.loss,
        statistics=partial(_statistics, engine, ranks),
        display=watcher.display(state.step, run.sampler.total_steps),
        trackers=Trackers(run.config.train.trackers, folder, state.step + 1, settings, watcher.say),
    )


def _rescue(ranks: Ranks, save: Callable[[TrainState], None]) -> Callable[[TrainState], None]:
    """What saves a state where a rank has failed: the first does it alone, if it has the whole drafter."""
    return save if ranks.leads and not ranks.sharded else lambda _state: None


def _fill_stores(run: Run, ranks: Ranks, folder: Path, watcher: Watcher) -> None:
    """Capture where states are kept on disk: one rank after the other, of which the first finds most to do."""
    for rank in range(ranks.count):
        if rank == ranks.rank:
            run.fill_stores(folder=folder, say=watcher.say)
        ranks.gather(None)


def _evaluate(run: Run, ranks: Ranks) -> Record:
    """Figures on held-out conversations, measured by the first rank."""
    drafter = run.drafter.assembled()
    return ranks.first((run if drafter is run.drafter else replace(run, drafter=drafter)).evaluate)


def _save(run: Run, checkpoints: CheckpointStore, log: StepLog, ranks: Ranks, state: TrainState) -> None:
    """Write a checkpoint, unless nothing has been learned yet; the first rank does, and the others wait for it."""
    if not state.step:
        return
    ranks.check_replicas(run.drafter.checksum)
    checkpoint = run.drafter.checkpoint(state, run.data.fingerprint)

    def write() -> None:
        log.sync()
        checkpoints.save(checkpoint)

    ranks.first(write)


def with_saved_threads(config: RunConfig, folder: Path) -> RunConfig:
    """The number of threads wished for, else that of the run so far in `folder`: results depend on it bit for bit."""
    saved = None if config.pipeline.threads_per_loop is not None else RunFolder(folder).config()
    return config if saved is None else _with_threads(config, saved.pipeline.threads_per_loop)


def _with_threads(config: RunConfig, threads: int | None) -> RunConfig:
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"threads_per_loop": threads})})


def drafter_device(name: str) -> torch.device:
    """`auto` is the last accelerator (the first is the target's) if there is one, else the CPU."""
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.device_count() - 1)
    return resolve_device(name)


def frozen_target(target: Target, device: torch.device, kept_ids: Tensor | None = None) -> FrozenTarget:
    """Embedding and head on the drafter's device: the target's own modules there, else a copy of just these.

    Embeddings come as float32, the precision of the drafter's residual stream.

    Args:
        kept_ids: tokens of a reduced vocabulary.
    """
    if device != target.device:
        embedding, head = copy.deepcopy((target.embedding, target.head))
        target = replace(target, parts=replace(target.parts, embedding=embedding.to(device)), head=head.to(device))
    return FrozenTarget.of(target, kept_ids, like=torch.zeros((), device=device))


def _choose_vocabulary(
    config: RunConfig, shape: DFlashConfig, data: RunData, target: Target, continued: DFlashDraftModel | None
) -> ReducedVocabulary | None:
    """The tokens that the drafter of a run can say, none if it can say all: a function of data and target.

    Args:
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
    counts_V = count_supervised(data.training, data.training_ids, target.vocab_size)
    if continued is not None and continued.kept_ids is not None:
        return ReducedVocabulary(continued.kept_ids, coverage_of(counts_V, continued.kept_ids))
    always = stop_token_ids(target.model, target.tokenizer) if target.tokenizer is not None else frozenset()
    return reduce_vocabulary(counts_V, shape.draft_vocab_size, always)


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
