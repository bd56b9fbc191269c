"""The captured states equal what a recorder inside the modules' own forward sees, in every family."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline.errors import ConfigError, TargetError
from draftline.records import CapturedSample, HiddenStates, Sample
from draftline.targets.capture import HookCapture, check_features
from draftline.targets.head import find_parts
from draftline.targets.model import build_target
from tests.targets.families import FAMILIES, random_ids, tiny

IDS = (0, 1, 2)


def record(model: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Layer outputs, final norm input and logits, by wrapping `forward` of the modules: no hooks involved."""
    parts = find_parts(model)
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []

    def wrap(module: nn.Module, keep: Callable[[Tensor, object], None]) -> None:
        original = module.forward

        def forward(hidden: Tensor, *args: object, **kwargs: object) -> object:
            result = original(hidden, *args, **kwargs)
            keep(hidden, result)
            return result

        module.forward = forward

    for layer in parts.decoder_layers:
        wrap(layer, lambda _, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    wrap(parts.final_norm, lambda hidden, _: inputs.append(hidden))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for module in (*parts.decoder_layers, parts.final_norm):
        del module.forward
    return outputs, inputs[0], logits


def captured_by_hooks(model: PreTrainedModel, ids: Tensor, layers: tuple[int, ...] = IDS) -> HiddenStates:
    with HookCapture(model, layers) as capture, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return capture.get_hidden_states_packed(torch.ones_like(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_logits_of_every_family(family: str) -> None:
    model = tiny(family)
    target = build_target(family, model, None)
    ids = random_ids(2, 11)
    outputs, last, logits = record(model, ids)
    states = captured_by_hooks(model, ids)
    assert states.hidden_states_packed.shape == (1, 22, len(IDS) * 32)
    assert states.verifier_last_hidden_packed.shape == (1, 22, 32)
    for place, layer in enumerate(IDS):
        found = states.hidden_states_packed[0, :, place * 32 : (place + 1) * 32]
        torch.testing.assert_close(found, outputs[layer].flatten(0, 1), rtol=1e-5, atol=1e-5)
    found = states.verifier_last_hidden_packed[0]
    torch.testing.assert_close(found, last.flatten(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, outputs[-1].flatten(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.head(found), logits.flatten(0, 1), rtol=1e-4, atol=1e-5)
    assert torch.equal(target.head.target_ids(found), logits.flatten(0, 1).argmax(-1))
    # the test is sensitive: an earlier layer, or a norm (with weights) applied twice, gives other logits
    twice = [target.final_norm(found)] if list(target.final_norm.parameters()) else []
    for wrong in (outputs[-2].flatten(0, 1), *twice):
        assert (target.head(wrong) - logits.flatten(0, 1)).abs().max() > 1e-3 * logits.abs().max()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_removed(side: str) -> None:
    model = tiny("llama")
    ids = random_ids(3, 6)
    mask = torch.ones_like(ids)
    for row, length in enumerate((6, 2, 4)):
        mask[row, length:] = 0
    mask = mask if side == "right" else mask.flip(1)
    outputs: list[Tensor] = []
    model.model.layers[1].register_forward_hook(lambda _m, _a, out: outputs.append(out))
    with HookCapture(model, (1,)) as capture:
        model(input_ids=ids, attention_mask=mask)
        states = capture.get_hidden_states_packed(mask)
    wanted = [outputs[0][row, column] for row in range(3) for column in range(6) if mask[row, column]]
    assert torch.equal(states.hidden_states_packed[0], torch.stack(wanted))


def test_one_captured_layer_is_not_the_last_hidden_state() -> None:
    model, ids = tiny("qwen3"), random_ids(1, 5)
    outputs, last, _ = record(model, ids)
    states = captured_by_hooks(model, ids, layers=(1,))
    assert states.hidden_states_packed.shape == states.verifier_last_hidden_packed.shape
    assert torch.equal(states.hidden_states_packed, outputs[1])
    assert torch.equal(states.verifier_last_hidden_packed, last)
    assert not torch.equal(outputs[1], last)


def test_a_model_that_ignores_output_hidden_states_is_captured_all_the_same() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    wanted = captured_by_hooks(model, ids).hidden_states_packed
    original = model.forward
    model.forward = lambda input_ids, **_ignored: original(input_ids=input_ids)
    assert torch.equal(captured_by_hooks(model, ids).hidden_states_packed, wanted)


def test_layers_that_return_tuples() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    wanted = captured_by_hooks(model, ids).hidden_states_packed
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: (out, "cache"))
    model.model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0][0], *args[1:]))
    model.model.layers[2].register_forward_pre_hook(lambda _m, args: (args[0][0], *args[1:]))
    model.model.layers[3].register_forward_pre_hook(lambda _m, args: (args[0][0], *args[1:]))
    model.model.norm.register_forward_pre_hook(lambda _m, args: (args[0][0],))
    assert torch.equal(captured_by_hooks(model, ids).hidden_states_packed, wanted)


def test_states_do_not_change_when_the_model_writes_into_its_tensor() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    wanted = captured_by_hooks(model, ids, (1,)).hidden_states_packed

    def overwrite(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].zero_()

    model.model.layers[2].register_forward_pre_hook(overwrite)
    assert torch.equal(captured_by_hooks(model, ids, (1,)).hidden_states_packed, wanted)


def test_a_layer_that_runs_twice_or_never_is_named() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    with HookCapture(model, IDS) as capture:
        with pytest.raises(TargetError, match="decoder layer 0 of the target ran 0 times"):
            capture.get_hidden_states_packed(torch.ones_like(ids))
        model(input_ids=ids)
        model(input_ids=ids)
        with pytest.raises(TargetError, match="decoder layer 0 of the target ran 2 times"):
            capture.get_hidden_states_packed(torch.ones_like(ids))
        model(input_ids=ids)
        capture.get_hidden_states_packed(torch.ones_like(ids))
        with pytest.raises(TargetError, match="ran 0 times"):
            capture.get_hidden_states_packed(torch.ones_like(ids))


def test_one_layer_twice_within_a_forward() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    model.model.layers[3].forward = lambda hidden, **kwargs: model.model.layers[2](hidden, **kwargs)
    with HookCapture(model, IDS) as capture:
        model(input_ids=ids)
        with pytest.raises(TargetError, match="decoder layer 2 of the target ran 2 times"):
            capture.get_hidden_states_packed(torch.ones_like(ids))


def test_a_norm_that_is_skipped() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    with HookCapture(model, IDS) as capture:
        model.model.norm = nn.Identity()
        model(input_ids=ids)
        with pytest.raises(TargetError, match="the final norm of the target ran 0 times"):
            capture.get_hidden_states_packed(torch.ones_like(ids))


def test_the_mask_of_another_batch_is_refused() -> None:
    model, ids = tiny("llama"), random_ids(2, 5)
    with HookCapture(model, IDS) as capture:
        model(input_ids=ids)
        with pytest.raises(TargetError, match=r"attention_mask is \[2, 4\], the forward had \[2, 5\]"):
            capture.get_hidden_states_packed(torch.ones(2, 4))


def test_hooks_leave_with_the_block_even_after_an_error() -> None:
    model = tiny("llama")
    with pytest.raises(RuntimeError, match="planted"), HookCapture(model, IDS):
        raise RuntimeError("planted")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    captured_by_hooks(model, random_ids(1, 5))


def test_a_second_capture_on_the_same_model_is_refused_in_any_thread() -> None:
    model, errors = tiny("llama"), []

    def enter() -> None:
        try:
            with HookCapture(model, IDS):
                pass
        except TargetError as error:
            errors.append(str(error))

    with HookCapture(model, (0,)):
        enter()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        with HookCapture(tiny("llama"), IDS):
            pass
    assert len(errors) == 2
    assert "another HookCapture is active" in errors[0]
    enter()
    assert len(errors) == 2


def test_the_head_may_be_used_inside_the_block() -> None:
    model, ids = tiny("llama"), random_ids(1, 5)
    target = build_target("llama", model, None)
    with HookCapture(model, IDS) as capture, torch.no_grad():
        logits = model(input_ids=ids).logits
        first = capture.get_hidden_states_packed(torch.ones_like(ids))
        torch.testing.assert_close(target.head(first.verifier_last_hidden_packed), logits)
        model(input_ids=ids)
        capture.get_hidden_states_packed(torch.ones_like(ids))


def test_ids_are_checked_against_the_model() -> None:
    with pytest.raises(ConfigError, match="has 3, the last layer"):
        HookCapture(tiny("llama"), (1, 3))


def _captured(states_SLD: Tensor, last_SD: Tensor) -> CapturedSample:
    length = len(states_SLD)
    sample = Sample(7, torch.arange(length), torch.ones(length, dtype=torch.bool))
    return CapturedSample(sample, states_SLD, verifier_last_hidden_SD=last_SD)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", r"layer 16 of the target is not finite at token 3 of sample 7 \(1 of 10 tokens\)"),
        ("zero", r"layer 1 of the target is all zero at token 0 of sample 7 \(10 of 10 tokens\)"),
        ("zero token", r"layer 16 of the target is all zero at token 9 of sample 7 \(1 of 10 tokens\)"),
        ("constant", "layer 16 of the target is the same at every token of sample 7"),
        ("twice", "layer 1 and layer 16 of the target are identical in sample 7"),
        ("last", "layer 16 and the last layer of the target are identical in sample 7"),
        ("last nan", "the last layer of the target is not finite at token 0 of sample 7"),
    ],
)
def test_features_that_no_working_target_gives(fault: str, message: str) -> None:
    states, last = torch.randn(10, 2, 4), torch.randn(10, 4)
    check_features(_captured(states.flatten(1), last), (1, 16))
    match fault:
        case "nan":
            states[3, 1, 2] = float("nan")
        case "zero":
            states[:, 0] = 0
        case "zero token":
            states[9, 1] = 0
        case "constant":
            states[:, 1] = torch.randn(4)
        case "twice":
            states[:, 1] = states[:, 0]
        case "last":
            last = states[:, 1]
        case "last nan":
            last[0, 0] = float("inf")
    with pytest.raises(TargetError, match=message):
        check_features(_captured(states.flatten(1), last), (1, 16))
