"""An answer that trickles or never ends is given up, by all who ask."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import httpx
import pytest

from lachesis.pipeline.common.bounded_http import get_within, wait_for_thread
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.atropos.gateway import curriculum_mixin
from lachesis.pipeline.model import source
from lachesis.services.observe.jaeger import Jaeger
from lachesis.services.preflight import room

pytestmark = pytest.mark.outside


@contextmanager
def server(kind):
    """Serve what trickles (a byte now and then, for ever) or floods."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            if kind == "head":  # its headers never end
                while not ended.wait(0.02):
                    self.wfile.write(b"x: y\r\n")
                return
            self.wfile.write(b"Content-Type: application/json\r\n\r\n")
            while not ended.wait(0.02 if kind == "trickle" else 0):
                self.wfile.write(b" " if kind == "trickle" else b" " * 65536)

        do_HEAD = do_GET  # noqa: N815 - the name that the library asks for

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # the client has gone

    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            ended.set()
            made.shutdown()
            thread.join()


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


@pytest.mark.parametrize("kind", ["trickle", "flood"])
def test_the_mixin_of_environments_gives_up_an_answer_without_end(kind):
    with (
        server(kind) as url,
        patch.object(curriculum_mixin, "_TIMEOUT_S", 0.5),
        patch.object(curriculum_mixin, "_MAX_ANSWER_BYTES", 1 << 20),
        pytest.raises(OSError, match="no whole answer"),
    ):
        curriculum_mixin._fetch(url, "")


def test_work_in_a_thread_returns_raises_or_is_left():
    assert wait_for_thread(lambda: 7, 5.0) == 7
    with pytest.raises(ValueError, match="no number"):
        wait_for_thread(_raise, 5.0)
    ended = threading.Event()
    assert wait_for_thread(ended.wait, 0.01) is None
    ended.set()


def _raise():
    raise ValueError("no number")
