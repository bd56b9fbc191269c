"""Draw the curves of a run folder as a PNG.

python benchmarks/plot_run.py RUN OUT.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from draftline.train.run_folder import RunFolder

NAMES = ("loss", "accuracy", "streak")


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    metrics = RunFolder(run).metrics
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    for axis, name in zip(axes, NAMES, strict=False):
        training, heldout = metrics[name], metrics[f"heldout_{name}"]
        axis.plot(training.steps, training.values, lw=0.6, alpha=0.6, label="training")
        axis.plot(heldout.steps, heldout.values, "o-", label="held out")
        axis.set(title=name, xlabel="step")
        axis.legend(frameon=False)
    axes[0].set_ylim(0, 6)
    walk = metrics["heldout_teacher_forced_acceptance_length"]
    axes[3].plot(walk.steps, walk.values, "o-", color="tab:orange")
    axes[3].set(title="teacher-forced acceptance length (with bonus)", xlabel="step")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
