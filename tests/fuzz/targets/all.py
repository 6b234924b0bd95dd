"""Every edge of the system that takes bytes, as a fuzz target."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fuzz.oracle import Target
from fuzz.targets import checkpoint, cli, config, control, gateway, http, large, state, wire

__all__ = ["all_targets"]


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    """Yield the targets; what they need (a model, an engine, folders) lives as long as the context."""
    with ExitStack() as things:
        yield [
            *wire.targets(),
            *control.targets(),
            *gateway.targets(),
            *large.targets(),
            *state.targets(),
            *config.targets(things),
            *cli.targets(things),
            *http.targets(things),
            *checkpoint.targets(things),
        ]
