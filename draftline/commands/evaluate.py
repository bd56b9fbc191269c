"""`draftline evaluate` and `draftline generate`: prompts answered with a drafter, measured or just shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftline.commands.options import (
    ApiKeyEnv,
    BaseUrl,
    Device,
    DraftFolder,
    DtypeName,
    JsonOut,
    MaxNewTokens,
    Seed,
    ServerModel,
    TargetDtype,
    TargetName,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
)
from draftline.config import TargetConfig, read_api_key
from draftline.errors import ConfigError
from draftline.outputs import keep_apart, write_json
from draftline.progress import counting, say

if TYPE_CHECKING:
    from draftline.data.accounting import ChatMode
    from draftline.data.prompts import Prompt
    from draftline.data.server import Endpoint
    from draftline.draft.model import DFlashDraftModel
    from draftline.evaluate.result import EvaluationResult
    from draftline.evaluate.server import ServerMeasurement, ServerResult
    from draftline.evaluate.settings import EvaluationSettings
    from draftline.targets.model import Target


def evaluate(
    target: TargetName,
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help='JSONL, {"turns": ["..."]} per line; may be repeated.')
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="gsm8k, mt-bench, ... from the hub, or gsm8k=FILE; repeatable.")
    ] = None,
    draft: Annotated[Path | None, typer.Option("--draft", help="Exported drafter, checkpoint or run folder.")] = None,
    base_url: BaseUrl = None,
    concurrency: Annotated[
        str | None, typer.Option(help="With --base-url: requests at once, a level each: 1,4,16; default 1.")
    ] = None,
    model: ServerModel = None,
    api_key_env: ApiKeyEnv = None,
    max_new_tokens: MaxNewTokens = 256,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first prompts of each file.")] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    system_prompt: Annotated[str | None, typer.Option(help="For prompts that have none of their own.")] = None,
    template_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the chat template: enable_thinking=false.")
    ] = None,
    json_out: JsonOut = None,
    target_dtype: TargetDtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure a drafter on prompts: acceptance length, equality with plain decoding, speed.

    In process with --draft; or, with --base-url, as a running vLLM, SGLang or llama.cpp serves it.
    """
    from rich.console import Console

    from draftline.data.server import Endpoint
    from draftline.evaluate.generate import Sampling
    from draftline.evaluate.result import result_table
    from draftline.evaluate.server import ServerMeasurement, server_table
    from draftline.evaluate.settings import EvaluationSettings, parse_template_options
    from draftline.formats.card import trained_mode

    if (draft is None) == (base_url is None):
        raise ConfigError("give --draft to measure in process, or --base-url to measure a server: exactly one")
    settings = EvaluationSettings(
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k),
        seed=seed,
        template_options=parse_template_options(template_option or []),
        system_prompt=system_prompt,
    )
    if base_url is not None:
        settings.refuse_for_server()
    else:
        refuse_server_words(model, api_key_env, concurrency)
    keep_apart([json_out], [*(prompts or []), *(word.partition("=")[2] for word in task or [])])
    asked = prompts_to_evaluate(prompts or [], task or [], limit)
    if base_url is not None:
        wanted = ServerMeasurement(model, max_new_tokens, parse_concurrency(concurrency or "1"))
        endpoint = Endpoint(base_url, read_api_key(api_key_env))
        config = TargetConfig(name=target, dtype=target_dtype, device=device, trust_remote_code=trust_remote_code)
        measured = evaluate_at_server(endpoint, config, asked, wanted)
        Console().print(server_table(measured))
        write_json(json_out, measured.to_json())
        return
    assert draft is not None
    live, drafter = _load_pair(target, draft, target_dtype, device, trust_remote_code)
    result = evaluate_drafter(live, drafter, asked, settings, trained_mode(draft), draft)
    Console().print(result_table(result, str(draft)))
    write_json(json_out, result.to_json())


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


def refuse_server_words(model: str | None, api_key_env: str | None, concurrency: str | None) -> None:
    """Refuse what would say nothing of a drafter that is measured in process.

    Raises:
        ConfigError: one of them was given.
    """
    words = {"--model": model, "--api-key-env": api_key_env, "--concurrency": concurrency}
    if given := [name for name, value in words.items() if value is not None]:
        raise ConfigError(f"{given[0]} is for a server: leave it out with --draft, or give --base-url instead")


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
) -> EvaluationResult:
    """Measure a drafter on prompts; warnings go to stderr as well.

    Args:
        folder: where the drafter was read; of a run, the checkpoint is named that it offers.

    Raises:
        DataError: a prompt does not fit.
        TargetError: the drafter was made for another target.
    """
    from draftline.evaluate.benchmark import evaluate_prompts

    with counting("turns") as on_turn:
        result = evaluate_prompts(target, draft_model, prompts, settings, trained_mode=trained, on_turn=on_turn)
    for warning in result.warnings:
        say(f"warning: {warning}")
    return result if folder is None else replace(result, drafter=str(_drafter_place(folder)))


def _drafter_place(folder: Path) -> Path:
    """The folder itself, or the checkpoint that is read of a run, whatever link names it."""
    from draftline.formats.load import checkpoint_folder

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

    conversations = [prompt.conversation for prompt in prompts]
    tokenizer = load_tokenizer(target)
    with counting("turns") as on_turn:
        result = evaluate_server(endpoint, tokenizer, conversations, wanted, on_turn)
    for note in result.notes:
        say(note)
    return result


def generate(
    target: TargetName,
    draft: DraftFolder,
    prompt: Annotated[str, typer.Option("--prompt", help="What the user says; - reads standard input.")],
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
    target_dtype: TargetDtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer one prompt with the drafter; the answer on stdout, counts on stderr."""
    from draftline.evaluate.answer import answer_prompt
    from draftline.evaluate.generate import Sampling

    live, drafter = _load_pair(target, draft, target_dtype, device, trust_remote_code)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    answer = answer_prompt(live, drafter, text, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    print(answer.text)
    print(answer.counts(), file=sys.stderr)
    write_json(json_out, answer.to_json())


def drafter_for(target: Target, folder: Path) -> DFlashDraftModel:
    """The drafter in any folder that is understood, checked against the target and on its device.

    Raises:
        CheckpointError, TargetError: see `export.importing.load_drafter`.
    """
    from draftline.formats.load import load_drafter

    return load_drafter(folder, target=target).draft_model.to(target.device)


def _load_pair(
    name: str, draft: Path, dtype: DtypeName, device: str, trust_remote_code: bool
) -> tuple[Target, DFlashDraftModel]:
    from draftline.targets.model import load_target

    target = load_target(TargetConfig(name=name, dtype=dtype, device=device, trust_remote_code=trust_remote_code))
    return target, drafter_for(target, draft)
