"""Dense against grouped attention, side by side: time and peak memory of forward and backward on CPU.

    python benchmarks/attention.py [--documents 8] [--tokens 300] [--anchors 64] [--block-size 8] [--threads 1]

Memory is the peak of what the operators allocate on top of the inputs, taken from torch's profiler. Time is the best of
several rounds in which the two take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from draftline.draft.attention import Attention, BlockLayout, DenseAttention, GroupedAttention, LayerKind

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
KIND = LayerKind(causal=False, window=None)


def random_layout(documents: int, tokens: int, anchors: int, block_size: int) -> BlockLayout:
    """Documents of equal length, each with its anchors at random places."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(tokens - 1, generator=generator)[:anchors] + i * tokens for i in range(documents)]
    return BlockLayout.of_row(torch.cat(drawn).sort().values, torch.arange(tokens).repeat(documents), block_size)


def random_tensors(layout: BlockLayout) -> list[Tensor]:
    """Queries, context keys and values, block keys and values."""
    context, queries = len(layout.position_ids_S), len(layout.position_ids_Q)
    shapes = [(queries, HEADS), (context, KV_HEADS), (context, KV_HEADS), (queries, KV_HEADS), (queries, KV_HEADS)]
    return [torch.randn(*shape, HEAD_DIM, requires_grad=True) for shape in shapes]


def forward_backward(implementation: type[Attention], layout: BlockLayout, tensors: list[Tensor]) -> None:
    """Build the masks, attend, and take the gradient of every tensor."""
    query, context_key, context_value, block_key, block_value = tensors
    attend = implementation(layout, KIND, len(layout.position_ids_S))
    output = attend(query, (context_key, context_value), (block_key, block_value))
    torch.autograd.grad(output.sum(), tensors)


def peak_bytes(work: Callable[[], None]) -> int:
    """Largest sum of live allocations while `work` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("documents", 8), ("tokens", 300), ("anchors", 64), ("block-size", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    layout = random_layout(options.documents, options.tokens, options.anchors, options.block_size)
    tensors = random_tensors(layout)
    implementations: list[type[Attention]] = [DenseAttention, GroupedAttention]
    peaks = [peak_bytes(lambda i=i: forward_backward(i, layout, tensors)) for i in implementations]
    seconds = [float("inf")] * len(implementations)
    for _ in range(options.rounds):
        for index, implementation in enumerate(implementations):
            start = time.perf_counter()
            forward_backward(implementation, layout, tensors)
            seconds[index] = min(seconds[index], time.perf_counter() - start)

    print(
        f"{len(layout.position_ids_S)} context tokens, {len(layout.position_ids_Q)} queries, {options.threads} threads"
    )
    for implementation, duration, peak in zip(implementations, seconds, peaks, strict=True):
        print(f"{implementation.__name__:18} {duration:8.3f} s {peak / 2**20:10.1f} MiB")
    print(f"{'dense / grouped':18} {seconds[0] / seconds[1]:8.1f} x {peaks[0] / peaks[1]:10.1f} x")


if __name__ == "__main__":
    main()
