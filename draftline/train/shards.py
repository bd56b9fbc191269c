"""A drafter of which each rank keeps a share of every tensor: PyTorch's FSDP2 (`fully_shard`), told to sum.

Weights are put together for each row, and the gradient is summed and shared out behind it; moments are never whole. The
drafter is one group and not one a layer, because it projects the context with parts of its layers before these run.
FSDP2 would divide the gradient by the number of ranks; it is told not to, because the step divides by the global count.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from draftline.draft.attention import Attention, BlockLayout
from draftline.draft.model import DFlashDraftModel


def shard_model(draft_model: DFlashDraftModel, device: torch.device) -> DeviceMesh:
    """Leave this rank its share of a drafter, by the first dimension of each tensor; returns the mesh of ranks."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    sharded = fully_shard(draft_model, mesh=mesh)
    assert isinstance(sharded, FSDPModule), "fully_shard makes it one"
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # else by a sum of multiples, which gloo does not have
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nobody writes into it
    return mesh


def share_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share of what all ranks have alike; a number stays whole."""
    return (
        distribute_tensor(tensor.to(mesh.device_type), mesh, [Shard(0)], src_data_rank=None) if tensor.ndim else tensor
    )


def like(tensor: Tensor, share: Tensor) -> Tensor:
    """Of a whole tensor what this rank keeps of `share`, another of its shape, which may be whole as well."""
    return share_of(tensor, share.device_mesh) if isinstance(share, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; if it is a share, all ranks have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def nothing_learned(draft_model: DFlashDraftModel, attention: type[Attention]) -> Tensor:
    """A loss of zero with a gradient of zeros for every parameter, from one block after one token.

    All ranks have to call a sharded drafter equally often, and each has to have a gradient of every parameter, also
    where a row has no supervised slot, or only blocks that see no context.
    """
    config, weight = draft_model.config, next(draft_model.parameters())
    row, nothing = torch.arange(2, device=weight.device), torch.zeros((), device=weight.device, dtype=weight.dtype)
    states = nothing.expand(1, len(row), len(config.target_layer_ids) * config.hidden_size)
    slots = nothing.expand(1, config.block_size, config.hidden_size)
    return 0.0 * draft_model(states, slots, BlockLayout.of_row(row[1:], row, config.block_size), attention).sum()
