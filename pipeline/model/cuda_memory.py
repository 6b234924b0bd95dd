"""Shares memory of a GPU between two processes, by CUDA's interprocess handles.

Tested on one H100 between two processes of this project, and not yet with vLLM. The handle is CUDA's own and not
torch's, because torch counts users in files that a killed process leaves behind. The memory is gone with the process
that allocated it; a process that has mapped it must stop computing then (see `SegmentReader.is_alive`). Runs inside
vLLM's process too.
"""

from __future__ import annotations

import base64
import weakref
from typing import Any, Protocol

import msgspec
import torch

from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["CudaMemory", "allocate", "exported", "opened"]


class CudaMemory(msgspec.Struct, frozen=True):
    """What another process needs in order to map the memory: the GPU's UUID, CUDA's handle in base64, bytes."""

    gpu: str
    handle: str
    size: int


class _Runtime(Protocol):
    """What is used of `cuda.bindings.runtime`, which comes with torch's CUDA builds."""

    cudaMalloc: Any  # noqa: N815 - CUDA's names
    cudaIpcGetMemHandle: Any  # noqa: N815
    cudaIpcOpenMemHandle: Any  # noqa: N815
    cudaIpcCloseMemHandle: Any  # noqa: N815
    cudaIpcMemHandle_t: Any  # noqa: N815
    cudaIpcMemLazyEnablePeerAccess: Any  # noqa: N815


class _Pointer:
    """Memory at an address, in the form that torch takes without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def allocate(size: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [size] on a GPU, an allocation of its own: a handle leads to the beginning of one.

    It lasts as long as the process.
    """
    runtime = _runtime()
    with torch.cuda.device(device):
        address = _done("cudaMalloc", runtime.cudaMalloc(size))
    return torch.as_tensor(_Pointer(int(address), size), device=device)


def exported(memory: torch.Tensor) -> CudaMemory:
    """Return what another process maps `memory` by, which `allocate` made."""
    runtime = _runtime()
    with torch.cuda.device(memory.device):
        handle = _done("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(memory.data_ptr()))
    return CudaMemory(_uuid(memory.device.index), base64.b64encode(bytes(handle.reserved)).decode(), memory.nbytes)


def opened(memory: CudaMemory) -> torch.Tensor:
    """Map the memory of another process, uint8 [size], until the last tensor in it is gone.

    Raises `DataError` where this process does not see its GPU.
    """
    runtime = _runtime()
    index = next((i for i in range(torch.cuda.device_count()) if _uuid(i) == memory.gpu), None)
    if index is None:
        raise DataError(
            f"the weights are on GPU {memory.gpu}, which this process does not see: let inference.policy.gpus name the "
            "trainer's"
        )
    handle = runtime.cudaIpcMemHandle_t()
    handle.reserved = base64.b64decode(memory.handle)
    with torch.cuda.device(index):
        address = _done(
            "cudaIpcOpenMemHandle", runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        )
    pointer = _Pointer(int(address), memory.size)  # kept by the tensor that torch makes of it, and by its views
    weakref.finalize(pointer, _close, runtime, index, int(address)).atexit = False
    return torch.as_tensor(pointer, device=f"cuda:{index}")


def _close(runtime: _Runtime, index: int, address: int) -> None:
    """Unmap memory; a failure is CUDA's to report at the next call, as when its process has ended."""
    with torch.cuda.device(index):
        torch.cuda.synchronize()
        runtime.cudaIpcCloseMemHandle(address)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _done(call: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise DataError(f"{call} failed: {status}; trainer and server must run as the same user of one machine")
    return values[0]


def _runtime() -> _Runtime:
    try:
        from cuda.bindings import runtime
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'weights.transport = "shared_memory" on a GPU needs {error.name}, which comes with CUDA builds of torch'
        ) from error
    found: _Runtime = runtime
    return found
