"""The command line. `main` is the entry point `lachesis`; expected errors are one line and exit code 2.

Modules here are imported by the commands that need them, so that `lachesis --help` answers at once and a process that
only runs raters never imports what only training needs.
"""

import sys

from lachesis.schemas.errors import LachesisError, leaves
from lachesis.services.cli.commands import app

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit. As with `python -m`, modules in the current folder can be named."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        app(prog_name="lachesis")
    except (LachesisError, BrokenPipeError, BaseExceptionGroup) as error:
        ended_by = leaves(error)
        if all(isinstance(leaf, BrokenPipeError) for leaf in ended_by):
            sys.exit(0)  # whoever read the output has seen enough
        if not all(isinstance(leaf, LachesisError) for leaf in ended_by):
            raise
        for leaf in ended_by:
            print(f"lachesis: {leaf}", file=sys.stderr)
        sys.exit(2)
