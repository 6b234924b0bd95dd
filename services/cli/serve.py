"""`lachesis serve`: puts a checkpoint of a run, or a model's folder, behind OpenAI's routes."""

import json
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import anyio
import typer

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.private_file import shared_token
from lachesis.pipeline.config.run import InferenceConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.local_model import open_app
from lachesis.services.cli.progress import drain_on_signal
from lachesis.services.output import printable
from lachesis.services.run.checkpoints import find_checkpoint
from lachesis.services.run.known_runs import find_run

if TYPE_CHECKING:
    from lachesis.pipeline.runtime.http import HttpServer

__all__ = ["ServedModel", "find_served_model", "serve"]

_GRACE_S = 5
"""Seconds that requests under way have to end after Ctrl-C."""


class ServedModel(NamedTuple):
    """What is served: the name that clients give, and the folder (or Hugging Face id) that it is loaded from."""

    name: str
    source: str


def serve(
    place: Annotated[
        str, typer.Argument(metavar="RUN_OR_FOLDER", help="Name or folder of a run, or folder of a model.")
    ],
    checkpoint: Annotated[
        str | None, typer.Option(help="Which one of a run: best, newest or a step. Default: newest.")
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on, in plain HTTP. Off loopback a key is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 0,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send; made if there is none.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    model_exception: Annotated[
        list[str] | None,
        typer.Option(help="What may be wrong with the model, as the setting model_exceptions has it. Repeatable."),
    ] = None,
) -> None:
    """Serve a checkpoint of a run, or a model's folder, to OpenAI clients. Ends with Ctrl-C.

    Routes: /v1/chat/completions, /v1/completions, /v1/models and those of the inference server of a run.
    """
    settings = InferenceConfig(
        host=host, port=port, threads=threads, key_file=None if key_file is None else str(key_file)
    )
    if settings.needs_key and key_file is None:
        raise ConfigError(
            f"--host {host}: others can reach this address, so requests must bear a key; add --key-file FILE, which is "
            "made if there is none"
        )
    model = find_served_model(place, checkpoint)
    anyio.run(_serve, model, settings, key_file, model_exception or [])


def find_served_model(place: str, checkpoint: str | None) -> ServedModel:
    """Return what `place`, a run or a model, and `--checkpoint` mean. Raises `ConfigError`."""
    folder = Path(place) if (Path(place) / CHECKPOINTS).is_dir() else None
    if folder is None and not Path(place).is_dir() and "/" not in place:
        folder = find_run(place)
        if folder is None:
            raise ConfigError(f"there is neither a run nor a folder {place!r}; `lachesis runs list` shows the runs")
    if folder is not None:
        return ServedModel(folder.name, str(find_checkpoint(folder, checkpoint or "newest")))
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {place} is no run, but a model; leave --checkpoint out")
    return ServedModel(Path(place).name, place)


async def _serve(model: ServedModel, settings: InferenceConfig, key_file: Path | None, exceptions: list[str]) -> None:
    try:
        import uvicorn  # noqa: F401 - so that it is the one that is named where it is missing

        from lachesis.pipeline.runtime.http import HttpServer, listen
    except ModuleNotFoundError as error:
        raise StartupError(f"serving needs the package {error.name!r}: {install_command('train')}") from error
    key = None if key_file is None else shared_token(key_file)
    stopping = anyio.Event()
    async with background() as tasks:
        tasks.start_soon(drain_on_signal, stopping, stopping.set)
        with listen(settings.host, settings.port, "--port") as listener:
            async with open_app(
                model.source,
                settings,
                name=model.name,
                aliases=["policy", "default", model.source, Path(model.source).name],
                token=secrets.token_urlsafe(32),  # no client can change its state
                key=key,
                hosts={settings.host} if settings.host in LOOPBACK else None,
                exceptions=exceptions,
            ) as app:
                server = HttpServer.over(app, grace_s=_GRACE_S)
                _print(model, f"http://{settings.local_address}:{listener.getsockname()[1]}", key_file)
                tasks.start_soon(_stop, server, stopping)
                await server.serve_until_cancelled([listener])


async def _stop(server: "HttpServer", stopping: anyio.Event) -> None:
    await stopping.wait()
    server.stop()


def _print(model: ServedModel, url: str, key_file: Path | None) -> None:
    body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": "Hello"}]})
    bearer = "" if key_file is None else f' -H "Authorization: Bearer $(cat {shlex.quote(str(key_file))})"'
    print(printable(f"serving {model.source} as {model.name} at {url}/v1; Ctrl-C ends it"))
    print(
        printable(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{bearer} -d {shlex.quote(body)}"),
        flush=True,
    )
