"""Calls a function of tensors at fixed addresses: as one CUDA graph on a GPU, or as plain code.

A decode step of a small model is a thousand launches, each of which takes the processor longer than the GPU; a graph is
one. Guarantees that the graph computes what the plain call does: it is that call, recorded. A call that cannot be
recorded runs as plain code from then on, which the log says once with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

__all__ = ["MEMORY_GROWTH", "CaptureError", "GraphPool", "GraphedCall", "bucket"]

log = logging.getLogger("lachesis")

MEMORY_GROWTH = 1.5
"""How much more memory there is at least where it has to grow: graphs are recorded again then."""
_WARM_UP_CALLS = 2
"""Calls before one is recorded: libraries allocate and choose kernels in the first ones, which no graph may hold."""


class CaptureError(RuntimeError):
    """Raised when a call cannot be recorded as a CUDA graph."""


def bucket(count: int, least: int = 1) -> int:
    """Return the size that `count` is rounded up to, so that few sizes are recorded.

    The smallest of `least` and 4, 5, 6 or 7 times a power of two (1, 2, 3 below) that holds it.
    """
    size = max(count, least, 1)
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


class GraphPool:
    """The memory that all graphs of one engine share, since no two of them run at once.

    `strict`: a call that cannot be recorded raises `CaptureError`; else it runs as plain code.
    """

    def __init__(self, device: torch.device, *, strict: bool = False) -> None:
        self.device = device
        self.strict = strict
        self.records = device.type == "cuda"
        """Whether calls are recorded; False once one could not be."""
        self._handle: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """Record `call`; return the graph and the call's result, which each replay overwrites.

        Raises `CaptureError`.
        """
        if not self._graphs:  # torch refuses the memory of graphs that are all gone, if a tensor still lies in it
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            output = self._record(graph, call)
        except RuntimeError as error:
            with suppress(RuntimeError):  # torch leaves it open where the end of a recording fails; else it says so
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._handle)  # noqa: SLF001 - no public way
            self._graphs.clear()  # later graphs get another memory
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise CaptureError(f"a CUDA graph cannot hold its step: {first}") from error
        self._graphs.add(graph)
        return graph, output

    def _record(self, graph: Any, call: Callable[[], Any]) -> Any:
        """Record `call` on a stream of the pool's device: torch's own one is of the thread's device."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # it goes back to the stream before also where `graph` does not
            for _ in range(_WARM_UP_CALLS):
                call()
            current.wait_stream(stream)
            # thread_local: other threads may allocate meanwhile, as one that reads new weights does
            with torch.cuda.graph(graph, self._handle, stream, "thread_local"):
                output = call()
        return output


class GraphedCall:
    """`call` takes nothing: it reads and writes tensors that stay where they are, and may be repeated at will."""

    def __init__(self, pool: GraphPool, call: Callable[[], Any]) -> None:
        self._pool = pool
        self._call = call
        self._graph: Any = None
        self._output: Any = None

    def __call__(self) -> Any:
        """Return the result of the call. It is valid until the next call of any graph of the pool."""
        if self._graph is None and self._pool.records:
            try:
                self._graph, self._output = self._pool.capture(self._call)
            except CaptureError as error:
                if self._pool.strict:
                    raise
                self._pool.records = False
                log.warning("%s; steps run without a graph from now on, which is slower", error)
        if self._graph is None:
            return self._call()
        self._graph.replay()
        return self._output
