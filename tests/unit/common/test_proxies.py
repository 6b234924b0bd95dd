"""The proxy that requests take is named, without its password; on this machine none stands in between."""

import pytest

from lachesis.pipeline.common.proxies import describe_proxy
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.chat_client import ChatClient
from lachesis.pipeline.inference.client import ClientConfig, InferenceClient
from lachesis.pipeline.scorer.rater_client import open_client, post_json


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)


@pytest.mark.parametrize(
    ("variables", "url", "said"),
    [
        ({}, "http://h:1", ""),
        ({"HTTP_PROXY": "http://me:word@p:3128"}, "http://h:1",
         " (by the proxy p:3128 that HTTP_PROXY names; NO_PROXY=h leaves it out)"),
        ({"http_proxy": "http://p:3128"}, "https://h:1", ""),
        ({"ALL_PROXY": "http://p"}, "https://h:1", " (by the proxy p that ALL_PROXY names; NO_PROXY=h leaves it out)"),
        ({"HTTP_PROXY": "http://p:3128", "NO_PROXY": "h,other"}, "http://h:1", ""),
        ({"HTTP_PROXY": "http://p:3128"}, "http://127.0.0.1:1", ""),
        ({"HTTP_PROXY": "http://p:3128"}, "http://localhost:1", ""),
        ({"HTTP_PROXY": "http://p:3128"}, "http://[::1]:1", ""),
        ({"HTTP_PROXY": "http://p:3128"}, "http://127.example.com:1",
         " (by the proxy p:3128 that HTTP_PROXY names; NO_PROXY=127.example.com leaves it out)"),
    ],
)  # fmt: skip
def test_the_proxy_of_a_server_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert describe_proxy(url) == said


async def _request(client: str, url: str) -> None:
    if client == "inference":
        async with InferenceClient(ClientConfig(url=url, connect_timeout=5)) as inference:
            await inference.tokenize([{"role": "user", "content": "x"}])
    elif client == "chat":
        async with ChatClient(url, timeout_s=5) as chat:
            await chat._request("GET", "/v1/models")
    else:
        async with open_client(url) as http:
            await post_json(http, f"{url}/v1", {})


@pytest.mark.outside
@pytest.mark.parametrize("client", ["inference", "chat", "rater"])
async def test_a_proxy_that_nobody_answers_at_is_not_taken_for_the_server(
    monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(InfrastructureError, match=r"far.*by the proxy 127\.0\.0\.1:9 that HTTP_PROXY names"):
        await _request(client, "http://far:1")


@pytest.mark.parametrize(("url", "proxied"), [("http://127.0.0.1:1/v1", False), ("http://judge:1/v1", True)])
async def test_a_rater_on_this_machine_is_asked_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, proxied: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with open_client(url) as http:
        assert bool(http._mounts) == proxied
