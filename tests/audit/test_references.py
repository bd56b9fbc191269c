"""The audit's own oracles, held against other people's code and hand-made cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftline.audit.drafter_reference import (
    embedding_of,
    head_of,
    reference_block,
    reference_blocks,
    rope_frequencies,
    view_of_config,
    visible_keys,
    with_rope,
)
from draftline.audit.exported import view_of
from draftline.audit.reference import (
    BlockPlace,
    decoder_layers,
    model_forward,
    naive_anchors,
    naive_slots,
    target_forward,
    visible,
)
from draftline.formats.folder import read_config
from draftline.formats.programs import read_as
from draftline.formats.write import export_zlab
from draftline.records import Sample
from draftline.targets.head import find_parts
from draftline.targets.model import build_target
from tests.formats.drafters import ALL_SLIDING, MIX, SMALL, make_drafter, make_target
from tests.targets.families import FAMILIES, FEW, random_ids, tiny

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def _sample(mask: str) -> Sample:
    return Sample(0, torch.arange(len(mask)), torch.tensor([letter == "1" for letter in mask]))


def test_anchors_and_slots_of_a_hand_made_row() -> None:
    samples = [_sample("0011101"), _sample("0111")]
    assert naive_anchors(samples) == [2, 3, 8, 9]
    slots = naive_slots(samples, [2, 3, 8, 9], block_size=4, first=1)
    assert slots == [(0, 1, 3), (0, 2, 4), (1, 1, 4), (2, 1, 9), (2, 2, 10), (3, 1, 10)]
    every = naive_slots(samples, [2, 9], block_size=3, first=0)
    assert every == [(0, 0, 3), (0, 1, 4), (1, 0, 10)]


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_frequencies_are_those_of_transformers(kind: str) -> None:
    view = with_rope(view_of_config(SMALL), rope_type=kind, **SCALINGS[kind])
    found, factor = rope_frequencies(view)
    config = Qwen3Config(head_dim=8, max_position_embeddings=128, rope_parameters=dict(view.rope))
    if kind == "default":
        wanted, wanted_factor = 5000.0 ** (-torch.arange(4) / 4), 1.0
    else:
        wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(found.float(), wanted.float())
    assert factor == pytest.approx(wanted_factor)


@pytest.mark.parametrize("changes", [{}, MIX, ALL_SLIDING], ids=["full", "mix", "sliding"])
def test_the_second_implementation_computes_what_z_labs_package_does(changes: dict, tmp_path: Path) -> None:
    zlab = pytest.importorskip("dflash.model")
    export_zlab(make_drafter(**changes), tmp_path / "drafter", "float32")
    theirs = zlab.DFlashDraftModel.from_pretrained(tmp_path / "drafter").eval()
    reading = read_as("zlab", read_config(tmp_path / "drafter"))
    context, block = torch.randn(1, 11, 3 * 24), torch.randn(1, 4, 24)
    with torch.no_grad():
        wanted = theirs(position_ids=torch.arange(15)[None], noise_embedding=block, target_hidden=context)[0]
    found = reference_block(view_of(reading), theirs.state_dict(), context[0], block[0])
    torch.testing.assert_close(found.float(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_the_mask_is_what_the_words_say_key_by_key(causal: bool, window: int | None) -> None:
    anchors, length, block = [0, 3, 9], 10, 4
    found = visible_keys(anchors, length, block, causal, window)
    for index, anchor in enumerate(anchors):
        place = BlockPlace(index, anchor, start=0)
        for slot in range(block):
            wanted = [visible(slot, key, None, place, causal, window) for key in range(length)]
            wanted += [visible(slot, key, index, place, causal, window) for key in range(block)]
            assert found[index, slot].tolist() == wanted


@pytest.mark.parametrize("changes", [{}, MIX], ids=["full", "mix"])
def test_blocks_of_a_conversation_are_what_each_block_is_alone(changes: dict) -> None:
    drafter = make_drafter(**changes)
    view, weights = view_of_config(drafter.config), drafter.state_dict()
    states, blocks = torch.randn(11, 3 * 24), torch.randn(3, 4, 24)
    together = reference_blocks(view, weights, states, [0, 4, 10], blocks)
    for index, anchor in enumerate([0, 4, 10]):
        alone = reference_block(view, weights, states[:anchor], blocks[index])
        torch.testing.assert_close(together[index], alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found_as_transformers_names_them(family: str) -> None:
    model = tiny(family)
    assert decoder_layers(model) == list(find_parts(model).decoder_layers)


@pytest.mark.parametrize("family", FEW)
def test_embedding_and_head_are_the_models_own(family: str) -> None:
    model = tiny(family)
    target, ids = build_target(family, model, None), random_ids(1, 9)[0]
    forward = model_forward(model, ids)
    assert torch.equal(embedding_of(model)(ids), target.embed(ids).double())
    if family != "gpt2":  # which adds positions
        torch.testing.assert_close(embedding_of(model)(ids), forward.first_input.double())
    scales = (target.head.output_multiplier, target.head.final_logit_softcapping)
    found = head_of(model, *scales, None).logits(forward.normed.double())
    torch.testing.assert_close(found, forward.logits.double(), rtol=1e-4, atol=1e-5)
    kept = torch.tensor([1, 5, 17])
    torch.testing.assert_close(head_of(model, *scales, kept).logits(forward.normed.double()), found[:, kept])


def test_gaps_and_the_best_of_some_tokens() -> None:
    found = model_forward(tiny("llama"), random_ids(1, 7)[0])
    ranked = found.logits.double().sort(dim=-1, descending=True).values
    torch.testing.assert_close(found.gaps, ranked[:, 0] - ranked[:, 1])
    kept = torch.arange(1, 96, 2)
    for place, best in enumerate(found.best_of(kept).tolist()):
        assert best == max(kept.tolist(), key=lambda token: float(found.logits[place, token]))
    torch.testing.assert_close(found.states((0, 2)), torch.cat([found.layers[0], found.layers[2]], dim=1))


def test_the_watched_forward_gives_what_transformers_records() -> None:
    target = make_target()
    ids = torch.arange(3, 20)
    found = target_forward(target, ids)
    recorded = target.model(input_ids=ids[None], output_hidden_states=True)
    for layer in range(6):
        torch.testing.assert_close(found.layers[layer], recorded.hidden_states[layer + 1][0])
    torch.testing.assert_close(found.first_input, recorded.hidden_states[0][0])
    torch.testing.assert_close(found.normed, recorded.hidden_states[-1][0])
    torch.testing.assert_close(found.logits, recorded.logits[0])
    assert "forward" not in vars(target.decoder_layers[0])
