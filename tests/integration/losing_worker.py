"""vLLM's worker with a fault: while the file exists that LOSING names, new weights do not reach the model.

To be named to vLLM with `--worker-extension-cls`. Everything else says that they have arrived.
"""

import os
from pathlib import Path

from lachesis.pipeline.inference.engines.vllm.worker import FileTransfer, WorkerExtension

__all__ = ["LosingExtension"]

_load = FileTransfer._load


def _lose(self, tensors):
    if not Path(os.environ["LOSING"]).exists():
        _load(self, tensors)


FileTransfer._load = _lose


class LosingExtension(WorkerExtension):
    """That of the project; naming it imports this module."""
