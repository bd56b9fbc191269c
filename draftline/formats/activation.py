"""How large the drafter's activations become, because some servers run it in float16, which ends at 65504.

An overflow there raises no error: the logits are NaN and nothing is accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftline.draft.block import Blocks, drafted_states
from draftline.draft.model import DFlashDraftModel
from draftline.records import Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target

FLOAT16_MAX = torch.finfo(torch.float16).max

_TOKENS = 64


@torch.no_grad()
def largest_activation(draft_model: DFlashDraftModel, target: Target) -> float:
    """Largest absolute output of any module of the drafter, in float32, on the target's own states.

    The states are of random tokens: their size hardly depends on what is said, and no text is needed.

    Raises:
        TargetError: the drafter does not fit the target.
    """
    config = draft_model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (_TOKENS,), generator=generator)
    sample = Sample(0, ids, torch.ones(_TOKENS, dtype=torch.bool))
    (captured,) = TargetForwardLoop(target, config.target_layer_ids).capture([sample])
    weight = draft_model.fc.weight
    anchors = torch.arange(1, _TOKENS, config.block_size, device=weight.device)
    blocks = Blocks.of_document(ids.to(weight.device), anchors, config)
    sizes: list[float] = []

    def note(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        sizes.extend(tensor.abs().max().item() for tensor in tensors)

    def embed(block_ids: Tensor) -> Tensor:
        return target.embed(block_ids.to(target.device)).to(weight)

    handles = [module.register_forward_hook(note) for module in draft_model.modules()]
    try:
        drafted_states(draft_model, captured.hidden_states_SLD[None].to(weight), blocks, embed)
    finally:
        for handle in handles:
            handle.remove()
    return max(sizes)
