"""What one command does from beginning to end, where it takes more than one call."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftline.config import DataConfig, TargetConfig
from draftline.data.answers import AnswerStore
from draftline.data.pipeline import PrepareOptions
from draftline.data.prepare import prepare
from draftline.data.prompts import read_prompts
from draftline.data.regenerate import GenerationSettings, TargetAnswers
from draftline.data.server import ServerAnswers, ServerSettings
from draftline.data.writer import ANSWERS_FILE
from draftline.draft.model import DFlashDraftModel
from draftline.errors import StorageError
from draftline.evaluate.benchmark import EvaluationResult, evaluate_prompts
from draftline.export.exporting import export_drafter
from draftline.export.zlab import load_zlab
from draftline.progress import counting, reading
from draftline.recipes import quickstart as quickstart_recipe
from draftline.run import train_run
from draftline.storage import write_text
from draftline.target.model import TINY_FOLDER, Target, load_target, save_target

QUICKSTART_HELDOUT = 40
"""Prompts of the embedded target that quickstart keeps out of training."""

QUICKSTART_ANSWER_TOKENS = 160


def prepare_for_target(
    target: Target,
    data: Sequence[str],
    out: Path,
    options: PrepareOptions,
    regenerate: GenerationSettings | ServerSettings | None = None,
) -> dict[str, Any]:
    """Prepare data for a target; with `regenerate` the target answers, in process or on a server.

    Finished answers are kept in OUT/answers.jsonl and never asked for again.

    Raises:
        DataError, TemplateError, Interrupted: see `data.prepare.prepare`.
    """
    target.require_chat_template()
    tokenizer = target.require_tokenizer()
    limit = target.config.max_position_embeddings
    if options.max_length > limit:
        _say(f"max_length {options.max_length} is lowered to {limit}, the most that target {target.name} reads")
        options = replace(options, max_length=limit)
    with ExitStack() as stack:
        if regenerate is None:
            return prepare(tokenizer, data, out, options, progress=stack.enter_context(reading("rows")))
        store = stack.enter_context(AnswerStore(out / ANSWERS_FILE))
        answered = stack.enter_context(counting("answers"))
        if isinstance(regenerate, ServerSettings):
            return prepare(tokenizer, data, out, options, ServerAnswers(store, regenerate, answered))
        answerer = TargetAnswers(target.model, tokenizer, store, regenerate, answered)
        return prepare(tokenizer, data, out, options, answerer)


def evaluate_drafter(
    target: Target, draft_model: DFlashDraftModel, prompts: Sequence[Path], *, limit: int | None, max_new_tokens: int
) -> EvaluationResult:
    """Measure a drafter on files of prompts, the first `limit` of them.

    Raises:
        DataError: a file cannot be read or has no prompt.
        TargetError: the drafter was made for another target.
    """
    conversations = read_prompts([str(path) for path in prompts])[:limit]
    with counting("turns") as on_turn:
        return evaluate_prompts(target, draft_model, conversations, max_new_tokens=max_new_tokens, on_turn=on_turn)


def quickstart(out: Path) -> EvaluationResult:
    """The whole job on the embedded target: answers, training, export, measurement. About three minutes on two cores.

    Leaves OUT/target (Hugging Face folder) and OUT/drafter (z-lab export), both float32, OUT/data, OUT/run,
    OUT/heldout.jsonl (prompts that were not trained on) and OUT/evaluate.json.

    Raises:
        StorageError: `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(f"{out} is not empty: delete it, or name another folder with --out")
    recipe = quickstart_recipe()
    _say(f"1/5 target: {out / 'target'}")
    save_target(load_target(recipe.target), out / "target")
    stored = TargetConfig(name=str(out / "target"), dtype="float32")
    target = load_target(stored)

    _say(f"2/5 the target answers the prompts: {out / 'data'}")
    options = PrepareOptions(heldout=QUICKSTART_HELDOUT)
    answers = GenerationSettings(max_new_tokens=QUICKSTART_ANSWER_TOKENS, batch_size=64)
    prepare_for_target(target, [str(TINY_FOLDER / "prompts.jsonl")], out / "data", options, answers)
    heldout_prompts = (out / "data" / "heldout" / "prompts.jsonl").read_text(encoding="utf-8")
    write_text(out / "heldout.jsonl", heldout_prompts)

    _say(f"3/5 training: {out / 'run'}")
    data = DataConfig(path=out / "data", heldout_path=out / "data" / "heldout")
    train_run(recipe.model_copy(update={"target": stored, "data": data}), out / "run")

    _say(f"4/5 export: {out / 'drafter'}")
    export_drafter(source=out / "run", out=out / "drafter", target=target, dtype="float32")

    _say(f"5/5 measuring on held-out prompts: {out / 'evaluate.json'}")
    result = evaluate_drafter(
        target, load_zlab(out / "drafter"), [out / "heldout.jsonl"], limit=None, max_new_tokens=QUICKSTART_ANSWER_TOKENS
    )
    write_text(out / "evaluate.json", json.dumps(result.to_json(), indent=2) + "\n")
    return result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
