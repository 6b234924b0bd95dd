"""The options that most commands share, declared once: where the configuration comes from.

`with_options` gives a command `--config`, `--set`, `--nats` and `--run`, and calls it with an `Options`. Light to
import: the configuration itself is loaded when a command asks for it.
"""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lachesis.pipeline.config.load import LoadedConfig
    from lachesis.pipeline.config.run import RunConfig

__all__ = ["Json", "Options", "read_params", "with_options"]

_PANEL = "Configuration"

_ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="TOML file of the run.", rich_help_panel=_PANEL)
]
_Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Set one value. Repeatable.", rich_help_panel=_PANEL),
]
_Nats = Annotated[
    str | None,
    typer.Option("--nats", metavar="URL", help="Use this NATS server (nats.url).", rich_help_panel=_PANEL),
]
_Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="Name of the run. Without --config, an earlier run is found from any folder and uses the "
        "run.toml in its own.",
        rich_help_panel=_PANEL,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says about the configuration."""

    file: Path | None = None
    sets: tuple[str, ...] = ()
    nats: str | None = None
    run: str | None = None

    @property
    def names_run(self) -> bool:
        """Whether anything says which run is meant.

        Else it is the one in runs/run here, and none of elsewhere.
        """
        return bool(self.file or self._name())

    def _name(self) -> str | None:
        return self.run or os.environ.get("LACHESIS_RUN")

    def _own_name(self) -> str | None:
        """Return the name that `--run` gives: of a folder that was renamed, that of the run in it."""
        if self.run is None or self.file is not None or not (Path("runs") / self.run).is_dir():
            return self.run
        from lachesis.services.run.known_runs import run_in

        return run_in(Path("runs") / self.run) or self.run

    def load(self) -> "LoadedConfig[RunConfig]":
        """Return the configuration and the origins of its values. Raises `ConfigError`."""
        import msgspec

        from lachesis.pipeline.common.secrets import without_secrets
        from lachesis.pipeline.config.extended import run_config_type
        from lachesis.pipeline.config.load import LoadedConfig, load
        from lachesis.schemas.errors import ConfigError
        from lachesis.services.run.known_runs import find_run
        from lachesis.services.run.trusted import check_trusted

        for text in self.texts():
            if without_secrets(text) != text:
                raise ConfigError(
                    f"{text.partition('=')[0]}: a password or token in a command line is shown to every user of this "
                    "machine; put it into a file (nats.token_file), or the address into the configuration or "
                    "LACHESIS_NATS__URL"
                )
        loaded = load(run_config_type(), file=self.config_file(), environ=os.environ, sets=self.texts())
        if loaded.config.folder:
            return loaded
        folder = find_run(loaded.config.run, self.file) if self.names_run else None
        if folder is None:
            if loaded.config.path.is_dir():
                check_trusted(loaded.config.path)
            return loaded
        known = msgspec.structs.replace(loaded.config, folder=str(folder))
        return LoadedConfig(known, {**loaded.origins, "folder": "where the run was started"})

    def config(self) -> "RunConfig":
        """Return the configuration. Raises `ConfigError`.

        Where it sets `shared_files`, what the command writes is no longer private to its user.
        """
        from lachesis.services.run.file_permissions import share_files

        config = self.load().config
        if config.shared_files:
            share_files()
        return config

    def config_with_environments(self, whose: str = "the run's") -> "RunConfig":
        """Return the configuration for what has to know its environments.

        Raises `ConfigError` where it has none, which says `whose` configuration is needed.
        """
        from lachesis.schemas.errors import ConfigError

        config = self.config()
        if not config.environments:
            raise ConfigError(f"the configuration has no environments; give {whose} with --config")
        return config

    def config_to_change(self, command: str, *, asks: bool, json: bool) -> "RunConfig":
        """Return the configuration of the run that `lachesis runs COMMAND` changes for good.

        `asks`: whether it waits for a confirmation. Raises `ConfigError` where nothing names the run, or where JSON is
        wanted of a command that asks.
        """
        from lachesis.schemas.errors import ConfigError

        if json and asks:
            raise ConfigError("--json asks nothing: give --yes with it")
        config = self.config()
        if not self.names_run:
            raise ConfigError(f"say which run: lachesis runs {command} NAME")
        return config

    def with_set(self, path: str, text: str) -> "Options":
        """Return the options with one more setting, which is a text."""
        return replace(self, sets=(*self.sets, _assign(path, text)))

    def arguments(self) -> list[str]:
        """Return what gives another process the same configuration."""
        file = self.config_file()
        named = {"--config": file and str(file.absolute()), "--nats": self.nats, "--run": self.run}
        found = [part for name, value in named.items() if value for part in (name, value)]
        return found + [part for text in self.sets for part in ("--set", text)]

    @property
    def has_file(self) -> bool:
        """Whether there is a configuration file: one that was given, or the run's own."""
        return self.config_file() is not None

    def config_file(self) -> Path | None:
        """Return the configuration's file: the one given, or the one in the folder of the run that is named."""
        from lachesis.services.run.known_runs import find_run
        from lachesis.services.run.run_file import run_file

        name = self._name()
        if self.file is not None or not name:
            return self.file
        folder = find_run(name)
        return None if folder is None else run_file(folder)

    def texts(self) -> list[str]:
        """Return all that is set on the command line, as texts of `--set`."""
        sugar = {"nats.url": self.nats, "run": self._own_name()}
        return [*self.sets, *(_assign(path, value) for path, value in sugar.items() if value is not None)]


def _assign(path: str, text: str) -> str:
    """Return `path=text` with the text as a TOML string, so that it is not read as a number."""
    return f"{path}={json.dumps(text, ensure_ascii=False)}"


def read_params(text: str) -> dict[str, Any]:
    """Return the JSON object that `--params` gives. Raises `ConfigError`."""
    import msgspec

    from lachesis.schemas.errors import ConfigError

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--params {text!r} is no JSON object: {error}") from error


def _run_name(given: str | None) -> str | None:
    """Return a run's name, or its folder if it was given as a path."""
    if given is None or "/" not in given or not Path(given).is_dir():
        return given
    return str(Path(given).absolute())


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, whose first parameter is an `Options`, the shared options in its place."""

    @wraps(command)
    def wrapper(**given: Any) -> None:
        run = _run_name(given.pop("run_name"))
        options = Options(given.pop("config_file"), tuple(given.pop("sets") or ()), given.pop("nats"), run)
        command(options, **given)

    shared = {"config_file": _ConfigFile, "sets": _Sets, "nats": _Nats, "run_name": _Run}
    own = list(inspect.signature(command).parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in shared.items()
    ]
    wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    return wrapper
