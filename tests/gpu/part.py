"""Runs one part in this process: `python -m gpu.part NAME [--cpu]`."""

import importlib
import sys

__all__: list[str] = []

if __name__ == "__main__":
    importlib.import_module(f"gpu.parts.{sys.argv[1]}").measure(small="--cpu" in sys.argv)
