"""`draftline audit`: a folder as it is, or a run to come."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftline.commands.options import DTYPE_HELP, AnchorPredicts, DtypeName, JsonOut, MaybeTrust, Recipe
from draftline.commands.train import train_settings
from draftline.config import load_run_config
from draftline.errors import ConfigError
from draftline.outputs import write_json

if TYPE_CHECKING:
    from draftline.audit.report import AuditReport


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

    of_a_run = {
        "target.name": target,
        "target.dtype": target_dtype,
        "target.device": device,
        "train.device": device,
        "target.trust_remote_code": trust_remote_code,
        "data.path": None if data is None else str(data),
    }
    flags = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in of_a_run.items() if value is not None]
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


def audit_words(
    words: Sequence[str],
    flags: Sequence[str],
    *,
    recipe: str | None,
    config: Path | None,
    sample_from_anchor: bool | None,
    select: Collection[str],
    ignore: Collection[str],
) -> AuditReport:
    """Audit what the words name: a folder (a run, a checkpoint, a drafter of any known trainer), or a run to come.

    Args:
        words: a folder, or `section.key=value` settings of a run to come.
        flags: settings that were given as options.
        sample_from_anchor: whether slot 0 predicts, if the folder does not say so.

    Raises:
        CheckpointError, ConfigError, DataError, TargetError: what is to be audited cannot be had.
    """
    from draftline.audit.folders import audit_checkpoint, audit_run_config, audit_run_folder
    from draftline.audit.report import chosen_checks
    from draftline.formats.files import read_config
    from draftline.formats.load import Given, checkpoint_folder
    from draftline.targets.model import load_target

    chosen_checks(select, ignore)
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    places = [word for word in words if word not in settings]
    if not places:
        wanted = train_settings(Path(), [*flags, *settings], recipe=recipe, config=config, resume=False)
        return audit_run_config(wanted, None, select, ignore)
    named = any(flag.startswith("target.name=") for flag in flags)
    of_a_run = [*settings, *(flag for flag in flags if not named or flag.startswith("data."))]
    of_a_run += [str(given) for given in (recipe, config) if given is not None]
    for other in (*places[1:], *of_a_run):
        raise ConfigError(f"{places[0]} is audited as it is: leave out {other}, or the folder")
    place, target = Path(places[0]), load_run_config(None, flags).target if named else None
    if checkpoint_folder(place) is not None:
        return audit_run_folder(place, None if target is None else load_target(target), select, ignore)
    read_config(place)
    if target is None:
        raise ConfigError(f"{place} does not say where its target is: give --target")
    return audit_checkpoint(place, load_target(target), Given(sample_from_anchor), select, ignore)
