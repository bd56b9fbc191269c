"""A short but whole life of a run, recorded: what the reference run is asked about.

The run is the one that will train: its settings, its target, its data, its code. Only sizes are reduced, and the life
says which. It trains in a temporary folder over the ends of several passes, sums rows, evaluates, saves, is stopped and
resumed at the end of a pass, and logs. Nothing of the run is replaced: torch's own hooks note what arrives at the
drafter and at its optimiser, and files are read back.

    shrink      settings and conversations of a life, and what was reduced
    live        train, stop, resume; every step goes to an observer while it is fresh
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from draftline.audit.oracle import plan_run
from draftline.config import RunConfig, TrainConfig, flatten
from draftline.data.sampler import IntArray
from draftline.data.split import Conversations, RunData
from draftline.draft.attention import BlockLayout
from draftline.errors import Interrupted
from draftline.formats.exporting import export_drafter
from draftline.formats.programs import formats_for
from draftline.options import ExportDtype, ExportSettings, Reader
from draftline.records import PackedBatch, Sample
from draftline.run import Run, Watcher, assemble, train
from draftline.targets.model import Target
from draftline.train.log import NoDisplay
from draftline.train.run_folder import SPEED_FILE, RunFolder
from draftline.train.step import Drafter, StepResult

STEPS, STOPS, ROWS_PER_STEP, PASSES = 5, (1, 3), 2, 3
"""With three rows a pass: two steps cross the end of a pass; one stop lies in the middle of a pass, one at the end."""

_ROWS_PER_PASS = STOPS[-1] * ROWS_PER_STEP // 2
_ANCHORS = 4
_CONVERSATIONS, _HELDOUT, _WALKS = 9, 6, 2
_MOST_TOKENS, _FEWEST_TOKENS = 3000, 400
ANSWER_TOKENS, LONG_PROMPT = 16, 400
"""Longest answer that is decoded at the end; tokens of the longest prompt."""

_OPERATIONS_PER_PASS = 1.2e11
"""Multiplications and additions that a pass of the target may take on a CPU: a second or so. The second trainer, in
float64, takes many times as long over the same tokens."""


class MemoryConversations:
    """Conversations in memory, with what a prepared folder would say of them.

    Args:
        samples: in the order of their numbers, from 0.
        fingerprint: identifies them.
    """

    def __init__(self, samples: Sequence[Sample], fingerprint: str) -> None:
        self._samples, self.fingerprint = list(samples), fingerprint
        self.lengths: IntArray = np.array([len(sample) for sample in samples], dtype=np.int64)
        self.supervised_lengths: IntArray = np.array(
            [int(sample.loss_mask.sum()) for sample in samples], dtype=np.int64
        )
        self.prompt_hashes: NDArray[np.uint64] = np.arange(len(samples), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample_id: int) -> Sample:
        return self._samples[sample_id]

    def used_token_ids(self) -> Tensor:
        """[highest id + 1] bool, true for ids that occur."""
        ids = torch.cat([sample.input_ids for sample in self._samples])
        return torch.zeros(int(ids.max()) + 1, dtype=torch.bool).index_fill_(0, ids, True)


def drawn_data(target: Target, mask_token_id: int | None, count: int = 12, length: int = 48) -> RunData:
    """Random conversations for a run that has no data: a few tokens asked, the rest supervised."""
    known = target.vocab_size if target.tokenizer is None else min(target.vocab_size, len(target.tokenizer))
    special = set() if target.tokenizer is None else set(target.tokenizer.all_special_ids)
    # Without a tokenizer the highest rows may be padding, one of which becomes the mask.
    usable = torch.tensor([i for i in range(max(2, known * 3 // 4)) if i not in special | {mask_token_id}])
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(count):
        tokens = min(length - index, target.config.max_position_embeddings)
        ids = usable[torch.randint(len(usable), (tokens,), generator=generator)]
        samples.append(Sample(index, ids, torch.arange(tokens) >= min(4 + index, tokens // 2)))
    conversations = MemoryConversations(samples, "drawn")
    return RunData(conversations, np.arange(count - 2), conversations, np.arange(count - 2, count))


@dataclass(frozen=True, eq=False)
class DrafterInput:
    """What one call of the drafter was given during a step.

    Attributes:
        states: [1, S, L*D]; embeddings: [1, Q, D]; anchors: [A] row positions; positions: [S].
        training: whether the drafter was in training mode.
    """

    states: Tensor
    embeddings: Tensor
    anchors: Tensor
    positions: Tensor
    training: bool


@dataclass(eq=False)
class RecordedStep:
    """One optimiser step as it happened.

    Attributes:
        step: steps done before it; resumed: whether it is the first of its session and not of the run.
        batches: the rows that the loop was given.
        inputs: what reached the drafter, one entry per row with a supervised slot.
        before, after: the drafter's tensors around it.
        summed: gradients as autograd has added them up; gradients: what the optimiser found, clipped; rates: at
            which it moved each tensor.
        updates: how often the optimiser moved.
        result: what the step returned.
    """

    step: int
    resumed: bool
    batches: list[PackedBatch]
    before: dict[str, Tensor]
    inputs: list[DrafterInput] = field(default_factory=list)
    summed: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    after: dict[str, Tensor] = field(default_factory=dict)
    result: StepResult | None = None


Observer = Callable[[Run, RecordedStep], None]
"""Called after every step, while its tensors are in memory."""


@dataclass(frozen=True, eq=False)
class Life:
    """What was lived.

    Attributes:
        run: as it was assembled for the last session, now at its end.
        folder: its run folder.
        reduced: what was reduced, in words.
        first_weights: the drafter's tensors before the first step.
    """

    run: Run
    folder: Path
    reduced: str
    first_weights: dict[str, Tensor]


def shrink(run: Run, folder: Path) -> tuple[RunConfig, RunData, str]:
    """Settings and conversations of a life of this run, and what was reduced, in words.

    Args:
        folder: where captured states go if the run keeps them on disk.
    """
    config, budget = run.config, _tokens_of_a_pass(run.target)
    chosen = _affordable(run.data.training.lengths, run.data.training_ids, _CONVERSATIONS, budget)
    lengths = run.data.training.lengths[chosen].tolist()
    small = config.train.model_copy(
        update={
            "max_steps": STEPS,
            "extensions": (),
            "rows_per_step": ROWS_PER_STEP,
            "num_anchors": min(config.train.num_anchors, _ANCHORS),
            "log_every": 3,  # so that a stop falls on a line
            "trackers": ("tensorboard",),
            "eval_every": 2,
            "save_every": 4,  # so that a best one between two saves is saved as well
            "eval_walks": min(config.train.eval_walks, _WALKS),
        }
    )
    tokens = _tokens_per_row(chosen.tolist(), lengths, small)
    small, data = small.model_copy(update={"tokens_per_row": tokens}), _some_data(run, chosen, tokens, budget // 3)
    pipeline = config.pipeline
    if pipeline.states_path is not None:
        pipeline = pipeline.model_copy(update={"states_path": folder / "states"})
    # were the last update's rate 0, the last two checkpoints would be the same
    ends_low = config.optim.schedule != "constant" and not config.optim.final_fraction
    optim = config.optim.model_copy(update={"final_fraction": 0.1}) if ends_low else config.optim
    lived = config.model_copy(update={"train": small, "optim": optim, "pipeline": pipeline})
    changed = _changes(config, lived)
    count = f"{len(lengths)} of {len(run.data.training_ids)} conversations ({sum(lengths)} tokens)"
    return lived, data, f"{STEPS} steps of {ROWS_PER_STEP} rows over {count}; {changed}"


def _changes(config: RunConfig, lived: RunConfig) -> str:
    before, after = flatten(config.model_dump(mode="json")), flatten(lived.model_dump(mode="json"))
    return ", ".join(f"{key} {before[key]} -> {value}" for key, value in after.items() if value != before[key])


def _some_data(run: Run, chosen: IntArray, tokens_per_row: int, budget: int) -> RunData:
    """The chosen conversations, and so many held-out ones that they are more than a row, if they can be had.

    They are of the run's own data set, by number. A run that keeps states on disk captures whole data sets: it lives
    on a copy of the few.
    """
    data = run.data
    for count in range(_HELDOUT, 2 * _HELDOUT + 1):
        most = min(count, run.config.train.eval_conversations)
        heldout = _affordable(data.heldout.lengths, data.heldout_ids, most, budget)
        if data.heldout.lengths[heldout].sum() > tokens_per_row:
            break
    if run.config.pipeline.states_path is None:
        return RunData(data.training, chosen, data.heldout, heldout)
    training, kept = _copied(data.training, chosen, "lived"), _copied(data.heldout, heldout, "lived, held out")
    return RunData(training, np.arange(len(training)), kept, np.arange(len(kept)))


def _copied(conversations: Conversations, ids: IntArray, name: str) -> MemoryConversations:
    samples = [replace(conversations[int(i)], sample_id=number) for number, i in enumerate(ids)]
    return MemoryConversations(samples, f"{name} {conversations.fingerprint}")


def _tokens_of_a_pass(target: Target) -> int:
    if target.device.type != "cpu":
        return _MOST_TOKENS
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    return int(min(_MOST_TOKENS, max(_FEWEST_TOKENS, _OPERATIONS_PER_PASS / (2 * parameters))))


def _affordable(lengths: IntArray, ids: IntArray, count: int, budget: int) -> IntArray:
    """At most `count` of the ids: the longest that leaves room for others, then as even a spread as the budget allows.

    Never none: where every conversation is longer than the budget, the shortest are taken.
    """
    by_length = ids[np.argsort(lengths[ids], kind="stable")]
    if len(by_length) <= count and lengths[by_length].sum() <= budget:
        return np.sort(by_length)
    roomy = [int(i) for i in by_length if lengths[i] <= budget // 2]
    chosen = roomy[-1:] or [int(by_length[0])]
    left = budget - int(lengths[chosen[0]])
    others = [int(i) for i in by_length if int(i) not in chosen]
    for most in range(min(count - 1, len(others)), 0, -1):
        spread = [others[j] for j in np.linspace(0, len(others) - 1, most).astype(int)]
        small = others[:most]
        for some in (spread, small):
            if lengths[some].sum() <= left or (most <= 2 and some is small):
                return np.sort(np.array([*chosen, *dict.fromkeys(some)]))
    return np.sort(np.array(chosen))


def _tokens_per_row(ids: list[int], lengths: list[int], train: TrainConfig) -> int:
    """A row length at which passes have as many rows as a stop at the end of one needs, if there is any."""
    best = max(max(lengths), -(-sum(lengths) // _ROWS_PER_PASS))
    for tokens in range(best, 2 * best):
        wanted = train.model_copy(update={"tokens_per_row": tokens, "max_steps": None, "epochs": PASSES})
        plan = plan_run(ids, lengths, wanted)
        if [sum(row.epoch == epoch for row in plan) for epoch in range(PASSES)] == [_ROWS_PER_PASS] * PASSES:
            return tokens
    return best


@contextmanager
def live(run: Run, observe: Observer) -> Iterator[Life]:
    """Live a short life of a run; its folder is there while the block runs.

    Args:
        observe: gets every step.

    Raises:
        Whatever the run raises.
    """
    with tempfile.TemporaryDirectory() as scratch, torch.random.fork_rng():
        place = Path(scratch)
        config, data, reduced = shrink(run, place)
        weights: dict[str, Tensor] = {}
        for before, stop in pairwise((0, *STOPS, STEPS)):
            lived = _assembled(run, config, data)
            weights = weights or _copy_of(lived.drafter.model)
            with suppress(Interrupted):
                _session(lived, place / "run", observe, resume=before > 0, steps=stop - before)
        yield Life(lived, place / "run", reduced, weights)


def export_earliest(life: Life, dtype: ExportDtype) -> tuple[Path, int]:
    """Export the run as if its earliest checkpoint that is left were its best, and say of which step it is.

    Where best and last are one, an export of the wrong one would not show.
    """
    folder, out = RunFolder(life.folder), life.folder.parent / dtype
    step = folder.checkpoint_steps()[0]
    folder.point("best", step)
    settings = ExportSettings(reader=_reader(life.run), dtype=dtype)
    export_drafter(source=life.folder, out=out, target=life.run.target, settings=settings, proven=False)
    return out, step


def export_step(life: Life, dtype: ExportDtype) -> tuple[Path, int]:
    """Export a checkpoint that is named, which is neither the best of the run nor the one that `best` points at."""
    folder, out = RunFolder(life.folder), life.folder.parent / f"{dtype} of a step"
    step = folder.checkpoint_steps()[-1]
    settings = ExportSettings(reader=_reader(life.run), dtype=dtype)
    place = folder.step_folder(step)
    export_drafter(source=place, out=out, target=life.run.target, settings=settings, proven=False)
    return out, step


def _reader(run: Run) -> Reader:
    return "zlab" if formats_for(run.shape)[0] == "zlab" else "speculators"


def _assembled(run: Run, config: RunConfig, data: RunData) -> Run:
    """A run like the given one, of its own kind: benchmarks and tests add to it."""
    made = assemble(config, run.target, data)
    return replace(run, **vars(made))


def _session(run: Run, folder: Path, observe: Observer, *, resume: bool, steps: int) -> None:
    """Train so many steps; a stop is asked for after the last."""
    done = 0
    if resume:
        _leave_lines(RunFolder(folder))

    def stop_requested() -> bool:
        return done >= steps

    @contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        yield stop_requested

    def seen(step: RecordedStep) -> None:
        nonlocal done
        done += 1
        observe(run, step)

    with _recorded(run.drafter, seen, resume):
        train(run, folder, resume=resume, watcher=replace(quiet_watcher(), stopping=stopping))


def _leave_lines(folder: RunFolder) -> None:
    """A session that was killed leaves lines of steps that no checkpoint holds, in every file."""
    for path in (folder.metrics_path, folder.path / SPEED_FILE):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": STEPS}) + "\n")
    with closing(SummaryWriter(folder.tensorboard)) as scalars:
        scalars.add_scalar("train/loss", 99.0, STEPS)


def quiet_watcher() -> Watcher:
    """Says and shows nothing, and is stopped by signals only."""
    return Watcher(say=lambda _text: None, display=lambda _step, _steps: NoDisplay())


@contextmanager
def _recorded(drafter: Drafter, seen: Callable[[RecordedStep], None], resumed: bool) -> Iterator[None]:
    """Note every step of a drafter: through torch's hooks on its weights and optimiser, and around its `step`."""
    now: list[RecordedStep] = []
    step, model = drafter.step, drafter.model

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        if now:
            states, embeddings, layout = args[:3]
            assert isinstance(layout, BlockLayout), "the drafter's third argument says where blocks sit"
            now[0].inputs.append(
                DrafterInput(
                    states.detach().clone(),
                    embeddings.detach().clone(),
                    layout.anchor_positions_A.clone(),
                    layout.position_ids_S.clone(),
                    module.training,
                )
            )

    def summing(name: str, weight: Tensor) -> None:
        if now and weight.grad is not None:
            now[0].summed[name] = weight.grad.detach().clone()

    def updating(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if now:
            named = dict(model.named_parameters())
            now[0].gradients = {name: p.grad.detach().clone() for name, p in named.items() if p.grad is not None}
            rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
            now[0].rates = {name: rates[id(p)] for name, p in named.items() if id(p) in rates}
            now[0].updates += 1

    def recorded_step(batches: Sequence[PackedBatch]) -> StepResult:
        copies = [_copy_of_row(batch) for batch in batches]
        now.append(RecordedStep(batches[0].step, resumed and not counted, copies, _copy_of(model)))
        counted.append(1)
        result = now[0].result = step(batches)
        now[0].after = _copy_of(model)
        seen(now.pop())
        return result

    counted: list[int] = []
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(entering).remove)
        stack.callback(drafter.optimizer.register_step_pre_hook(updating).remove)
        for name, weight in model.named_parameters():
            stack.callback(weight.register_post_accumulate_grad_hook(partial(summing, name)).remove)
        drafter.step = recorded_step  # type: ignore[method-assign]
        stack.callback(drafter.__dict__.pop, "step")
        yield


def _copy_of_row(batch: PackedBatch) -> PackedBatch:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    return replace(batch, **copies)


def _copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
