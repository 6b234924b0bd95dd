"""Hides a machine's GPU from tests, so that they compare with a CPU's bits on every machine.

Tests marked `gpu` see it and are skipped on a machine without one. The others, and what they start, see none: by
torch's own answers in this process, since CUDA looks at its environment once, and by CUDA_VISIBLE_DEVICES in others.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["hidden_gpu", "machine_has_gpu", "pytest_collection_modifyitems", "seen_gpu"]

_DRIVER = Path("/dev/nvidiactl")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def machine_has_gpu() -> bool:
    """Return whether this machine has a GPU that torch may see."""
    return _DRIVER.exists() and os.environ.get(_VISIBLE) != ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees none."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not (machine_has_gpu() and _torch_sees_one()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def hidden_gpu() -> Iterator[pytest.MonkeyPatch | None]:
    """Hide the GPU from the first fixture on. None: there is none."""
    if not machine_has_gpu():
        yield None
        return
    patch = pytest.MonkeyPatch()
    _hide(patch)
    yield patch
    patch.undo()


@pytest.fixture(autouse=True)
def seen_gpu(request: pytest.FixtureRequest, hidden_gpu: pytest.MonkeyPatch | None) -> Iterator[None]:
    """Let a test marked `gpu` see it."""
    if hidden_gpu is None or request.node.get_closest_marker("gpu") is None:
        yield
        return
    hidden_gpu.undo()
    yield
    _hide(hidden_gpu)


def _hide(patch: pytest.MonkeyPatch) -> None:
    import torch

    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setenv(_VISIBLE, "")


def _torch_sees_one() -> Any:
    import torch

    return torch.cuda.is_available()
