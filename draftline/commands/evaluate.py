"""`draftline evaluate` and `draftline generate`: prompts answered with a drafter, measured or just shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftline.commands.chat import text_or_file, warn_unread_options
from draftline.commands.options import check_read
from draftline.config import TargetConfig, read_api_key
from draftline.errors import ConfigError
from draftline.options import EvaluateCommand, EvaluationSettings, GenerateCommand, ServerMeasurement
from draftline.progress import counting, say
from draftline.storage import keep_apart, write_json

if TYPE_CHECKING:
    from draftline.data.accounting import ChatMode
    from draftline.data.conversations import Conversation
    from draftline.data.prompts import Prompt
    from draftline.data.server import Endpoint
    from draftline.draft.model import DFlashDraftModel
    from draftline.evaluate.result import EvaluationResult
    from draftline.evaluate.server import ServerResult
    from draftline.targets.model import Target

_ANSWERS_AT_ONCE = 16


def evaluate(options: EvaluateCommand) -> None:
    """Measure a drafter on prompts: acceptance length, equality with plain decoding, speed.

    In process with --draft; or, with --base-url, as a running vLLM, SGLang or llama.cpp serves it.
    """
    check_words(options)
    keep_apart([options.json_file], [*options.prompts, *(word.partition("=")[2] for word in options.task)])
    prompts = prompts_to_evaluate(options.prompts, options.task, options.limit)
    check_read("drafter", options.draft)
    settings = with_system_text(options.settings)
    if options.draft is None:
        _evaluate_server(options, prompts, settings)
    else:
        _evaluate_drafter(options, options.draft, prompts, settings)


def _evaluate_drafter(
    options: EvaluateCommand, draft: Path, prompts: Sequence[Prompt], settings: EvaluationSettings
) -> None:
    from rich.console import Console

    from draftline.evaluate.result import result_table
    from draftline.formats.card import trained_mode
    from draftline.targets.model import load_target

    target = load_target(options.target)
    drafter = drafter_for(target, draft)
    warn_unread_options(target.require_tokenizer(), settings.template_options)
    at_once = (options.batch_size or _ANSWERS_AT_ONCE) if options.fast else None
    result = evaluate_drafter(target, drafter, prompts, settings, trained_mode(draft), draft, at_once)
    Console().print(result_table(result, str(draft)))
    write_json(options.json_file, result.to_json())


def with_system_text(settings: EvaluationSettings) -> EvaluationSettings:
    """The settings with the text of the system prompt, where a file was named."""
    return settings.model_copy(update={"system_prompt": text_or_file(settings.system_prompt)})


def _evaluate_server(options: EvaluateCommand, prompts: Sequence[Prompt], settings: EvaluationSettings) -> None:
    from rich.console import Console

    from draftline.data.server import Endpoint
    from draftline.evaluate.server import server_table

    server = options.server
    assert server.base_url is not None, "exactly one of --draft and --base-url is given"
    wanted = ServerMeasurement(
        model=server.model,
        max_new_tokens=settings.max_new_tokens,
        system_prompt=settings.system_prompt,
        template_options=settings.template_options,
        concurrency=parse_concurrency(options.concurrency or "1"),
    )
    endpoint = Endpoint(server.base_url, read_api_key(server.api_key_env))
    result = evaluate_at_server(endpoint, options.target, prompts, wanted)
    Console().print(server_table(result))
    write_json(options.json_file, result.to_json())


def check_words(options: EvaluateCommand) -> None:
    """Refuse words that do not go together: what only one of the two ways to measure can do.

    Raises:
        ConfigError: naming one.
    """
    server, settings = options.server, options.settings
    if (options.draft is None) == (server.base_url is None):
        raise ConfigError("give --draft to measure in process, or --base-url to measure a server: exactly one")
    if options.fast and server.base_url is not None:
        raise ConfigError("--fast is for measuring in process: leave it out with --base-url, or give --draft instead")
    if options.fast and not settings.sampling.greedy:
        raise ConfigError("--fast counts along greedy answers: leave out --temperature, or leave out --fast")
    if not options.fast and options.batch_size is not None:
        raise ConfigError("--batch-size is of --fast: give that too, or leave it out")
    if server.base_url is not None:
        if not settings.sampling.greedy:
            raise ConfigError(
                "a server is measured greedily: leave out --temperature, or measure in process with --draft"
            )
        return
    of_a_server = {"--model": server.model, "--api-key-env": server.api_key_env, "--concurrency": options.concurrency}
    if given := [name for name, value in of_a_server.items() if value is not None]:
        raise ConfigError(f"{given[0]} is for a server: leave it out with --draft, or give --base-url instead")


def prompts_to_evaluate(files: Sequence[Path], tasks: Sequence[str], limit: int | None) -> list[Prompt]:
    """The prompts of files and of task sets (`NAME` or `NAME=FILE`), the first `limit` of each.

    Raises:
        ConfigError: neither was given, one is named twice, or a task set is unknown.
        DataError: a file or a set cannot be read or has no prompt.
    """
    from draftline.data.prompts import find_task, read_prompts, read_task

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


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Numbers of requests at once, from a list such as `1,4,16`.

    Raises:
        ConfigError: it is none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--concurrency {text!r} is not a list of positive numbers: write it as 1,4,16")
    return tuple(int(word) for word in words)


def evaluate_drafter(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    trained: ChatMode | None = None,
    folder: Path | None = None,
    answers_at_once: int | None = None,
) -> EvaluationResult:
    """Measure a drafter on prompts; warnings go to stderr as well.

    Args:
        folder: where the drafter was read; of a run, the checkpoint is named that it offers.
        answers_at_once: of `--fast`; None: every prompt is decoded.

    Raises:
        DataError: a prompt does not fit.
        TargetError: the drafter was made for another target.
    """
    from draftline.evaluate.benchmark import evaluate_prompts

    with counting("turns") as on_turn:
        result = evaluate_prompts(
            target,
            draft_model,
            prompts,
            settings,
            trained_mode=trained,
            on_turn=on_turn,
            answers_at_once=answers_at_once,
        )
    for warning in result.warnings:
        say(f"warning: {warning}")
    return result if folder is None else replace(result, drafter=str(_drafter_place(folder)))


def _drafter_place(folder: Path) -> Path:
    """The folder itself, or the checkpoint that is read of a run, whatever link names it."""
    from draftline.train.run_folder import checkpoint_folder

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
    from draftline.evaluate.server import evaluate_server
    from draftline.targets.model import load_tokenizer

    conversations = [_as_wanted(prompt.conversation, wanted) for prompt in prompts]
    tokenizer = load_tokenizer(target)
    warn_unread_options(tokenizer, wanted.template_options)
    with counting("turns") as on_turn:
        result = evaluate_server(endpoint, tokenizer, conversations, wanted, on_turn)
    for note in result.notes:
        say(note)
    return result


def _as_wanted(conversation: Conversation, wanted: ServerMeasurement) -> Conversation:
    """The conversation with the system prompt and the options of the template that all are to have."""
    options = {**wanted.template_options, **conversation.template_options}
    return conversation.with_system_prompt(wanted.system_prompt).model_copy(update={"template_options": options})


def generate(options: GenerateCommand) -> None:
    """Answer one prompt with the drafter; the answer on stdout, counts on stderr."""
    asked = " ".join(options.words) or options.prompt
    if asked is None or (options.words and options.prompt is not None):
        raise ConfigError("generate answers one prompt: give it in quotes behind the options, or with --prompt")
    check_read("drafter", options.draft)
    from draftline.evaluate.answer import answer_prompt
    from draftline.targets.model import load_target

    target = load_target(options.target)
    drafter = drafter_for(target, options.draft)
    text = sys.stdin.read() if asked == "-" else asked
    warn_unread_options(target.require_tokenizer(), options.settings.template_options)
    answer = answer_prompt(target, drafter, text, with_system_text(options.settings))
    print(answer.text)
    print(answer.counts(), file=sys.stderr)
    write_json(options.json_file, answer.to_json())


def drafter_for(target: Target, folder: Path) -> DFlashDraftModel:
    """The drafter in any folder that is understood, checked against the target and on its device.

    Raises:
        CheckpointError, TargetError: see `export.importing.load_drafter`.
    """
    from draftline.formats.load import load_drafter

    return load_drafter(folder, target=target).draft_model.to(target.device)
