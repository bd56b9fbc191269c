"""`draftline prepare` and `draftline inspect`: conversations to token ids and masks, and a look at what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftline.commands.options import (
    ApiKeyEnv,
    BaseUrl,
    Device,
    HtmlOut,
    JsonOut,
    ServerModel,
    TargetDtype,
    TargetName,
    TrustRemoteCode,
)
from draftline.config import TargetConfig, read_api_key
from draftline.outputs import keep_apart, write_file, write_json
from draftline.progress import counting, reading, say

if TYPE_CHECKING:
    from draftline.data.prepare import PrepareOptions
    from draftline.data.server import ServerSettings
    from draftline.targets.model import Target
    from draftline.targets.regenerate import GenerationSettings

AGREEMENT_CONVERSATIONS = 100
"""Given answers that the target reads before it writes its own."""


def prepare(
    target: TargetName,
    data: Annotated[list[str], typer.Option("--data", help="File, folder, pattern, hub data set, or - for stdin.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the prepared data.")],
    more: Annotated[list[str] | None, typer.Argument(help="Further files, as after --data.")] = None,
    regenerate: Annotated[bool, typer.Option("--regenerate", help="The target answers the prompts itself.")] = False,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest conversation, tokens; default 3072 or what the target reads.")
    ] = None,
    heldout: Annotated[int, typer.Option(min=0, help="Prompts kept out of training, in OUT/heldout.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest regenerated answer, tokens.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers that are regenerated at the same time.")] = 16,
    base_url: BaseUrl = None,
    model: ServerModel = None,
    api_key_env: ApiKeyEnv = None,
    supervise: Annotated[Literal["answers", "last", "all"], typer.Option(help="What is learned.")] = "answers",
    no_reasoning: Annotated[bool, typer.Option("--no-reasoning", help="Do not learn reasoning.")] = False,
    truncation: Annotated[Literal["right", "left"], typer.Option(help="Side that is cut.")] = "right",
    min_supervised: Annotated[int, typer.Option(min=1, help="Fewest supervised tokens of a row.")] = 1,
    strip_images: Annotated[bool, typer.Option("--strip-images", help="Keep rows with images, without them.")] = False,
    split: Annotated[str | None, typer.Option(help="Of Hugging Face data sets; default train.")] = None,
    max_unreadable: Annotated[float, typer.Option(min=0, max=1, help="Share of rows that may be unreadable.")] = 0.01,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any row is dropped.")] = False,
    json_out: JsonOut = None,
    target_dtype: TargetDtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Turn conversations into token ids and loss masks, exactly as the target's chat template gives them."""
    from draftline.data.prepare import PrepareOptions
    from draftline.data.render import MaskOptions
    from draftline.data.server import Endpoint, ServerSettings
    from draftline.targets.regenerate import GenerationSettings

    keep_apart([json_out], [*data, *(more or [])])
    options = PrepareOptions(
        truncation=truncation,
        mask=MaskOptions(supervise=supervise, reasoning=not no_reasoning),
        strip_images=strip_images,
        heldout=heldout,
        min_supervised=min_supervised,
        split=split,
        strict=strict,
        max_unreadable=max_unreadable,
    )
    answers: GenerationSettings | ServerSettings | None = None
    if base_url is not None:
        endpoint = Endpoint(base_url, read_api_key(api_key_env))
        answers = ServerSettings(endpoint, model or target, max_new_tokens=max_new_tokens, concurrency=batch_size)
    elif regenerate:
        answers = GenerationSettings(max_new_tokens=max_new_tokens, batch_size=batch_size)
    wanted = TargetConfig(name=target, dtype=target_dtype, device=device, trust_remote_code=trust_remote_code)
    report = prepare_data(wanted, [*data, *(more or [])], out, options, answers, max_length=max_length)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    write_json(json_out, report)


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
    from draftline.data.answers import AnswerStore
    from draftline.data.dataset import ANSWERS_FILE
    from draftline.data.prepare import prepare
    from draftline.data.server import ServerAnswers
    from draftline.targets.model import load_context_limit, load_target, load_tokenizer
    from draftline.targets.regenerate import GenerationSettings

    limit = load_context_limit(target)
    if max_length is not None and max_length > limit:
        say(f"--max-length {max_length} is lowered to {limit}, the most that target {target.name} reads")
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
    from draftline.data.answers import AnswerStore
    from draftline.data.dataset import ANSWERS_FILE
    from draftline.data.prepare import given_samples, prepare
    from draftline.targets.regenerate import TargetAnswers, measure_agreement

    target.require_chat_template()
    tokenizer = target.require_tokenizer()
    if given := given_samples(tokenizer, data, options, AGREEMENT_CONVERSATIONS):
        say(measure_agreement(target.model, given).advice)
    with AnswerStore(out / ANSWERS_FILE) as store, counting("answers") as answered:
        answerer = TargetAnswers(target.model, tokenizer, store, settings, answered)
        return prepare(tokenizer, data, out, options, answerer)


def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder that `draftline prepare` wrote.")],
    count: Annotated[int | None, typer.Option(min=1, help="Only the first conversations.")] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Of the block that is drawn.")] = 8,
    html: HtmlOut = None,
    json_out: JsonOut = None,
) -> None:
    """Show conversations with their supervised tokens marked, and a block drawn."""
    from rich.console import Console

    from draftline.data.inspect import as_text, inspect_dataset, page_values
    from draftline.page.frame import render

    views = inspect_dataset(folder, count=count, block_size=block_size)
    console = Console()
    console.print(as_text(views, color=console.is_terminal))
    write_json(json_out, [view.as_json() for view in views])
    if html is not None:
        values = page_values(folder, views)
        write_file(html, render("inspect.html", title="Prepared conversations", sections=[], context=values))
