"""The proof that travels with a drafter: `draftline_proof.json` beside its weights.

It says what the drafter does on some prompts, decoded from the folder as it was written, and what the folder consists
of: a digest of every tensor, and the meaning of `config.json`. Whoever has the folder and the target can ask again
(`draftline audit`), and so can whoever has only the address of a server (`draftline verify`).

What is compared, in this order: tensors (the first that differs is named), settings, then the decoding (the first
block that differs). Near ties are told from faults by the gap of the logits, see `evaluate.replay`. Where tensors
cannot be compared, because somebody has converted the folder to another number format, the decoding decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftline.config import DFlashConfig
from draftline.data.conversations import hash_json
from draftline.errors import CheckpointError, DataError, TargetError
from draftline.evaluate.replay import ROUNDING, KeptAnswer, Replay, keep_answers, replay_answers
from draftline.formats.files import DrafterFiles, canonical, read_files
from draftline.formats.folder import PROOF_FILE
from draftline.formats.load import load_drafter
from draftline.storage import write_text
from draftline.targets.model import Target, stop_token_ids, weights_fingerprint

VERSION = 1

MAX_NEW_TOKENS = 32
"""Longest answer in a proof."""

ENOUGH_FORWARDS = 200
"""Forwards of the target after which no further prompt is asked: some 20 s on one core with a target of 135M."""

OTHER_FORMAT = 5
"""So many times the rounding where the target computes in another number format than then: its states are others, not
only their last bits. Measured: 0.06 of the largest logit between float32 and bfloat16, 0.16 with a fault."""

UNMOVED = 0.9
"""Share of the drafted tokens, and of the target's own, that near ties and other number formats leave as they are."""

_NOT_COMPUTED = {"bos_token_id", "eos_token_id", "initializer_range"}
"""Fields of a drafter's shape that change nothing that it computes, and that not every format has a place for."""


PromptSource = Literal["held-out", "training", "proof", "embedded", "random"]
"""The run's data, the proof of the folder that was exported, the prompts that ship with Draftline; random tokens for a
target without a chat template."""


@dataclass(frozen=True)
class ProofPrompts:
    """What is asked: prompts as token ids, and where they come from."""

    source: PromptSource
    ids: list[list[int]]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ProvenTarget(_Record):
    """The target that answered."""

    name: str
    fingerprint: str
    """`weights_fingerprint` of the weights as they were loaded."""
    rounded_fingerprint: str
    """The same of the weights rounded to bfloat16: equal however the target is loaded."""


class ProvenTokenizer(_Record):
    """The meaning of the token ids."""

    vocabulary: str
    """SHA-256 of all tokens with their ids."""
    vocab_size: int = Field(ge=1)
    """Tokens, without padding rows of the embedding table."""


class ProvenDecoding(_Record):
    """How the prompts were chosen and answered: greedily."""

    prompts: PromptSource
    max_new_tokens: int = Field(ge=1)
    stop_token_ids: tuple[int, ...]


class ProvenPrecision(_Record):
    """Where the decoding holds token by token; elsewhere only its figures do."""

    target_dtype: Literal["float64", "float32", "bfloat16", "float16"]
    drafter_dtype: Literal["float32", "bfloat16", "float16"]
    """Of the weights in the folder; they are computed with in float32."""
    device: str
    torch: str
    transformers: str


class ProvenTensor(_Record):
    """What identifies a tensor."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Over its number format, its shape and its bytes."""


class Proof(_Record):
    """What an exported drafter does, and what it consists of."""

    version: Literal[1]
    target: ProvenTarget
    tokenizer: ProvenTokenizer | None
    """None where the target has none."""
    decoding: ProvenDecoding
    precision: ProvenPrecision
    shape: dict[str, Any]
    """What `config.json` means: the drafter's whole shape, as `DFlashConfig` has it."""
    tensors: dict[str, ProvenTensor]
    """Every tensor of the folder, under its name there."""
    answers: tuple[KeptAnswer, ...]

    def text(self) -> str:
        """The file: one line an entry, one line an answer, and a digest over all of it."""
        tree = self.model_dump(mode="json")
        answers = ",\n".join("  " + _compact(answer) for answer in tree["answers"])
        lines = [f' "{name}": {_compact(value)}' for name, value in tree.items() if name != "answers"]
        lines += [f' "answers": [\n{answers}\n ]', f' "digest": "{hash_json(tree)}"']
        return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class FileDifferences:
    """What a folder holds otherwise than its proof says.

    Attributes:
        lines: one a difference, tensors first.
        notes: what is no difference: tensors that were stored in another number format.
        lossy: whether tensors were converted so that their values cannot be compared.
    """

    lines: list[str]
    notes: list[str]
    lossy: bool = False


def write_proof(folder: Path, target: Target, prompts: ProofPrompts) -> str | None:
    """Decode prompts with the drafter that lies in a folder, and write its proof there.

    Args:
        folder: a drafter's folder; what is read back from it is what is decoded.
        prompts: what is asked.

    Returns:
        None, or why there is no proof: this target cannot be decoded here.

    Raises:
        CheckpointError: what lies there cannot be read.
        StorageError: the file cannot be written.
    """
    loaded, files = load_drafter(folder, target=target), read_files(folder)
    stops = tuple(sorted(_stop_token_ids(target)))
    drafter = loaded.draft_model.to(target.device)
    try:
        kept = keep_answers(target, drafter, prompts.ids, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stops)
        answers = tuple(_until_enough(kept))
    except (TargetError, DataError) as error:
        return f"The folder has no proof: {error}."
    proof = Proof(
        version=1,
        target=ProvenTarget(
            name=target.name,
            fingerprint=weights_fingerprint(target.model),
            rounded_fingerprint=weights_fingerprint(target.model, torch.bfloat16),
        ),
        tokenizer=None if target.tokenizer is None else _tokenizer(target.tokenizer),
        decoding=ProvenDecoding(prompts=prompts.source, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stops),
        precision=ProvenPrecision(
            target_dtype=_name(target.dtype),
            drafter_dtype=_name(loaded.stored_dtype),
            device=target.device.type,
            torch=torch.__version__,
            transformers=transformers.__version__,
        ),
        shape=_shape(loaded.config),
        tensors={name: _digest(tensor) for name, tensor in sorted(files.tensors.items())},
        answers=answers,
    )
    write_text(folder / PROOF_FILE, proof.text())
    return None


def read_proof(folder: Path) -> Proof | None:
    """The proof in a drafter's folder; None if there is none, as in folders of other programs and older ones of ours.

    Raises:
        CheckpointError: it was written by a newer version, changed afterwards, damaged, or has no prompts.
    """
    path = folder / PROOF_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_AGAIN}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("version"), int):
        raise CheckpointError(f"{path} is damaged (it has no version): {_AGAIN}")
    if tree["version"] > VERSION:
        raise CheckpointError(
            f"{path} has version {tree['version']}, this Draftline reads {VERSION}: it was written by a newer one; "
            "use that"
        )
    if not tree.get("answers"):
        raise CheckpointError(f"{path} has no prompts and proves nothing: {_AGAIN}")
    digest = tree.pop("digest", None)
    if digest != hash_json(tree):
        raise CheckpointError(f"{path} was changed after it was written (its own digest does not fit): {_AGAIN}")
    try:
        return Proof.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged ({place}: {first['msg']}): {_AGAIN}") from error


def other_target(proof: Proof, target: Target) -> str | None:
    """Why a proof says nothing of a target: it has other weights, or its token ids mean something else."""
    written, found = _fingerprints(proof, target)
    if found != written:
        return (
            f"it is of a target with other weights ({proof.target.name}, fingerprint {written[:12]}; "
            f"{target.name} has {found[:12]})"
        )
    if proof.tokenizer is not None and target.tokenizer is not None:
        here = _tokenizer(target.tokenizer)
        if here != proof.tokenizer:
            return (
                f"it is of another tokenizer ({proof.tokenizer.vocab_size:,} tokens, vocabulary "
                f"{proof.tokenizer.vocabulary[:12]}; {target.name} has {here.vocab_size:,}, {here.vocabulary[:12]})"
            )
    return None


def file_differences(proof: Proof, folder: Path, config: DFlashConfig) -> FileDifferences:
    """Compare what lies in a folder with its proof.

    Args:
        config: what the folder's `config.json` means.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    tensors, written, found = tensor_differences(proof, read_files(folder)), proof.shape, _shape(config)
    settings = [
        f"config.json: {name} reads as {found[name]!r}, the proof has {written[name]!r}"
        for name in written
        if name in found and name not in _NOT_COMPUTED and found[name] != written[name]
    ]
    return replace(tensors, lines=[*tensors.lines, *settings])


def replay_decoding(proof: Proof, folder: Path, target: Target) -> Replay:
    """Decode the proof's prompts again with the drafter in a folder.

    Raises:
        CheckpointError: the folder cannot be read.
        TargetError: it belongs to another target, or this one cannot be decoded here.
    """
    loaded = load_drafter(folder, target=target)
    return replay_answers(
        target,
        loaded.draft_model.to(target.device),
        proof.answers,
        max_new_tokens=proof.decoding.max_new_tokens,
        stop_token_ids=proof.decoding.stop_token_ids,
        step_by_step=not same_format(proof, target),
    )


def decoding_differences(proof: Proof, replay: Replay, target: Target, *, lossy: bool = False) -> list[str]:
    """What a replay gave that rounding does not explain, one line each.

    Args:
        lossy: the drafter's weights were converted since.
    """
    formats = {proof.precision.target_dtype, _name(target.dtype)} | ({"bfloat16"} if lossy else set())
    coarsest = max(formats, key=ROUNDING.__getitem__)
    rounding = ROUNDING[coarsest] * (1 if same_format(proof, target) else OTHER_FORMAT)
    faults = [departure for departure in replay.departures if not departure.is_tie(rounding)]
    lines = [departure.sentence() for departure in faults]
    forwards = ((proof.answers[index].target_forwards, index, found) for index, found in replay.astray)
    lines += [f"prompt {i + 1} takes {found} forwards, expected {wanted}" for wanted, i, found in forwards]
    for drafted, share in ((True, replay.equal_drafted), (False, replay.equal_said)):
        if share < UNMOVED and not lines:
            first = next(departure for departure in replay.departures if (departure.block is not None) == drafted)
            what = "drafted tokens" if drafted else "tokens of the target"
            lines.append(
                f"{share:.1%} of the {what} are those of the proof, at least {UNMOVED:.0%} are with rounding to "
                f"{coarsest} alone; {first.sentence()}"
            )
    return lines


def same_format(proof: Proof, target: Target) -> bool:
    """Whether the proof holds token by token: the target computes in the number format that it did then."""
    return _name(target.dtype) == proof.precision.target_dtype


_AGAIN = "restore the file, or export the drafter again"


def _until_enough(answers: Iterator[KeptAnswer]) -> Iterator[KeptAnswer]:
    forwards = 0
    for answer in answers:
        yield answer
        forwards += answer.target_forwards
        if forwards >= ENOUGH_FORWARDS:
            return


def tensor_differences(proof: Proof, files: DrafterFiles) -> FileDifferences:
    """Compare the tensors of a folder with its proof."""
    lines = [f"{name} is missing" for name in sorted(proof.tensors.keys() - files.tensors.keys())]
    lines += [f"{name} is not in the proof" for name in sorted(files.tensors.keys() - proof.tensors.keys())]
    converted, lossy = [], []
    for name, tensor in sorted(files.tensors.items()):
        written = proof.tensors.get(name)
        if written is None or _digest(tensor) == written:
            continue
        stored = _name(tensor.dtype)
        if list(tensor.shape) != list(written.shape):
            lines.append(f"{name} is {list(tensor.shape)}, the proof has {list(written.shape)}")
        elif stored == written.dtype:
            lines.append(f"{name} has other values than the proof")
        elif not tensor.is_floating_point() or written.dtype not in ROUNDING:
            lines.append(f"{name} is {stored}, the proof has {written.dtype}")
        elif torch.finfo(tensor.dtype).bits <= torch.finfo(_dtype(written.dtype)).bits:
            lossy.append((name, stored, written.dtype))
        elif _same_values(tensor, written):
            converted.append((name, stored, written.dtype))
        else:
            lines.append(f"{name} is {stored}, the proof has {written.dtype}, and has other values")
    notes = []
    for names, effect in ((converted, "its values are the same"), (lossy, "its values cannot be compared")):
        if names:
            name, stored, before = names[0]
            others = f" and {len(names) - 1} others were" if len(names) > 1 else " was"
            notes.append(f"{name}{others} converted from {before} to {stored}: {effect}")
    return FileDifferences(lines, notes, bool(lossy))


def _same_values(tensor: Tensor, written: ProvenTensor) -> bool:
    """Whether a tensor in a wider number format is exactly the written one."""
    narrow = tensor.to(_dtype(written.dtype))
    return torch.equal(narrow.to(tensor.dtype), tensor) and _digest(narrow) == written


def _digest(tensor: Tensor) -> ProvenTensor:
    dtype, shape = _name(tensor.dtype), list(tensor.shape)
    digest = hashlib.sha256(f"{dtype} {shape}\n".encode())
    flat = tensor.detach().cpu().contiguous().flatten()
    digest.update(flat.view(torch.uint8).numpy().data)
    return ProvenTensor(dtype=dtype, shape=tuple(shape), sha256=digest.hexdigest())


def _shape(config: DFlashConfig) -> dict[str, Any]:
    shape: dict[str, Any] = canonical(config).model_dump(mode="json")
    return shape


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> ProvenTokenizer:
    """By its vocabulary alone: what else a tokenizer does is between a text and the ids that a proof has."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    return ProvenTokenizer(vocabulary=hash_json(vocabulary), vocab_size=len(vocabulary))


def _fingerprints(proof: Proof, target: Target) -> tuple[str, str]:
    """Of the target that was written down and of this one, comparable: as loaded, else rounded to bfloat16."""
    if same_format(proof, target):
        return proof.target.fingerprint, weights_fingerprint(target.model)
    if "float16" in (_name(target.dtype), proof.precision.target_dtype):
        return "", ""  # rounded twice, equal weights may differ: the decoding decides
    return proof.target.rounded_fingerprint, weights_fingerprint(target.model, torch.bfloat16)


def _stop_token_ids(target: Target) -> frozenset[int]:
    return frozenset() if target.tokenizer is None else stop_token_ids(target.model, target.tokenizer)


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = vars(torch)[name]
    return found


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
