"""What is taken out of everything that is shown."""

import pytest

from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.secrets import masked, without_secrets
from lachesis.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://a:b@h:1,tls://t@h2", "nats://***@h:1,tls://***@h2"),
        ("nats://h:1", "nats://h:1"),
        ("nats://user:p@ss@h:1", "nats://***@h:1"),
        ("no answer of http://me:k3@h/v1 and nats://k4@h", "no answer of http://***@h/v1 and nats://***@h"),
        ("http://h/a@b", "http://h/a@b"),
        ("'http://h/v1?api_key=k1&n=2&sig=k2' failed", "'http://h/v1?api_key=***&n=2&sig=***' failed"),
        ("http://h/v1?n=2&turkey_club=3", "http://h/v1?n=2&turkey_club=3"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_values_by_their_name() -> None:
    given = {"api_key": "k", "judge": {"token": ["t"], "max_tokens": 3}, "urls": ["http://k@h"], "password": None}
    assert masked("params", given) == {
        "api_key": "***",
        "judge": {"token": ["***"], "max_tokens": 3},
        "urls": ["http://***@h"],
        "password": None,
    }


def test_what_a_refused_setting_says() -> None:
    for text in ("environments.x.params.api_key=k3", "nats.token=k3", "nats.url=nats://k3@h", "nats=k3://k3@h"):
        with pytest.raises(ConfigError) as caught:
            load(RunConfig, sets=[text, "unknown=1"])
        assert "k3@" not in str(caught.value)
        assert "=k3" not in str(caught.value)
