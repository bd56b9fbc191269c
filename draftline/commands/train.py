"""`draftline train`: the settings of a run, the audit before it, and the run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftline.commands.options import check_read
from draftline.config import RunConfig, load_run_config
from draftline.errors import AuditRefusal, ConfigError
from draftline.options import TrainCommand

if TYPE_CHECKING:
    from draftline.run import Examination, Run, RunResult
    from draftline.train.ranks import Ranks


def train(options: TrainCommand) -> None:
    """Audit the run, then train a drafter, alone or as one of the ranks that torchrun has started."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return _train(options, _saved_settings(options), None)
    from draftline.engine.torchrun import ranks_of_torchrun

    with ranks_of_torchrun() as ranks:
        return _train(options, ranks.first(lambda: _saved_settings(options)), ranks)


def _saved_settings(options: TrainCommand) -> RunConfig | None:
    """Of the run that is continued; a recipe that is named is taken instead, so that the command of a run repeats."""
    from draftline.train.run_folder import RunFolder

    if options.extend is not None:
        check_finished(options.out, options.extend)
    going_on = options.resume or options.extend is not None
    return RunFolder(options.out).config() if going_on and options.recipe is None else None


def _train(options: TrainCommand, saved: RunConfig | None, ranks: Ranks | None) -> None:
    words = [*options.flags.words(), *options.settings]
    wanted = train_settings(words, recipe=options.recipe, config=options.config, saved=saved)
    resume = options.resume or options.extend is not None
    if options.extend is not None:
        wanted = extended(wanted, options.extend)
    check_places(wanted)
    from draftline import run as runs  # slow to load: what can be refused without it is by now
    from draftline.train.ranks import ALONE

    ranks = ranks or ALONE
    check_codes(options.allow)
    run = runs.open_run(wanted, options.out, resume=resume, ranks=ranks)
    trained = examine_and_train(run, options.out, resume=resume, allow=options.allow, ranks=ranks)
    if ranks.leads:
        print(json.dumps(trained.to_json(), ensure_ascii=False))


def examine_and_train(
    run: Run, out: Path, *, resume: bool, allow: Collection[str] = (), ranks: Ranks | None = None
) -> RunResult:
    """Train an opened run in a folder; one that is not continued is audited first. Raises as `examine` and `train`.

    Args:
        ranks: who trains; the first of them audits. None: this process alone.
    """
    from draftline import run as runs
    from draftline.train.ranks import ALONE
    from draftline.train.run_folder import RunFolder

    ranks = ranks or ALONE
    examination = ranks.first(lambda: None if RunFolder(out).exists else examine(run, allow))
    return runs.train(run, out, resume=resume, examination=examination, ranks=ranks)


def train_settings(
    words: Sequence[str], *, recipe: str | None, config: Path | None, saved: RunConfig | None = None
) -> RunConfig:
    """Settings of a run: a recipe, or those that a run has `saved`; then a YAML file; then words.

    Raises:
        ConfigError: a setting is unknown or out of range, or nothing says what the target is.
    """
    from draftline.config import find_recipe

    if saved is None and config is None and not any(word.startswith("target.name=") for word in words):
        raise ConfigError("nothing says what to train for: give --target, --config, or --resume with a run")
    return load_run_config(config, words, saved or find_recipe(recipe or "default"))


def check_finished(out: Path, passes: int) -> None:
    """Look at a run that is to go on for some passes.

    Raises:
        ConfigError: there is no run, or it has not come to its end.
    """
    from draftline.train.run_folder import RunFolder

    folder = RunFolder(out)
    if not folder.exists:
        raise ConfigError(f"--extend {passes}: {out} holds no run: name the folder of a finished one with --out")
    last = max(folder.checkpoint_steps(), default=0)
    if last != folder.total_steps:
        done = f"has done {last} of {folder.total_steps} steps"
        raise ConfigError(f"--extend {passes}: {out} {done}: finish it with --resume first")


def extended(config: RunConfig, passes: int) -> RunConfig:
    """Settings of a run with one more extension."""
    train = config.train.model_copy(update={"extensions": (*config.train.extensions, passes)})
    return config.model_copy(update={"train": train})


def check_places(config: RunConfig) -> None:
    """Look at what a run reads, without loading anything.

    Raises:
        CheckpointError, DataError, TargetError: a place is not what it should be.
    """
    data = config.data
    places = [("target", config.target.name), ("drafter", config.drafter.init_from)]
    for kind, place in [*places, ("prepared", data.path), ("prepared", data.heldout_path)]:
        check_read(kind, place)


def check_codes(allow: Collection[str]) -> None:
    """Raise a `ConfigError` for a code of `--allow` that no check has."""
    from draftline.audit import CHECKS

    unknown = [code for code in allow if code not in CHECKS]
    if unknown:
        raise ConfigError(f"--allow {unknown[0]}: there is no such check; name a code of the audit, such as DRF001")


def examine(run: Run, allow: Collection[str], select: Collection[str] = ()) -> Examination:
    """Audit a run before it starts; the report goes to stderr.

    Args:
        select: areas of the audit; none: all.

    Returns:
        The codes that the run starts in spite of, allowed warnings included, and the report.

    Raises:
        AuditRefusal: a finding of severity error is not allowed, or a check could not run, so that what it would have
            found is not known.
    """
    from rich.console import Console

    from draftline.audit import run_audit
    from draftline.audit.subject import subject_of_run
    from draftline.run import Examination

    report = run_audit(subject_of_run(run), select)
    report.render(Console(stderr=True))
    codes = [finding.code for finding in report.errors()] + report.not_examined
    stopping = [code for code in codes if code not in allow]
    if stopping:
        raise AuditRefusal(f"the audit found {', '.join(stopping)}: fix them as it says, or add --allow CODE for each")
    warned = [finding.code for finding in report.findings if finding.severity == "warning"]
    return Examination([*codes, *(code for code in warned if code in allow)], report.to_json())
