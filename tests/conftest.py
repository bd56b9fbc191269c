"""What holds for every test."""

from __future__ import annotations

import torch

# Small tensors on busy cores: OpenMP threads that wait for each other take longer than the work itself.
torch.set_num_threads(1)
