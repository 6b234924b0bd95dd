"""Configuration: a TOML file, `LACHESIS_*` variables and `--set` texts, laid over one another."""

import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
from fuzz.mutate import TEXTS, mutate_bytes, mutate_text
from fuzz.oracle import Target

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load, settings
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError

__all__ = ["targets"]

_FILE = b"""run = "r"
seed = 3
model = "m"
[environments.sums]
kind = "sums.py:Sums"
params = { largest = 9, deep = [1, [2, { a = 3.5 }]] }
[scoring]
raters = [ { rater = "length", params = { shortest = 1 } }, { rater = "exact_match" } ]
[batching]
batch_size = 128
score_deadline_s = 1.5
mix = { sums = 2.0 }
[streams]
rollouts_bytes = 1073741824
"""
_VALUES = [
    "1", "-1", "nan", "inf", "-inf", "1e999", "0x7f", "9" * 30, "9" * 5000, "true", '"a"', "'", "[1]", "{a=1}", "[[",
    "1979-05-27", "2020-13-45", "1\n[x]\ny=2", "", "{}", "[" * 200, "[" * 20_000, "{a=" * 300, "1_0", "+5", "#",
    '"\\ud800"',
]  # fmt: skip


def targets(things: ExitStack) -> list[Target]:
    """Return the targets. A case of `config.sets`: one line each, `$NAME=text` a variable, else a `--set`."""
    folder = Path(things.enter_context(tempfile.TemporaryDirectory()))
    paths = [row.path for row in settings(load(run_config_type()))]
    seeds = [f"{path}={value}\nbatching.batch_size=64".encode() for path in paths for value in ("1", '"x"')]
    return [
        Target(
            "config.file", [_FILE], _mutate_file, lambda data: _feed_file(folder / "run.toml", data), (ConfigError,)
        ),
        Target("config.sets", seeds, lambda rng, good: _mutate_sets(rng, good, paths), _feed_sets, (ConfigError,)),
    ]


def _mutate_file(rng: random.Random, good: bytes) -> bytes:
    lines = good.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        key, equals, _value = lines[place].partition(b" = ")
        if equals and rng.random() < 0.6:
            lines[place] = key + b" = " + rng.choice(_VALUES).encode(errors="replace")
        else:
            lines[place] = rng.choice([lines[rng.randrange(len(lines))], mutate_text(rng, lines[place]), b""])
    data = b"\n".join(lines)
    return mutate_bytes(rng, data) if rng.random() < 0.2 else data


def _mutate_sets(rng: random.Random, good: bytes, paths: list[str]) -> bytes:
    lines = good.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([*paths, "batching", "environments", "environments.a", "x", "", ".", "run.run", "a." * 3000])
        value = rng.choice([*_VALUES, *TEXTS]).encode(errors="replace").replace(b"\n", b"\r")
        if rng.random() < 0.4:
            path = "$LACHESIS_" + path.upper().replace(".", "__")
        lines.insert(rng.randrange(len(lines) + 1), path.encode() + b"=" + value)
    return b"\n".join(lines)


def _feed_file(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    _use(load(run_config_type(), file=file).config)


def _feed_sets(data: bytes) -> None:
    lines = data.decode("utf-8", "replace").split("\n")
    environ = dict(line[1:].partition("=")[::2] for line in lines if line.startswith("$"))
    loaded = load(run_config_type(), environ=environ, sets=[line for line in lines if not line.startswith("$")])
    settings(loaded)
    _use(loaded.config)


def _use(config: RunConfig) -> None:
    """A configuration that was taken survives its own record, and holds no number that is none."""
    plain = msgspec.to_builtins(config)
    assert all(map(math.isfinite, _floats(plain))), "a setting is not finite"
    msgspec.json.encode(plain)
    assert config.path.parts


def _floats(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "params":
                yield from _floats(item)
    elif isinstance(value, list):
        for item in value:
            yield from _floats(item)
