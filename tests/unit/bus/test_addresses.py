"""What is wrong with an address is said before it is used, and never with the secrets in it."""

from urllib.parse import urlparse

import pytest

from lachesis.pipeline.bus.addresses import (
    check_addresses,
    decoded_credentials,
    host_and_port,
    parse_address,
    url_host,
)
from lachesis.pipeline.bus.client import NatsClient
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.outside


@pytest.mark.parametrize(
    "text",
    [
        "nats://127.0.0.1:4222",
        "127.0.0.1:4222",
        "localhost",
        "nats://[::1]:4222",
        "tls://user:p%40ss@nats.example.com",
        "nats://us%2Fer:p@ss@host:4222/",
        "nats://a:4222, nats://b:4222",
        "wss://host/nats?x",
        "ws://host:8080/path",
    ],
)
def test_addresses_that_are_taken(text: str) -> None:
    if "?" not in text:
        check_addresses(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nats://::1:4222", "an IPv6 address stands in brackets"),
        ("::1", "an IPv6 address stands in brackets"),
        ("nats://user:secret/word@host:4222", "percent-encoded"),
        ("nats://user:secret#word@host:4222", "percent-encoded"),
        ("nats://user:secret?word@host:4222", "percent-encoded"),
        ("nats://user:12/word@host:4222", "percent-encoded"),
        ("nats://a:4222,nats://user:secret,word@b", "address 2 of 3: its port is no number"),
        ("http://127.0.0.1:8222", "'http' is no way to a NATS server"),
        ("nats://host:99999", "its port is no number from 0 to 65535"),
        ("nats://:4222", "it names no host"),
        ("", "it is empty"),
        ("nats://a, ws://b", "use one kind"),
    ],
)
def test_what_is_wrong_with_an_address_is_said_without_its_secrets(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"nats\.url") as caught:
        ConnectionConfig(url=text)
    assert said in str(caught.value)
    assert "word" not in str(caught.value).replace("password", "")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "fields"),
    [
        ("nats://us%2Fer:p%40%25@h:1", {"user": "us/er", "pass": "p@%"}),
        ("nats://to%3Dken@h:1", {"auth_token": "to=ken"}),
        ("nats://user:50%off@h:1", {"user": "user", "pass": "50%off"}),
        ("nats://h:1", {}),
    ],
)
def test_credentials_are_decoded(address: str, fields: dict[str, str]) -> None:
    assert decoded_credentials(urlparse(address)) == fields


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("nats://h:1", ("h", 1)),
        ("tls://us:p%40@h", ("h", 4222)),
        ("us:p@h", ("h", 4222)),
        ("h:7", ("h", 7)),
        ("h", ("h", 4222)),
        ("[::1]", ("::1", 4222)),
        ("nats://h:", ("h", 4222)),
        ("ws://h", ("h", 80)),
        ("wss://h/path", ("h", 443)),
    ],
)
def test_an_address_is_read_as_the_client_reads_it(address: str, place: tuple[str, int]) -> None:
    server = parse_address(address)
    assert server == NatsClient._parse_server_uri(address)
    assert host_and_port(server) == place


def test_an_ipv6_address_stands_in_brackets_in_a_url() -> None:
    assert [url_host(host) for host in ("::1", "[::1]", "127.0.0.1", "nats")] == ["[::1]", "[::1]", "127.0.0.1", "nats"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"user": "a"}, "nats.user and nats.password_file: set both"),
        ({"password_file": "/x"}, "nats.user and nats.password_file: set both"),
        ({"user": "a", "password_file": "/x", "token_file": "/y"}, "nats has user and token_file: give one of them"),
        ({"tls_first": True}, "nats.tls_first is set without TLS"),
        ({"domain": "a.b"}, "nats.domain is 'a.b'"),
        ({"inbox_prefix": "_INBOX.>"}, "nats.inbox_prefix is '_INBOX.>'"),
        ({"inbox_prefix": "a b"}, "nats.inbox_prefix is 'a b'"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectionConfig(**given)
    assert said in str(caught.value)
