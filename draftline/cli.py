"""The command line: words in, one function called, an exit status out. No logic.

stdout is data, stderr is progress. A `DraftlineError` becomes one line and its exit status; anything unexpected becomes
one line and exit status 1. `--debug`, anywhere on the line, shows the traceback instead.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftline.errors import ConfigError, DraftlineError
from draftline.outputs import keep_apart, new_folder, new_json, new_page, new_pictures, write_file, write_json

if TYPE_CHECKING:
    from draftline.config import TargetConfig
    from draftline.draft.model import DFlashDraftModel
    from draftline.targets.model import Target

app = typer.Typer(
    name="draftline",
    help="Train DFlash drafters for speculative decoding, and prove that what is trained is what will be served.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TargetName = Annotated[str, typer.Option("--target", help="tiny, smollm2, a local Hugging Face folder or a hub name.")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_HELP = "auto: float32 on CPU, else as stored."
TargetDtype = Annotated[DtypeName, typer.Option("--target-dtype", help=DTYPE_HELP)]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that ships with the target.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help="published (the default), small-model or quickstart.")]
MaybeTrust = Annotated[bool | None, typer.Option("--trust-remote-code", help="Run code that ships with the target.")]
InitFrom = Annotated[Path | None, typer.Option("--init-from", help="A drafter of any trainer, to train further.")]
ReaderName = Literal["zlab", "vllm", "sglang", "llama.cpp", "speculators"]
DraftFolder = Annotated[Path, typer.Option("--draft", help="Exported drafter, checkpoint or run folder.")]
BaseUrl = Annotated[str | None, typer.Option("--base-url", help="A running server, up to and with /v1.")]
ServerModel = Annotated[str | None, typer.Option("--model", help="The target's name on the server.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable with the server's key; else OPENAI_API_KEY.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="1 keeps all.")]
TopK = Annotated[int, typer.Option(help="0 keeps all.")]
Seed = Annotated[int, typer.Option(help="Of sampling.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, tokens.")]

Out = Annotated[
    Path, typer.Option("--out", callback=new_folder, help="Folder to write; it must not exist or be empty.")
]
AnchorPredicts = Annotated[
    bool | None,
    typer.Option("--sample-from-anchor/--no-sample-from-anchor", help="Whether slot 0 predicts, if nothing says so."),
]
JsonOut = Annotated[
    Path | None, typer.Option("--json", callback=new_json, help="Also write the result as JSON to this file.")
]

HtmlOut = Annotated[Path | None, typer.Option("--html", callback=new_page, help="Also write a page to this file.")]


def main() -> None:
    """Entry point of the `draftline` command."""
    words = sys.argv[1:]
    debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], debug=debug))


def run(words: list[str], debug: bool = False) -> int:
    """Run one command and return its exit status."""
    _quiet_libraries()
    try:
        result = app(words, prog_name="draftline", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, debug)
    except DraftlineError as error:
        return _fail(str(error), error.exit_status, debug)
    except typer.TyperException as error:
        return _fail(_usage(error), 2, debug) if str(error) else 2  # no words at all: the help was printed
    except Exception as error:  # the border of the process: nothing is above
        line = " ".join(str(error).split())
        return _fail(f"unexpected {type(error).__name__}: {line} (add --debug for the traceback)", 1, debug)
    return result if isinstance(result, int) else 0


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the words, with the name of the option where the error knows it."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split()).replace("Value error, ", "").replace("Input should be", "it must be")
    return f"{message.partition(', unable to')[0]} (see draftline --help)"


def _fail(line: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"draftline: {line}", file=sys.stderr)
    return status


def _quiet_libraries() -> None:
    """Progress of ours is on stderr; that of libraries would be torn into it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Folder to write, or to continue in.")] = Path("quickstart"),
) -> None:
    """The whole job on the embedded target: answers, training, export, measurement; about three minutes.

    A second call goes on where the first one was interrupted.
    """
    from rich.console import Console

    from draftline.evaluate.table import result_table
    from draftline.jobs import quickstart as run_quickstart

    trained, result = run_quickstart(out)
    Console().print(result_table(result, str(out / "drafter")))
    if trained.heldout:
        print("held-out accuracy {accuracy:.3f}, streak at random anchors {streak:.2f}".format(**trained.heldout))


@app.command()
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
    from draftline.config import read_api_key
    from draftline.data.endpoint import Endpoint
    from draftline.data.pipeline import PrepareOptions
    from draftline.data.regenerate import GenerationSettings
    from draftline.data.render import MaskOptions
    from draftline.data.server import ServerSettings
    from draftline.jobs import prepare_data

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
    wanted = _target_config(target, target_dtype, device, trust_remote_code)
    report = prepare_data(wanted, [*data, *(more or [])], out, options, answers, max_length=max_length)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    write_json(json_out, report)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder that `draftline prepare` wrote.")],
    count: Annotated[int | None, typer.Option(min=1, help="Only the first conversations.")] = None,
    block_size: Annotated[int, typer.Option(min=2, help="Of the block that is drawn.")] = 8,
    html: HtmlOut = None,
    json_out: JsonOut = None,
) -> None:
    """Show conversations with their supervised tokens marked, and a block drawn."""
    from rich.console import Console

    from draftline.data.inspect import as_html, as_text, inspect_dataset

    views = inspect_dataset(folder, count=count, block_size=block_size)
    console = Console()
    console.print(as_text(views, color=console.is_terminal))
    write_json(json_out, [view.as_json() for view in views])
    if html is not None:
        write_file(html, as_html(folder, views))


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", help="Run folder.")],
    target: Annotated[
        str | None, typer.Option("--target", help="tiny, smollm2, a local Hugging Face folder or a hub name.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder that `draftline prepare` wrote.")] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="section.key=value words, see draftline/config.py.")
    ] = None,
    recipe: Recipe = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")] = None,
    init_from: InitFrom = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with its settings.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="Start in spite of audit findings with this code.")
    ] = None,
    target_dtype: Annotated[DtypeName | None, typer.Option("--target-dtype", help=DTYPE_HELP)] = None,
    device: Annotated[str | None, typer.Option("--device", help="Of both halves: auto, cpu, cuda:1, ...")] = None,
    trust_remote_code: MaybeTrust = None,
) -> None:
    """Audit the run, then train a drafter; hidden states go from target to drafter in memory."""
    from draftline.jobs import audit_gate, train_settings
    from draftline.run import train_run

    flags = {
        "target.name": target,
        "data.path": None if data is None else str(data),
        "drafter.init_from": None if init_from is None else str(init_from),
        "target.dtype": target_dtype,
        "target.device": device,
        "train.device": device,
        "target.trust_remote_code": trust_remote_code,
    }
    given = [f"{key}={_json(value)}" for key, value in flags.items() if value is not None]
    wanted = train_settings(out, [*given, *(settings or [])], recipe=recipe, config=config, resume=resume)
    print(_json(train_run(wanted, out, resume=resume, gate=audit_gate(allow or [])).to_json()))


@app.command()
def audit(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER | key=value ...]",
            help="Run folder, checkpoint, or drafter of any trainer; or settings of a run to come.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="tiny, smollm2, a folder or a hub name; of a run: its own.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Prepared data of the run to come.")] = None,
    recipe: Recipe = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with settings of the run to come.")] = None,
    select: Annotated[list[str] | None, typer.Option("--select", help="Only this code or area (TGT, DRF002).")] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="Without this code or area.")] = None,
    sample_from_anchor: AnchorPredicts = None,
    json_out: JsonOut = None,
    target_dtype: Annotated[DtypeName | None, typer.Option("--target-dtype", help=DTYPE_HELP)] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = None,
    trust_remote_code: MaybeTrust = None,
) -> int:
    """Ask whether what is trained is what will be served: exit status 0 clean, 1 errors found, 2 could not run."""
    from rich.console import Console

    from draftline.jobs import audit_words

    of_a_run = {
        "target.name": target,
        "target.dtype": target_dtype,
        "target.device": device,
        "train.device": device,
        "target.trust_remote_code": trust_remote_code,
        "data.path": None if data is None else str(data),
    }
    flags = [f"{key}={_json(value)}" for key, value in of_a_run.items() if value is not None]
    report = audit_words(
        words or [],
        flags,
        recipe=recipe,
        config=config,
        sample_from_anchor=sample_from_anchor,
        select=select or (),
        ignore=ignore or (),
    )
    report.render(Console())
    write_json(json_out, report.to_json())
    return report.exit_status


@app.command()
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

    from draftline.config import read_api_key
    from draftline.data.endpoint import Endpoint
    from draftline.evaluate.sampling import Sampling
    from draftline.evaluate.server import ServerMeasurement
    from draftline.evaluate.server_result import server_table
    from draftline.evaluate.settings import EvaluationSettings, parse_template_options
    from draftline.evaluate.table import result_table
    from draftline.jobs import (
        evaluate_at_server,
        evaluate_drafter,
        parse_concurrency,
        prompts_to_evaluate,
        refuse_server_words,
        trained_mode,
    )

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
        target_config = _target_config(target, target_dtype, device, trust_remote_code)
        measured = evaluate_at_server(endpoint, target_config, asked, wanted)
        Console().print(server_table(measured))
        write_json(json_out, measured.to_json())
        return
    assert draft is not None
    live, drafter = _load_pair(target, draft, target_dtype, device, trust_remote_code)
    result = evaluate_drafter(live, drafter, asked, settings, trained_mode(draft), draft)
    Console().print(result_table(result, str(draft)))
    write_json(json_out, result.to_json())


@app.command()
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
    from draftline.evaluate.sampling import Sampling

    live, drafter = _load_pair(target, draft, target_dtype, device, trust_remote_code)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    answer = answer_prompt(live, drafter, text, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    print(answer.text)
    print(answer.counts(), file=sys.stderr)
    write_json(json_out, answer.to_json())


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="Run folder, checkpoint, or a drafter of another trainer.")],
    out: Out,
    target: Annotated[
        str | None, typer.Option("--target", help="Folder or hub name; the run's own if left out, which a run knows.")
    ] = None,
    reader: Annotated[ReaderName, typer.Option("--for", help="The program that will read it.")] = "zlab",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype")] = "bfloat16",
    target_path: Annotated[str | None, typer.Option(help="The target as the server will find it.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="JSON of `evaluate`, for the model card.")] = None,
    audit_json: Annotated[Path | None, typer.Option("--audit", help="JSON of `audit`, for the model card.")] = None,
    sample_from_anchor: AnchorPredicts = None,
    json_out: JsonOut = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the drafter for the program that will serve it, and check what was written."""
    from draftline.formats.exporting import Results, export_drafter, target_of_export
    from draftline.formats.facts import Given
    from draftline.targets.model import load_target

    keep_apart([json_out], [evaluation, audit_json])
    live = load_target(target_of_export(source, target, trust_remote_code))
    report = export_drafter(
        source=source,
        out=out,
        target=live,
        reader=reader,
        dtype=dtype,
        target_path=target_path,
        results=Results(evaluation=evaluation, audit=audit_json),
        given=Given(sample_from_anchor=sample_from_anchor),
    )
    print(report.command)
    write_json(json_out, report.to_json())


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="Folder of SpecForge, TorchSpec, ModelOpt, NeMo, speculators, z-lab.")],
    out: Out,
    target: Annotated[str | None, typer.Option("--target", help="Also check that it fits this target.")] = None,
    sample_from_anchor: AnchorPredicts = None,
    block_size: Annotated[int | None, typer.Option(min=2, help="If the folder does not say.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="If the folder does not say.")] = None,
    num_target_layers: Annotated[int | None, typer.Option(min=1, help="If the folder does not say.")] = None,
    json_out: JsonOut = None,
) -> None:
    """Rewrite another trainer's drafter in a format that every command here reads."""
    from draftline.config import TargetConfig
    from draftline.formats.exporting import import_drafter
    from draftline.formats.facts import Given
    from draftline.targets.model import load_target

    live = None if target is None else load_target(TargetConfig(name=target))
    given = Given(
        sample_from_anchor=sample_from_anchor,
        block_size=block_size,
        mask_token_id=mask_token_id,
        num_target_layers=num_target_layers,
    )
    report = import_drafter(source=source, out=out, target=live, given=given)
    print(report.folder)
    for note in report.notes:
        print(note, file=sys.stderr)
    write_json(json_out, report.to_json())


@app.command()
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders, CSV files or TensorBoard folders; the first is the baseline. Several seeds as a group: "
            "NAME=RUN,RUN,RUN or a quoted pattern 'runs/new-*'."
        ),
    ] = None,
    a: Annotated[list[str] | None, typer.Option("--a", help="A run of the baseline; repeat for each seed.")] = None,
    b: Annotated[list[str] | None, typer.Option("--b", help="A run of the other side; repeat for each seed.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Value of the verdict; repeat for what other logs call it.")
    ] = None,
    margin: Annotated[float, typer.Option("--margin", help="Smallest relative difference that matters.")] = 0.03,
    lower_is_better: Annotated[
        bool | None, typer.Option("--lower-is-better/--higher-is-better", help="If the name does not tell.")
    ] = None,
    html: HtmlOut = None,
    png: Annotated[
        Path | None, typer.Option("--png", callback=new_pictures, help="Draw the curves: a .png file, or a folder.")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Which runs learned more, how many times sooner, and how sure that is: better, same or worse."""
    from rich.console import Console

    from draftline.compare import compare_groups, name_groups
    from draftline.compare.view import as_page, as_pictures, as_text

    groups = name_groups(runs or [], a or [], b or [])
    keep_apart([html, png, json_out], [path for paths in groups.values() for path in paths])
    comparison = compare_groups(groups, metric=metric or (), margin=margin, lower_is_better=lower_is_better)
    files: dict[Path, str | bytes] = {} if png is None else {**as_pictures(comparison, png)}
    if html is not None:
        files[html] = as_page(comparison)
    Console().print(as_text(comparison))
    write_json(json_out, comparison.to_json())
    for path, content in files.items():
        write_file(path, content)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, also of a run that goes on.")],
    out: Annotated[
        Path | None, typer.Option("--out", callback=new_page, help="Page to write; default RUN/report.html.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None, typer.Option("--evaluation", help="JSON of `evaluate` for this run's drafter.")
    ] = None,
    audit_json: Annotated[
        Path | None, typer.Option("--audit", help="JSON of `audit`; default what `train` wrote.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page on 127.0.0.1 while the run goes on.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="With --watch; default a free one.")] = None,
) -> None:
    """Show a run on one HTML page: curves, speed, answers, audit, data, settings."""
    from draftline.report.document import report_page
    from draftline.report.watch import serve_page

    if watch and out is not None:
        raise ConfigError(f"--watch serves the page and writes no {out}: leave out one of the two")
    if port is not None and not watch:
        raise ConfigError(f"--port {port} is for --watch only: add it, or leave out --port")
    if watch:
        serve_page(folder, evaluation or (), audit_json, port or 0)
        return
    path = out or folder / "report.html"
    keep_apart([path], [*(evaluation or []), audit_json])
    write_file(path, report_page(folder, evaluation or (), audit_json))
    print(path)


def _target_config(name: str, dtype: DtypeName, device: str, trust_remote_code: bool) -> TargetConfig:
    from draftline.config import TargetConfig

    return TargetConfig(name=name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def _load_pair(
    name: str, draft: Path, dtype: DtypeName, device: str, trust_remote_code: bool
) -> tuple[Target, DFlashDraftModel]:
    from draftline.jobs import drafter_for
    from draftline.targets.model import load_target

    target = load_target(_target_config(name, dtype, device, trust_remote_code))
    return target, drafter_for(target, draft)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
