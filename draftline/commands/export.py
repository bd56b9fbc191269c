"""`draftline export` and `draftline import`: from a folder that holds a drafter to one that a program serves."""

from __future__ import annotations

import sys

from draftline.config import TargetConfig
from draftline.options import ExportCommand, Given, ImportCommand
from draftline.storage import keep_apart, write_json


def export(options: ExportCommand) -> None:
    """Write the drafter for the program that will serve it, and check what was written."""
    from draftline.formats.exporting import export_drafter, target_of_export
    from draftline.targets.model import load_target

    keep_apart([options.json_file], [options.settings.results.evaluation, options.settings.results.audit])
    report = export_drafter(
        source=options.source,
        out=options.out,
        target=load_target(target_of_export(options.source, options.target, options.trust_remote_code)),
        settings=options.settings,
        given=Given(sample_from_anchor=options.layout.sample_from_anchor),
    )
    print(report.command)
    write_json(options.json_file, report.to_json())


def import_(options: ImportCommand) -> None:
    """Rewrite another trainer's drafter in a format that every command here reads."""
    from draftline.formats.exporting import import_drafter
    from draftline.targets.model import load_target

    target = None if options.target is None else load_target(TargetConfig(name=options.target))
    report = import_drafter(source=options.source, out=options.out, target=target, given=options.given)
    print(report.folder)
    for note in report.notes:
        print(note, file=sys.stderr)
    write_json(options.json_file, report.to_json())
