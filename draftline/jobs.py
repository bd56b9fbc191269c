"""What one command does from beginning to end, where it takes more than one call."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftline.audit import CHECKS
from draftline.audit.folders import audit_checkpoint, audit_run_config, audit_run_folder
from draftline.audit.report import AuditReport, chosen_checks
from draftline.config import DataConfig, RunConfig, TargetConfig, load_run_config
from draftline.data.agreement import given_samples, measure_agreement
from draftline.data.answers import AnswerStore
from draftline.data.chat_mode import ChatMode
from draftline.data.endpoint import Endpoint
from draftline.data.pipeline import PrepareOptions
from draftline.data.prepare import prepare
from draftline.data.prompts import Prompt, read_prompts
from draftline.data.regenerate import GenerationSettings, TargetAnswers
from draftline.data.server import ServerAnswers, ServerSettings
from draftline.data.tasks import find_task, read_task
from draftline.data.writer import ANSWERS_FILE
from draftline.draft.model import DFlashDraftModel
from draftline.engine.cores import intra_op_threads
from draftline.errors import AuditRefusal, ConfigError, StorageError
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.evaluate.result import EvaluationResult
from draftline.evaluate.server import ServerMeasurement, evaluate_server
from draftline.evaluate.server_result import ServerResult
from draftline.evaluate.settings import EvaluationSettings
from draftline.formats.exporting import export_drafter
from draftline.formats.facts import Given
from draftline.formats.folder import read_config
from draftline.formats.importing import checkpoint_folder, load_drafter
from draftline.formats.mode import trained_mode
from draftline.progress import counting, reading
from draftline.recipes import find_recipe
from draftline.recipes import quickstart as quickstart_recipe
from draftline.run import Examination, Gate, RunResult, train_run
from draftline.storage import remove_folder, remove_leftovers, write_text
from draftline.targets.model import TINY_FOLDER, Target, load_context_limit, load_target, load_tokenizer, save_target
from draftline.train.run_folder import saved_config

AGREEMENT_CONVERSATIONS = 100
"""Given answers that the target reads before it writes its own."""

QUICKSTART_HELDOUT = 40
"""Prompts of the embedded target that quickstart keeps out of training."""

QUICKSTART_ANSWER_TOKENS = 160

QUICKSTART_LEAVES = {"target", "data", "run", "drafter", "heldout.jsonl", "evaluate.json"}
"""Names in a quickstart's folder."""


def prepare_data(
    target: TargetConfig,
    data: Sequence[str],
    out: Path,
    options: PrepareOptions,
    regenerate: GenerationSettings | ServerSettings | None = None,
    *,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Prepare data for a target, of which only the tokenizer is loaded unless it is to answer the prompts in process.

    Conversations are cut to `max_length`, or to that of `options` if None, but never to more than the target reads.

    Raises:
        TargetError, TemplateError: the target cannot be loaded, or has no tokenizer or chat template.
        ServerError: the server does not answer.
        DataError, StorageError, Interrupted: see `data.prepare.prepare`.
    """
    limit = load_context_limit(target)
    if max_length is not None and max_length > limit:
        _say(f"--max-length {max_length} is lowered to {limit}, the most that target {target.name} reads")
    options = replace(options, max_length=min(max_length or options.max_length, limit))
    if isinstance(regenerate, GenerationSettings):
        return answer_and_prepare(load_target(target), data, out, options, regenerate)
    tokenizer = load_tokenizer(target, chat_template=regenerate is not None)
    if regenerate is None:
        with reading("rows") as on_rows:
            return prepare(tokenizer, data, out, options, progress=on_rows)
    with AnswerStore(out / ANSWERS_FILE) as store, counting("answers") as answered:
        return prepare(tokenizer, data, out, options, ServerAnswers(store, regenerate, answered))


def answer_and_prepare(
    target: Target, data: Sequence[str], out: Path, options: PrepareOptions, settings: GenerationSettings
) -> dict[str, Any]:
    """Let the target answer the prompts in process, and prepare its answers.

    Where the data has answers already, what the target thinks of them is said first. Finished answers are kept in
    OUT/answers.jsonl and never asked for again. Raises as `prepare_data`.
    """
    target.require_chat_template()
    tokenizer = target.require_tokenizer()
    if given := given_samples(tokenizer, data, options, AGREEMENT_CONVERSATIONS):
        _say(measure_agreement(target.model, given).advice)
    with AnswerStore(out / ANSWERS_FILE) as store, counting("answers") as answered:
        answerer = TargetAnswers(target.model, tokenizer, store, settings, answered)
        return prepare(tokenizer, data, out, options, answerer)


def train_settings(
    out: Path, words: Sequence[str], *, recipe: str | None, config: Path | None, resume: bool
) -> RunConfig:
    """Settings of a run: a recipe, or on resume those of the run in `out`; then a YAML file; then words.

    A recipe that is named on resume is taken, so that the command that began a run also continues it.

    Raises:
        ConfigError: a setting is unknown or out of range, or nothing says what the target is.
    """
    saved = saved_config(out) if resume and recipe is None else None
    if saved is None and config is None and not any(word.startswith("target.name=") for word in words):
        raise ConfigError("nothing says what to train for: give --target, --config, or --resume with a run")
    return load_run_config(config, words, saved or find_recipe(recipe or "published"))


def audit_gate(allow: Collection[str]) -> Gate:
    """Examine a run before it starts; findings of severity error stop it unless their codes are allowed.

    So does a check that could not run: what it would have found is not known. The report goes to stderr. The gate
    raises `AuditRefusal`, and gives the codes that the run starts in spite of, allowed warnings included.

    Raises:
        ConfigError: a code does not exist.
    """
    unknown = [code for code in allow if code not in CHECKS]
    if unknown:
        raise ConfigError(f"--allow {unknown[0]}: there is no such check; name a code of the audit, such as DRF001")

    def examine(config: RunConfig, target: Target) -> Examination:
        report = audit_run_config(config, target)
        report.render(Console(stderr=True))
        codes = [finding.code for finding in report.errors()] + report.not_examined
        stopping = [code for code in codes if code not in allow]
        if stopping:
            raise AuditRefusal(
                f"the audit found {', '.join(stopping)}: fix them as it says, or add --allow CODE for each"
            )
        warned = [finding.code for finding in report.findings if finding.severity == "warning"]
        return Examination([*codes, *(code for code in warned if code in allow)], report.to_json())

    return examine


def audit_words(
    words: Sequence[str],
    flags: Sequence[str],
    *,
    recipe: str | None,
    config: Path | None,
    sample_from_anchor: bool | None,
    select: Collection[str],
    ignore: Collection[str],
) -> AuditReport:
    """Audit what the words name: a folder (a run, a checkpoint, a drafter of any known trainer), or a run to come.

    Args:
        words: a folder, or `section.key=value` settings of a run to come.
        flags: settings that were given as options.
        sample_from_anchor: whether slot 0 predicts, if the folder does not say so.

    Raises:
        CheckpointError, ConfigError, DataError, TargetError: what is to be audited cannot be had.
    """
    chosen_checks(select, ignore)
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    places = [word for word in words if word not in settings]
    if not places:
        wanted = train_settings(Path(), [*flags, *settings], recipe=recipe, config=config, resume=False)
        return audit_run_config(wanted, None, select, ignore)
    named = any(flag.startswith("target.name=") for flag in flags)
    of_a_run = [*settings, *(flag for flag in flags if not named or flag.startswith("data."))]
    of_a_run += [str(given) for given in (recipe, config) if given is not None]
    for other in (*places[1:], *of_a_run):
        raise ConfigError(f"{places[0]} is audited as it is: leave out {other}, or the folder")
    place, target = Path(places[0]), load_run_config(None, flags).target if named else None
    if checkpoint_folder(place) is not None:
        return audit_run_folder(place, None if target is None else load_target(target), select, ignore)
    read_config(place)
    if target is None:
        raise ConfigError(f"{place} does not say where its target is: give --target")
    return audit_checkpoint(place, load_target(target), Given(sample_from_anchor), select, ignore)


def drafter_for(target: Target, folder: Path) -> DFlashDraftModel:
    """The drafter in any folder that is understood, checked against the target and on its device.

    Raises:
        CheckpointError, TargetError: see `export.importing.load_drafter`.
    """
    return load_drafter(folder, target=target).draft_model.to(target.device)


def prompts_to_evaluate(files: Sequence[Path], tasks: Sequence[str], limit: int | None) -> list[Prompt]:
    """The prompts of files and of task sets (`NAME` or `NAME=FILE`), the first `limit` of each.

    Raises:
        ConfigError: neither was given, one is named twice, or a task set is unknown.
        DataError: a file or a set cannot be read or has no prompt.
    """
    if not files and not tasks:
        raise ConfigError("nothing says what to ask: give --prompts FILE or --task NAME")
    for word in tasks:
        find_task(word)  # names are refused before anything is read
    words = [*map(str, files), *tasks]
    if twice := [word for place, word in enumerate(words) if word in words[:place]]:
        raise ConfigError(f"{twice[0]} is named twice, and its prompts would count twice: name it once")
    prompts = read_prompts([str(path) for path in files], limit) if files else []
    for word in tasks:
        prompts += read_task(word, limit)
    return prompts


def refuse_server_words(model: str | None, api_key_env: str | None, concurrency: str | None) -> None:
    """Refuse what would say nothing of a drafter that is measured in process.

    Raises:
        ConfigError: one of them was given.
    """
    words = {"--model": model, "--api-key-env": api_key_env, "--concurrency": concurrency}
    if given := [name for name, value in words.items() if value is not None]:
        raise ConfigError(f"{given[0]} is for a server: leave it out with --draft, or give --base-url instead")


def evaluate_drafter(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    trained: ChatMode | None = None,
    folder: Path | None = None,
) -> EvaluationResult:
    """Measure a drafter on prompts; warnings go to stderr as well.

    Args:
        folder: where the drafter was read; of a run, the checkpoint is named that it offers.

    Raises:
        DataError: a prompt does not fit.
        TargetError: the drafter was made for another target.
    """
    with counting("turns") as on_turn:
        result = evaluate_prompts(target, draft_model, prompts, settings, trained_mode=trained, on_turn=on_turn)
    for warning in result.warnings:
        _say(f"warning: {warning}")
    return result if folder is None else replace(result, drafter=str(_drafter_place(folder)))


def _drafter_place(folder: Path) -> Path:
    """The folder itself, or the checkpoint that is read of a run, whatever link names it."""
    checkpoint = checkpoint_folder(folder)
    if checkpoint is None:
        return folder
    place = checkpoint.resolve()
    return place if folder.is_absolute() else Path(os.path.relpath(place))


def evaluate_at_server(
    endpoint: Endpoint, target: TargetConfig, prompts: Sequence[Prompt], wanted: ServerMeasurement
) -> ServerResult:
    """Measure a running server on prompts; of the target, only the tokenizer.

    Raises:
        ServerError: the server does not answer, is none of the known programs, or drafts nothing.
        TargetError, TemplateError: the target has no tokenizer or chat template.
    """
    conversations = [prompt.conversation for prompt in prompts]
    tokenizer = load_tokenizer(target)
    with counting("turns") as on_turn:
        result = evaluate_server(endpoint, tokenizer, conversations, wanted, on_turn)
    for note in result.notes:
        _say(note)
    return result


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Numbers of requests at once, from a list such as `1,4,16`.

    Raises:
        ConfigError: it is none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--concurrency {text!r} is not a list of positive numbers: write it as 1,4,16")
    return tuple(int(word) for word in words)


def quickstart(out: Path) -> tuple[RunResult, EvaluationResult]:
    """The whole job on the embedded target: answers, training, export, measurement. About three minutes on two cores.

    Leaves OUT/target (Hugging Face folder) and OUT/drafter (z-lab export), both float32, OUT/data, OUT/run,
    OUT/heldout.jsonl (prompts that were not trained on) and OUT/evaluate.json. What an earlier call has completed is
    not done again, except for the export and the measurement.

    Raises:
        StorageError: `out` holds something else.
    """
    if out.is_dir():
        remove_leftovers(out)
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= QUICKSTART_LEAVES):
        raise StorageError(f"{out} holds something that is not a quickstart: name another folder with --out")
    with intra_op_threads(1):  # the model is tiny: more threads win little on idle cores and lose much on busy ones
        return _quickstart(out)


def _quickstart(out: Path) -> tuple[RunResult, EvaluationResult]:
    recipe = quickstart_recipe()
    _say(f"1/5 target: {out / 'target'}")
    if not (out / "target").exists():
        save_target(load_target(recipe.target), out / "target")
    stored = TargetConfig(name=str(out / "target"), dtype="float32")
    target = load_target(stored)

    _say(f"2/5 the target answers the prompts: {out / 'data'}")
    options = PrepareOptions(heldout=QUICKSTART_HELDOUT)
    answers = GenerationSettings(max_new_tokens=QUICKSTART_ANSWER_TOKENS, batch_size=64)
    answer_and_prepare(target, [str(TINY_FOLDER / "prompts.jsonl")], out / "data", options, answers)
    heldout_prompts = (out / "data" / "heldout" / "prompts.jsonl").read_text(encoding="utf-8")
    write_text(out / "heldout.jsonl", heldout_prompts)

    _say(f"3/5 training: {out / 'run'}")
    data = DataConfig(path=out / "data", heldout_path=out / "data" / "heldout")
    trained = train_run(recipe.model_copy(update={"target": stored, "data": data}), out / "run", resume=True)

    _say(f"4/5 export: {out / 'drafter'}")
    remove_folder(out / "drafter")
    export_drafter(source=out / "run", out=out / "drafter", target=target, dtype="float32")

    _say(f"5/5 measuring on held-out prompts: {out / 'evaluate.json'}")
    drafter, prompts = drafter_for(target, out / "drafter"), read_prompts([str(out / "heldout.jsonl")])
    settings = EvaluationSettings(QUICKSTART_ANSWER_TOKENS)
    folder = out / "drafter"
    result = evaluate_drafter(target, drafter, prompts, settings, trained_mode(folder), folder)
    write_text(out / "evaluate.json", json.dumps(result.to_json(), indent=2) + "\n")
    return trained, result


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
