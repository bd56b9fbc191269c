"""Draw the curves of a run folder as a PNG.

python benchmarks/plot_run.py RUN OUT.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = ("loss", "accuracy", "streak")


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    heldout = [line for line in lines if "heldout_loss" in line]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    for axis, name in zip(axes, NAMES, strict=False):
        axis.plot([line["step"] for line in lines], [line[name] for line in lines], lw=0.6, alpha=0.6, label="training")
        axis.plot(
            [line["step"] for line in heldout], [line[f"heldout_{name}"] for line in heldout], "o-", label="held out"
        )
        axis.set(title=name, xlabel="step")
        axis.legend(frameon=False)
    axes[0].set_ylim(0, 6)
    walk = [line["heldout_teacher_forced_acceptance_length"] for line in heldout]
    axes[3].plot([line["step"] for line in heldout], walk, "o-", color="tab:orange")
    axes[3].set(title="teacher-forced acceptance length (with bonus)", xlabel="step")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
