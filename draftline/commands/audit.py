"""`draftline audit`: a folder as it is, or a run to come."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftline.commands.options import check_read
from draftline.commands.train import check_places, train_settings
from draftline.config import load_run_config
from draftline.errors import ConfigError
from draftline.options import AuditCommand, Given
from draftline.storage import write_json

if TYPE_CHECKING:
    from draftline.audit.report import AuditReport


def audit(options: AuditCommand) -> int:
    """Ask whether what is trained is what will be served: exit status 0 clean, 1 errors found, 2 could not run."""
    from rich.console import Console

    report = audit_words(options)
    report.render(Console())
    write_json(options.json_file, report.to_json())
    return report.exit_status


def audit_words(options: AuditCommand) -> AuditReport:
    """Audit what the words name: a folder (a run, a checkpoint, a drafter of any known trainer), or a run to come.

    Raises:
        CheckpointError, ConfigError, DataError, TargetError: what is to be audited cannot be had.
    """
    recipe, config, select, ignore = options.recipe, options.config, options.select, options.ignore
    settings = [word for word in options.words if "=" in word and not Path(word).exists()]
    places = [word for word in options.words if word not in settings]
    flags = options.flags.words()
    if not places:
        wanted = train_settings([*flags, *settings], recipe=recipe, config=config)
        check_places(wanted)
        from draftline.audit.report import audit_run_config

        return audit_run_config(wanted, None, select, ignore)
    named = options.flags.target is not None
    of_a_run = [*settings, *(flag for flag in flags if not named or flag.startswith("data."))]
    of_a_run += [str(given) for given in (recipe, config) if given is not None]
    for other in (*places[1:], *of_a_run):
        raise ConfigError(f"{places[0]} is audited as it is: leave out {other}, or the folder")
    place, target = Path(places[0]), load_run_config(None, flags).target if named else None
    check_read("drafter", place)
    from draftline.audit.report import audit_checkpoint, audit_run_folder, chosen_checks
    from draftline.formats.folder import read_config
    from draftline.targets.model import load_target
    from draftline.train.run_folder import checkpoint_folder

    chosen_checks(select, ignore)
    if checkpoint_folder(place) is not None:
        return audit_run_folder(place, None if target is None else load_target(target), select, ignore)
    read_config(place)
    if target is None:
        raise ConfigError(f"{place} does not say where its target is: give --target")
    given = Given(sample_from_anchor=options.layout.sample_from_anchor)
    return audit_checkpoint(place, load_target(target), given, select, ignore)
