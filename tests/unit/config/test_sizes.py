import re
from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load, settings
from lachesis.pipeline.config.sizes import is_byte_setting, parse_bytes
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.gc import limits


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1 << 30), ("1GB", 10**9), ("512 MiB", 512 << 20), ("1.5kb", 1500), (" 2 tib ", 2 << 40), ("0", 0),
        ("64M", 64 * 10**6), ("64Mi", 64 << 20), ("1_000 B", 1000), ("9007199254740993", 9007199254740993),
        ("7 bytes", 7),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiBB", "1e9", "1.5", "1.5 B", "nan", "1GiB2", "½GiB"])
def test_what_is_no_size_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{text!r} is no size")):
        parse_bytes(text)


@pytest.mark.extension
def test_every_size_of_the_configuration_takes_a_unit() -> None:
    paths = [row.path for row in settings(load(run_config_type(), sets=["nats.url=nats://h:1"]))]
    sizes = [path for path in paths if is_byte_setting(path.rpartition(".")[2])]
    assert {"streams.rollouts_bytes", "server.max_file_bytes", "nats.window_bytes", "gateway.body_bytes"} < set(sizes)
    for path in sizes:
        text = "1MiB"  # within the bounds of each
        found = load(run_config_type(), sets=["nats.url=nats://h:1", f"{path}={text}"]).config
        value = found
        for name in path.split("."):
            value = getattr(value, name)
        assert value == 1 << 20, path


def test_each_source_takes_a_unit_and_a_wrong_size_names_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[streams]\nevents_bytes = "512 MiB"\nrollouts_bytes = 1_000_000_000\n')
    environ = {"LACHESIS_STREAMS__LEDGER_BYTES": "2GB"}
    streams = load(run_config_type(), file=file, environ=environ, sets=["streams.teacher_bytes=3GiB"]).config.streams
    assert (streams.events_bytes, streams.rollouts_bytes) == (512 << 20, 10**9)
    assert (streams.ledger_bytes, streams.teacher_bytes) == (2 * 10**9, 3 << 30)
    with pytest.raises(ConfigError, match=r"streams.replay_bytes: 'lots' is no size.*\(from --set streams.replay"):
        load(run_config_type(), sets=["streams.replay_bytes=lots"])


def test_a_size_keeps_its_bounds_and_other_integers_take_no_unit() -> None:
    with pytest.raises(ConfigError, match=r"streams.events_bytes is 1024: use at least 1048576"):
        load(run_config_type(), sets=["streams.events_bytes=1KiB"])
    with pytest.raises(ConfigError, match="expected `int`, got `str`"):
        load(run_config_type(), sets=["batching.batch_size=1KiB"])
    assert msgspec.to_builtins(load(run_config_type()).config.server)["max_file_bytes"] is None


def test_what_gc_keeps_is_a_size_as_well() -> None:
    assert limits(None, "512 MiB", [], [], ledger=False).keep_bytes == 512 << 20
    with pytest.raises(ConfigError, match="--keep-bytes: '3 pages' is no size"):
        limits(None, "3 pages", [], [], ledger=False)
