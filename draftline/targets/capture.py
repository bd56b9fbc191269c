"""Read two sets of hidden states out of a target's forward, with hooks.

Set one: the outputs of chosen decoder layers, for the drafter's `fc`. Set two: the input of the final norm, which is
the output of the last decoder layer, for the training targets. `output_hidden_states` is not used: its last entry is
normed in some models and not in others, some models ignore it, and wrappers hide it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from draftline.errors import TargetError
from draftline.records import CapturedSample, HiddenStates
from draftline.targets.head import find_parts
from draftline.targets.layers import check_target_layer_ids


class HookCapture:
    """Context manager: inside it, every forward of `model` leaves its hidden states here, to be fetched once.

        with HookCapture(model, target_layer_ids) as capture:
            model(input_ids=ids, attention_mask=mask)
            states = capture.get_hidden_states_packed(mask)

    One capture owns its model while it is active: hooks of two threads on one module would mix their states.

    Raises:
        ConfigError: `target_layer_ids` does not fit the model.
        TargetError: the model has no parts to hook; or, on entry, another capture is active on it.
    """

    _active: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        parts = find_parts(model)
        self.target_layer_ids = check_target_layer_ids(target_layer_ids, len(parts.decoder_layers))
        self._layers = [parts.decoder_layers[i] for i in self.target_layer_ids]
        self._final_norm = parts.final_norm
        self._places = [f"decoder layer {i}" for i in self.target_layer_ids] + ["the final norm"]
        self._seen: list[list[Tensor]] = [[] for _ in self._places]
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> HookCapture:
        with self._lock:
            if self._final_norm in self._active:
                raise TargetError(
                    "another HookCapture is active on this target: give each loop its own copy, or leave the first one"
                )
            self._active.add(self._final_norm)
        self._clear()
        for place, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._output_hook(place)))
        self._handles.append(self._final_norm.register_forward_pre_hook(self._input_hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._clear()
        with self._lock:
            self._active.discard(self._final_norm)

    def get_hidden_states_packed(self, attention_mask: Tensor) -> HiddenStates:
        """The states of the last forward for real tokens only, rows one after another.

        Args:
            attention_mask: [B, T], nonzero on real tokens; padding may be on either side.

        Raises:
            TargetError: a hook did not fire exactly once since the last call, or the mask has another shape.
        """
        try:
            states = [self._only(place) for place in range(len(self._places))]
        finally:
            self._clear()
        last = states[-1]
        if attention_mask.shape != last.shape[:2]:
            raise TargetError(
                f"attention_mask is {list(attention_mask.shape)}, the forward had {list(last.shape[:2])} tokens: "
                "give the mask of that forward"
            )
        real = attention_mask.to(last.device).bool()
        packed = torch.cat([layer.to(last.device)[real] for layer in states[:-1]], dim=-1)
        return HiddenStates(packed.unsqueeze(0), last[real].unsqueeze(0))

    def _output_hook(self, place: int) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            self._keep(place, output[0] if isinstance(output, tuple | list) else output)

        return hook

    def _input_hook(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._keep(len(self._places) - 1, args[0] if args else kwargs["hidden_states"])

    def _keep(self, place: int, states: object) -> None:
        if not isinstance(states, Tensor) or states.ndim != 3:
            form = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise TargetError(f"{self._places[place]} of the target gave {form}, expected [B, T, D]: not supported")
        # cloned: the model is free to write into its own tensor after the hook
        self._seen[place].append(states.detach().clone())

    def _only(self, place: int) -> Tensor:
        seen = self._seen[place]
        if len(seen) != 1:
            raise TargetError(
                f"{self._places[place]} of the target ran {len(seen)} times where one forward was expected: "
                "call get_hidden_states_packed once after each forward"
            )
        return seen[0]

    def _clear(self) -> None:
        for seen in self._seen:
            seen.clear()


def check_features(captured: CapturedSample, target_layer_ids: Sequence[int]) -> None:
    """Refuse states that no working target gives. Costs a few passes over the states.

    Raises:
        TargetError: a layer is not finite or all zero at some token, is the same at all of several different tokens,
            or equals another layer. The message names the layer, the sample and the token.
    """
    name = f"sample {captured.sample.sample_id}"
    layers = captured.hidden_states_SLD.unflatten(-1, (len(target_layer_ids), -1)).unbind(1)
    named = [(f"layer {i}", states) for i, states in zip(target_layer_ids, layers, strict=True)]
    if captured.verifier_last_hidden_SD is not None:
        named.append(("the last layer", captured.verifier_last_hidden_SD))
    several = bool((captured.sample.input_ids != captured.sample.input_ids[0]).any())
    for layer, states_SD in named:
        for fault, bad_S in (
            ("is not finite", ~states_SD.isfinite().all(-1)),
            ("is all zero", (states_SD == 0).all(-1)),
        ):
            if bad_S.any():
                token, count = int(bad_S.int().argmax()), int(bad_S.sum())
                raise TargetError(
                    f"{layer} of the target {fault} at token {token} of {name} ({count} of {len(bad_S)} tokens): "
                    "the target is broken or runs in too narrow a dtype"
                )
        if several and bool((states_SD == states_SD[0]).all()):
            raise TargetError(f"{layer} of the target is the same at every token of {name}: the target is broken")
    for (first, a_SD), (second, b_SD) in itertools.combinations(named, 2):
        if torch.equal(a_SD, b_SD):
            raise TargetError(f"{first} and {second} of the target are identical in {name}: one layer was read twice")
