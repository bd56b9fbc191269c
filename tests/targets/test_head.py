"""Head and embedding as the model applies them, scales and caps included."""

import copy

import pytest
import torch
from torch import nn

from draftline.errors import TargetError
from draftline.targets.head import ReducedHead, TargetHead
from draftline.targets.model import build_target
from tests.targets.families import FEW, random_ids, tiny


@pytest.mark.parametrize(
    ("family", "multiplier", "cap", "outside", "embedding"),
    [
        ("llama", 1.0, None, 1.0, 1.0),
        ("granite", 0.25, None, 3.0, 3.0),
        ("cohere", 0.25, None, 1.0, 1.0),
        ("gemma2", 1.0, 0.5, 1.0, 32**0.5),
        ("gemma3-wrapper", 1.0, None, 1.0, 32**0.5),
        ("afmoe", 1.0, None, 32**0.5, 32**0.5),
        ("falcon-h1", 0.5, None, 3.0, 3.0),
        ("hyperclovax", 2.0, None, 3.0, 3.0),
    ],
)
def test_scales_and_caps_are_found(
    family: str, multiplier: float, cap: float | None, outside: float, embedding: float
) -> None:
    target = build_target(family, tiny(family), None)
    assert target.head.output_multiplier == multiplier
    assert target.head.final_logit_softcapping == cap
    assert target.embedding_multiplier == outside
    assert target.input_embedding_scale == pytest.approx(embedding, rel=1e-6)


@pytest.mark.parametrize("family", [name for name in FEW if name != "gpt2"])
def test_embed_is_what_the_first_layer_receives(family: str) -> None:
    target = build_target(family, tiny(family), None)
    received = []
    layer = target.decoder_layers[0]
    original = layer.forward

    def recording(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        received.append(hidden_states.clone())
        return original(hidden_states, *args, **kwargs)

    layer.forward = recording
    ids = random_ids(2, 7)
    with torch.no_grad():
        target.model(input_ids=ids)
    assert torch.equal(target.embed(ids), received[0])
    rows = target.embedding.get_parameter("weight")[ids] * target.input_embedding_scale
    torch.testing.assert_close(rows, received[0], rtol=1e-5, atol=1e-6)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda _module, _args, out: out, always_call=True)
    build_target("llama", model, None)
    original = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = output.logits + output.logits.roll(1, -1)
        return output

    model.forward = forward
    with pytest.raises(TargetError, match="do not give the model's own logits"):
        build_target("llama", model, None)


def test_an_untied_head_in_place_of_a_tied_one_is_refused() -> None:
    model = tiny("llama-tied")
    head = copy.deepcopy(model.lm_head)
    head.weight = nn.Parameter(torch.randn_like(head.weight))
    model.get_output_embeddings = lambda: head
    with pytest.raises(TargetError, match="do not give the model's own logits"):
        build_target("llama-tied", model, None)


def test_the_embedding_multiplier_outside_the_module_is_not_guessed() -> None:
    model = tiny("granite")
    model.model.embedding_multiplier = 2.0
    with pytest.raises(TargetError, match="does not receive scaled embedding rows"):
        build_target("granite", model, None)


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_target_ids_are_the_argmax_whatever_the_chunk(chunk_size: int) -> None:
    head = build_target("gemma2", tiny("gemma2"), None).head
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.target_ids(hidden, chunk_size), head(hidden).argmax(-1))
    assert head.target_ids(hidden[:0]).shape == (0, 5)


def test_the_cap_follows_the_multiplier_and_gradients_pass() -> None:
    linear = nn.Linear(4, 6, bias=False)
    head = TargetHead(nn.Identity(), linear, output_multiplier=3.0, final_logit_softcapping=2.0)
    hidden = torch.randn(5, 4, requires_grad=True)
    torch.testing.assert_close(head.logits(hidden), 2.0 * torch.tanh(3.0 * hidden @ linear.weight.T / 2.0))
    head.logits(hidden).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_a_reduced_head_gives_the_logits_of_its_tokens(family: str) -> None:
    target = build_target(family, tiny(family), None)
    kept_ids = torch.tensor([1, 4, 5, 20])
    reduced = target.head.of_rows(kept_ids)
    last_hidden = torch.randn(3, 7, target.hidden_size, generator=torch.Generator().manual_seed(0))
    whole = target.head(last_hidden)
    torch.testing.assert_close(reduced(last_hidden), whole[..., kept_ids])
    assert isinstance(reduced, ReducedHead)
    ids = reduced.target_ids(last_hidden, chunk_size=4)
    assert torch.equal(ids, whole.argmax(-1))
    rows = reduced.label_rows(ids, last_hidden, chunk_size=4)
    hidden = torch.full_like(whole, float("-inf"))
    hidden[..., kept_ids] = whole[..., kept_ids]
    assert torch.equal(reduced.to_target_ids(rows), hidden.argmax(-1))
    spread = reduced.to_whole(reduced(last_hidden).softmax(-1))
    torch.testing.assert_close(spread, hidden.softmax(-1))
    assert target.head.of_rows(None) is target.head is target.head.whole is reduced.whole
    assert target.head.label_rows(ids, None) is ids is target.head.to_target_ids(ids)


def test_a_mapping_of_another_table_is_refused() -> None:
    target = build_target("llama", tiny("llama"), None)
    with pytest.raises(TargetError, match="ids outside 0"):
        ReducedHead(target.head, torch.tensor([1, target.vocab_size]))
