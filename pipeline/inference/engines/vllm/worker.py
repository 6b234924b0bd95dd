"""vLLM's half of a weight update: a transfer backend that loads a policy's file.

Runs inside vLLM's own processes.

Given the path and version of a policy record, it loads these weights: copied from a file, or, if the path is a pointer
to shared memory, the trainer's own (`shared_memory`). Guarantees: a file is taken only from the run's weights
folder, and only if it has the version's digest and every tensor of the checkpoint that vLLM was started with, in its
shape and in float32 (vLLM rounds to the dtype it serves). The old weights stay untouched until all of that holds. A
load that fails half-way ends the process, so half-loaded weights never answer.

vLLM imports this as its worker extension, before the model is loaded, in an environment that has only the source of
this project. So it may need only torch, safetensors, msgspec and blake3, which come with vLLM.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm._custom_ops
from huggingface_hub import snapshot_download
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker.gpu_worker import Worker

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.inference.engines.vllm.loaded_weights import digest_as_held, loaded_weights
from lachesis.pipeline.inference.engines.vllm.names import REFUSED, TRANSFER_BACKEND, WEIGHTS_FOLDER
from lachesis.pipeline.inference.engines.vllm.shared_memory import SharedModel, guard_worker
from lachesis.pipeline.model.shards import weight_file_names
from lachesis.pipeline.model.shared_memory import POINTER_FILE
from lachesis.pipeline.model.weight_files import path_inside, read_weights, travel_dtype
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["FileTransfer", "WorkerExtension"]

log = logging.getLogger("vllm.lachesis")

# On a CPU vLLM packs every Linear into a private oneDNN handle, and loading weights does not reach what it computes
# with: updates would be silently lost.
vllm._custom_ops._supports_onednn = False  # noqa: SLF001
guard_worker(Worker)


class WorkerExtension:
    """Added to vLLM's worker. Naming it is also what makes every worker import this module in time."""

    weight_transfer_engine: FileTransfer

    def loaded_digest(self) -> dict[str, Any]:
        """Return a `LoadedWeights` of the weights that this worker computes with.

        It is read from its model's memory. For `/collective_rpc`.
        """
        return self.weight_transfer_engine.loaded()


@dataclass
class _InitInfo:
    """Nothing is agreed upon beforehand."""


@dataclass
class _FileUpdateInfo:
    path: str
    version: str


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Reads and checks in `update_weights`, loads in `finish_weight_update`; `init` drops unfinished ones."""

    init_info_cls = _InitInfo
    update_info_cls = _FileUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._folder = Path(os.environ[WEIGHTS_FOLDER]).resolve()
        self._expected = _published_form(vllm_config)
        self._staged: dict[str, torch.Tensor] | None = None
        self._dtype = "float32"  # that the weights travelled in which were delivered last
        self._as_held: str | None = None
        self._shared = SharedModel(vllm_config, model, self._expected, self._load)
        packed = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if packed:
            raise RuntimeError(
                f"vLLM has packed {len(packed)} weights ({packed[0]}, ...) into a form that updates do not reach; "
                "start it with another dtype or without CPU kernels of its own"
            )

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Drop the tensors of an update that was not finished."""
        self._staged = None
        self._shared.drop_update()

    def start_weight_update(self) -> None:
        """Do nothing yet: the old weights stay whole until the new ones are known to be."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and check the file. Raises ValueError, beginning with `REFUSED`, when it cannot be served."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _FileUpdateInfo) -> None:
        try:
            path, version = path_inside(self._folder, update_info.path), PolicyVersion.parse(update_info.version)
            if path.name == POINTER_FILE:
                self._shared.update(path, version)
                self._dtype, self._as_held = "float32", None
            else:
                self._staged = read_weights(path, version, self._expected)
                self._dtype = travel_dtype(path)
                self._as_held = digest_as_held(self.model, self._staged, self._dtype)
        except (DataError, NotFoundError) as error:
            raise ValueError(f"{REFUSED}{error}") from error

    def finish_weight_update(self) -> None:
        """Load the file that was read, or serve the shared weights; without either only end the session."""
        self._shared.finish_update()
        if self._staged is None:
            return
        staged, self._staged = self._staged, None
        try:
            self._shared.detach()
            self._load(staged)
        except BaseException:
            log.exception("the weights are loaded in part and must not be served; ending vLLM")
            logging.shutdown()
            os._exit(1)

    def loaded(self) -> dict[str, Any]:
        """Return a `LoadedWeights` as plain values."""
        found = loaded_weights(self.model, self._expected, self._dtype, self._as_held)
        plain: dict[str, Any] = msgspec.to_builtins(found)
        return plain

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors into the model as vLLM itself does."""
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        _synchronize(self.device)

    def shutdown(self) -> None:
        self._staged = None


def _published_form(vllm_config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a published policy of this model, as meta tensors: name, shape, dtype.

    They are the tensors of the checkpoint that vLLM has just loaded, by its headers; floating-point ones come in
    float32, whatever the checkpoint has. A head that is tied to the embedding is not stored; vLLM itself ignores it in
    checkpoints that have it.
    """
    model = vllm_config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        cache = vllm_config.load_config.download_dir
        patterns = ["*.safetensors", "*.json"]
        folder = Path(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=cache, allow_patterns=patterns, local_files_only=True
            )
        )
    form: dict[str, torch.Tensor] = {}
    for name in weight_file_names(folder):
        with safe_open(folder / name, framework="pt") as file:
            for tensor in file.keys():  # noqa: SIM118 - not a mapping
                piece = file.get_slice(tensor)
                floating = piece.get_dtype() in {"F64", "F32", "F16", "BF16"}
                dtype = torch.float32 if floating else file.get_tensor(tensor).dtype
                form[tensor] = torch.empty(piece.get_shape(), dtype=dtype, device="meta")
    if getattr(model.hf_text_config, "tie_word_embeddings", False):
        form.pop("lm_head.weight", None)
    return form


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, FileTransfer)
