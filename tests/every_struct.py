"""Finds every struct of the package, in whichever module."""

import importlib
import pkgutil
from functools import cache

import msgspec

import lachesis.pipeline
import lachesis.schemas
import lachesis.services

__all__ = ["named", "structs"]

LACKING = {"lachesis.pipeline.inference.engines.vllm.worker", "lachesis.pipeline.model.picked_kernels"}
"""Modules that need vLLM and triton; neither decodes a struct of its own."""


@cache
def structs() -> frozenset[type[msgspec.Struct]]:
    """Return every struct of the package."""
    for package in (lachesis.schemas, lachesis.pipeline, lachesis.services):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in LACKING:
                importlib.import_module(module.name)
    found: set[type[msgspec.Struct]] = set()
    ahead = list(msgspec.Struct.__subclasses__())
    while ahead:
        kind = ahead.pop()
        ahead += kind.__subclasses__()
        if kind.__module__.startswith("lachesis."):
            found.add(kind)
    return frozenset(found)


def named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("lachesis.")
