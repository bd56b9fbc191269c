"""The evaluation of prompts on the embedded target: a dialogue, its counts, and the JSON that others read."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from draftline.config import DrafterConfig, TargetConfig
from draftline.data.accounting import ChatMode
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate import answer as answer_module
from draftline.evaluate import benchmark as benchmark_module
from draftline.evaluate.acceptance import Acceptance
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.evaluate.generate import Generation
from draftline.evaluate.result import EvaluationResult, result_table
from draftline.options import EvaluationSettings, Sampling
from draftline.report.results import token_slots
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import Target, load_target, stop_token_ids, weights_fingerprint

NEW_TOKENS = 10
TURNS = [["Sort these numbers: 5 2 9", "Now in reverse."], ["What is 12 + 7?"]]


def dialogue(turns: list[str], number: int = 1) -> Prompt:
    messages = tuple(Message(role="user", content=turn) for turn in turns)
    return Prompt("prompts.jsonl", number, Conversation(messages=messages))


@pytest.fixture(scope="module")
def pair() -> tuple[Target, DFlashDraftModel]:
    target = load_target(TargetConfig(name="tiny", device="cpu"))
    config = resolve_drafter_config(target, DrafterConfig(num_layers=1), None)
    return target, DFlashDraftModel(config).eval()


@pytest.fixture(scope="module")
def result(pair: tuple[Target, DFlashDraftModel]) -> EvaluationResult:
    seen: list[tuple[int, int]] = []
    found = evaluate_prompts(
        *pair,
        [dialogue(turns, number) for number, turns in enumerate(TURNS, start=1)],
        EvaluationSettings(max_new_tokens=NEW_TOKENS),
        on_turn=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    return found


def test_json_holds_the_agreed_keys_and_adds_up(result: EvaluationResult) -> None:
    tree = json.loads(json.dumps(result.to_json(), allow_nan=False))
    for key in ("teacher_forced_acceptance_length", "tokens_per_second", "baseline_tokens_per_second", "speedup"):
        assert tree[key] > 0
    assert tree["greedy_equal"] == 1.0
    assert len(tree["per_prompt"]) == 3
    keys = {"file", "number", "turn", "asked", "text_pieces", "accepted_per_forward"}
    assert all(turn.keys() == {"input_ids", "output_ids", "target_forwards", *keys} for turn in tree["per_prompt"])
    tokens = sum(len(turn["output_ids"]) - 1 for turn in tree["per_prompt"])
    forwards = sum(turn["target_forwards"] for turn in tree["per_prompt"])
    assert tree["acceptance_length"] == tokens / forwards
    low, high = tree["acceptance_length_interval"]
    assert low <= tree["acceptance_length"] <= high
    assert len(tree["acceptance_rate_by_position"]) == 7
    assert sum(tree["accepted_histogram"]) == forwards == tree["counts"]["target_forwards"]
    assert tree["counts"]["drafted_tokens"] == 7 * forwards
    assert tree["counts"]["output_tokens"] == tokens + 3
    assert tree["counts"]["accepted_tokens"] == sum(sum(turn["accepted_per_forward"]) for turn in tree["per_prompt"])
    for name in ("by_file", "by_output_length", "by_output_position"):
        assert sum(part["forwards"] for part in tree[name]) == forwards
    assert tree["teacher_forced_acceptance_length"] == pytest.approx(tree["acceptance_length"])


def test_the_second_turn_sees_the_first_answer(result: EvaluationResult, pair: tuple[Target, DFlashDraftModel]) -> None:
    target = pair[0]
    first, second, _ = result.per_prompt
    stops = stop_token_ids(target.model, target.require_tokenizer())
    answer = target.require_tokenizer().decode([token for token in first.output_ids if token not in stops])
    history = target.require_tokenizer().decode(second.input_ids)
    assert TURNS[0][0] in history
    assert answer in history
    assert history.index(answer) < history.index(TURNS[0][1])
    assert len(first.output_ids) <= NEW_TOKENS


def test_each_turn_says_where_it_comes_from_and_what_was_drafted(
    result: EvaluationResult, pair: tuple[Target, DFlashDraftModel]
) -> None:
    places = [(turn.file, turn.number, turn.turn, turn.asked) for turn in result.per_prompt]
    asked = [(1, 1, TURNS[0][0]), (1, 2, TURNS[0][1]), (2, 1, TURNS[1][0])]
    assert places == [("prompts.jsonl", *place) for place in asked]
    for turn in result.per_prompt:
        assert "".join(turn.text_pieces) == pair[0].require_tokenizer().decode(turn.output_ids)
        slots = token_slots(len(turn.output_ids), turn.accepted_per_forward)
        assert len(slots) == len(turn.text_pieces) == len(turn.output_ids)
        assert sum(slot > 0 for slot in slots) == sum(turn.accepted_per_forward)


def test_table_names_the_convention(result: EvaluationResult) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result_table(result, "drafter"))
    assert f"acceptance length (with bonus): {result.acceptance_length:.2f}" in console.export_text()


@pytest.mark.parametrize("width", [40, 80])
def test_tables_fit_narrow_terminals_whole(result: EvaluationResult, width: int) -> None:
    odd = replace(
        result, by_file=[replace(result.by_file[0], name=name) for name in ("a[old].jsonl", "[/b]" + 40 * "x")]
    )
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(result_table(odd, "run[red]/[/x]"))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "run[red]/[/x]: acceptance" in text
    if width == 80:
        assert "a[old].jsonl" in text
        for heading in ("drafted", "accepted", "if all", "before", "forwards"):
            assert heading in text


def test_repeated_prompts_are_a_warning(pair: tuple[Target, DFlashDraftModel]) -> None:
    prompts = [dialogue(["Hello"], number) for number in (1, 2)] + [dialogue(["Bye"], 3)]
    found = evaluate_prompts(*pair, prompts, EvaluationSettings(max_new_tokens=2))
    assert "1 of 3 prompts were asked before, the first is prompts.jsonl line 2" in found.warnings[0]


def test_the_result_says_which_drafter_and_target_it_is_of(
    result: EvaluationResult, pair: tuple[Target, DFlashDraftModel]
) -> None:
    target, drafter = pair
    other = DFlashDraftModel(drafter.config)
    again = evaluate_prompts(target, other, [dialogue(["Hello"])], EvaluationSettings(max_new_tokens=2))
    assert (again.target_weights, again.drafter) == (result.target_weights, None)
    assert result.target_weights == weights_fingerprint(target.model)
    assert result.drafter_weights == weights_fingerprint(drafter) != again.drafter_weights


def test_numbers_that_do_not_exist_are_null(pair: tuple[Target, DFlashDraftModel]) -> None:
    found = evaluate_prompts(*pair, [dialogue(["Hello"])], EvaluationSettings(max_new_tokens=1))
    assert math.isnan(found.acceptance_length)
    assert found.to_json()["acceptance_length"] is None
    assert found.to_json()["acceptance_rate_by_position"] == [None] * 7


def test_a_prompt_that_is_too_long_is_named_before_anything_is_answered(pair: tuple[Target, DFlashDraftModel]) -> None:
    limit = pair[0].config.max_position_embeddings
    prompts = [dialogue(["Hello"]), dialogue(["many words " * limit], 2)]
    answered: list[int] = []
    settings = EvaluationSettings(max_new_tokens=4)
    with pytest.raises(DataError, match=r"prompts.jsonl line 2, 'many words"):
        evaluate_prompts(*pair, prompts, settings, on_turn=lambda done, _total: answered.append(done))
    assert answered == []


def test_a_dialogue_counts_once_in_the_share_of_equal_prompts(
    pair: tuple[Target, DFlashDraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer of the first dialogue is spoilt: one prompt of two, though two turns of three."""
    original = answer_module.generate_plain
    calls = iter(range(3))

    def spoil(*words: Any, **names: Any) -> Generation:
        plain = original(*words, **names)
        return replace(plain, output_ids=plain.output_ids[:-1]) if next(calls) < 2 else plain

    monkeypatch.setattr(answer_module, "generate_plain", spoil)
    found = evaluate_prompts(*pair, [dialogue(turns) for turns in TURNS], EvaluationSettings(max_new_tokens=4))
    assert (len(found.differences), found.greedy_equal, found.prompts) == (2, 0.5, 2)


def test_no_prompts_is_an_error_with_the_fix(pair: tuple[Target, DFlashDraftModel]) -> None:
    with pytest.raises(DataError, match="turns"):
        evaluate_prompts(*pair, [], EvaluationSettings(max_new_tokens=4))


def test_with_sampling_what_is_not_defined_is_null_and_said(pair: tuple[Target, DFlashDraftModel]) -> None:
    settings = EvaluationSettings(max_new_tokens=6, sampling=Sampling(temperature=0.8, top_p=0.9), seed=3)
    found, again = (evaluate_prompts(*pair, [dialogue(["Hello"]), dialogue(["Bye"], 2)], settings) for _ in range(2))
    tree = found.to_json()
    for key in ("greedy_equal", "teacher_forced_acceptance_length"):
        assert tree[key] is None
        assert tree[f"{key}_interval"] == [None, None]
    assert (tree["differences"], tree["warnings"]) == ([], [])
    assert tree["settings"]["sampling"] == {"temperature": 0.8, "top_p": 0.9, "top_k": 0}
    assert [turn.output_ids for turn in found.per_prompt] == [turn.output_ids for turn in again.per_prompt]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result_table(found, "drafter"))
    text = console.export_text()
    assert text.count("not defined at temperature 0.8") == 2
    assert "temperature 0.8, top-p 0.9" in text


def test_an_estimate_that_disagrees_is_a_warning(
    pair: tuple[Target, DFlashDraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = benchmark_module.walk

    def flattered(*words: Any) -> Acceptance:
        walked = original(*words)
        return Acceptance(walked.tokens * 11, walked.forwards * 10)

    monkeypatch.setattr(benchmark_module, "walk", flattered)
    found = evaluate_prompts(*pair, [dialogue(["Hello"])], EvaluationSettings(max_new_tokens=6))
    assert len(found.warnings) == 1
    assert "differ by more than 5%" in found.warnings[0]


def test_a_later_turn_that_does_not_fit_is_left_out_loudly(pair: tuple[Target, DFlashDraftModel]) -> None:
    long = "many words " * pair[0].config.max_position_embeddings
    found = evaluate_prompts(*pair, [dialogue(["Hello", long, "Bye"])], EvaluationSettings(max_new_tokens=2))
    assert len(found.per_prompt) == 1
    assert "2 turns were not asked" in found.warnings[0]
    assert "turn 2 of prompts.jsonl line 1" in found.warnings[0]


def test_system_prompt_and_training_modes_are_compared(pair: tuple[Target, DFlashDraftModel]) -> None:
    trained = ChatMode({"with_reasoning": 9}, {"none": 9}, {"{}": 9})
    settings = EvaluationSettings(max_new_tokens=2, system_prompt="You are a pirate.")
    found = evaluate_prompts(*pair, [dialogue(["Hello"])], settings, trained_mode=trained)
    assert "pirate" in pair[0].require_tokenizer().decode(found.per_prompt[0].input_ids)
    assert ["think first" in warning for warning in found.warnings] == [True, False]
    assert "system prompt" in found.warnings[1]
    assert found.mode.thinking == {"without_reasoning": 1}
    json.dumps(found.to_json(), allow_nan=False)
