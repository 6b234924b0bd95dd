"""`lachesis web`: serves a page that shows a run and its rollouts."""

import sys
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.services.cli.ending import end_on_signal
from lachesis.services.cli.options import Options, with_options
from lachesis.services.run.connect import check_there

__all__ = ["web"]

_PACKAGES = {"h11", "starlette", "uvicorn"}


@with_options
def web(
    options: Options,
    *,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on, in plain HTTP.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 is any free one.")] = 0,
) -> None:
    """Serve a page that shows the run and its rollouts, and print its address. Ends with Ctrl-C."""
    named = options.run is not None or not options.has_file  # else the page may wait for the run that the file is of
    anyio.run(_serve, options.config(), host, port, named)


async def _serve(config: RunConfig, host: str, port: int, named: bool) -> None:
    try:
        from lachesis.services.web.server import serve_page
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        raise StartupError(f"the page needs the package {error.name}: {install_command('web')}") from error
    if named:
        await check_there(config, f"{config.run}.web")
    async with background() as tasks:
        tasks.start_soon(end_on_signal, tasks.cancel_scope)
        await serve_page(config, host, port, _show)


def _show(url: str) -> None:
    print(url, flush=True)
    print("lachesis: this is the page's address with its token; Ctrl-C ends it", file=sys.stderr, flush=True)
