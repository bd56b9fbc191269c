"""`draftline prepare` and `draftline inspect`: conversations to token ids and masks, and a look at what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.commands.chat import text_or_file, warn_unread_options
from draftline.config import read_api_key
from draftline.errors import ConfigError
from draftline.options import (
    GenerationSettings,
    InspectCommand,
    PrepareCommand,
    PrepareOptions,
    Sampling,
    ServerSettings,
)
from draftline.progress import counting, reading, say
from draftline.storage import keep_apart, write_file, write_json

if TYPE_CHECKING:
    from draftline.targets.model import Target

AGREEMENT_CONVERSATIONS = 100
"""Given answers that the target reads before it writes its own."""


def prepare(options: PrepareCommand) -> None:
    """Turn conversations into token ids and loss masks, exactly as the target's chat template gives them."""
    keep_apart([options.json_file], [*options.data, *options.more])
    report = prepare_data(options)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    write_json(options.json_file, report)


def prepare_data(options: PrepareCommand) -> dict[str, Any]:
    """Prepare data for a target, of which only the tokenizer is loaded unless it is to answer the prompts in process.

    Conversations are cut to what is asked for, but never to more than the target reads.

    Raises:
        TargetError, TemplateError: the target cannot be loaded, or has no tokenizer or chat template.
        ServerError: the server does not answer.
        DataError, StorageError, Interrupted: see `data.prepare.prepare`.
    """
    from draftline.data.readers import resolve_sources

    target, data, out = options.target, [*options.data, *options.more], options.out
    settings = _generation_settings(options)
    resolve_sources(data)  # before torch is loaded: a file that is not there is refused at once
    from draftline.data.answers import AnswerStore
    from draftline.data.dataset import ANSWERS_FILE
    from draftline.data.prepare import prepare
    from draftline.data.server import Endpoint, ServerAnswers
    from draftline.data.template import ChatTemplate
    from draftline.targets.model import load_context_limit, load_target, load_tokenizer

    asked, limit = options.max_length, load_context_limit(target)
    if asked is not None and asked > limit:
        say(f"--max-length {asked} is lowered to {limit}, the most that target {target.name} reads")
    length, system = min(asked or options.rows.max_length, limit), text_or_file(options.rows.system_prompt)
    rows = options.rows.model_copy(update={"max_length": length, "system_prompt": system})
    server = options.server
    if server.base_url is not None:
        endpoint = Endpoint(server.base_url, read_api_key(server.api_key_env))
        asking = ServerSettings(model=server.model or target.name, patience=options.patience, **settings.model_dump())
        tokenizer = load_tokenizer(target, chat_template=True)
        warn_unread_options(tokenizer, rows.template_options)
        with AnswerStore(out / ANSWERS_FILE) as store, counting("answers") as answered:
            template = ChatTemplate(tokenizer, rows.template_options)
            return prepare(tokenizer, data, out, rows, ServerAnswers(store, endpoint, asking, answered, template))
    if options.regenerate:
        return answer_and_prepare(load_target(target), data, out, rows, settings)
    tokenizer = load_tokenizer(target, chat_template=False)
    warn_unread_options(tokenizer, rows.template_options)
    with reading("rows") as on_rows:
        return prepare(tokenizer, data, out, rows, progress=on_rows)


def _generation_settings(options: PrepareCommand) -> GenerationSettings:
    """How the target answers, with the options of the template that all rows have.

    Raises:
        ConfigError: words for sampling where nothing is sampled.
    """
    answers = options.answers
    asked = answers.sampling != Sampling() or answers.answers_per_prompt > 1
    if asked and not options.regenerate and options.server.base_url is None:
        raise ConfigError(
            "--temperature, --top-p, --top-k and --answers-per-prompt are for answers that the target writes: "
            "add --regenerate"
        )
    return answers.model_copy(update={"template_options": options.rows.template_options})


def answer_and_prepare(
    target: Target, data: Sequence[str], out: Path, rows: PrepareOptions, settings: GenerationSettings
) -> dict[str, Any]:
    """Let the target answer the prompts in process, and prepare its answers.

    Where the data has answers already, what the target thinks of them is said first. Finished answers are kept in
    OUT/answers.jsonl and never asked for again. Raises as `prepare_data`.
    """
    from draftline.data.answers import AnswerStore
    from draftline.data.dataset import ANSWERS_FILE
    from draftline.data.prepare import given_samples, prepare
    from draftline.targets.regenerate import TargetAnswers, measure_agreement

    target.require_chat_template()
    tokenizer = target.require_tokenizer()
    warn_unread_options(tokenizer, rows.template_options)
    if given := given_samples(tokenizer, data, rows, AGREEMENT_CONVERSATIONS):
        say(measure_agreement(target.model, given).advice)
    with AnswerStore(out / ANSWERS_FILE) as store, counting("answers") as answered:
        answerer = TargetAnswers(target.model, tokenizer, store, settings, answered)
        return prepare(tokenizer, data, out, rows, answerer)


def inspect(options: InspectCommand) -> None:
    """Show conversations with their supervised tokens marked, and a block drawn."""
    from rich.console import Console

    from draftline.data.inspect import conversations_text, inspect_dataset, page_values
    from draftline.page.frame import render

    views = inspect_dataset(options.folder, count=options.count, block_size=options.block_size)
    console = Console()
    console.print(conversations_text(views, color=console.is_terminal))
    write_json(options.json_file, [view.as_json() for view in views])
    if options.html is not None:
        values = page_values(options.folder, views)
        page = render("inspect.html", title="Prepared conversations", sections=[], context=values)
        write_file(options.html, page)
