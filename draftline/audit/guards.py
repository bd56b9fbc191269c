"""RUN017 and RUN018: does a run refuse what belongs to another one, and does it survive what fails?

States of another target, data that were exchanged, a setting that was changed before a resume: the shapes are right, so
nothing but a guard notices. Each guard is called as the run calls it, in the folder of its short life, with one thing
that is wrong; it has to refuse, and by name where it has one.

A second life of the same steps fails at each of them in another place, and is resumed: what is raised is what failed,
what is saved is the state after the last whole step, and at its end it has the weights of the first life, bit for bit.
"""

from __future__ import annotations

import copy
import math
import tempfile
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from draftline import run as run_module
from draftline.audit.comparison import Judge
from draftline.audit.life import STEPS, Life, MemoryConversations, quiet_watcher
from draftline.config import PipelineMode, RunConfig, flatten
from draftline.data.sampler import RowPlan, Sampler
from draftline.data.split import RunData
from draftline.errors import DraftlineError, PipelineError, UpdateError
from draftline.evaluate import generate
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.run import Run
from draftline.targets import model as model_module
from draftline.targets.model import Target
from draftline.train import checkpoint as checkpoint_module
from draftline.train.run_folder import RunFolder
from draftline.train.step import StepResult
from draftline.transfer import store as store_module

_MAY_CHANGE = (
    *("data.path", "data.heldout_path", "target.name", "target.trust_remote_code", "target.device", "train.device"),
    *(
        "train.sharding",
        "train.log_every",
        "train.trackers",
        "train.eval_every",
        "train.save_every",
        "train.keep_last",
        "pipeline.",
    ),
)
"""Settings that say where and how often, not what is learned. Data and targets may move: contents are compared."""

_SAVE = "raise what failed, save the state after the last whole step, move nothing else; a resume goes on from there"
_FIX = "a resume, and states that are read, compare settings, data, target and shape with what was written"
_MOST_TENSORS = 12
"""Of the target, each of which is changed to see whether its identity changes."""


class _Planted(Exception):
    """What is made to fail."""


@dataclass(frozen=True)
class _Failure:
    """Something that fails in a session.

    Attributes:
        place: what.
        step: steps of the run that are whole before it.
        mode: of the pipeline in that session; `threads` is `processes` for a run that is configured so.
        said: the error that is raised, where it is not the planted one itself.
    """

    place: str
    step: int
    mode: Literal["inline", "threads"]
    said: type[DraftlineError] | None = None


_FAILURES = (
    _Failure("a row of the data", 1, "threads", PipelineError),
    _Failure("the drafter inside of a step", 2, "inline"),
    _Failure("a gradient, which is infinite", 3, "inline", PipelineError),
    _Failure("the optimiser", 3, "inline", UpdateError),
    _Failure("the target in its loop", 4, "inline"),
)


def survive(life: Life, judge: Judge) -> None:
    """Fail and go on until the end; on a CPU, where the same steps give the same bits."""
    if life.run.target.device.type != "cpu" or life.run.drafter.device.type != "cpu" or len(judge.steps) != STEPS:
        return None
    place, steps = life.folder.parent / "failing", [step.after for step in judge.steps]
    kept = life.run.config.pipeline.states_path is not None  # then the target is not asked
    for failure in _FAILURES[:-1] if kept else _FAILURES:
        if not sum(judge.counts[failure.step].slots):
            continue  # nothing is learned in this step, so that nothing of it can fail
        wrong = _survived(life.run, place, failure, steps, resume=place.exists())
        if wrong is not None:
            return judge.say("RUN018", f"where {failure.place} fails: {wrong}", _SAVE)
    run = _again(life.run, "inline")
    try:
        _continued(run, place)
    except Exception as error:  # whatever a run raises that has survived so much
        return judge.say("RUN018", f"a run that failed is not continued: {type(error).__name__}: {error}", _SAVE)
    if _unlike(run.drafter.model.state_dict(), steps[-1]):
        judge.say("RUN018", f"after {len(_FAILURES)} failures and resumes the weights at the end are others", _SAVE)
    return None


def _survived(
    of: Run, folder: Path, failure: _Failure, steps: Sequence[Mapping[str, Tensor]], *, resume: bool
) -> str | None:
    """What is wrong with how a session ends in which something fails, in words."""
    processes = failure.mode == "threads" and of.config.pipeline.mode == "processes"
    run = _again(of, "processes" if processes else failure.mode)
    with _failing(run, failure) as failing:
        try:
            run_module.train(failing, folder, resume=resume, watcher=quiet_watcher())
        except Exception as error:  # the border of a session: what it raises is looked at
            raised: BaseException = error
        else:
            return "nothing is raised"
    causes, cause = [raised], raised.__cause__ or raised.__context__
    while cause is not None and len(causes) < 9:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if failure.said is not None and not isinstance(raised, failure.said):
        return f"{type(raised).__name__} is raised, not {failure.said.__name__}: {raised}"
    if "infinite" not in failure.place and not any(isinstance(one, _Planted) for one in causes):
        return f"{type(raised).__name__} is raised, which hides what failed: {raised}"
    if [thread.name for thread in threading.enumerate() if thread.name.startswith("target-loop")]:
        return "a target loop is left running"
    newest, early = RunFolder(folder).checkpoint("newest"), failure.mode == "threads"
    if newest is None:
        return None if early else "nothing is saved"
    saved = checkpoint_module.read_checkpoint(newest)
    # rows are made ahead in threads, so that one fails before its step: what is saved is whole all the same
    allowed = range(1, failure.step + 1) if early else (failure.step,)
    if saved.state.step not in allowed:
        return f"step {saved.state.step} is saved, {failure.step} were whole"
    whole = steps[saved.state.step - 1]
    if _unlike(saved.weights, whole):
        return f"the checkpoint of step {saved.state.step} has other weights than that step gave"
    if failure.said is not UpdateError and _unlike(run.drafter.model.state_dict(), whole):
        return f"weights have moved since step {saved.state.step}"
    return None


def _again(run: Run, mode: PipelineMode) -> Run:
    """The run from its beginning, without evaluations, saved by nothing but its end."""
    seldom = run.config.train.model_copy(update={"eval_every": 99, "save_every": 99, "log_every": 1})
    pipeline = run.config.pipeline.model_copy(update={"mode": mode, "target_loops": 1, "target_devices": None})
    config = run.config.model_copy(update={"train": seldom, "pipeline": pipeline})
    data = replace(run.data, heldout_ids=run.data.heldout_ids[:0])
    return replace(run, **vars(run_module.assemble(config, run.target, data)))


def _unlike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    if found.keys() != wanted.keys():
        return True
    return any(not torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in wanted.items())


@contextmanager
def _failing(run: Run, failure: _Failure) -> Iterator[Run]:
    """The run, one part of which fails once so many steps are whole."""
    done, step, model = [0], run.drafter.step, run.drafter.model

    def counted(batches: Sequence[PackedBatch]) -> StepResult:
        done[0] = batches[0].step
        result = step(batches)
        done[0] += 1
        return result

    def fail(*_: object) -> None:
        if done[0] >= failure.step:
            raise _Planted(failure.place)

    def infinite(gradient: Tensor) -> Tensor:
        return gradient * (math.inf if done[0] >= failure.step else 1.0)

    with ExitStack() as stack:
        run.drafter.step = counted  # type: ignore[method-assign]
        stack.callback(run.drafter.__dict__.pop, "step")
        if failure.place.startswith("the drafter"):
            stack.callback(model.register_forward_pre_hook(fail).remove)
        elif failure.place.startswith("a gradient"):
            weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            stack.callback(weight.register_hook(infinite).remove)
        elif failure.place == "the optimiser":
            stack.callback(run.drafter.optimizer.register_step_pre_hook(fail).remove)
        elif failure.place.startswith("the target"):
            stack.callback(run.target.model.register_forward_pre_hook(fail).remove)
        else:
            run = replace(run, sampler=_FailingRows(run.sampler, failure.step))  # type: ignore[arg-type]
        yield run


class _FailingRows:
    """The order of rows, which cannot be read from a step on."""

    def __init__(self, inner: Sampler, step: int) -> None:
        self._inner, self._step = inner, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plans(self, first: int = 0) -> Iterator[RowPlan]:
        """Rows of the steps before."""
        for plan in self._inner.plans(first):
            if plan.step >= self._step:
                raise _Planted("a row")
            yield plan


def compare(life: Life, judge: Judge) -> None:
    """Try what has to be refused; the folder of the life is of no use for training afterwards."""
    for taken in _taken(life):
        return judge.say("RUN017", taken, _FIX)
    return None


def _taken(life: Life) -> Iterator[str]:
    """What was not refused, in words."""
    yield from _settings(life)
    yield from _resumes(life)
    yield from _identities(life.run.target)
    yield from _states(life.run)
    yield from _misfits(life.run)


def _refusal(attempt: Callable[[], object]) -> str | None:
    """What the attempt was refused with; None if it was not."""
    try:
        attempt()
    except DraftlineError as error:
        return str(error)
    return None


def _settings(life: Life) -> Iterator[str]:
    """Every setting that decides what is learned, one after the other."""
    folder, config = RunFolder(life.folder), life.run.config
    changed = dict(_changed_settings(config))
    for key, other in changed.items():
        said = _refusal(lambda other=other: folder.check_usable(other, resume=True))  # type: ignore[misc]
        if said is None or key not in said:
            yield f"a run is continued although {key} is another"
    if _refusal(lambda: folder.check_usable(config, resume=False)) is None:
        yield "a new run begins in the folder of another"
    if _refusal(lambda: folder.check_usable(config, resume=True)) is not None:
        yield "a run is not continued although nothing has changed"
    key = "optim.learning_rate"
    said = _refusal(lambda: run_module.open_run(changed[key], life.folder, resume=True))
    if said is None or key not in said:
        yield f"`train --resume` opens a run although {key} is another"


def _changed_settings(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """By key, a valid configuration in which that setting alone is another."""
    tree = config.model_dump(mode="json")
    for key, value in flatten(tree).items():
        section, _, name = key.partition(".")
        if key.startswith(_MAY_CHANGE) or name not in type(getattr(config, section)).model_fields:
            continue
        for other in _others(value, type(getattr(config, section)).model_fields[name].annotation):
            try:
                made = RunConfig.model_validate({**tree, section: {**tree[section], name: other}})
            except ValidationError:
                continue
            if flatten(made.model_dump(mode="json"))[key] != value:
                yield key, made
                break


def _others(value: Any, annotation: Any) -> Iterator[Any]:
    """Values that a setting might have instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1, value / 2 or 0.1, (1 + value) / 2)
    elif isinstance(value, list):
        yield [*value[:-1], value[-1] + 1] if value and isinstance(value[-1], int) else [0]
    yield from (word for word in _words(annotation) if word != value)
    yield from (1, 2, 0.1, [0], "other")


def _words(annotation: Any) -> Iterator[Any]:
    """All that a `Literal` somewhere in an annotation allows."""
    for part in typing.get_args(annotation):
        yield from [part] if isinstance(part, str) else _words(part)


def _resumes(life: Life) -> Iterator[str]:
    """The life's own folder, continued with one thing exchanged; the run is at its end, so that nothing is trained."""
    run = life.run
    other = MemoryConversations([run.data.training[i] for i in (0, 0)], "other data")
    data = replace(run.data, training=other, training_ids=np.arange(2))
    drafter = copy.copy(run.drafter)
    drafter.model = copy.deepcopy(run.drafter.model)
    mask = run.shape.mask_token_id
    drafter.model.config = run.shape.model_copy(update={"mask_token_id": mask - 1 if mask else 1})
    seed = run.config.train.model_copy(update={"seed": run.config.train.seed + 1})
    strange = MemoryConversations([run.data.training[i] for i in run.data.training_ids[[0, 0]].tolist()], "others")
    heldout = replace(run.data, heldout=strange, heldout_ids=np.arange(2))
    others = {
        "its data": replace(run, data=data),
        "its held-out data": replace(run, data=heldout),
        "its drafter's mask token": replace(run, drafter=drafter),
        "train.seed": replace(run, config=run.config.model_copy(update={"train": seed})),
    }
    for what, exchanged in others.items():
        if _refusal(lambda run=exchanged: _continued(run, life.folder)) is None:  # type: ignore[misc]
            yield f"a run is continued although {what} is another"
    with _another_target(run.target):
        if _refusal(lambda: _continued(run, life.folder)) is None:
            yield "a run is continued although its target has other weights"
    newest = RunFolder(life.folder).checkpoint("newest")
    assert newest is not None, "a life saves"
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        with _damaged(newest / name):
            if _refusal(lambda: checkpoint_module.read_checkpoint(newest)) is None:
                yield f"a checkpoint is read although {name} is damaged"


def _continued(run: Run, folder: Path) -> object:
    return run_module.train(run, folder, resume=True, watcher=quiet_watcher())


@contextmanager
def _another_target(target: Target) -> Iterator[None]:
    """One tensor of the target changed."""
    tensor = list(target.model.parameters())[-1]
    with _changed(tensor):
        yield


@contextmanager
def _changed(tensor: torch.Tensor) -> Iterator[None]:
    kept = tensor.detach().clone()
    with torch.no_grad():
        tensor.add_(1.0)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(kept)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """One byte near the end of a file changed."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    try:
        yield
    finally:
        path.write_bytes(whole)


def _identities(target: Target) -> Iterator[str]:
    """The identity of a target moves with each of its tensors."""
    tensors = list(target.model.named_parameters())
    before = model_module.weights_fingerprint(target.model)
    chosen = np.unique(np.linspace(0, len(tensors) - 1, _MOST_TENSORS).astype(int)).tolist()
    for name, tensor in (tensors[i] for i in chosen):
        with _changed(tensor):
            if model_module.weights_fingerprint(target.model) == before:
                yield f"a target passes for the same although {name} is another"


def _states(run: Run) -> Iterator[str]:
    """Captured states on disk, opened as if they were of another target, layer, data set or kind."""
    identity = store_module.loop_identity(run.capture_loop(), run.data.training.fingerprint)
    with _another_target(run.target):
        if store_module.loop_identity(run.capture_loop(), identity.data) == identity:
            yield "states have the same identity whatever the weights of their target"
    ids = run.data.training_ids[:2].tolist()
    lengths = np.array([len(run.data.training[i]) for i in ids])
    others: dict[str, Any] = {"target": "other", "target_layer_ids": (*identity.target_layer_ids, 0)}
    others |= {"hidden_size": identity.hidden_size + 2, "data": "other"}
    others |= {"dtype": "float32" if identity.dtype == "float16" else "float16"}
    others |= {"send": "last_hidden" if identity.send == "target_ids" else "target_ids"}
    others["kept"] = "bfloat16" if identity.kept == "fp8" else "fp8"
    assert others.keys() == {field.name for field in fields(identity)}, "each part of an identity is tried"
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "states"
        store_module.StatesStore(place, identity, lengths, 1)
        for name, value in others.items():
            other = replace(identity, **{name: value})
            if _refusal(lambda other=other: store_module.StatesStore(place, other, lengths, 1)) is None:  # type: ignore[misc]
                yield f"states are read although their {name} is another"
    yield from _states_of_the_run(run, identity)
    yield from _damaged_states(run, identity, lengths)


def _states_of_the_run(run: Run, identity: store_module.StoreIdentity) -> Iterator[str]:
    """A run finds states of another target where its own would lie."""
    with tempfile.TemporaryDirectory() as scratch:
        pipeline = run.config.pipeline.model_copy(update={"states_path": Path(scratch)})
        other = replace(run, config=run.config.model_copy(update={"pipeline": pipeline}), stores={})
        place = Path(scratch) / store_module.folder_name(identity.data)
        store_module.StatesStore(place, replace(identity, target="other"), run.data.training.lengths, 1)
        if _refusal(lambda: other.fill_stores(say=lambda _text: None)) is None:
            yield "pipeline.states_path is used although it holds states of another target"


def _damaged_states(run: Run, identity: store_module.StoreIdentity, lengths: Any) -> Iterator[str]:
    """States of which a byte has changed."""
    dtype, width = getattr(torch, identity.dtype), identity.hidden_size
    sample = Sample(0, torch.arange(int(lengths[0])), torch.ones(int(lengths[0]), dtype=torch.bool))
    states = torch.ones(len(sample), width * len(identity.target_layer_ids), dtype=dtype)
    beside: dict[str, Any] = {"verifier_last_hidden_SD": states[:, :width]}
    if identity.send == "target_ids":
        beside = {"target_ids_S": torch.zeros(len(sample), dtype=torch.int64)}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "states"
        store = store_module.StatesStore(place, identity, lengths[:1], 1)
        store.write(0, [CapturedSample(sample, states, **beside)])
        with _damaged(store.path(0)):
            again = store_module.StatesStore(place, identity, lengths[:1], 1)
            if _refusal(lambda: again.capture([sample])) is None:
                yield "states are read although a byte of them has changed"
    del run


def _misfits(run: Run) -> Iterator[str]:
    """Data and drafters that are no match for the target."""
    last, limit = run.target.vocab_size, run.target.config.max_position_embeddings
    strange = Sample(0, torch.tensor([1, last, 1]), torch.ones(3, dtype=torch.bool))
    long = Sample(0, torch.ones(limit + 1, dtype=torch.int64), torch.ones(limit + 1, dtype=torch.bool))
    for what, sample in (("tokens that the target does not know", strange), ("more tokens than it reads", long)):
        part = MemoryConversations([sample], "misfit")
        data = RunData(part, np.arange(1), part, np.arange(0))
        if _refusal(lambda data=data: run_module.assemble(run.config, run.target, data)) is None:  # type: ignore[misc]
            yield f"a run is assembled although a conversation has {what}"
    for name in ("hidden_size", "vocab_size", "num_target_layers"):
        shape = run.shape.model_copy(update={name: getattr(run.shape, name) + 2})
        if _refusal(lambda shape=shape: generate.check_fits(shape, run.target)) is None:  # type: ignore[misc]
            yield f"a drafter decodes although it was trained for a target with another {name}"
