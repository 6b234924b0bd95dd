"""`lachesis config`: every setting with its value, origin and meaning, and their JSON Schema."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import typer

from lachesis.pipeline.common import secrets
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.json_schema import json_schema
from lachesis.pipeline.config.load import ConfigSetting, absent_settings, settings
from lachesis.pipeline.config.recipes import recipes
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json, print_table, printable

__all__ = ["config_app", "config_recipes", "config_schema", "config_show", "masked", "show_settings"]

config_app = typer.Typer(help="The configuration.", no_args_is_help=True)


@config_app.command("show")
@with_options
def config_show(options: Options, as_json: Json = False) -> None:
    """Show every setting with its value, source and meaning."""
    show_settings(options, as_json=as_json)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a run's configuration file, for editors.

    Write it beside the file (`lachesis config schema > run.schema.json`), and make `#:schema ./run.schema.json` the
    file's first line: editors with Taplo (VS Code's Even Better TOML, say) then complete, explain and check it.
    """
    print_json(json_schema(run_config_type()))


@config_app.command("recipes")
def config_recipes(as_json: Json = False) -> None:
    """Show the recipes, named settings of advantage and loss.

    `recipe = "NAME"` in a configuration takes one, and so does `lachesis up --recipe NAME`.
    """
    if as_json:
        print_json([one._asdict() for one in recipes().values()])
        return
    for recipe in recipes().values():
        print(recipe.name)
        print(textwrap.indent(textwrap.fill(recipe.about, 100), "    "))
        for path, value in _leaves(recipe.settings):
            print(f"    {path} = {msgspec.json.encode(value).decode()}")


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of a table by its dotted path."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def show_settings(options: Options, *, as_json: bool) -> None:
    """Print the settings in the order in which they are declared, then those of tables that are not there."""
    loaded = options.load()
    rows = [masked(row) for row in (*settings(loaded), *absent_settings(loaded.config))]
    if as_json:
        print_json([msgspec.structs.asdict(row) if isinstance(row, msgspec.Struct) else row for row in rows])
    elif sys.stdout.isatty():
        cells = ((row.path, _plain(row.value), row.origin, row.description) for row in rows)
        print_table(("setting", "value", "from", "meaning"), cells)
    else:
        _print_lines(rows)


def _print_lines(rows: Sequence[ConfigSetting]) -> None:
    """Print a line for each setting, to be found by grep, and below it what it means: a table would be too wide."""
    for row in rows:
        print(printable(f"{row.path} = {_plain(row.value) or '-'}   ({row.origin})"))
        print(textwrap.indent(textwrap.fill(row.description, 100), "    "))


def masked(row: ConfigSetting) -> ConfigSetting:
    """Return the setting without passwords in URLs and without secret values.

    A value is secret if its name says so. Its origin then names the `--set` that it came from, without the value.
    """
    value = secrets.masked(row.path, row.value)
    origin = row.origin.partition("=")[0] if row.origin.startswith("--set ") else row.origin
    return ConfigSetting(row.path, value, origin, row.description)


def _plain(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
