"""The command line.

`main` is the entry point `lachesis`; expected errors are one line and exit code 2.

Each command is a module: its options, its help and its work. `commands` is the table that names them.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import typer

from lachesis.pipeline.common.os_errors import explain_os_error
from lachesis.pipeline.common.safe_text import printable, protect_output
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.errors import leaves
from lachesis.schemas.errors import LachesisError
from lachesis.services.cli.commands import app
from lachesis.services.cli.own_code import guard_own_code, runs_own_code
from lachesis.services.run.file_permissions import make_files_private
from lachesis.services.run.trusted import describe_foreign_modules, is_trusted

__all__ = ["main"]

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What every error in how a command was called derives from; of typer's errors only this child of it is public."""


def main() -> None:
    """Run the command line and exit.

    Modules in the current folder can be named, unless another user may have written them.
    """
    protect_output()
    make_files_private()
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        print("lachesis: the current folder was deleted; change to one that is there: cd", file=sys.stderr)
        sys.exit(2)
    if sys.flags.optimize > 1:
        print("lachesis: PYTHONOPTIMIZE=2 (-OO) removes the docstrings that transformers reads when it is imported: "
              "set it to 1, or leave it out", file=sys.stderr)  # fmt: skip
        sys.exit(2)
    _add_current_folder()
    with guard_own_code() if runs_own_code(sys.argv[1:]) else nullcontext():
        _run_command()


def _add_current_folder() -> None:
    folder = Path.cwd()
    if sys.path[:1] == [""] and not sys.flags.safe_path:
        del sys.path[0]  # of `python -c`; that of `python -m` is gone by now, and one of PYTHONPATH stays
    if is_trusted(folder):
        sys.path.append("")  # after all others, else a datasets.py of somebody's would be imported for the package
    elif (text := describe_foreign_modules(folder)) is not None:
        print(f"lachesis: {printable(text)}", file=sys.stderr)


def _run_command() -> None:
    try:
        sys.exit(app(prog_name="lachesis", standalone_mode=False))  # None, or the code of a `typer.Exit`
    except typer.Abort:
        sys.exit("lachesis: not confirmed; nothing was done")
    except _UsageError as error:
        _explain(error)
        sys.exit(2)
    except (LachesisError, OSError, BaseExceptionGroup) as error:
        ended_by = leaves(error)
        if all(isinstance(leaf, BrokenPipeError) for leaf in ended_by):
            sys.exit(0)  # the reader of the output has closed it
        texts = [_text_of(leaf) for leaf in ended_by]
        if not all(texts):
            raise
        for text in texts:
            print(f"lachesis: {text}", file=sys.stderr)
        sys.exit(2)


def _text_of(error: BaseException) -> str | None:
    """Return what an expected error says, None for one that is a bug."""
    if isinstance(error, LachesisError):
        return without_secrets(str(error))
    return explain_os_error(error)


def _explain(error: Exception) -> None:
    """Print an error in how a command was called as one line, like all others; a group of commands alone its help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help(), end="")
        return
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    path = context.command_path if context is not None else "lachesis"
    print(f"lachesis: {' '.join(text.split()).rstrip('.')}; see `{path} --help`", file=sys.stderr)
