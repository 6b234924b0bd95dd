"""A segment whose tensors are on a GPU: all but CUDA itself, which main memory stands for here, and then CUDA itself.

The stand-in shares a file where CUDA shares memory; what it cannot show is a GPU's asynchrony.
"""

import base64
import mmap
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from lachesis.pipeline.inference.engines.vllm import shared_memory as vllm_shared_memory
from lachesis.pipeline.inference.engines.vllm.shared_memory import guard_worker
from lachesis.pipeline.model import cuda_memory, shared_memory
from lachesis.pipeline.model.cuda_memory import CudaMemory
from lachesis.pipeline.model.shared_memory import SegmentReader, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version, weights_digest
from lachesis.schemas.errors import DataError

from .test_shared_memory import JoinedModel, World, tiny


class StandIn:
    """Main memory in the place of a GPU's."""

    def __init__(self):
        self.waits = 0
        self._files = {}

    def allocate(self, size, device):
        file = os.memfd_create("stands-for-a-gpu")
        os.ftruncate(file, size)
        memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        self._files[memory.data_ptr()] = file
        return memory

    def exported(self, memory):
        return CudaMemory("GPU-0", str(self._files[memory.data_ptr()]), memory.nbytes)

    def opened(self, memory):
        return torch.frombuffer(mmap.mmap(int(memory.handle), memory.size, prot=mmap.PROT_READ), dtype=torch.uint8)

    def synchronize(self, device=None):
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(shared_memory, "_is_gpu", lambda device: True)
    for name in ("allocate", "exported", "opened"):
        monkeypatch.setattr(cuda_memory, name, getattr(stand_in, name))
    monkeypatch.setattr(torch.cuda, "synchronize", stand_in.synchronize)
    yield stand_in
    vllm_shared_memory._served.reader = None


@pytest.fixture
def world(tmp_path, gpu):
    trainer = tiny()
    return World(tmp_path, trainer, JoinedModel(trainer.config.vocab_size))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_server_and_trainer_compute_with_one_copy_and_the_count_waits_for_the_gpu(world, gpu):
    segment = world.serve()
    assert os.fstat(segment._fd).st_size <= 4 * mmap.PAGESIZE  # the file has no tensor
    waited = gpu.waits
    with segment.changing(), torch.no_grad():
        for parameter in world.trainer.parameters():
            parameter.add_(1.0)
    assert gpu.waits == waited + 1
    right = JoinedModel(world.trainer.config.vocab_size)
    right.load(policy_tensors(world.trainer))
    for name, held in world.served.named_parameters():
        assert torch.equal(held, right.get_parameter(name)), name
    reader = SegmentReader(segment_pointer(world.folder))
    assert weights_digest(reader.tensors) == weights_digest(policy_tensors(world.trainer))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_graphs_that_were_captured_before_are_refused(world):
    world.shared._eager = False
    with pytest.raises(DataError, match=r"captured graphs .*--enforce-eager"):
        world.serve()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_server_stops_before_it_computes_with_memory_whose_trainer_has_ended(world, gpu, monkeypatch):
    ended = []
    monkeypatch.setattr(vllm_shared_memory, "_die", ended.append)

    class Worker:
        def execute_model(self):
            return "computed"

        def sample_tokens(self):
            return "sampled"

    guard_worker(Worker)
    segment = world.serve()
    version = policy_version(0, "a", policy_tensors(world.trainer))
    segment.publish(version)
    world.shared.update(segment_pointer(world.folder), version)
    world.shared.finish_update()
    waited = gpu.waits
    assert Worker().execute_model() == "computed"
    assert gpu.waits == waited + 1  # before the trainer may change what the GPU still reads
    assert not ended
    os.close(segment._fd)  # as the end of its process does
    Worker().sample_tokens()
    assert "the trainer whose memory the weights are in has ended" in ended[0]


def test_mapped_memory_is_unmapped_with_the_last_tensor_in_it(monkeypatch):
    closed = []

    class Handle:
        reserved = b""

    class Runtime:
        cudaIpcMemHandle_t = Handle  # noqa: N815 - CUDA's names
        cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815

        def cudaIpcOpenMemHandle(self, handle, flags):  # noqa: N802
            assert (len(handle.reserved), flags) == (64, 1)
            return 0, 4096

        def cudaIpcCloseMemHandle(self, address):  # noqa: N802
            closed.append(address)
            return (0,)

    monkeypatch.setattr(cuda_memory, "_runtime", Runtime)
    monkeypatch.setattr(cuda_memory, "_uuid", str)
    for name, stand_in in (
        ("device_count", lambda: 1), ("device", lambda index: nullcontext()), ("synchronize", lambda: None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "as_tensor", lambda pointer, device: pointer)  # a tensor keeps it as long as it lives
    mapped = cuda_memory.opened(CudaMemory("0", base64.b64encode(bytes(64)).decode(), 16))
    assert not closed
    del mapped
    assert closed == [4096]


OWNER = """
import sys, torch, msgspec
from lachesis.pipeline.model.cuda_memory import allocate, exported
memory = allocate(1 << 20, torch.device("cuda:0"))
memory[:] = 7
torch.cuda.synchronize()
print(msgspec.json.encode(exported(memory)).decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_memory_of_a_gpu_is_mapped_by_another_process():
    import msgspec

    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        try:
            shared = msgspec.json.decode(owner.stdout.readline(), type=CudaMemory)
            assert (cuda_memory.opened(shared) == 7).all()
        finally:
            owner.kill()
