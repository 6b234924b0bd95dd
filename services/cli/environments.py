"""`lachesis env`: what can be an environment on this machine, and a new one to begin with."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lachesis.pipeline.common.safe_text import printable_lines
from lachesis.pipeline.environment.installed import InstalledEnvironments, scan_installed
from lachesis.pipeline.environment.load import environment_kinds
from lachesis.pipeline.environment.source_files import SourceFile, scan_files
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extension import added, load_place
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.env_new import env_new
from lachesis.services.cli.env_test_command import env_test
from lachesis.services.cli.env_verify import env_verify
from lachesis.services.cli.options import Json
from lachesis.services.output import print_json, print_table, printable

__all__ = ["env_app", "env_list", "env_show"]

env_app = typer.Typer(help="Environments.", no_args_is_help=True)
env_app.command("new")(env_new)
env_app.command("test")(env_test)
env_app.command("verify")(env_verify)


@env_app.command("list")
def env_list(
    folder: Annotated[
        list[Path] | None,
        typer.Option(help="Also list those in the Python files there, which are read and not imported. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the built-in environments and their tasks, those of installed packages, and those in folders."""
    choices, missing = _choices()
    installed = scan_installed()
    files = [file for place in folder or () for file in scan_files(place)]
    if as_json:
        builtin = {"builtin": sorted(environment_kinds()), **choices, "missing": missing}
        found = {"installed": msgspec.to_builtins(installed.environments), "problems": installed.problems}
        print_json({**builtin, **found, "files": msgspec.to_builtins(files)})
        return
    print("built in: " + ", ".join(sorted(environment_kinds())))
    print("your own: module:Class, or path/to/file.py:Class")
    for kind, names in choices.items():
        if kind in missing:
            print(f"{kind}: {missing[kind]}")
        else:
            parameter, _ = added("environments")[kind].choices
            print(f"{kind}: {len(names)} choices of params.{parameter}")
            print("\n".join(f"  {name}" for name in names))
    _print_installed(installed)
    if folder:
        _print_files(files)


@env_app.command("show")
def env_show(
    place: Annotated[str, typer.Argument(help="path/to/file.py, or path/to/file.py:CLASS.")], as_json: Json = False
) -> None:
    """Show docstring, settings and defaults of environments as their source has them; nothing is imported."""
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    if not path.endswith(".py"):
        raise ConfigError(f"{place} is no Python file: give path/to/file.py or path/to/file.py:CLASS")
    files = scan_files(Path(path))
    if problem := next((file.problem for file in files if file.problem), None):
        raise ConfigError(f"{path} {problem}")
    every = [env for file in files for env in file.environments]
    found = [env for env in every if name in {"", env.name}]
    if not found:
        known = f"; it has {', '.join(env.name for env in every)}" if every else ""
        raise ConfigError(f"{path} has no environment {name}".rstrip() + known)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    for env in found:
        print(printable(f"{env.name} ({env.family}), {path}:{env.line}"))
        print("".join(f"  {line}\n" for line in printable_lines(env.docstring or "no docstring").splitlines()))
        print(printable(f"  defines: {', '.join(env.methods) or 'nothing itself'}"))
        print_table(
            ("setting", "type", "default", "help"), ((one.name, one.type, one.default, one.help) for one in env.fields)
        )


def _print_installed(installed: InstalledEnvironments) -> None:
    rows = [(one.kind, one.environment.family, one.package, one.environment.summary) for one in installed.environments]
    if rows:
        print_table(("installed", "family", "package", "about"), rows)
    for problem in installed.problems:
        print(printable(problem))


def _print_files(files: list[SourceFile]) -> None:
    rows = [
        (env.name, env.family, f"{file.path}:{env.line}", env.summary) for file in files for env in file.environments
    ]
    print_table(("environment", "family", "place", "about"), rows)
    for file in files:
        if file.problem:
            print(printable(f"{file.path}: {file.problem}"))


def _choices() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return by kind of environment the values of its parameter, and by kind why they cannot be listed."""
    found, missing = dict[str, list[str]](), dict[str, str]()
    for name, kind in added("environments").items():
        if kind.choices is None:
            continue
        try:
            _, place = kind.choices
            found[name] = load_place(place)()
        except StartupError as error:
            found[name], missing[name] = [], str(error)
    return found, missing
