"""`lachesis mcp`: tools for agents, over stdin and stdout or over HTTP."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.private_file import given_token, shared_token
from lachesis.pipeline.config.load import LoadedConfig
from lachesis.pipeline.config.policy import ConfigPolicy, load_policy
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extension import foreign_classes
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Options, with_options
from lachesis.services.run.known_runs import state_folder

__all__ = ["mcp"]

_TOKEN_FILE = "mcp.token"  # noqa: S105 - a file's name


def _parameter(kind: str) -> str:
    return f"{kind.replace('-', '_')}_python"


def _with_pythons(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option `--KIND-python` for each kind of environment that runs classes of another project."""
    own = [one for one in inspect.signature(command).parameters.values() if one.kind is not one.VAR_KEYWORD]
    for kind, classes in foreign_classes().items():
        said = f"Interpreter with {classes.package}, for the classes of that project in the folders."
        option = Annotated[str | None, typer.Option(f"--{kind}-python", metavar="PYTHON", help=said)]
        own.append(inspect.Parameter(_parameter(kind), own[-1].kind, default=None, annotation=option))
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return command


@with_options
@_with_pythons
def mcp(
    options: Options,
    *,
    folder: Annotated[
        list[Path] | None, typer.Option(help="Folder of Python files with environments to offer. Repeatable.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE|PRESET", help="Which settings agents may change, and within which bounds."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve over HTTP there, with a token, instead.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The token for HTTP. Default: one that is made and kept.")
    ] = None,
    key_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Variable with a key that agents may send to servers. Repeatable."),
    ] = None,
    max_runs: Annotated[
        int, typer.Option(min=0, max=1000, help="Live runs from which on agents start no further one.")
    ] = 8,
    **pythons: str | None,
) -> None:
    """Serve tools for agents by the Model Context Protocol: find, configure, start, watch and stop runs.

    Each run begins with the configuration that is given here, its model above all. One agent a server: what is selected
    and edited is the server's.
    """
    try:
        from lachesis.services.agent.server import HTTP_PATH, make_server, serve_http
    except ModuleNotFoundError as error:
        raise StartupError(f"lachesis mcp needs the package {error.name}: {install_command('mcp')}") from error
    from lachesis.services.agent.tools import AgentTools

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    options.load()  # an error in it is said now, not to the agent
    rules = ConfigPolicy() if policy is None else load_policy(policy)
    tools = AgentTools(
        options.config_file(),
        options.texts(),
        rules,
        folder or (),
        _load_run,
        key_envs=frozenset(key_env or ()),
        max_runs=max_runs,
        pythons={kind: path for kind in foreign_classes() if (path := pythons[_parameter(kind)]) is not None},
    )
    server = make_server(tools)
    if http is None:
        anyio.run(server.run_stdio_async)
        return
    host, port = _address(http)
    token, where = _token(token_file)
    started = partial(_print_address, host, HTTP_PATH, where)
    anyio.run(partial(serve_http, server, host, port, token, started))


def _load_run(name: str, sets: Sequence[str]) -> LoadedConfig[RunConfig]:
    return Options(run=name, sets=tuple(sets)).load()


def _print_address(host: str, path: str, token: Path, port: int) -> None:
    print(f"tools at http://{url_host(host)}:{port}{path}; the token is in {token}", file=sys.stderr, flush=True)


def _token(file: Path | None) -> tuple[str, Path]:
    if file is not None:
        return given_token(file, "--token-file"), file
    state = state_folder(os.environ)
    if state is None:
        raise ConfigError("no home folder to keep the token in: give --token-file")
    place = state.parent / _TOKEN_FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    return shared_token(place), place


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http {text}: write it as 127.0.0.1:8800")
    return host, int(port)
