"""The demo's configuration: `demo.toml`, then `LACHESIS_*`, then the command line, written out as one file for the run.

In: what the command line says. Out: a `RunConfig`, and its text as TOML, which `lachesis up`, `status` and `tail` take.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.private_files import share_files

__all__ = ["DemoOptions", "demo_config", "to_toml"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `lachesis demo` was asked for. `deadline_s`: the demo fails when it is not done by then."""

    seed: int = 0
    steps: int | None = None
    run: str | None = None
    folder: Path | None = None
    nats: str | None = None
    sets: Sequence[str] = ()
    shuffle_advantages: bool = False
    gate: bool = True
    fresh: bool = False
    deadline_s: float = 600.0


def demo_config(options: DemoOptions) -> RunConfig:
    """Return the configuration. Raises `ConfigError`, also where it would be no demo: no trainer, no held-out set."""
    run = options.run or time.strftime("demo-%Y%m%d-%H%M%S")
    given: dict[str, Any] = {"run": run, "folder": str(options.folder or Path("runs") / run), "seed": options.seed}
    given |= {"training.steps": options.steps} if options.steps is not None else {}
    given |= {"training.shuffle_advantages": True} if options.shuffle_advantages else {}
    given |= {"nats.url": options.nats} if options.nats else {}
    sets = [f"{path}={_toml_value(value)}" for path, value in given.items()]
    source = Path(str(files(__package__) / "demo.toml"))
    config = load(RunConfig, file=source, environ=os.environ, sets=[*sets, *options.sets]).config
    if config.shared_files:
        share_files()
    if config.mode != "train" or config.training.steps is None:
        raise ConfigError("the demo trains for a number of steps: leave mode and training.steps as they are")
    if len(config.environments) != 1 or len(config.evaluation) != 1:
        raise ConfigError("the demo has one environment and one evaluation; use `lachesis up` for runs of your own")
    return msgspec.structs.replace(config, folder=str(config.path))


def to_toml(config: RunConfig) -> str:
    """Return the configuration as TOML that loads to an equal one. What is None is left out, as TOML has no null."""
    lines: list[str] = []
    _table(lines, (), msgspec.to_builtins(config))
    return "\n".join(lines).lstrip() + "\n"


def _table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
    if path and plain:
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _table(lines, (*path, key), value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = (f"{_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(inner) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, numbers and booleans are TOML's too, but for DEL, which TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
