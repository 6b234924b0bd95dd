"""The worker extension of this project in vLLM 0.26.0, which asks a transfer backend for one method more."""

import abc
from typing import Any, NoReturn

from lachesis.pipeline.inference.engines.vllm.worker import FileTransfer, WorkerExtension

__all__ = ["WorkerExtension"]


def _nothing_to_send(iterator: Any, trainer_args: Any) -> NoReturn:
    raise NotImplementedError("the trainer writes a file or shares its memory")


FileTransfer.trainer_send_weights = staticmethod(_nothing_to_send)
abc.update_abstractmethods(FileTransfer)
