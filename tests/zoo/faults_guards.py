"""Faults of what is chosen, kept and refused: the best checkpoint, rounded numbers of a checkpoint, absent guards.

And faults of the number formats that a run computes in, which change no shape and no name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import tensorboard

from draftline import run as run_module
from draftline.data.split import RunData
from draftline.draft import attention as attention_module
from draftline.draft import vocabulary as vocabulary_module
from draftline.draft.loss import StepMetrics
from draftline.engine import capture as capture_module
from draftline.evaluate import generate as generate_module
from draftline.evaluate import replay as replay_module
from draftline.formats import load as load_module
from draftline.formats import proof_prompts as proof_prompts_module
from draftline.records import PackedBatch
from draftline.targets import model as model_module
from draftline.train import checkpoint as checkpoint_module
from draftline.train import log as log_module
from draftline.train import run_folder as folder_module
from draftline.train import step as step_module
from draftline.train.checkpoint import TrainState
from draftline.train.loop import DrafterTrainLoop
from draftline.train.run_folder import RunFolder
from draftline.train.step import Drafter
from draftline.transfer import store as store_module
from draftline.transfer.queue import HiddenStatesQueue
from tests.zoo.fault import fault
from tests.zoo.pipeline import REDUCED, Recipe, World

ROWS = Recipe(data="rows")
LAST_LOW = Recipe(settings={"pipeline": {"send": "last_hidden"}, "train": {"precision": "bfloat16"}})


# What is chosen.


def _choosing(world: World, figure: str, *, honest: bool) -> None:
    """The best checkpoint by another figure; `honest` keeps the streak beside it all the same."""
    run, note, latest = DrafterTrainLoop.run, TrainState.note_streak, dict[str, Any]()

    def running(loop: DrafterTrainLoop) -> None:
        evaluate = loop.evaluate

        def noting() -> Any:
            latest.update(evaluate())
            return dict(latest)

        loop.evaluate = noting
        run(loop)

    def noting_streak(state: TrainState, streak: float) -> bool:
        before = latest.get("kept")
        state.best_streak = None if state.best_step is None or before is None else before
        better = note(state, latest[figure])
        latest["kept"] = state.best_streak
        if better and honest:
            latest["streak kept"] = streak
        if honest:
            state.best_streak = latest.get("streak kept")
        return better

    world.patch.setattr(DrafterTrainLoop, "run", running)
    world.patch.setattr(TrainState, "note_streak", noting_streak)


@fault("the best checkpoint is that of the highest accuracy", "B98", "RUN008")
def _(world: World) -> None:
    _choosing(world, "accuracy", honest=False)


@fault("the best checkpoint is that of the longest walk", "B98", "RUN008")
def _(world: World) -> None:
    _choosing(world, "teacher_forced_acceptance_length", honest=True)


@fault("of equal streaks the last is the best", "B98", "RUN008")
def _(world: World) -> None:
    def note(state: TrainState, streak: float) -> bool:
        if not streak >= (float("-inf") if state.best_streak is None else state.best_streak):
            return False
        state.best_step, state.best_streak = state.step, streak
        return True

    world.patch.setattr(TrainState, "note_streak", note)


@fault("the export of a named step takes the best", "B81", "RUN009")
def _(world: World) -> None:
    clean = checkpoint_module.checkpoint_folder

    def best(folder: Path) -> Path | None:
        found = clean(folder)
        if found is None or found.resolve().parent.name != "checkpoints":
            return found
        return RunFolder(found.resolve().parent.parent).checkpoint("best") or found

    for module in (checkpoint_module, load_module):
        world.patch.setattr(module, "checkpoint_folder", best)


# What a checkpoint keeps.


def _keeping(world: World, change: Callable[[str, Tensor], Tensor]) -> None:
    clean = step_module.optimizer_tensors

    def tensors(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
        return {name: change(name, tensor) for name, tensor in clean(optimizer, model).items()}

    world.patch.setattr(step_module, "optimizer_tensors", tensors)


@fault("a checkpoint rounds the count of updates", "B77", "OPT007")
def _(world: World) -> None:
    _keeping(world, lambda name, t: t.bfloat16().float() + 0.0 if name.endswith(".step") else t)


@fault("a checkpoint rounds small moments", "B77", "OPT007")
def _(world: World) -> None:
    _keeping(world, lambda name, t: t.half().float() if name.endswith(".exp_avg_sq") else t)


@fault("a resume caps the count of updates", "B77", "OPT007")
def _(world: World) -> None:
    clean = step_module.restore_optimizer

    def restore(optimizer: Any, model: nn.Module, tensors: Any) -> None:
        clean(optimizer, model, tensors)
        for state in optimizer.state.values():
            state["step"] = state["step"].clamp(max=3)

    world.patch.setattr(step_module, "restore_optimizer", restore)


@fault("the open sums of the log are rounded in a checkpoint", "B95", "OPT007")
def _(world: World) -> None:
    clean = checkpoint_module._metrics_to_json

    def rounded(metrics: StepMetrics) -> Any:
        return {name: round(v, 3) if isinstance(v, float) else v for name, v in clean(metrics).items()}

    world.patch.setattr(checkpoint_module, "_metrics_to_json", rounded)


@fault("a resume draws from another generator", "B77", "OPT007")
def _(world: World) -> None:
    world.patch.setattr(step_module, "restore_random_states", lambda _states: None)


# What lets pass what is another run's.


def _passing(world: World, name: str) -> None:
    world.patch.setattr(RunFolder, name, lambda *_: None)


@fault("a resume takes any drafter", "B15", "RUN017")
def _(world: World) -> None:
    clean = RunFolder.check_same_run
    world.patch.setattr(
        RunFolder,
        "check_same_run",
        lambda folder, kept, config, _shape, data: clean(folder, kept, config, kept.drafter_config, data),
    )


@fault("a resume takes any data", "B15", "RUN017")
def _(world: World) -> None:
    clean = RunFolder.check_same_run
    world.patch.setattr(
        RunFolder,
        "check_same_run",
        lambda folder, kept, config, shape, _data: clean(folder, kept, config, shape, kept.data_fingerprint),
    )


@fault("a resume takes any target", "B26", "RUN017")
def _(world: World) -> None:
    _passing(world, "check_same_target")


@fault("a resume takes any settings", "B15", "RUN017")
def _(world: World) -> None:
    _passing(world, "check_same_settings")


@fault("a resume takes another loss", "B15", "RUN017")
def _(world: World) -> None:
    world.patch.setattr(folder_module, "FREE_TO_CHANGE", (*folder_module.FREE_TO_CHANGE, "loss."))


@fault("a damaged checkpoint is read", "B77", "RUN017")
def _(world: World) -> None:
    world.patch.setattr(checkpoint_module, "_sha256", lambda _path: "")


@fault("states of any target are read from the disk", "B26", "RUN017")
def _(world: World) -> None:
    clean = store_module.loop_identity
    for module in (store_module, capture_module):
        world.patch.setattr(module, "loop_identity", lambda *given: replace(clean(*given), target=""))


@fault("states of any kind are read from the disk", "B26", "RUN017")
def _(world: World) -> None:
    clean = store_module.StatesStore.__init__

    def init(store: Any, folder: Path, identity: Any, lengths: Any, size: int) -> None:
        for name in [field.name for field in fields(identity)]:
            path = folder / "manifest.json"
            if path.exists():
                tree = json.loads(path.read_text())
                tree[name] = list(v) if isinstance(v := getattr(identity, name), tuple) else v
                path.write_text(json.dumps(tree))
        clean(store, folder, identity, lengths, size)

    world.patch.setattr(store_module.StatesStore, "__init__", init)


@fault("damaged states are read", "B26", "RUN017")
def _(world: World) -> None:
    world.patch.setattr(store_module.StatesStore, "_checksum", lambda *_: 0)


@fault("a target is known by its shapes alone", "B26", "RUN017")
def _(world: World) -> None:
    clean = model_module._spread_values
    world.patch.setattr(model_module, "_spread_values", lambda parameter, dtype: clean(parameter, dtype) * 0)


@fault("a drafter of any target decodes", "B81", "RUN017")
def _(world: World) -> None:
    world.patch.setattr(generate_module, "check_fits", lambda *_: None)


@fault("data is taken whose tokens the target does not know", "B15", "RUN017")
def _(world: World) -> None:
    world.patch.setattr(run_module, "_check_data_fits", lambda *_: None)


@fault("a resume takes any held-out data", "B15", "RUN017")
def _(world: World) -> None:
    world.patch.setattr(RunData, "fingerprint", property(lambda data: data.training.fingerprint))


# What fails, and what is kept then.


@fault("a step that fails saves nothing", "B77", "RUN018")
def _(world: World) -> None:
    clean = run_module._save

    def save(*given: Any) -> None:
        if sys.exc_info()[0] is None:
            clean(*given)

    world.patch.setattr(run_module, "_save", save)


@fault("an infinite gradient moves the weights", "B97", "RUN018")
def _(world: World) -> None:
    world.patch.setattr(step_module, "math", SimpleNamespace(isfinite=lambda _norm: True))


@fault("a target loop that fails ends the run like one that is done", "B82", "RUN018")
def _(world: World) -> None:
    world.patch.setattr(HiddenStatesQueue, "fail", lambda queue, _error: queue.close())


# What a run says of itself.


@fault("run.json forgets earlier sessions", "B95", "RUN007")
def _(world: World) -> None:
    clean = RunFolder.begin_session

    def begin(folder: RunFolder, *given: Any) -> None:
        folder.__dict__["identity"] = {**folder.identity, "sessions": []}
        clean(folder, *given)

    world.patch.setattr(RunFolder, "begin_session", begin)


@fault("a resume takes the last line from TensorBoard", "B95", "RUN007")
def _(world: World) -> None:
    class Early(tensorboard.SummaryWriter):
        def __init__(self, folder: Any, purge_step: int | None = None) -> None:
            super().__init__(folder, purge_step=None if purge_step is None else max(0, purge_step - 1))

    world.patch.setattr(tensorboard, "SummaryWriter", Early)


@fault("TensorBoard shows nothing of evaluations", "B95", "RUN007")
def _(world: World) -> None:
    clean = log_module.RunLog._write_scalars

    def write(log: Any, record: Any, speed: Any) -> None:
        clean(log, {name: value for name, value in record.items() if not name.startswith("heldout_")}, speed)

    world.patch.setattr(log_module.RunLog, "_write_scalars", write)


# What a proof says.


@fault("a proof asks what was trained on and calls it held out", "W40", "PRF004", ROWS)
def _(world: World) -> None:
    clean = proof_prompts_module.choose_conversations

    def choose(*given: Any) -> RunData:
        data = clean(*given)
        return replace(data, heldout_ids=data.training_ids[: len(data.heldout_ids)])

    world.patch.setattr(proof_prompts_module, "choose_conversations", choose)


@fault("a proof's prompts hold the beginning of their answers", "B11", "PRF004", ROWS)
def _(world: World) -> None:
    clean = proof_prompts_module.before_answer

    def longer(sample: Any) -> list[int]:
        return sample.input_ids[: len(clean(sample)) + 1].tolist()

    world.patch.setattr(proof_prompts_module, "before_answer", longer)


@fault("a proof is twice as sure as it was", "B92", "PRF004")
def _(world: World) -> None:
    clean = replay_module._WatchedDrafter._gaps
    world.patch.setattr(
        replay_module._WatchedDrafter, "_gaps", lambda drafter, logits: [2 * gap for gap in clean(drafter, logits)]
    )


@fault("every departure from a proof is a tie", "B100", "PRF004")
def _(world: World) -> None:
    world.patch.setattr(replay_module.Departure, "is_tie", lambda *_: True)


# Number formats.


@contextmanager
def _in_bfloat16() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@fault("held-out rows are measured in bfloat16", "B71", "RUN015")
def _(world: World) -> None:
    clean = Drafter.measure

    def measure(drafter: Drafter, batch: PackedBatch) -> StepMetrics:
        with _in_bfloat16():
            return clean(drafter, batch)

    world.patch.setattr(Drafter, "measure", measure)


@fault("labels are made in the drafter's precision", "B71", "RUN015", LAST_LOW)
def _(world: World) -> None:
    @contextmanager
    def as_drafted(_batch: PackedBatch) -> Iterator[None]:
        with torch.no_grad():
            yield

    world.patch.setattr(step_module, "_as_the_target_says", as_drafted)


@fault("attention alone is computed in bfloat16", "B71", "RUN015")
def _(world: World) -> None:
    clean = attention_module._masked_attention

    def narrow(*tensors: Tensor) -> Tensor:
        low = [t.bfloat16() if t is not None and t.is_floating_point() else t for t in tensors]
        return clean(*low).float()

    world.patch.setattr(attention_module, "_masked_attention", narrow)


@fault("coverage of a reduced vocabulary is its share of the whole", "P9", "RUN015", REDUCED)
def _(world: World) -> None:
    def coverage(counts_V: Tensor, kept_ids: Tensor) -> float:
        return len(kept_ids) / len(counts_V)

    world.patch.setattr(vocabulary_module, "coverage_of", coverage)
