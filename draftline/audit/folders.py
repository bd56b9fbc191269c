"""Subjects made from what a user names: settings of a run to come, a run folder, a finished drafter's folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from draftline.audit.life import drawn_data
from draftline.audit.report import AuditReport, Finding, run_audit
from draftline.audit.subject import AuditSubject, prepared_data
from draftline.config import DFlashConfig, RunConfig, TargetConfig
from draftline.data.dataset import PreparedDataset, open_data
from draftline.data.split import choose_conversations
from draftline.errors import CheckpointError, ConfigError, TargetError
from draftline.formats.beginning import settings_of
from draftline.formats.dialects import describe
from draftline.formats.files import read_config, read_files
from draftline.formats.load import checkpoint_folder, load_drafter
from draftline.options import Given
from draftline.run import Run, assemble
from draftline.targets.model import Target, load_target
from draftline.train.checkpoint import load_draft_model, read_checkpoint

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
    target = target or load_target(config.target)
    return run_audit(subject_to_come(config, target), select, ignore)


def subject_to_come(config: RunConfig, target: Target) -> AuditSubject:
    """A run that has not started: the drafter has its first weights; without data, on conversations drawn here."""
    if config.data.path is not None:
        training, heldout = open_data(config)
        return subject_of_run(assemble(config, target, choose_conversations(config, training, heldout)))
    if config.drafter.draft_vocab_size is not None:
        raise ConfigError("drafter.draft_vocab_size chooses tokens by their frequency in the data: give --data")
    return AuditSubject(assemble(config, target, drawn_data(target, config.drafter.mask_token_id)))


def subject_of_run(run: Run, trained: bool = False, run_folder: Path | None = None) -> AuditSubject:
    """An assembled run; what is known of its data comes from the prepared folder, if it has one."""
    training = run.data.training
    known = (training.report, training.meta) if isinstance(training, PreparedDataset) else (None, None)
    return AuditSubject(run, prepared_data(run.data, *known), trained, run_folder=run_folder)


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
    target = target or load_target(config.target)
    start = load_draft_model(folder)
    if config.data.path is None:
        run = assemble(config, target, drawn_data(target, start.config.mask_token_id), start)
        return run_audit(AuditSubject(run, trained=True, run_folder=folder), select, ignore)
    run = assemble(config, target, choose_conversations(config, *open_data(config)), start)
    return run_audit(subject_of_run(run, trained=True, run_folder=folder), select, ignore)


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
        given = given.model_copy(update={"num_target_layers": target.num_layers})
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
    run = assemble(config, target, drawn_data(target, loaded.config.mask_token_id), loaded.draft_model)
    report = run_audit(AuditSubject(run, trained=True, folder=folder), select, ignore)
    return AuditReport(report.findings, report.checks, [*notes, *loaded.notes, *report.notes])


def _unusable(evidence: str, fix: str) -> Finding:
    code, title = UNUSABLE
    return Finding(code, "error", title, evidence, fix)


def run_config_of(shape: DFlashConfig, target: Target) -> RunConfig:
    """Settings under which a drafter of this shape would be trained."""
    wanted = TargetConfig(name=target.name, device=str(target.device))
    return RunConfig(target=wanted, drafter=settings_of(shape))
