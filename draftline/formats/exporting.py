"""`draftline export` and `draftline import`: from a folder that holds a drafter to one that a program serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftline.config import ExportDtype, TargetConfig
from draftline.draft.block import Blocks, drafted_states
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ConfigError
from draftline.formats.card import FLOAT16_MAX, CardFacts, Training, model_card, trained_mode
from draftline.formats.check import EXPORT_CHECKS
from draftline.formats.load import LoadedDrafter, load_drafter
from draftline.formats.programs import (
    Form,
    Serving,
    format_for,
    formats_for,
    readers_of,
    refuse_unserved,
    serving_command,
    serving_notes,
)
from draftline.formats.proof import write_proof
from draftline.formats.proof_prompts import choose_prompts
from draftline.formats.write import export_speculators, export_zlab
from draftline.options import ExportSettings, Given
from draftline.records import Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import TINY_FOLDER, Target
from draftline.train.checkpoint import read_record, run_of
from draftline.train.run_folder import RunFolder, checkpoint_folder

_TOKENS = 64


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        format: `zlab` or `speculators`.
        checks: what was read back and compared.
        command: how to serve it.
        notes: what to know about it, one sentence each.
    """

    folder: Path
    format: Form
    dtype: ExportDtype
    checks: tuple[str, ...]
    command: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "folder": str(self.folder),
            "format": self.format,
            "dtype": self.dtype,
            "checks": list(self.checks),
            "command": self.command,
            "notes": list(self.notes),
        }


def target_of_export(source: Path, name: str | None = None, trust_remote_code: bool = False) -> TargetConfig:
    """The target to load for an export: the one that is named, else the one that the run in `source` was trained for.

    Args:
        source: a run, a checkpoint, or any folder that `import` reads.
        name: wins over what the run knows, its dtype and device among it.
        trust_remote_code: allowed besides by the settings of a run that was started with it.

    Raises:
        CheckpointError: the run's own record cannot be read.
        ConfigError: no target is named, and `source` is not a run that knows one.
    """
    if name is not None:
        return TargetConfig(name=name, trust_remote_code=trust_remote_code)
    checkpoint = checkpoint_folder(source)
    if checkpoint is None:
        raise ConfigError(f"{source} does not say where its target is: give --target")
    known = read_record(checkpoint).run_config.target
    return known.model_copy(update={"trust_remote_code": trust_remote_code or known.trust_remote_code})


def export_drafter(
    *,
    source: Path,
    out: Path,
    target: Target,
    settings: ExportSettings | None = None,
    given: Given | None = None,
    proven: bool = True,
) -> ExportReport:
    """Write what a program needs to serve the drafter in `source`, checked, with its card, proof and command.

    Args:
        source: a run, a checkpoint, or any folder that `import` reads.
        target: what the drafter was trained for; it is checked that it fits.
        settings: reader `speculators` writes that format, and so does `vllm` for a reduced vocabulary; all else is
            z-lab's.
        given: facts that the source leaves out.
        proven: whether a proof comes with it; the audit's own short run leaves it out.

    Raises:
        CheckpointError: there is no usable drafter in `source`.
        TargetError: it belongs to another target.
        ExportError: the format cannot express it, or what was read back differs.
        StorageError: `out` is not empty or cannot be written.
    """
    settings = settings or ExportSettings()
    reader, dtype, results = settings.reader, settings.dtype, settings.results
    loaded, run = load_drafter(source, given, target), run_of(source)
    refuse_unserved(reader, loaded.config)
    largest = largest_activation(loaded.draft_model, target)
    form = format_for(reader, loaded.config)
    serving = Serving(str(out), settings.target_path or _served_name(target), dtype, loaded.config)
    others = tuple(other for other in readers_of(form, loaded.config) if other != reader)
    evaluation = _read_json(results.evaluation, "acceptance_length")
    card = model_card(
        CardFacts(
            serving=serving,
            readers=(reader, *others),
            checks=EXPORT_CHECKS,
            largest_activation=largest,
            training=_training(source, run),
            trained_mode=trained_mode(source),
            evaluation=evaluation,
            audit=_read_json(results.audit, "findings"),
            audit_of_run=None if run is None else run.audit,
        )
    )
    unproven = _write(loaded, out, form, dtype, target, serving.target, card, source if proven else None)
    notes = [*loaded.notes, *unproven, *serving_notes(reader, serving)]
    if serving.target == "smollm2":
        notes.append("smollm2 is a name that servers do not know: save the target as a folder and name that instead.")
    if largest > FLOAT16_MAX:
        notes.append(f"Not float16-safe: activations reach {largest:.0f}, float16 ends at {FLOAT16_MAX:.0f}.")
    if evaluation is not None and (best := evaluation.get("best_num_speculative_tokens")) is not None:
        notes.append(
            f"On the machine of the evaluation {best} checked tokens per forward are fastest, with blocks drafted "
            f"whole: draftline generate --num-speculative-tokens {best}. A server told so drafts shorter blocks, "
            "which the drafter was not trained on: measure that with draftline evaluate --base-url before choosing."
        )
    return ExportReport(out, form, dtype, EXPORT_CHECKS, serving_command(reader, serving), tuple(notes))


def import_drafter(
    *, source: Path, out: Path, target: Target | None = None, given: Given | None = None
) -> ExportReport:
    """Rewrite another trainer's checkpoint in a format that every command here reads, at the dtype it was stored in.

    z-lab's format, or speculators' for what z-lab's has no word for: every slot predicts, a reduced vocabulary.

    Raises:
        CheckpointError: there is no drafter, it is incomplete, not computed here, or leaves out what was not given.
        TargetError: it was trained for another target.
        ExportError: the format cannot express it.
        StorageError: `out` is not empty or cannot be written.
    """
    loaded = load_drafter(source, given, target)
    config = loaded.config
    form = formats_for(config)[0]
    name = "TARGET" if target is None else _served_name(target)
    serving = Serving(str(out), name, loaded.export_dtype, config)
    readers = readers_of(form, config)
    card = model_card(CardFacts(serving=serving, readers=readers, checks=EXPORT_CHECKS))
    unproven = _write(loaded, out, form, loaded.export_dtype, target, None if target is None else name, card, source)
    command = serving_command(readers[0], serving)
    return ExportReport(out, form, loaded.export_dtype, EXPORT_CHECKS, command, (*loaded.notes, *unproven))


@torch.no_grad()
def largest_activation(draft_model: DFlashDraftModel, target: Target) -> float:
    """Largest absolute output of any module of the drafter, in float32, on the target's own states.

    The states are of random tokens: their size hardly depends on what is said, and no text is needed.

    Raises:
        TargetError: the drafter does not fit the target.
    """
    config = draft_model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (_TOKENS,), generator=generator)
    sample = Sample(0, ids, torch.ones(_TOKENS, dtype=torch.bool))
    (captured,) = TargetForwardLoop(target, config.target_layer_ids).capture([sample])
    weight = draft_model.fc.weight
    anchors = torch.arange(1, _TOKENS, config.block_size, device=weight.device)
    blocks = Blocks.of_document(ids.to(weight.device), anchors, config)
    sizes: list[float] = []

    def note(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        sizes.extend(tensor.abs().max().item() for tensor in tensors)

    def embed(block_ids: Tensor) -> Tensor:
        return target.embed(block_ids.to(target.device)).to(weight)

    handles = [module.register_forward_hook(note) for module in draft_model.modules()]
    try:
        drafted_states(draft_model, captured.hidden_states_SLD[None].to(weight), blocks, embed)
    finally:
        for handle in handles:
            handle.remove()
    return max(sizes)


def _served_name(target: Target) -> str:
    """The embedded target has no hub name; its folder is one that servers can read."""
    return str(TINY_FOLDER) if target.name == "tiny" else target.name


def _write(
    loaded: LoadedDrafter,
    out: Path,
    form: Form,
    dtype: ExportDtype,
    target: Target | None,
    verifier: str | None,
    card: str,
    source: Path | None,
) -> list[str]:
    """Write the folder, with its proof where there are a target and a source; gives what to know of a missing one."""
    notes: list[str] = []

    def prove(written: Path) -> None:
        if target is not None and source is not None:
            fault = write_proof(written, target, choose_prompts(source, target))
            notes.extend([] if fault is None else [fault])

    if form == "zlab":
        export_zlab(loaded.draft_model, out, dtype, card, prove)
        return notes
    architectures = tuple(target.model.config.architectures or ()) if target is not None else ()
    export_speculators(
        loaded.draft_model,
        out,
        dtype,
        verifier=verifier,
        verifier_architectures=architectures,
        target_head=None if target is None else target.head,
        card=card,
        prove=prove,
    )
    return notes


def _training(source: Path, run: RunFolder | None) -> Training | None:
    """From the checkpoint's own record, which lies beside its weights; None for a drafter of another program."""
    checkpoint = checkpoint_folder(source)
    if checkpoint is None:
        return None
    record = read_record(checkpoint)
    return Training(
        run_config=record.run_config,
        data_fingerprint=record.data_fingerprint,
        step=record.state.step,
        tokens=record.state.tokens,
        allowed=() if run is None else run.allowed,
    )


def _read_json(path: Path | None, wanted: str) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): give a file written with --json") from error
    if not isinstance(tree, dict) or wanted not in tree:
        raise CheckpointError(f"{path} has no {wanted!r}: give a file written with --json by the right command")
    return tree
