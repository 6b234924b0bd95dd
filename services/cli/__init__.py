"""The command line. `main` is the entry point `lachesis`; expected errors are one line and exit code 2.

Modules here are imported by the commands that need them, so that `lachesis --help` answers at once and a process that
only runs raters never imports what only training needs.
"""

import sys
from collections.abc import Iterator

from lachesis.schemas.errors import LachesisError
from lachesis.services.cli.commands import app

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit. As with `python -m`, modules in the current folder can be named."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        app(prog_name="lachesis")
    except (LachesisError, BrokenPipeError, BaseExceptionGroup) as error:
        leaves = list(_leaves(error))
        if all(isinstance(leaf, BrokenPipeError) for leaf in leaves):
            sys.exit(0)  # whoever read the output has seen enough
        if not all(isinstance(leaf, LachesisError) for leaf in leaves):
            raise
        for leaf in leaves:
            print(f"lachesis: {leaf}", file=sys.stderr)
        sys.exit(2)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
