"""A training loop of one's own on captured states: how much of the next token does each layer know already?

    python examples/probe_layers.py tiny 2 5 7

For each layer that is named, a matrix is trained to turn its states into what the final norm reads; the target's own
head then says the next token. Printed is the share of tokens for which that is what the target itself says.
"""

from __future__ import annotations

import sys

import torch

from draftline import HookCapture, load_target
from draftline.config import TargetConfig

STEPS, ROWS, LENGTH = 60, 8, 48


def main(name: str, layers: list[int], steps: int = STEPS) -> dict[int, float]:
    """Share of right tokens by layer, on rows that were not trained on."""
    target = load_target(TargetConfig(name=name))
    generator, width = torch.Generator().manual_seed(0), target.config.hidden_size
    probes = {layer: torch.eye(width).requires_grad_() for layer in layers}
    optimizer = torch.optim.Adam(probes.values(), lr=1e-2)
    right = dict.fromkeys(layers, 0.0)
    with HookCapture(target.model, layers) as capture:
        for step in range(steps + 1):
            ids = torch.randint(target.vocab_size, (ROWS, LENGTH), generator=generator)
            with torch.no_grad():
                target.model(input_ids=ids, use_cache=False)
            states = capture.get_hidden_states_packed(torch.ones_like(ids))
            last_SD = states.verifier_last_hidden_packed[0].float()
            by_layer = states.hidden_states_packed[0].float().split(width, dim=-1)  # in the order of `layers`
            said = {layer: states_SD @ probes[layer] for layer, states_SD in zip(layers, by_layer, strict=True)}
            if step < steps:
                optimizer.zero_grad()
                sum((guess_SD - last_SD).square().mean() for guess_SD in said.values()).backward()
                optimizer.step()
    wanted_S = target.head.target_ids(last_SD)
    for layer, guess_SD in said.items():
        right[layer] = (target.head.target_ids(guess_SD.detach()) == wanted_S).float().mean().item()
    return right


if __name__ == "__main__":
    for layer, share in main(sys.argv[1], sorted(map(int, sys.argv[2:]))).items():
        print(f"layer {layer}: {share:.1%} of the target's tokens")
