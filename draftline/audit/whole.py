"""RUN: does the run as a whole do what the written recipe says?

A short life of the run (`life.py`) beside the reference run (`oracle.py`): the steps are compared while they happen
(`comparison.py`), and here what the run left behind: log, checkpoints, export, answers, and the target itself. The
other checks say *what* is wrong with a stage; what none of them explains is reported under these codes, with the place
where it first shows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftline.audit import finished, guards, oracle, oracle_update
from draftline.audit.comparison import Difference, Judge, is_narrow, text_of
from draftline.audit.drafter_reference import drafter_of
from draftline.audit.life import (
    ANSWER_TOKENS,
    LONG_PROMPT,
    ROWS_PER_STEP,
    STEPS,
    STOPS,
    Life,
    RecordedStep,
    export_earliest,
    export_step,
    live,
)
from draftline.audit.oracle_decoding import Decoded, decode, last_answer
from draftline.audit.probe import Probe, once_per_audit
from draftline.audit.reference import model_forward
from draftline.audit.report import CHECKS, Problem, check
from draftline.audit.subject import NotApplicable
from draftline.data.sampler import Deal
from draftline.draft.loss import StepMetrics
from draftline.evaluate import generate
from draftline.evaluate.target_state import decoding_fault
from draftline.formats.load import load_drafter
from draftline.options import ExportDtype
from draftline.run import Run
from draftline.targets.borrowed import LayersNotLoaded
from draftline.targets.model import TINY_FOLDER, stop_token_ids, weights_fingerprint
from draftline.train.checkpoint import TrainState, read_state
from draftline.train.log import metrics_record, whole_lines
from draftline.train.loop import DrafterTrainLoop
from draftline.train.run_folder import SPEED_FILE, RunFolder
from draftline.train.step import StepResult

_LARGEST_COPY = 4 << 30
"""Bytes of a target that is loaded a second time, through transformers alone, to be compared with the live one."""

_FIGURES = ("accuracy", "streak", "data_accuracy", "accuracy_by_position", "conditional_accuracy_by_position")


@dataclass(frozen=True, eq=False)
class Lived:
    """How a life went.

    Attributes:
        differences: the first of each code.
        failure: what the run raised, or nothing.
        uncompared: what the reference or the comparison raised, which is not the run's fault, or nothing.
    """

    differences: Mapping[str, Difference]
    failure: str = ""
    uncompared: str = ""


class _Uncompared(Exception):
    """The comparison failed, and not the run; its cause says how."""


@once_per_audit
def lived(probe: Probe) -> Lived:
    """One short life, compared with the reference; the note says what was reduced."""
    run = probe.subject.run
    if probe.subject.trained:
        raise NotApplicable("the run has been lived already; a life is for a run to come")
    if not run.target.has_layers:
        raise LayersNotLoaded("a life needs the whole target")
    before, judge = _sums(run.target.model), Judge(run)

    def observe(lived_run: Run, record: RecordedStep) -> None:
        with _comparing():
            judge.observe(lived_run, record)

    try:
        with live(run, observe) as life:
            probe.notes.append(f"lived beside the reference run: {life.reduced}")
            with _comparing():
                for compare in (_log, _checkpoints, _export):
                    compare(life, judge)
                _target(probe, before, judge)
                guards.survive(life, judge)
                guards.compare(life, judge)
    except _Uncompared as error:
        return Lived({}, uncompared=_in_words(error.__cause__ or error))
    except Exception as error:  # the border of the life: whatever the run raises is what it would raise later
        return Lived({}, failure=_in_words(error))
    return Lived({one.code: one for one in judge.differences})


@contextmanager
def _comparing() -> Iterator[None]:
    """Tell what the comparison raises from what the run raises."""
    try:
        yield
    except Exception as error:
        raise _Uncompared from error


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _log(life: Life, judge: Judge) -> None:
    """The lines of the log against the counts of the steps and the figures of the reference."""
    train, loss = life.run.config.train, life.run.config.loss
    total = life.run.sampler.total_steps
    records = [line for _, line in whole_lines(RunFolder(life.folder).metrics_path)]
    lines = {line["step"]: line for line in records}
    wanted = oracle.log_lines(judge.counts, train, total, evaluates=bool(judge.evaluated))
    fix = "a line averages over all steps since the line before, also over a resume; an evaluation reads held-out rows"
    steps = [line["step"] for line in records]
    if steps != list(wanted):
        return judge.say("RUN007", f"the log has lines of steps {steps}, by the recipe {list(wanted)}", fix)
    for step, counts in wanted.items():
        line, figures = lines[step], oracle.figures(counts, loss)
        of_step = judge.steps[step - 1]
        figures |= {
            "tokens": sum(one.tokens for one in judge.counts[:step]),
            "learning_rate": oracle_update.learning_rate(step - 1, total, life.run.config.optim),
            "grad_norm": None if of_step.result is None else of_step.result.grad_norm,
        }
        unlike = next((name for name, value in figures.items() if not _near(line.get(name), value, 1e-6)), None)
        if unlike is not None:
            return judge.say(
                "RUN007", f"line of step {step}: {unlike} {line.get(unlike)}, it was {figures[unlike]}", fix
            )
        _heldout(life, judge, step, line)
    return _curves(life, judge, lines)


def _curves(life: Life, judge: Judge, lines: Mapping[int, Mapping[str, Any]]) -> None:
    """TensorBoard shows every figure of every line, once, and nothing else; each line has its line of speeds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, wanted = RunFolder(life.folder), dict[tuple[str, int], float]()
    fix = "write the same figures to both, under the step of the line; a resume drops what lies behind its checkpoint"
    for step, line in lines.items():
        for name, value in line.items():
            tag = f"heldout/{name.removeprefix('heldout_')}" if name.startswith("heldout_") else f"train/{name}"
            places = enumerate(value) if isinstance(value, list) else [(None, value)]
            shown = {tag if place is None else f"{tag}/{place}": number for place, number in places}
            wanted |= {(t, step): n for t, n in shown.items() if n is not None and name != "step"}
    logger, found = logging.getLogger("tensorboard"), list[tuple[str, int, float]]()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says of every session that it begins before the last one ended
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    logger.setLevel(level)
    for tag in events.Tags()["scalars"]:
        scalars = events.Scalars(tag)
        found += [(tag, event.step, event.value) for event in scalars if not tag.startswith("speed/")]
        if tag.startswith("speed/") and [event.step for event in scalars] != list(lines):
            text = f"TensorBoard shows {tag} at steps {[event.step for event in scalars]}"
            return judge.say("RUN007", f"{text}, the log has lines of {list(lines)}", fix)
    for tag, step, value in found:
        if not _near(value, wanted.get((tag, step)), 1e-6):
            text = f"TensorBoard shows {tag} {value:.6g} at step {step}, the log says {wanted.get((tag, step))}"
            return judge.say("RUN007", text, fix)
    if len(found) != len(wanted):
        lost = sorted(wanted.keys() - {(tag, step) for tag, step, _ in found})
        return judge.say("RUN007", f"TensorBoard shows {len(found)} of {len(wanted)} figures, not {lost[:3]}", fix)
    speeds = [line["step"] for _, line in whole_lines(folder.path / SPEED_FILE)]
    if speeds != list(lines):
        return judge.say("RUN007", f"{SPEED_FILE} has lines of steps {speeds}, the log of {list(lines)}", fix)
    return _identity(life, judge)


def _identity(life: Life, judge: Judge) -> None:
    """What run.json and config.yaml say after three sessions."""
    run, folder = life.run, RunFolder(life.folder)
    coverage = {} if run.vocabulary is None else {"draft_vocab_coverage": run.vocabulary.coverage}
    wanted: dict[str, Any] = {
        "target": weights_fingerprint(run.target.model),
        "config": run.config.model_dump(mode="json"),
        "drafter": run.shape.model_dump(mode="json"),
        "data": {
            "fingerprint": run.data.fingerprint,
            "conversations": len(run.data.training_ids),
            "heldout_conversations": len(run.data.heldout_ids),
            "heldout_anchors_seed": oracle.HELDOUT_SEED,
            "rows": STEPS * ROWS_PER_STEP,
            "steps": STEPS,
            **coverage,
        },
    }
    found, sessions = folder.identity, folder.identity.get("sessions", [])
    wrong = next((name for name, value in wanted.items() if found.get(name) != value), None)
    fix = "run.json says what the run is, and adds to its sessions one for each start"
    if wrong is not None:
        return judge.say("RUN007", f"run.json says {wrong} {found.get(wrong)}, it is {wanted[wrong]}", fix)
    firsts = [session.get("first_step") for session in sessions]
    if firsts != [0, *STOPS] or any(session.get("threads_per_loop") != run.threads for session in sessions):
        return judge.say("RUN007", f"after sessions from steps {[0, *STOPS]}, run.json has {sessions}", fix)
    if folder.settings != wanted["config"]:
        return judge.say("RUN007", "config.yaml holds other settings than those of the run", fix)
    return None


def _heldout(life: Life, judge: Judge, step: int, line: Mapping[str, Any]) -> None:
    """Held-out figures of a line against the reference with the weights of that step."""
    measured = judge.evaluated.get(step)
    fix = "held-out rows in the given order, anchors of seed 0 and pass 0, the weights of this step in evaluation"
    logged = {name: line.get(f"heldout_{name}") for name in (*_FIGURES, "loss")}
    if measured is None or logged["accuracy"] is None:
        if (measured is None) != (logged["accuracy"] is None):
            judge.say("RUN007", f"line of step {step}: held-out accuracy {logged['accuracy']}", fix)
        return
    counts, slots = measured.counts, max(1, sum(measured.counts.slots))
    figures = oracle.figures(counts, life.run.config.loss)
    low = is_narrow(life.run)
    allowed = {
        "accuracy": measured.near / slots,
        "data_accuracy": measured.near / slots,
        "streak": measured.near * len(counts.slots) / max(1, counts.blocks),
        "loss": (0.05 if low else 2e-4) * abs(float(figures["loss"] or 0.0)),  # type: ignore[arg-type]
    }
    for name, spread in allowed.items():
        if not _near(logged[name], figures[name], 1e-6, spread):
            text = f"line of step {step}: held-out {name} {logged[name]}, measured again {figures[name]:.6g}"
            judge.say("RUN007", text, fix)
    walked = line.get("heldout_teacher_forced_acceptance_length")
    if not low and measured.walk is not None and not _near(walked, measured.walk, 1e-6):
        text = f"line of step {step}: teacher-forced acceptance length {walked}, walked again {measured.walk:.6g}"
        judge.say("RUN007", text, "anchor at the answer's first token, jump streak + 1, on the weights of this step")


def _near(found: Any, wanted: Any, relative: float, spread: float = 0.0) -> bool:
    """Whether two figures, or lists of them, are the same but for rounding."""
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(map(_near, found, wanted, [relative] * len(wanted)))
        )
    if found is None or wanted is None:
        return found is None and wanted is None
    return abs(found - wanted) <= spread + relative * max(1.0, abs(wanted))


def _checkpoints(life: Life, judge: Judge) -> None:
    """Which checkpoints there are, which is best, and whether they hold the weights of their step."""
    folder, train = RunFolder(life.folder), life.run.config.train
    lines = whole_lines(folder.metrics_path)
    streaks = {line["step"]: line["heldout_streak"] for _, line in lines if "heldout_streak" in line}
    saved, best = oracle.checkpoints(streaks, train, life.run.sampler.total_steps)
    written = sorted({*saved, *STOPS})
    kept = sorted({*written[-train.keep_last :], *([] if best is None else [best])})
    fix = "best: the first of the highest held-out streaks; kept: it and the newest keep_last"
    found = {which: folder.checkpoint(which) for which in ("best", "last")}
    for which, wanted in (("best", best), ("last", written[-1])):
        place = found[which]
        step = None if place is None else int(place.resolve().name.partition("-")[2])
        if step != wanted:
            return judge.say("RUN008", f"{which} is the checkpoint of step {step}, by the logged streaks {wanted}", fix)
    if folder.checkpoint_steps() != kept:
        return judge.say("RUN008", f"checkpoints of steps {folder.checkpoint_steps()} are kept, wanted {kept}", fix)
    for step in kept:
        stored = load_file(folder.step_folder(step) / "drafter.safetensors")
        after = judge.steps[step - 1].after
        unlike = [
            name for name, tensor in after.items() if name not in stored or not torch.equal(stored[name], tensor.cpu())
        ]
        if unlike:
            text = f"the checkpoint of step {step} has other weights than the drafter had: {unlike[0]}"
            return judge.say("RUN008", text, "write the weights of the step, in float32")
        progress = read_state(folder.step_folder(step))["progress"]
        measured = None if progress["best_step"] is None else streaks.get(progress["best_step"])
        if progress["best_streak"] != measured:
            text = f"the checkpoint of step {step} says {progress['best_streak']} of its best, the log {measured}"
            return judge.say("RUN008", text, fix)
    return _choice(life, judge)


def _choice(life: Life, judge: Judge) -> None:
    """The loop itself over made-up evaluations, in which every other figure is best where the streak is not."""
    run, streaks = life.run, (0.2, math.nan, 0.7, 0.5, 0.7, 0.6)
    names = [
        *metrics_record(StepMetrics.zero(run.shape.block_size), run.config.loss),
        "teacher_forced_acceptance_length",
    ]
    seldom = run.config.train.model_copy(update={"eval_every": 1, "log_every": 1000, "save_every": 1000})
    row, state = judge.a_row, TrainState(StepMetrics.zero(run.shape.block_size))
    assert row is not None, "a life has steps"
    saved: list[tuple[int, int | None, float | None]] = []
    log = SimpleNamespace(advance=lambda _state: None, write=lambda *_: None)
    drafter = SimpleNamespace(
        seams=(),
        config=run.config.model_copy(update={"train": seldom}),
        step=lambda _rows: StepResult(StepMetrics.zero(run.shape.block_size), 0.0),
    )
    loop = DrafterTrainLoop(
        drafter=drafter,  # type: ignore[arg-type]  # has what the loop asks of one
        rows=iter([replace(row, sequence_number=i, step=i, last_of_step=True) for i in range(len(streaks))]),
        deal=Deal(len(streaks), rows_per_step=1),
        total_steps=len(streaks),
        state=state,
        log=log,
        evaluate=lambda: (
            {n: (1.0 if n == "loss" else -1.0) * state.step for n in names} | {"streak": streaks[state.step - 1]}
        ),
        save=lambda now: saved.append((now.step, now.best_step, now.best_streak)),
        rescue=lambda _now: None,
        stop_requested=lambda: False,
    )
    loop.run()
    wanted = [(1, 1, 0.2), (3, 3, 0.7), (6, 3, 0.7)]
    if saved != wanted:
        text = (
            f"after evaluations with streaks {streaks}, (step, best step, its streak) is saved as {saved}, not {wanted}"
        )
        judge.say("RUN008", text, "best: the first of the highest held-out streaks; NaN never is")


def _export(life: Life, judge: Judge) -> None:
    """Two checkpoints exported, one by its name and one as the best: tensors, and answers that they help to decode."""
    dtypes: dict[ExportDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    exports = {"float32": export_step, "bfloat16": export_earliest}
    for name, dtype in dtypes.items():
        folder, step = exports[name](life, name)
        weights = {n: t if n == "d2t" else t.cpu().to(dtype) for n, t in judge.steps[step - 1].after.items()}
        stored = load_file(folder / "model.safetensors")
        wrong = [n for n, t in weights.items() if n != "d2t" and (n not in stored or not _bits(stored[n], t))]
        if wrong:
            what = f"{len(wrong)} tensors are not those of step {step} rounded once to {name}, first {wrong[0]}"
            judge.say(
                "RUN009",
                what,
                "the checkpoint that is asked for, each float32 weight rounded once to nearest, nothing else",
            )
    _answers(life, judge, folder, weights)


def _bits(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def _answers(life: Life, judge: Judge, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Greedy answers with an exported drafter to two prompts, against a decoder that recomputes everything."""
    run, target, data = life.run, life.run.target, life.run.data
    if decoding_fault(target):
        return
    part, ids = (data.heldout, data.heldout_ids) if data.heldout_ids.size else (data.training, data.training_ids)
    text, longest = (
        text_of(part, int(ids[0])),
        int(data.training_ids[data.training.lengths[data.training_ids].argmax()]),
    )
    start, _ = last_answer(text.loss_mask)
    model = load_drafter(folder, target=target).draft_model.to(target.device)
    reference = drafter_of(run.shape, weights, judge.model)
    limit = min(LONG_PROMPT, target.config.max_position_embeddings - ANSWER_TOKENS)
    long = text_of(data.training, longest).input_ids[:limit].tolist()
    answers = list[Decoded]()
    stops = frozenset[int]() if target.tokenizer is None else stop_token_ids(target.model, target.tokenizer)
    prompts = (text.input_ids[: max(1, start)].tolist(), long)
    for prompt, tokens in zip(prompts, (ANSWER_TOKENS, ANSWER_TOKENS // 2), strict=True):
        found = generate.generate(target, model, torch.tensor([prompt]), max_new_tokens=tokens, stop_token_ids=stops)
        answers.append(decode(reference, judge.model, prompt, tokens, stops))
        unlike = _unlike_answer(found, answers[-1], judge.model)
        if unlike is not None:
            fix = "accept a drafted token only if it is the target's own; states of kept tokens only, in both caches"
            judge.say("RUN010", f"after a prompt of {len(prompt)} tokens, {unlike}", fix)

    wrong = finished.wrong_prompts(life) or finished.wrong_proof(folder, target, prompts[0], answers[0], stops)
    if wrong is not None:
        judge.say("PRF004", wrong, "ask what is said to be asked; keep what was decoded, and how sure each choice was")


def _unlike_answer(found: generate.Generation, wanted: Decoded, model: PreTrainedModel) -> str | None:
    """How an answer differs from the reference's, near ties left out."""
    if found.output_ids != wanted.output_ids:
        pairs = enumerate(zip(found.output_ids, wanted.output_ids, strict=False))
        place = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if place is None:
            return f"the answer has {len(found.output_ids)} tokens instead of {len(wanted.output_ids)}"
        return f"token {place} is not the target's own" if wanted.output_gaps[place] > _tie(model) else None
    for number, (ours, theirs) in enumerate(zip(found.drafted_blocks, wanted.drafted_blocks, strict=False)):
        if ours != theirs:
            sure = _sure(wanted, number, ours, theirs, model)
            return f"block {number} is drafted {ours}, by the reference {theirs}" if sure else None
    if found.accepted_per_forward != wanted.accepted_per_forward:
        return f"accepted per forward {found.accepted_per_forward}, by the rule {wanted.accepted_per_forward}"
    return None


def _tie(model: PreTrainedModel) -> float:
    """Distance of two logits that rounding may turn around."""
    return 0.25 if model.dtype in (torch.bfloat16, torch.float16) else 2e-3


def _sure(wanted: Decoded, number: int, ours: Sequence[int], theirs: Sequence[int], model: PreTrainedModel) -> bool:
    """Whether the first drafted token that differs was no near tie."""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return wanted.drafted_gaps[number][place] > _tie(model)


def _target(probe: Probe, before: Mapping[str, tuple[float, float]], judge: Judge) -> None:
    """The target after the life is the one before it, and the one that its checkpoint holds."""
    target = probe.subject.target
    changed = [name for name, sums in _sums(target.model).items() if sums != before[name]]
    if changed:
        text = f"the life changed {len(changed)} tensors of the target, first {changed[0]}"
        return judge.say("RUN011", text, "the target is frozen and shares no memory with what is trained")
    folder = TINY_FOLDER if target.name == "tiny" else Path(target.name).expanduser()
    size = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if not (folder / "config.json").is_file() or size > _LARGEST_COPY:
        return None
    try:
        alone = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):  # wrappers and remote code: loaded another way
        return None
    ids = text_of(probe.subject.run.data.training, int(probe.subject.run.data.training_ids[0])).input_ids
    live_logits, logits = (
        model_forward(target.model, ids).logits,
        model_forward(alone.eval().to(target.device), ids).logits,
    )
    off = float((live_logits - logits).double().abs().max() / logits.double().abs().max())
    if not off <= 1e-5 + 4 * torch.finfo(target.dtype).eps:
        text = f"its logits differ by {off:.1e} (relative) from those of {folder} loaded through transformers alone"
        judge.say(
            "RUN011", text, "load the checkpoint as it is: weights, rotary base, epsilon and scaling of its config"
        )
    return None


def _sums(model: PreTrainedModel) -> dict[str, tuple[float, float]]:
    """Two sums of every tensor, which a change of any weight moves."""
    return {
        name: (float(p.detach().sum(dtype=torch.float64)), float(p.detach().double().square().sum()))
        for name, p in model.named_parameters()
    }


def _codes(*words: str) -> tuple[str, ...]:
    """Codes of checks by area or by their own name, as far as they are registered."""
    return tuple(code for code in CHECKS if code[:3] in words or code in words)


_EXPLAINED = {
    "RUN002": ("the rows that are trained on are not those of the recipe", _codes("DAT001")),
    "RUN003": ("what reaches the drafter is not what the target says", _codes("TGT", "DAT001", "DRF001")),
    "RUN004": ("blocks, anchors or first weights are not those of the recipe", _codes("TGT", "DRF", "DAT001")),
    "RUN005": (
        "a step's gradient or counts are not those of the recipe",
        _codes("TGT", "DRF", "LOS", "DAT001", "RUN003"),
    ),
    "RUN006": ("weights do not move as the recipe says", _codes("OPT", "RUN001")),
    "RUN007": ("the log, a record or an evaluation is not what was measured", _codes("TGT", "DRF", "LOS", "EVL005")),
    "RUN008": ("checkpoints are not those that the log calls for", _codes("OPT007")),
    "RUN009": ("the export is not the trained drafter", _codes("EXP")),
    "RUN010": ("an answer is not decoded as the recipe says", _codes("TGT", "DRF", "EXP", "EVL")),
    "RUN011": ("the target is not its checkpoint, or training changes it", _codes("TGT010", "OPT008")),
    "RUN018": ("what fails is not survived, or is survived otherwise than a resume says", _codes("OPT007", "RUN006")),
    "PRF004": ("a proof says something else than the folder that it lies in does", _codes("TGT", "DRF", "EXP", "EVL")),
    "RUN017": ("what belongs to another run, target or data is taken without a word", _codes("OPT007")),
}
"""Code -> title, and the codes that would say more exactly what is wrong."""


@check(
    "RUN001",
    "the run does not live through a short life of itself",
    _codes("TGT", "DAT001", "DRF", "LOS", "OPT", "EXP", "EVL"),
)
def survives(probe: Probe) -> Problem | None:
    found = lived(probe)
    if found.uncompared:
        raise RuntimeError(found.uncompared)
    return Problem(f"it raised {found.failure}", "fix what it names: it would come later") if found.failure else None


def _register(code: str, title: str, needs: tuple[str, ...]) -> None:
    @check(code, title, ("RUN001", *needs))
    def compared(probe: Probe) -> Problem | None:
        if lived(probe).uncompared:
            raise NotApplicable("the life could not be compared, see RUN001")
        if lived(probe).failure:
            raise NotApplicable("the life did not come to its end")
        found = lived(probe).differences.get(code)
        return None if found is None else Problem(found.evidence, found.fix)


for _code, (_title, _needs) in _EXPLAINED.items():
    _register(_code, _title, _needs)
