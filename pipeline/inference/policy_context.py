"""Finds the context length of a model by the settings of its server. No torch."""

from collections.abc import Sequence

from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.model.context import context_of_model

__all__ = ["context_of_server"]


def context_of_server(settings: InferenceConfig, model: str | None, *, elsewhere: bool = False) -> int | None:
    """Return the tokens of a server's context, None where only the server knows.

    `model`: the one that it serves unless its settings name another. `elsewhere`: another project serves it.
    """
    if settings.engine.max_model_len is not None:
        return settings.engine.max_model_len
    if settings.url is not None or elsewhere:
        return None
    option = settings.spec.context_option
    given = None if option is None else _option(settings.args, option)
    if given is not None:
        return int(given) if given.isdecimal() else None
    return context_of_model(settings.model or model)


def _option(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of an option of a command line, `--name VALUE` or `--name=VALUE`; None: it has none."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        if argument == name:
            found = following
        elif argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
    return found
