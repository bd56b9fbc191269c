"""Every option of every command, each written once.

A command has one record here (`TrainCommand`, ...). `commands/options.py` makes its words from the fields: the name is
the field's, or its `Flag`; type, default, least and largest value are the field's own; the help is the docstring below
it. Records inside a record are opened, so that a stage gets its settings (`Sampling`, `Given`, ...) as one object,
whoever calls it. What is a setting of a run has its default in `config.py`, and is only named here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from draftline.config import DataConfig, DrafterConfig, ExportDtype, Flag, Settings, StatesDtype, TargetConfig
from draftline.errors import ConfigError

TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
     "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
     "return_assistant_tokens_mask", "sanitize_control_tokens", "messages"}
)  # fmt: skip
"""What a template is called with anyway, so that no option may be named so."""

Reader = Literal["zlab", "vllm", "sglang", "llama.cpp", "speculators"]


@dataclass(frozen=True)
class Word:
    """Marks a field that is given by its place among the words, not by a name.

    Attributes:
        metavar: how the help names it, if not as the field is named.
    """

    metavar: str | None = None


@dataclass(frozen=True)
class Written:
    """Marks a place that the command writes to, which is checked before the work begins."""

    kind: Literal["folder", "json", "page", "pictures"]


@dataclass(frozen=True)
class Read:
    """Marks what the command reads, and which is looked at before torch is loaded."""

    kind: Literal["target", "prepared", "drafter", "proof"]


@dataclass(frozen=True)
class Sets:
    """Marks an option that sets these settings of a run, and that leaves them alone where it is not given."""

    keys: tuple[str, ...]


JsonFile = Annotated[
    Path | None,
    Flag("--json"),
    Written("json"),
    Field(description="Also write the result as JSON to this file."),
]
Page = Annotated[Path | None, Written("page"), Field(description="Also write a page to this file.")]
NewFolder = Annotated[Path, Written("folder"), Field(description="Folder to write; it must not exist or be empty.")]


class NamedTarget(TargetConfig):
    """A target that has to be named."""

    name: Annotated[str, Flag("--target"), Read("target")]
    """tiny, smollm2, a local Hugging Face folder or a hub name."""


class RunFlags(Settings):
    """Settings of a run that have an option of their own."""

    target: Annotated[str | None, Sets(("target.name",))] = None
    """tiny, smollm2, a local Hugging Face folder or a hub name; of a run: its own."""
    data: Annotated[Path | None, Sets(("data.path",))] = None
    """Folder that `draftline prepare` wrote."""
    target_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"] | None, Sets(("target.dtype",))] = None
    """auto: float32 on CPU, else as stored."""
    device: Annotated[str | None, Sets(("target.device", "train.device"))] = None
    """Of both halves: auto, cpu, cuda:1, ..."""
    trust_remote_code: Annotated[bool | None, Flag("--trust-remote-code"), Sets(("target.trust_remote_code",))] = None
    """Run code that ships with the target."""
    chat_template: Annotated[Path | None, Sets(("target.chat_template",))] = None
    """File with a chat template instead of the target's."""

    def words(self) -> list[str]:
        """What was given, as `section.key=value` words."""
        found = []
        for name, field in type(self).model_fields.items():
            value = self.model_dump(mode="json")[name]
            for mark in field.metadata:
                if isinstance(mark, Sets) and value is not None:
                    found += [f"{key}={json.dumps(value, ensure_ascii=False)}" for key in mark.keys]
        return found


class TrainFlags(RunFlags):
    """Settings of a run that have an option of their own in `train`."""

    init_from: Annotated[Path | None, Sets(("drafter.init_from",))] = None
    """A drafter of any trainer, to train further."""
    states: Annotated[Path | None, Sets(("pipeline.states_path",))] = None
    """Folder of captured states, as `draftline capture` writes it."""


def parse_template_options(words: Any) -> Any:
    """Keyword arguments of the chat template from `KEY=VALUE` words, values being YAML; a dictionary stays as it is.

    Raises:
        ConfigError: a word is none, or its key is not the template's.
    """
    if isinstance(words, dict):
        return words
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier() or key in TEMPLATE_ARGUMENTS:
            raise ConfigError(f"--template-option {word!r} is not an option of a chat template: write KEY=VALUE")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--template-option {word!r}: {value!r} is not a YAML value: quote it") from error
    return options


TemplateOptions = Annotated[dict[str, Any], BeforeValidator(parse_template_options)]
"""Keyword arguments of a chat template; as an option, KEY=VALUE words."""


class ServerOptions(Settings):
    """A server with the OpenAI interface."""

    base_url: str | None = None
    """A running server, up to and with /v1."""
    model: str | None = None
    """The target's name on the server."""
    api_key_env: str | None = None
    """Environment variable with the server's key; else OPENAI_API_KEY."""


class MaskOptions(Settings):
    """What is supervised."""

    supervise: Literal["answers", "last", "all"] = "answers"
    """What is learned: every answer, only the last one, or all text (other roles and the template's markup too)."""
    reasoning: bool = True
    """Do not learn the reasoning inside answers."""


class PrepareOptions(Settings):
    """How rows become samples."""

    mask: MaskOptions = MaskOptions()
    truncation: Literal["right", "left"] = "right"
    """Side that is cut."""
    max_length: Annotated[int, Flag(None)] = Field(DataConfig().max_length, ge=2)
    """Longest sample, tokens; longer ones are cut."""
    template_options: Annotated[TemplateOptions, Flag("--template-option")] = Field(default_factory=dict)
    """KEY=VALUE for the chat template: enable_thinking=false."""
    system_prompt: str | None = None
    """Text or file, for conversations that have none."""
    heldout: int = Field(0, ge=0)
    """Prompts kept out of training, in OUT/heldout."""
    min_supervised: int = Field(1, ge=1)
    """Fewest supervised tokens of a row."""
    strip_images: bool = False
    """Keep rows with images, without them."""
    deduplicate: Annotated[bool, Flag(None)] = True
    """Drop rows that are equal to an earlier one."""
    split: str | None = None
    """Of Hugging Face data sets; default train."""
    max_unreadable: float = Field(0.01, ge=0, le=1)
    """Share of rows that may be unreadable."""
    strict: bool = False
    """Fail if any row is dropped."""


class Sampling(Settings):
    """Temperature first, then top-k, then top-p over what is left, as transformers' generation does."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """This many most likely tokens; 0 keeps all."""

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature {self.temperature} is not a temperature: give 0 (greedy) or a positive number"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p} is not a probability: give a number above 0, at most 1 (keeps all)")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is negative: give 0 (keeps all) or a number of tokens")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def describe(self) -> str:
        """In words, without what has no effect."""
        if self.greedy:
            return "greedy"
        top_k = f", top-k {self.top_k}" if self.top_k else ""
        return f"temperature {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "") + top_k


class GenerationSettings(Settings):
    """How the target answers the prompts of its training data.

    Each answer has a generator of its own, seeded by its key, so that no answer depends on what was asked beside it.
    """

    max_new_tokens: int = Field(1024, ge=1)
    """Longest regenerated answer, tokens; one that reaches it is kept as cut."""
    batch_size: int = Field(16, ge=1)
    """Answers that are regenerated at the same time."""
    answers_per_prompt: int = Field(1, ge=1)
    """Sampled answers to each prompt; with --temperature."""
    sampling: Sampling = Sampling()
    seed: int = 0
    """Of sampling."""
    template_options: Annotated[dict[str, Any], Flag(None)] = Field(default_factory=dict)
    """Keyword arguments of the chat template for all rows; a row's own come on top."""

    @model_validator(mode="after")
    def _check(self) -> GenerationSettings:
        if self.answers_per_prompt > 1 and self.sampling.greedy:
            raise ConfigError(
                f"{self.answers_per_prompt} greedy answers to one prompt would all be the same: give --temperature, "
                "or leave out --answers-per-prompt"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """The part that can change an answer. Template options act through the prompt ids."""
        sampled = {} if self.sampling.greedy else {**self.sampling.model_dump(), "seed": self.seed}
        return {"max_new_tokens": self.max_new_tokens, "temperature": 0, **sampled}


class ServerSettings(GenerationSettings):
    """How a server is asked for the answers; template options are sent as `chat_template_kwargs`."""

    model: str
    """Name of the model on the server."""
    retries: int = 5
    """Repetitions of a request before giving up, however soon they fail."""
    patience: float = 0.0
    """Seconds in which a server that is busy or away is asked again."""

    def identity(self) -> dict[str, Any]:
        """The part that can change an answer, without the address: a target may move between machines."""
        return {
            **super().identity(),
            "model": self.model,
            "temperature": self.sampling.temperature,
            "template_options": self.template_options,
        }


class EvaluationSettings(Settings):
    """How prompts are put to a target, and how it answers with a drafter.

    Each turn has a generator of its own, seeded by `seed` and its place, so that no answer depends on what was asked
    before it.
    """

    max_new_tokens: int = Field(256, ge=1)
    """Longest answer, tokens."""
    num_speculative_tokens: int | None = Field(None, ge=1)
    """Drafted tokens that the target checks per forward; none: all of a block."""
    sampling: Sampling = Sampling()
    seed: int = 0
    """Of sampling."""
    system_prompt: str | None = None
    """Text or file, for prompts that have none of their own."""
    template_options: Annotated[TemplateOptions, Flag("--template-option")] = Field(default_factory=dict)
    """KEY=VALUE for the chat template: enable_thinking=false."""


class ServerMeasurement(Settings):
    """What is asked of a server that is measured."""

    model: str | None
    """Its name on the server; none: the first that it serves."""
    max_new_tokens: int
    """Longest answer, tokens."""
    system_prompt: str | None = None
    """For prompts that have none of their own."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the chat template; a prompt's own come on top."""
    concurrency: tuple[int, ...]
    """Requests under way at once, one level each."""


class SlotLayout(Settings):
    """A fact that the user states where a folder leaves it out."""

    sample_from_anchor: bool | None = None
    """Whether slot 0, the anchor, predicts too, if nothing says so."""


class Given(SlotLayout):
    """Facts that the user states because a folder leaves them out."""

    block_size: int | None = Field(None, ge=2)
    """Slots of a block, if the folder does not say."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token that stands for slots to be predicted, if the folder does not say."""
    num_target_layers: int | None = Field(None, ge=1)
    """Depth of the target, if the folder does not say."""


class Results(Settings):
    """Measurements for the model card."""

    evaluation: Path | None = None
    """JSON of `evaluate`, for the model card."""
    audit: Path | None = None
    """JSON of `audit`, for the model card."""


class ExportSettings(Settings):
    """What an export is written for."""

    reader: Annotated[Reader, Flag("--for")] = "zlab"
    """The program that will read it."""
    dtype: ExportDtype = "bfloat16"
    """Of the weights."""
    target_path: str | None = None
    """The target as the server will find it."""
    results: Results = Results()


class CompareSettings(Settings):
    """What a verdict is about."""

    metric: tuple[str, ...] = ()
    """Value of the verdict; repeat for what other logs call it."""
    margin: float = 0.03
    """Smallest relative difference that matters."""
    lower_is_better: Annotated[bool | None, Flag("--lower-is-better/--higher-is-better")] = None
    """If the name does not tell."""


class QuickstartCommand(Settings):
    """Options of `draftline quickstart`."""

    out: Path = Path("quickstart")
    """Folder to write, or to continue in."""


class PrepareCommand(Settings):
    """Options of `draftline prepare`."""

    target: NamedTarget
    data: tuple[str, ...]
    """File, folder, pattern, hub data set, or - for stdin."""
    out: Path
    """Folder for the prepared data."""
    more: Annotated[tuple[str, ...], Word()] = ()
    """Further files, as after --data."""
    regenerate: bool = False
    """The target answers the prompts itself."""
    max_length: int | None = Field(
        None,
        ge=2,
        description=f"Longest conversation, tokens; default {DataConfig().max_length} or what the target reads.",
    )
    answers: GenerationSettings
    server: ServerOptions
    patience: float = Field(120.0, ge=0)
    """Seconds to wait for a server that is busy or away."""
    rows: PrepareOptions
    json_file: JsonFile = None


class InspectCommand(Settings):
    """Options of `draftline inspect`."""

    folder: Annotated[Path, Word(), Read("prepared")]
    """Folder that `draftline prepare` wrote."""
    count: int | None = Field(None, ge=1)
    """Only the first conversations."""
    block_size: int = Field(DrafterConfig().block_size, ge=2)
    """Of the block that is drawn."""
    html: Page = None
    json_file: JsonFile = None


class TrainCommand(Settings):
    """Options of `draftline train`."""

    out: Path
    """Run folder."""
    settings: Annotated[tuple[str, ...], Word()] = ()
    """section.key=value words, see draftline/config.py."""
    flags: TrainFlags
    recipe: str | None = None
    """default, published, small-model or quickstart."""
    config: Path | None = None
    """YAML file with settings."""
    resume: bool = False
    """Continue the run in --out, with its settings."""
    extend: int | None = Field(None, ge=1)
    """Go on with the finished run in --out for so many more passes."""
    allow: tuple[str, ...] = ()
    """Start in spite of audit findings with this code."""


class CaptureCommand(Settings):
    """Options of `draftline capture`."""

    out: Path
    """Folder for the states; what is there already is kept."""
    settings: Annotated[tuple[str, ...], Word()] = ()
    """section.key=value words, see draftline/config.py."""
    flags: RunFlags
    recipe: str | None = None
    """default, published, small-model or quickstart."""
    config: Path | None = None
    """YAML file with settings."""
    loops: int = Field(1, ge=1)
    """Processes that capture and write."""
    dtype: StatesDtype | None = None
    """How states are kept: target (as it gives them), bfloat16, or fp8."""
    repair: bool = False
    """Read all that is there, and capture again what is damaged."""
    allow: tuple[str, ...] = ()
    """Capture in spite of audit findings with this code."""


class PlanCommand(Settings):
    """Options of `draftline plan`."""

    settings: Annotated[tuple[str, ...], Word()] = ()
    """section.key=value words, see draftline/config.py."""
    flags: RunFlags
    recipe: str | None = None
    """default, published, small-model or quickstart."""
    config: Path | None = None
    """YAML file with settings."""
    mean_length: int | None = Field(None, ge=2)
    """Without --data: tokens of a conversation."""
    conversations: int = Field(100_000, ge=1)
    """With --mean-length: how many there are."""
    answer_share: float = Field(0.6, gt=0, le=1)
    """With --mean-length: share of the tokens that answers are."""
    accelerator: str = "here"
    """What it runs on: here (measured), a100, h100, h200, b200, mi300x, ..."""
    devices: int = Field(1, ge=1)
    """How many of them each rank has; with one, both halves share it."""
    ranks: int = Field(1, ge=1)
    """How many ranks torchrun starts, each with its own devices."""
    efficiency: float = Field(0.4, gt=0, le=1)
    """Share of an accelerator's peak that is reached."""
    json_file: JsonFile = None


class AuditCommand(Settings):
    """Options of `draftline audit`."""

    words: Annotated[tuple[str, ...], Word("[FOLDER | key=value ...]")] = ()
    """Run folder, checkpoint, or drafter of any trainer; or settings of a run to come."""
    flags: RunFlags
    recipe: str | None = None
    """default, published, small-model or quickstart."""
    config: Path | None = None
    """YAML file with settings of the run to come."""
    select: tuple[str, ...] = ()
    """Only this code or area (TGT, DRF002)."""
    ignore: tuple[str, ...] = ()
    """Without this code or area."""
    layout: SlotLayout
    json_file: JsonFile = None


class EvaluateCommand(Settings):
    """Options of `draftline evaluate`."""

    target: NamedTarget
    prompts: tuple[Path, ...] = ()
    """JSONL, {"turns": ["..."]} per line; may be repeated."""
    task: tuple[str, ...] = ()
    """gsm8k, mt-bench, ... from the hub, or gsm8k=FILE; repeatable."""
    draft: Path | None = None
    """Exported drafter, checkpoint or run folder."""
    server: ServerOptions
    concurrency: str | None = None
    """With --base-url: requests at once, a level each: 1,4,16; default 1."""
    limit: int | None = Field(None, ge=1)
    """Only the first prompts of each file."""
    fast: bool = False
    """Answers in batches, and the drafter's blocks counted along them: the decoder's figures, but no speed."""
    batch_size: int | None = Field(None, ge=1)
    """With --fast: answers made at the same time; default 16."""
    settings: EvaluationSettings
    json_file: JsonFile = None


class VerifyCommand(Settings):
    """Options of `draftline verify`."""

    folder: Annotated[Path, Word(), Read("proof")]
    """Exported drafter, with its proof."""
    server: ServerOptions
    limit: int | None = Field(None, ge=1)
    """Only the first prompts of the proof."""
    json_file: JsonFile = None


class GenerateCommand(Settings):
    """Options of `draftline generate`."""

    target: NamedTarget
    draft: Path
    """Exported drafter, checkpoint or run folder."""
    words: Annotated[tuple[str, ...], Word("PROMPT")] = ()
    """What the user says; - reads standard input."""
    prompt: str | None = None
    """The same, as an option."""
    settings: EvaluationSettings
    json_file: JsonFile = None


class ExportCommand(Settings):
    """Options of `draftline export`."""

    source: Annotated[Path, Word(), Read("drafter")]
    """Run folder, checkpoint, or a drafter of another trainer."""
    out: NewFolder
    target: Annotated[str | None, Read("target")] = None
    """Folder or hub name; the run's own if left out, which a run knows."""
    settings: ExportSettings
    layout: SlotLayout
    json_file: JsonFile = None
    trust_remote_code: bool = False
    """Run code that ships with the target."""


class ImportCommand(Settings):
    """Options of `draftline import`."""

    source: Annotated[Path, Word(), Read("drafter")]
    """Folder of SpecForge, TorchSpec, ModelOpt, NeMo, speculators, z-lab."""
    out: NewFolder
    target: Annotated[str | None, Read("target")] = None
    """Also check that it fits this target."""
    given: Given
    json_file: JsonFile = None


class CompareCommand(Settings):
    """Options of `draftline compare`."""

    runs: Annotated[tuple[str, ...], Word()] = ()
    """Run folders, CSV files or TensorBoard folders; the first is the baseline. Several seeds as a group:
    NAME=RUN,RUN,RUN or a quoted pattern 'runs/new-*'."""
    a: tuple[str, ...] = ()
    """A run of the baseline; repeat for each seed."""
    b: tuple[str, ...] = ()
    """A run of the other side; repeat for each seed."""
    settings: CompareSettings
    html: Page = None
    png: Annotated[Path | None, Written("pictures")] = None
    """Draw the curves: a .png file, or a folder."""
    json_file: JsonFile = None


class ReportCommand(Settings):
    """Options of `draftline report`."""

    folder: Annotated[Path, Word("RUN")]
    """Run folder, also of a run that goes on."""
    out: Annotated[Path | None, Written("page")] = None
    """Page to write; default RUN/report.html."""
    evaluation: tuple[Path, ...] = ()
    """JSON of `evaluate` for this run's drafter."""
    audit: Path | None = None
    """JSON of `audit`; default what `train` wrote."""
    watch: bool = False
    """Serve the page on 127.0.0.1 while the run goes on."""
    port: int | None = Field(None, ge=0, le=65535)
    """With --watch; default a free one."""
