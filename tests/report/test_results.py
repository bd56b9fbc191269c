"""What was decoded, and whether it can be of this run's drafter; what the audit found, whichever file says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import DataError
from draftline.report.results import Evaluation, read_evaluation, read_verdict, token_slots
from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import AUDIT, evaluation, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.open(write_run(tmp_path / "run", lines=1))


def read(run: RunFolder, content: dict[str, Any]) -> Evaluation:
    path = run.path.parent / "evaluate.json"
    path.write_text(json.dumps(content))
    return read_evaluation(path, run)


def test_tokens_are_coloured_by_the_slot_that_drafted_them(run: RunFolder) -> None:
    shown = read(run, evaluation(answers=4))
    assert [answer.accepted for answer in shown.answers] == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]
    longest = shown.answers[0]
    assert [piece.slot for piece in longest.pieces] == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0]
    assert "".join(piece.text for piece in longest.pieces) == "".join(f" t{k}" for k in range(11))
    assert longest.length == 10 / 4
    assert (longest.asked, longest.place) == ("Question <4>?", "prompts.jsonl line 4, turn 1")


def test_answers_are_shown_from_the_best_to_the_worst(run: RunFolder) -> None:
    shown = read(run, evaluation(answers=60))
    lengths = [answer.length for answer in shown.answers]
    assert lengths == sorted(lengths, reverse=True)
    assert (len(lengths), shown.of_answers) == (6, 60)
    every = [sum(k % 8 + 1 for k in range(i)) / i for i in range(1, 61)]
    assert (lengths[0], lengths[-1]) == (max(every), min(every))


def test_a_file_without_texts_says_how_to_get_them(run: RunFolder) -> None:
    content = evaluation()
    for turn in content["per_prompt"]:
        del turn["text_pieces"], turn["accepted_per_forward"]
    shown = read(run, content)
    assert shown.answers == []
    assert "run `draftline evaluate --json` again" in shown.absent


def test_what_newer_results_say_more_is_shown(run: RunFolder) -> None:
    part = {
        "name": "1 to 32",
        "prompts": 5,
        "tokens": 9,
        "forwards": 4,
        "acceptance_length": 2.25,
        "acceptance_length_interval": [2.0, 2.5],
    }
    more = {
        "warnings": ["mode differs"],
        "by_output_length": [part, part],
        "by_file": [part],
        "counts": {"drafted_tokens": 700},
        "settings": {"sampling": {"temperature": 0.5}},
        "target": "some/target",
    }
    shown = read(run, {**evaluation(), **more, "greedy_equal": None})
    assert shown.warnings == ["mode differs"]
    assert shown.parts == [("By length of the answer, tokens", [["1 to 32", "2.250", "2 to 2.500", "5", "4"]] * 2)]
    assert ["drafted tokens", "700"] in shown.figures
    assert shown.settings == [["settings.sampling.temperature", "0.5"]]
    assert ["target", "some/target"] in shown.drafter


def test_results_of_another_drafter_or_target_are_refused(run: RunFolder) -> None:
    with pytest.raises(DataError, match=r"of a drafter with 3 drafted tokens, that of .* has 7: evaluate the drafter"):
        read(run, evaluation(slots=3))
    other = evaluation()
    other["per_prompt"][2]["output_ids"][1] = 1000
    with pytest.raises(DataError, match=r"has token 1000, the target of .* knows 0\.\.999"):
        read(run, other)


@pytest.mark.parametrize("content", [{}, [], {"per_prompt": 3}, {**evaluation(), "acceptance_length": "x"}])
def test_what_is_no_evaluation_is_refused(run: RunFolder, content: Any) -> None:
    with pytest.raises(
        DataError, match=r"evaluate.json is not an evaluation: give what `draftline evaluate --json` wrote"
    ):
        read(run, content)
    with pytest.raises(DataError, match="is not an evaluation"):
        read_evaluation(run.path / "nothing.json", run)


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    content = evaluation()
    empty = {"name": "b", "prompts": 0, "forwards": 0, "acceptance_length": None}
    content |= {"by_file": [{**empty, "acceptance_length_interval": [None, None]}] * 2}
    content |= {"acceptance_length": None, "acceptance_length_interval": [None, None]}
    (tmp_path / "e.json").write_text(json.dumps(content))
    run = RunFolder.open(write_run(tmp_path / "run", lines=1))
    found = read_evaluation(tmp_path / "e.json", run)
    assert (found.acceptance_length, found.interval) == (None, None)
    assert found.figures[:2] == [["acceptance length (with bonus), decoded", "–"], ["95 % interval, by prompt", "–"]]
    assert found.parts[0][1][0] == ["b", "–", "–", "0", "0"]


def test_another_target_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps(evaluation()))
    folder = write_run(tmp_path / "run", lines=1)
    identity = json.loads((folder / "run.json").read_text())
    warnings = []
    for weights in (evaluation()["target_weights"], "0123" * 16, None):
        (folder / "run.json").write_text(json.dumps({**identity, "target": weights}))
        warnings.append(read_evaluation(tmp_path / "e.json", RunFolder.open(folder)).warnings)
    assert [len(lines) for lines in warnings] == [0, 1, 0]
    assert f"is {evaluation()['target_weights'][:12]} here, in the run 012301230123" in warnings[1][0]
    assert (
        dict(read_evaluation(tmp_path / "e.json", RunFolder.open(folder)).drafter)["drafter"]
        == "run/checkpoints/step-000100"
    )


@pytest.mark.parametrize(
    ("length", "accepted", "slots"),
    [
        (1, [], [0]),
        (7, [2, 0, 1], [0, 1, 2, 0, 0, 1, 0]),
        (6, [2, 0, 1], [0, 1, 2, 0, 0, 1]),  # the stop token was drafted: the target adds nothing
    ],
)
def test_slots_tell_drafted_tokens_from_the_targets_own(length: int, accepted: list[int], slots: list[int]) -> None:
    assert token_slots(length, accepted) == slots


def test_the_audit_before_the_run_is_found_and_a_given_one_goes_before_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    assert read_verdict(RunFolder.open(folder), None) is None
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    verdict = read_verdict(RunFolder.open(folder), None)
    assert verdict is not None
    assert verdict.sentence == "1 errors, 1 warnings; 1 checks passed."
    assert verdict.areas == [
        ["target and captured states", "1", "1", "0", "0", "0.750"],
        ["labels and loss", "0", "1", "1", "0", "0"],
        ["exported drafter", "0", "0", "0", "1", "1"],
    ]
    assert verdict.open == [
        ["LOS004", "fault LOS004", "skipped", "there is no data yet"],
        ["EXP001", "fault EXP001", "could not run", "KeyError: x"],
    ]
    assert verdict.checks[:2] == [
        ["TGT001", "fault TGT001", "not found", "0.250"],
        ["TGT002", "fault TGT002", "found", "0.500"],
    ]
    (tmp_path / "later.json").write_text(json.dumps({"findings": [], "checks": []}))
    later = read_verdict(RunFolder.open(folder), tmp_path / "later.json")
    assert later is not None
    assert later.findings == []


def test_allowed_codes_come_from_all_sessions(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    identity = json.loads((folder / "run.json").read_text())
    identity["sessions"] = [{"allowed": ["TGT002"]}, {}]
    (folder / "run.json").write_text(json.dumps(identity))
    verdict = read_verdict(RunFolder.open(folder), None)
    assert verdict is not None
    assert verdict.allowed == ["TGT002"]


def test_an_audit_of_an_earlier_version_is_shown_by_its_codes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    checks = [{"code": "TGT001", "status": "ok", "seconds": 1}, {"code": "TGT002", "status": "skipped", "seconds": 1}]
    (folder / "audit.json").write_text(json.dumps({"findings": [], "checks": checks}))
    verdict = read_verdict(RunFolder.open(folder), None)
    assert verdict is not None
    assert verdict.areas == [["TGT", "1", "0", "1", "0", "2"]]
    assert verdict.open == [["TGT002", "", "skipped", ""]]


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "{",
        '{"findings": [{}], "checks": []}',
        '{"findings": [], "checks": [3]}',
        '{"findings": [], "checks": [{"code": "TGT001", "status": "ok", "seconds": null}]}',
    ],
)
def test_what_is_no_audit_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        DataError, match=r"a.json is not a result of an audit: give what `draftline audit --json` wrote"
    ):
        read_verdict(RunFolder.open(write_run(tmp_path / "run", lines=1)), tmp_path / "a.json")
