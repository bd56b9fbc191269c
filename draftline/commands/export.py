"""`draftline export` and `draftline import`: from a folder that holds a drafter to one that a program serves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftline.commands.options import AnchorPredicts, JsonOut, Out, ReaderName, TrustRemoteCode
from draftline.config import TargetConfig
from draftline.outputs import keep_apart, write_json


def export(
    source: Annotated[Path, typer.Argument(help="Run folder, checkpoint, or a drafter of another trainer.")],
    out: Out,
    target: Annotated[
        str | None, typer.Option("--target", help="Folder or hub name; the run's own if left out, which a run knows.")
    ] = None,
    reader: Annotated[ReaderName, typer.Option("--for", help="The program that will read it.")] = "zlab",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype")] = "bfloat16",
    target_path: Annotated[str | None, typer.Option(help="The target as the server will find it.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="JSON of `evaluate`, for the model card.")] = None,
    audit_json: Annotated[Path | None, typer.Option("--audit", help="JSON of `audit`, for the model card.")] = None,
    sample_from_anchor: AnchorPredicts = None,
    json_out: JsonOut = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the drafter for the program that will serve it, and check what was written."""
    from draftline.formats.exporting import Results, export_drafter, target_of_export
    from draftline.formats.load import Given
    from draftline.targets.model import load_target

    keep_apart([json_out], [evaluation, audit_json])
    live = load_target(target_of_export(source, target, trust_remote_code))
    report = export_drafter(
        source=source,
        out=out,
        target=live,
        reader=reader,
        dtype=dtype,
        target_path=target_path,
        results=Results(evaluation=evaluation, audit=audit_json),
        given=Given(sample_from_anchor=sample_from_anchor),
    )
    print(report.command)
    write_json(json_out, report.to_json())


def import_(
    source: Annotated[Path, typer.Argument(help="Folder of SpecForge, TorchSpec, ModelOpt, NeMo, speculators, z-lab.")],
    out: Out,
    target: Annotated[str | None, typer.Option("--target", help="Also check that it fits this target.")] = None,
    sample_from_anchor: AnchorPredicts = None,
    block_size: Annotated[int | None, typer.Option(min=2, help="If the folder does not say.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="If the folder does not say.")] = None,
    num_target_layers: Annotated[int | None, typer.Option(min=1, help="If the folder does not say.")] = None,
    json_out: JsonOut = None,
) -> None:
    """Rewrite another trainer's drafter in a format that every command here reads."""
    from draftline.formats.exporting import import_drafter
    from draftline.formats.load import Given
    from draftline.targets.model import load_target

    live = None if target is None else load_target(TargetConfig(name=target))
    given = Given(
        sample_from_anchor=sample_from_anchor,
        block_size=block_size,
        mask_token_id=mask_token_id,
        num_target_layers=num_target_layers,
    )
    report = import_drafter(source=source, out=out, target=live, given=given)
    print(report.folder)
    for note in report.notes:
        print(note, file=sys.stderr)
    write_json(json_out, report.to_json())
