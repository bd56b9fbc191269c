"""`draftline quickstart`: the whole job on the embedded target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from draftline.commands.evaluate import drafter_for, evaluate_drafter
from draftline.commands.prepare import answer_and_prepare
from draftline.commands.train import examine_and_train
from draftline.config import DataConfig, TargetConfig
from draftline.errors import StorageError
from draftline.options import EvaluationSettings, ExportSettings, GenerationSettings, PrepareOptions, QuickstartCommand
from draftline.progress import say
from draftline.storage import remove_folder, remove_leftovers, write_text

if TYPE_CHECKING:
    from draftline.evaluate.result import EvaluationResult
    from draftline.run import RunResult

HELDOUT_PROMPTS = 40
"""Prompts of the embedded target that are kept out of training."""

LONGEST_ANSWER = 160

LEAVES = {"target", "data", "run", "drafter", "heldout.jsonl", "evaluate.json"}
"""Names in a quickstart's folder."""


def quickstart(options: QuickstartCommand) -> None:
    """The whole job on the embedded target: answers, training, export, measurement; some minutes.

    A second call goes on where the first one was interrupted.
    """
    trained, result = run_quickstart(options.out)
    from rich.console import Console

    from draftline.evaluate.result import result_table

    Console().print(result_table(result, str(options.out / "drafter")))
    if trained.heldout:
        print("held-out accuracy {accuracy:.3f}, streak at random anchors {streak:.2f}".format(**trained.heldout))


def run_quickstart(out: Path) -> tuple[RunResult, EvaluationResult]:
    """The whole job on the embedded target: answers, training, export, measurement. Some minutes on two cores.

    Leaves OUT/target (Hugging Face folder) and OUT/drafter (z-lab export), both float32, OUT/data, OUT/run,
    OUT/heldout.jsonl (prompts that were not trained on) and OUT/evaluate.json. What an earlier call has completed is
    not done again, except for the export and the measurement.

    Raises:
        StorageError: `out` holds something else.
    """
    if out.is_dir():
        remove_leftovers(out)
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= LEAVES):
        raise StorageError(f"{out} holds something that is not a quickstart: name another folder with --out")
    from draftline.engine.process import intra_op_threads

    with intra_op_threads(1):  # the model is tiny: more threads win little on idle cores and lose much on busy ones
        return _quickstart(out)


def _quickstart(out: Path) -> tuple[RunResult, EvaluationResult]:
    from draftline.config import quickstart_recipe
    from draftline.data.prompts import read_prompts
    from draftline.formats.card import trained_mode
    from draftline.formats.exporting import export_drafter
    from draftline.run import open_run
    from draftline.targets.model import load_target, save_target

    recipe = quickstart_recipe()
    say(f"1/5 target: {out / 'target'}")
    if not (out / "target").exists():
        save_target(load_target(recipe.target), out / "target")
    stored = TargetConfig(name=str(out / "target"), dtype="float32")
    target = load_target(stored)

    say(f"2/5 the target answers the prompts: {out / 'data'}")
    options = PrepareOptions(heldout=HELDOUT_PROMPTS)
    answers = GenerationSettings(max_new_tokens=LONGEST_ANSWER, batch_size=64)
    answer_and_prepare(target, [str(embedded_prompts())], out / "data", options, answers)
    heldout_prompts = (out / "data" / "heldout" / "prompts.jsonl").read_text(encoding="utf-8")
    write_text(out / "heldout.jsonl", heldout_prompts)

    say(f"3/5 training: {out / 'run'}")
    data = DataConfig(path=out / "data", heldout_path=out / "data" / "heldout")
    run = open_run(recipe.model_copy(update={"target": stored, "data": data}), out / "run", resume=True)
    trained = examine_and_train(run, out / "run", resume=True)

    say(f"4/5 export: {out / 'drafter'}")
    remove_folder(out / "drafter")
    export_drafter(source=out / "run", out=out / "drafter", target=target, settings=ExportSettings(dtype="float32"))

    say(f"5/5 measuring on held-out prompts: {out / 'evaluate.json'}")
    drafter, prompts = drafter_for(target, out / "drafter"), read_prompts([str(out / "heldout.jsonl")])
    settings = EvaluationSettings(max_new_tokens=LONGEST_ANSWER)
    folder = out / "drafter"
    result = evaluate_drafter(target, drafter, prompts, settings, trained_mode(folder), folder)
    write_text(out / "evaluate.json", json.dumps(result.to_json(), indent=2) + "\n")
    return trained, result


def embedded_prompts() -> Path:
    """The prompts that come with the embedded target."""
    from draftline.targets.model import TINY_FOLDER

    return TINY_FOLDER / "prompts.jsonl"
