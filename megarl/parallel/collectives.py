"""The few collectives that the trainer itself needs; Megatron brings its own."""

import torch
import torch.distributed as dist


def sum_over(group: dist.ProcessGroup):
    """A function Tensor -> Tensor that sums over `group` without touching its argument (same shape, same dtype)."""

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        return total

    return summed


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The largest of all ranks' CPU scalars."""
    largest = value.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def broadcast_from_first(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rank 0's one-dimensional CPU tensor, on every rank; the others pass None. Two broadcasts: size, then content."""
    size = torch.tensor([0 if tensor is None else tensor.numel()], dtype=torch.int64)
    dist.broadcast(size, src=0)
    content = torch.empty(int(size), dtype=dtype) if tensor is None else tensor.to(dtype).contiguous()
    dist.broadcast(content, src=0)
    return content
