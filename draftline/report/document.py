"""All that is known of a run as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftline.page.axis import number
from draftline.page.frame import render
from draftline.report import curves
from draftline.report.data_summary import read_data_summary
from draftline.report.evaluation import PARTS_HEAD, Evaluation, read_evaluation
from draftline.report.run_folder import (
    configuration,
    drafter_shape,
    duration,
    environment,
    moment,
    sessions,
)
from draftline.report.verdict import read_verdict
from draftline.train.run_folder import RunFolder

SECTIONS = (
    ("curves", "Curves"),
    ("positions", "By slot"),
    ("speed", "Speed"),
    ("evaluation", "Decoded"),
    ("samples", "Answers"),
    ("audit", "Audit"),
    ("data", "Data"),
    ("configuration", "Configuration"),
    ("environment", "Environment"),
)


def report_page(
    folder: Path,
    evaluations: Sequence[Path] = (),
    audit: Path | None = None,
    follow: tuple[str, str] | None = None,
) -> str:
    """The page of the run in a folder.

    Arguments:
        evaluations: files that `draftline evaluate --json` wrote for the run's drafter.
        audit: file that `draftline audit --json` wrote; without it the one that the run was started with.
        follow: see `page.frame.render`.

    Raises:
        CheckpointError: the folder is not a run.
        DataError: an evaluation or audit cannot be read, or is of another drafter.
    """
    run = RunFolder.open(folder)
    decoded = [read_evaluation(path, run) for path in evaluations]
    changed, settings = configuration(run)
    context = {
        "run": run,
        "made": moment(run.now),
        "written": moment(run.last_written),
        "cards": cards(run, decoded),
        "learning": curves.learning(run.metrics),
        "heldout": curves.heldout_table(run.metrics),
        "positions": curves.positions(run.metrics),
        "speed": curves.speed(run.speed),
        "queue": curves.queue(run.speed),
        "evaluations": decoded,
        "parts_head": PARTS_HEAD,
        "verdict": read_verdict(run, audit),
        "data": read_data_summary(run),
        "changed": changed,
        "settings": settings,
        "drafter": drafter_shape(run),
        "environment": environment(run),
        "sessions": sessions(run),
    }
    title = "/".join(folder.resolve().parts[-2:])
    return render("report.html", title=title, sections=SECTIONS, context=context, follow=follow)


def cards(run: RunFolder, evaluations: Sequence[Evaluation]) -> list[tuple[str, str, str]]:
    """The figures that one looks for first: name, value, remark."""
    total = f"of {run.total_steps:,}" if run.total_steps is not None else ""
    tokens = run.metrics["tokens"].values
    entries = [
        ("step", f"{run.step:,}", total),
        ("time", duration(run.seconds), f"{tokens[-1]:,.0f} tokens" if len(tokens) else ""),
    ]
    for key, name, remark in (
        ("heldout_accuracy", "held-out accuracy", "last evaluation"),
        ("heldout_streak", "held-out streak", "random anchors, without bonus"),
        ("heldout_teacher_forced_acceptance_length", "teacher-forced acceptance length", "with bonus"),
    ):
        values = run.metrics[key].values
        if len(values):
            entries.append((name, number(float(values[-1])), remark))
    for one in evaluations:
        if one.acceptance_length is not None:
            remark = "" if one.interval is None else "95 %: {:.2f} to {:.2f}".format(*one.interval)
            entries.append(("acceptance length, decoded", number(one.acceptance_length), remark))
    return entries
