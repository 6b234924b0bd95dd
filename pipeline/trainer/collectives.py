"""Exchanges sums, bytes and tensors between the ranks of one trainer.

Guarantees that every rank gets the same result, to the bit, and that everything travels as arrays of numbers: nothing
that is received is unpickled. Each method except those of `ALONE` is a collective: all ranks call it, in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lachesis.pipeline.errors import InfrastructureError, RankLostError

__all__ = ["ALONE", "Ranks", "raise_rank_lost"]

_BUCKET_BYTES = 1 << 26
"""Bytes of gradients that are summed at once."""
_SIGNS_OF_TRANSPORT = ("gloo", "NCCL", "ProcessGroup", "Connection closed", "Timed out waiting")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a trainer and the one that this process is, from 0."""

    rank: int = 0
    size: int = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of each of the values, in float64."""
        if self.size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals)
        found: list[float] = totals.tolist()
        return found

    def largest(self, value: int) -> int:
        """Return the largest value that a rank has."""
        return max(int(found) for found in self.gather(str(value).encode()))

    def gather(self, message: bytes) -> list[bytes]:
        """Return the message of each rank, in their order."""
        if self.size == 1:
            return [message]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(message)]))
        width = max(1, *(int(length) for length in lengths))
        parts = [torch.zeros(width, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.frombuffer(bytearray(message.ljust(width, b"\0")), dtype=torch.uint8))
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor with that of rank 0. Any device, shape and dtype, the same on all ranks."""
        if self.size > 1:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(whole)

    def sum_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace the gradient of each parameter by its sum over the ranks; a rank that has none adds 0."""
        if self.size == 1:
            return
        for bucket in _buckets(list(parameters)):
            flat = torch.cat([_gradient(parameter).flatten() for parameter in bucket])
            dist.all_reduce(flat)
            for parameter, part in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).clone()


ALONE = Ranks()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters in order, so many at a time as fit `_BUCKET_BYTES`, of one dtype."""
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        full = sum(each.nbytes for each in bucket) + parameter.nbytes > _BUCKET_BYTES
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


@contextmanager
def raise_rank_lost(ranks: Ranks) -> Iterator[None]:
    """Raise `RankLostError` where a collective fails: another rank has ended or stands still."""
    try:
        yield
    except InfrastructureError:
        raise
    except RuntimeError as error:
        is_transport = isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS_OF_TRANSPORT)
        if ranks.size == 1 or isinstance(error, RankLostError) or not is_transport:
            raise
        reason = str(error).splitlines()[0].partition(" This is typically")[0]
        raise RankLostError(f"rank {ranks.rank} of the trainer lost another: {reason}") from error
