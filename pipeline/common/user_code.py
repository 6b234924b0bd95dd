"""Loads a user's Python: a module by name, or a file by path; from any number of threads at once.

Guarantees: a module's code runs once a process, and a thread that loads it while another runs it waits for the end; a
load that failed leaves no module behind, so the next one tries again. While a file runs it is in `sys.modules`, where
dataclasses and pickle look for it. Files that import one another load as under Python's `import`, and do not deadlock,
because only one thread at a time runs code of the user's.
"""

import dis
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.code_place import own_line, stack_of_error
from lachesis.pipeline.errors import EnvironmentCodeError, leaves
from lachesis.schemas.errors import ConfigError

__all__ = [
    "FAILURE_LOG",
    "FORKED_EXIT",
    "IMPORT_LOCK",
    "argument_problem",
    "describe_ending",
    "fork_reports",
    "forks_that_returned",
    "is_ending",
    "load_attribute",
    "load_module",
    "log_failure",
    "mark_own_process",
    "missing_file",
    "refuse_ending",
    "refuse_forked",
]

FAILURE_LOG: Final = logging.getLogger("lachesis.user_code")
"""At level DEBUG, the traceback of whatever environments and raters raise. Events and messages hold its text alone."""

FORKED_EXIT: Final = 70
"""Exit code of a process that a user's code has forked and let come back."""
_CANCELLATIONS = frozenset({"CancelledError", "Cancelled"})
"""Names of what asyncio and trio cancel a task by."""
_own_process: tuple[int, str] | None = None
"""Pid and name of the service that this process is."""
_fork_reports: tuple[int, int] | None = None
"""Ends of the pipe by which a process that was forked, and came back, notifies the service."""
_MAX_REPORTS_BYTES = 1 << 16
_MAX_WHERE_CHARS = 100

IMPORT_LOCK: Final = threading.RLock()
"""Held while code of a user's, or of a library that cannot be imported by two threads at once, is imported. Python's
own locks are one for each module: two threads that import files in a circle see one of them half finished."""


def load_module(place: str, what: str) -> ModuleType:
    """Return the module called `place`, or the one in the file `place` if that ends with .py.

    Raises ConfigError if there is none; its text begins with `what` it was to hold (an environment, say). Whatever the
    module raises while it runs, ImportError included, propagates as it is.
    """
    if place.endswith(".py"):
        return _load_file(Path(place), what)
    try:
        with IMPORT_LOCK, refuse_ending(f"{what}: importing {place!r}"):
            found = importlib.import_module(place)
    except ModuleNotFoundError as error:
        # only the named module: if an import inside it is missing, its author has to see that
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{what}: module {place!r} was not found: install it, put its folder on PYTHONPATH, or name the file: "
            "path/to/file.py:NAME"
        ) from error
    _refuse_hidden(place, what)
    return found


def _refuse_hidden(place: str, what: str) -> None:
    """Raise ConfigError if the current folder has a module of this name, too, and another one was imported."""
    name = place.partition(".")[0]
    here = next((file for file in (Path(name, "__init__.py"), Path(f"{name}.py")) if file.is_file()), None)
    file = getattr(sys.modules.get(name), "__file__", None)
    if here is None or (file is not None and Path(file).resolve() == here.resolve()):
        return
    way = f"{here}:NAME" if here.name != "__init__.py" else "put this folder on PYTHONPATH, which counts first"
    raise ConfigError(
        f"{what}: module {name!r} is {file or 'a part of Python'}, and not {here} of this folder: rename that one, or "
        f"name it by its file: {way}"
    )


def missing_file(path: Path) -> str:
    """Return what to say of a file that a configuration or a command names and that is not there."""
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    return (
        f"there is no file {str(path)!r}{where}; a path in a configuration is relative to its folder, any other to the "
        "current one"
    )


def load_attribute(place: str, name: str, what: str) -> Any:
    """Return what is called `name` in the module or file `place`.

    Raises ConfigError, which begins with `what` it was to be, if there is none, or if the module cannot be imported.
    """
    try:
        module = load_module(place, what)
    except ImportError as error:
        raise ConfigError(f"{what}: cannot import {place!r}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{what}: {place!r} has no {name!r}")
    return getattr(module, name)


def is_ending(error: BaseException) -> bool:
    """Return whether an error of a user's code would end the process or the task that calls it.

    `KeyboardInterrupt` and `GeneratorExit` count if a statement raises them: a person's Ctrl-C does not, nor the end of
    a generator. `CancelledError` counts unless something cancels the task that runs.
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return _is_raised_by_statement(error)
    if type(error).__name__ in _CANCELLATIONS:
        return not _is_being_cancelled()
    return not isinstance(error, Exception | BaseExceptionGroup)


def describe_ending(error: BaseException) -> str:
    """Return that code ends the process, by which error, and the place in the code.

    Of a group, that is the first such error in it.
    """
    leaf = next((one for one in leaves(error) if is_ending(one)), error)
    stack = stack_of_error(leaf) or stack_of_error(error)
    line = own_line(stack) or next(iter(stack), None)  # a package may stand in `sys.exit`'s place, as wandb does
    place = "" if line is None else f" ({Path(line.file).name}, line {line.line})"
    said = repr(leaf.code) if isinstance(leaf, SystemExit) else str(leaf)
    verb = "cancels itself" if type(leaf).__name__ in _CANCELLATIONS else "ends the process"
    return f"{verb}: {type(leaf).__name__}({said:.80}){place}"


class refuse_ending:  # noqa: N801 - a context, as those of contextlib
    """Raise `EnvironmentCodeError` where a user's code in the body ends the process, or cancels itself.

    `where` says which code it is. A process that it forks and lets come back is ended. It may be entered many times.
    """

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        refuse_forked(self._where)
        if error is not None and any(map(is_ending, leaves(error))):
            raise EnvironmentCodeError(f"{self._where} {describe_ending(error)}") from error


def _is_raised_by_statement(error: BaseException) -> bool:
    """Return whether code raised it itself: a signal, or what closes a generator, raises it in between."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename.endswith("/asyncio/runners.py"):  # its handler of Ctrl-C
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _is_being_cancelled() -> bool:
    """Return whether something cancels the task that runs. False in a thread, where nothing can."""
    if (asyncio := sys.modules.get("asyncio")) is None:  # logic that runs no event loop uses this module, too
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def mark_own_process(name: str) -> None:
    """Let no process that a user's code forks from this one go on as if it were the service `name`."""
    global _own_process, _fork_reports  # noqa: PLW0603 - facts of this process
    _own_process = os.getpid(), name
    _fork_reports = os.pipe()
    for end in _fork_reports:
        os.set_blocking(end, False)


def fork_reports() -> int | None:
    """Return the file descriptor that can be read once `forks_that_returned` has something to return.

    None: this process is no service.
    """
    return None if _fork_reports is None else _fork_reports[0]


def forks_that_returned() -> list[str]:
    """Return which code has forked this process and come back, once for each time since the last call."""
    if _fork_reports is None:
        return []
    try:
        return os.read(_fork_reports[0], _MAX_REPORTS_BYTES).decode(errors="replace").splitlines()
    except BlockingIOError:
        return []


def refuse_forked(where: str) -> None:
    """End this process if a user's code, `where`, has forked it from the service and returned."""
    if _own_process is not None and _own_process[0] != os.getpid():
        said = f"{_own_process[1]}: {where} has forked process {os.getpid()}, which came back into the service: it is "
        print(f"{said}ended. What is forked must end by os._exit", file=sys.stderr, flush=True)
        if _fork_reports is not None:
            with suppress(OSError):  # there is no room, so enough is known
                os.write(_fork_reports[1], f"{where[:_MAX_WHERE_CHARS]!s}\n".encode())
        os._exit(FORKED_EXIT)


def log_failure(where: str, error: BaseException) -> None:
    """Log an exception that a user's code raised, with its traceback.

    `where` says which code it was, and on which input.
    """
    FAILURE_LOG.debug("%s", where, exc_info=error)


def argument_problem(function: Callable[..., Any], given: Collection[str], *, positional: int = 0) -> str | None:
    """Return which arguments are unknown or missing in a call of `function`; None if none are.

    `given` are the arguments by name.

    `positional`: how many others are given by position, before them.
    """
    parameters = list(inspect.signature(function).parameters.values())
    named = {
        one.name: one
        for one in [one for one in parameters if one.kind is not one.VAR_POSITIONAL][positional:]
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
    }
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for name in given:
        if name not in named and not takes_any:
            return f"unknown argument {name[:60]!r}{nearest(name, named)}"
    missing = [name for name, one in named.items() if one.default is one.empty and name not in given]
    if missing:
        return f"missing argument{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
    return None


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what}: {missing_file(path)}")
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"lachesis_file_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{digest}"
    with IMPORT_LOCK:
        _FINDER.files[name] = path
        if _FINDER not in sys.meta_path:
            sys.meta_path.append(_FINDER)
        with refuse_ending(f"{what}: importing {str(path)!r}"):
            return importlib.import_module(name)


class _FileFinder(MetaPathFinder):
    """Finds the requested files, so that Python's import machinery runs them like any module."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


_FINDER: Final = _FileFinder()
