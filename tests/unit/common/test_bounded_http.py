"""An answer that trickles or never ends is given up, by all who ask."""

import threading
from unittest.mock import patch

import httpx
import pytest
from endless_server import server

from lachesis.pipeline.common.bounded_http import get_within, wait_for_thread
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.model import source
from lachesis.services.observe.jaeger import Jaeger
from lachesis.services.preflight import room

pytestmark = pytest.mark.outside


@pytest.mark.parametrize(
    ("kind", "words"),
    [("trickle", "no whole answer within 0.3 s"), ("head", "no whole"), ("flood", "more than 100000")],
)
async def test_a_whole_answer_comes_within_time_and_bytes_or_not_at_all(kind, words):
    with server(kind) as url:
        async with httpx.AsyncClient(timeout=5.0) as client:
            within_s = 30.0 if kind == "flood" else 0.3
            with pytest.raises(InfrastructureError, match=words):
                await get_within(client, url, within_s=within_s, most_bytes=100_000)


async def test_what_is_no_success_or_no_server_is_an_outage():
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(503))) as client:
        with pytest.raises(InfrastructureError, match="503"):
            await get_within(client, "http://a", within_s=1.0, most_bytes=10)


@pytest.mark.parametrize("kind", ["trickle", "head"])
async def test_jaeger_that_never_ends_its_answer_is_given_up(kind):
    with server(kind) as url, patch("lachesis.services.observe.jaeger._TIMEOUT_S", 0.3):
        async with httpx.AsyncClient() as client:
            with pytest.raises(InfrastructureError, match="no whole answer"):
                await Jaeger(url, client, "r").rollout("0" * 32, "slow")


@pytest.mark.parametrize("kind", ["trickle", "flood", "head"])
async def test_a_monitor_that_never_ends_its_answer_says_nothing(kind):
    with server(kind) as url, patch.object(room, "_MONITOR_S", 0.3):
        assert await room.read_monitor("127.0.0.1", "id", port=int(url.rpartition(":")[2])) is None


def test_a_hub_that_never_ends_its_headers_is_unreachable():
    with server("head") as url, patch.object(source, "_HUB_TIMEOUT_S", 0.2):
        assert source.check_hub(url, "org/model", None) == "unreachable"


def test_work_in_a_thread_returns_raises_or_is_left():
    assert wait_for_thread(lambda: 7, 5.0) == 7
    with pytest.raises(ValueError, match="no number"):
        wait_for_thread(_raise, 5.0)
    ended = threading.Event()
    assert wait_for_thread(ended.wait, 0.01) is None
    ended.set()


def _raise():
    raise ValueError("no number")
