"""One prompt answered through the chat template, against a loop without drafter, cache or decoder."""

from __future__ import annotations

import pytest
import torch

from draftline.config import DrafterConfig, TargetConfig
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.answer import answer_dialogue, answer_prompt
from draftline.options import EvaluationSettings, Sampling
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import Target, load_target, stop_token_ids


@pytest.fixture(scope="module")
def pair() -> tuple[Target, DFlashDraftModel]:
    target = load_target(TargetConfig(name="tiny", device="cpu"))
    return target, DFlashDraftModel(resolve_drafter_config(target, DrafterConfig(num_layers=1), None)).eval()


def naive_answer(target: Target, text: str, budget: int) -> list[int]:
    """One whole forward per token, up to a stop token."""
    tokenizer = target.require_tokenizer()
    asked = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    stops, output = stop_token_ids(target.model, tokenizer), list[int]()
    while len(output) < budget and not (output and output[-1] in stops):
        logits = target.model(input_ids=torch.tensor([[*ids, *output]]), use_cache=False).logits
        output.append(int(logits[0, -1].argmax()))
    return output


def test_an_answer_is_the_targets_own_and_its_counts_add_up(pair: tuple[Target, DFlashDraftModel]) -> None:
    answer = answer_prompt(*pair, "What is 12 + 7?", EvaluationSettings(max_new_tokens=12))
    assert answer.output_ids == naive_answer(pair[0], "What is 12 + 7?", 12)
    text = pair[0].require_tokenizer().decode(answer.output_ids, skip_special_tokens=True)
    assert answer.text == answer.to_json()["text"] == text
    kept = sum(answer.accepted_per_forward)
    words = f"{len(answer.output_ids)} tokens, {answer.target_forwards} target forwards, {kept} drafted tokens kept"
    assert answer.counts() == words


def test_an_empty_prompt_is_refused(pair: tuple[Target, DFlashDraftModel]) -> None:
    with pytest.raises(DataError, match="--prompt"):
        answer_prompt(*pair, " \n", EvaluationSettings(max_new_tokens=4))


def test_both_decodings_of_a_sampled_turn_have_a_generator_of_their_own(
    pair: tuple[Target, DFlashDraftModel],
) -> None:
    """What was asked before does not change an answer: the second prompt alone, and as the second of two."""
    prompt = Prompt("p.jsonl", 1, Conversation(messages=(Message(role="user", content="Count to ten"),)))
    settings = EvaluationSettings(max_new_tokens=8, sampling=Sampling(temperature=1.0), seed=5)
    first, again, other = (next(answer_dialogue(*pair, prompt, index, settings)) for index in (1, 1, 2))
    assert first.drafted.output_ids == again.drafted.output_ids
    assert first.plain.output_ids == again.plain.output_ids
    assert first.asked == "Count to ten"
    assert (first.drafted.output_ids, first.plain.output_ids) != (other.drafted.output_ids, other.plain.output_ids)
