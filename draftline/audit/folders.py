"""Subjects made from what a user names: settings of a run to come, a run folder, a finished drafter's folder.

`run` audits itself through `audit.live`; this file is for the command line and may therefore import `run`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from draftline.audit.conventions import describe
from draftline.audit.finding import Finding
from draftline.audit.live import live_subject, prepared_data
from draftline.audit.report import AuditReport, run_audit
from draftline.audit.subject import AuditSubject, PreparedData
from draftline.config import DFlashConfig, RunConfig, TargetConfig
from draftline.data.dataset import PreparedDataset
from draftline.data.split import choose_conversations
from draftline.draft.model import DFlashDraftModel
from draftline.engine.replicas import frozen_target
from draftline.errors import CheckpointError, ConfigError, TargetError
from draftline.formats.beginning import drafter_to_continue, set_first_weights, settings_of
from draftline.formats.files import read_config, read_files
from draftline.formats.load import Given, checkpoint_folder, load_drafter
from draftline.run import HELDOUT_FOLDER, choose_vocabulary, drafter_device
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import Target, load_target
from draftline.train.checkpoint import load_draft_model, read_checkpoint
from draftline.train.drafter import Drafter

UNUSABLE = ("EXP013", "the folder cannot be used with this target as it stands")
"""Code and title of the finding about a folder whose drafter cannot be built at all."""


def audit_run_config(
    config: RunConfig, target: Target | None = None, select: Collection[str] = (), ignore: Collection[str] = ()
) -> AuditReport:
    """Audit a run before it starts, on the target, data and drafter that it will use.

    Args:
        target: the run's target, if it is loaded already.

    Raises:
        ConfigError, DataError, TargetError: the run itself could not start.
    """
    return run_audit(subject_of_run(config, target or load_target(config.target)), select, ignore)


def subject_of_run(config: RunConfig, target: Target) -> AuditSubject:
    """The subject for a run that has not started: the drafter has its first weights."""
    dataset = None if config.data.path is None else PreparedDataset.open(config.data.path)
    used = None if dataset is None else dataset.used_token_ids()
    continued = drafter_to_continue(config.drafter, target)
    shape = resolve_drafter_config(target, config.drafter, used) if continued is None else continued.config
    device = drafter_device(config.train.device)
    kept_ids = _kept_ids(config, shape, dataset, target, continued)
    frozen = frozen_target(target, device, kept_ids)
    drafter = Drafter(config=config, shape=shape, total_steps=1, frozen=frozen, device=device)
    set_first_weights(drafter.model, config.drafter, target, continued)
    return live_subject(config, target, drafter.model, _prepared(config))


def _kept_ids(
    config: RunConfig,
    shape: DFlashConfig,
    data: PreparedDataset | None,
    target: Target,
    continued: DFlashDraftModel | None,
) -> Tensor | None:
    """The reduced vocabulary that the run will choose."""
    if shape.draft_vocab_size is None:
        return None
    if continued is not None:
        return continued.kept_ids
    if data is None:
        raise ConfigError("drafter.draft_vocab_size chooses tokens by their frequency in the data: give --data")
    chosen = choose_conversations(config, data, _heldout(config))
    vocabulary = choose_vocabulary(config, shape, data, chosen.training_ids, target)
    return None if vocabulary is None else vocabulary.kept_ids


def audit_run_folder(
    folder: Path, target: Target | None = None, select: Collection[str] = (), ignore: Collection[str] = ()
) -> AuditReport:
    """Audit a run that has written a checkpoint: its best weights, with the settings it was trained with.

    Raises:
        CheckpointError: there is no checkpoint in the folder.
        ConfigError, DataError, TargetError: what the run used is not there any more.
    """
    place = checkpoint_folder(folder)
    if place is None:
        raise CheckpointError(
            f"{folder} is not a run folder: it has no checkpoint; name one that `draftline train` wrote"
        )
    config = read_checkpoint(place).run_config
    draft_model = load_draft_model(folder).to(drafter_device(config.train.device))
    target = target or load_target(config.target)
    return run_audit(live_subject(config, target, draft_model, _prepared(config), trained=True), select, ignore)


def audit_checkpoint(
    folder: Path,
    target: Target,
    given: Given | None = None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> AuditReport:
    """Audit a finished drafter, of ours or of another trainer, against a target.

    What is examined is the folder as it lies there: which conventions it follows, what each serving engine makes of
    them, and whether the drafter does what it says on this target.

    Args:
        given: facts that the folder leaves out.

    Raises:
        CheckpointError: the folder holds no configuration of a drafter.
    """
    if checkpoint_folder(folder) is not None:
        return audit_run_folder(folder, target, select, ignore)
    tree, notes, given = read_config(folder), list[str](), given or Given()
    if tree.get("num_target_layers") is None:  # the target can be asked; that the key is missing is EXP002's to report
        given = replace(given, num_target_layers=target.num_layers)
    try:
        notes = describe(read_files(folder))
        loaded = load_drafter(folder, given, target)
    except (CheckpointError, TargetError) as error:
        fix = "fix what it names; `draftline import` takes facts that are missing; or name the target it was made for"
        return AuditReport([_unusable(str(error), fix)], [], notes)
    broken = [name for name, weight in loaded.draft_model.named_parameters() if not weight.isfinite().all()]
    if broken:
        evidence = f"{len(broken)} tensors have values that are not finite, first {broken[0]}"
        return AuditReport([_unusable(evidence, "take an earlier checkpoint")], [], notes)
    config = run_config_of(loaded.config, target)
    subject = live_subject(config, target, loaded.draft_model.to(target.device), trained=True, folder=folder)
    report = run_audit(subject, select, ignore)
    return AuditReport(report.findings, report.checks, [*notes, *loaded.notes, *report.notes])


def _unusable(evidence: str, fix: str) -> Finding:
    code, title = UNUSABLE
    return Finding(code, "error", title, evidence, fix)


def run_config_of(shape: DFlashConfig, target: Target) -> RunConfig:
    """Settings under which a drafter of this shape would be trained."""
    return RunConfig(target=TargetConfig(name=target.name), drafter=settings_of(shape))


def _prepared(config: RunConfig) -> PreparedData | None:
    """Conversations of the run's own choosing, some of them."""
    if config.data.path is None:
        return None
    training = PreparedDataset.open(config.data.path)
    heldout = _heldout(config)
    chosen = choose_conversations(config, training, heldout)
    return prepared_data(
        training,
        chosen.training_ids,
        training if heldout is None else heldout,
        chosen.heldout_ids,
        training.report,
        training.meta,
    )


def _heldout(config: RunConfig) -> PreparedDataset | None:
    """What is held out in a folder of its own."""
    assert config.data.path is not None, "the caller has opened it"
    place = config.data.heldout_path or config.data.path / HELDOUT_FOLDER
    return PreparedDataset.open(place) if config.data.heldout_path or place.exists() else None
