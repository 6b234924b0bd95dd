"""`lachesis demo`: the whole pipeline on real tasks, judged by what it learned."""

import sys

from lachesis.services.demo.run import run_demo
from lachesis.services.demo.settings import DemoOptions

__all__ = ["run_demo_command"]


def run_demo_command(options: DemoOptions) -> None:
    """Run it and exit with its code."""
    sys.exit(run_demo(options))
