"""What `doctor` says of the room that account and server leave for the streams."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.streams import definitions
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.preflight.budget_check import check_budgets
from lachesis.services.preflight.room import ServerStorage, check_account, check_sharing, check_storage, read_monitor

GIB = 1 << 30
STREAMS = StreamsConfig()
WANTED = STREAMS.total_bytes()
WANTED_TEXT = f"{WANTED / GIB:.1f} GiB"
PRESENT = {one["name"]: {"config": one} for one in definitions("r", STREAMS)}
FREE = {"max_storage": -1, "max_streams": -1, "storage_max_stream_bytes": -1}


def account(reserved: int = 0, **limits: int) -> dict[str, Any]:
    return {"limits": FREE | limits, "reserved_storage": reserved}


@pytest.mark.parametrize(
    ("answer", "present", "said"),
    [
        (account(), {}, "no limit"),
        (account(max_storage=WANTED), {}, f"limit {WANTED_TEXT}"),
        (account(WANTED, max_storage=WANTED), PRESENT, f"limit {WANTED_TEXT}, {WANTED_TEXT} reserved"),
        (account(max_storage=WANTED - 1), {}, f"may store {WANTED_TEXT}, the streams want {WANTED_TEXT}"),
        (account(GIB, max_storage=WANTED), {}, f"the streams want {WANTED_TEXT}, and other streams have 1.0 GiB"),
        (account(max_streams=5), {}, "may have 5 streams"),
        (account(storage_max_stream_bytes=GIB), {}, "less than lachesis_r_ROLLOUTS want"),
        ({"error": {"description": "JetStream not enabled for account"}}, {}, "JetStream not enabled for account"),
        ({"limits": {"max_storage": 0}, "tiers": {"R1": account()}}, {}, "no limit"),
        ({"limits": {"max_storage": 0}, "tiers": {"R3": account()}}, {}, "streams of R3, not of 1 copies"),
    ],
)
def test_the_limits_of_an_account(answer: dict[str, Any], present: dict[str, Any], said: str) -> None:
    (finding,) = check_account(answer, "r", STREAMS, present)
    assert said in finding.text
    assert (finding.level == "OK") == ("limit" in finding.text.split(",")[0])
    assert (finding.mend is None) == (finding.level == "OK")


def test_who_has_reserved_how_much_is_said_where_runs_share_an_account() -> None:
    assert list(check_sharing({"run one": GIB})) == []
    (finding,) = check_sharing({"run one": GIB, "run two": 3 * GIB})
    assert finding.text.endswith("reserved: run two 3.0 GiB, run one 1.0 GiB")


def test_copies_count_against_the_limit_of_an_account_and_not_against_that_of_a_tier() -> None:
    three = StreamsConfig(replicas=3)
    (finding,) = check_account(account(max_storage=2 * WANTED), "r", three, {})
    assert finding.level == "FAIL"
    (finding,) = check_account({"limits": {}, "tiers": {"R3": account(max_storage=WANTED)}}, "r", three, {})
    assert finding.level == "OK"


@pytest.mark.parametrize(
    ("storage", "replicas", "level"),
    [
        (ServerStorage(GIB, 0, None), 1, "FAIL"),
        (ServerStorage(WANTED, 0, None), 1, "OK"),
        (ServerStorage(WANTED, GIB, None), 1, "FAIL"),
        (ServerStorage(GIB, 0, "c"), 3, "FAIL"),
        (ServerStorage(GIB, 0, "c"), 1, None),
        (None, 1, None),
    ],
)
def test_the_max_file_of_a_server(storage: ServerStorage | None, replicas: int, level: str | None) -> None:
    findings = list(check_storage(storage, StreamsConfig(replicas=replicas), {}))
    assert [one.level for one in findings] == ([level] if level else [])


@pytest.fixture
def monitor() -> Iterator[tuple[int, bytearray]]:
    body = bytearray()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/jsz" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, body
        server.shutdown()
        thread.join()


@pytest.mark.outside
async def test_only_the_monitoring_of_that_server_is_believed(monitor: tuple[int, bytearray]) -> None:
    port, body = monitor
    told = {"server_id": "ME", "config": {"max_storage": GIB}, "reserved_storage": 5, "meta_cluster": {"name": "c"}}
    body[:] = msgspec.json.encode(told)
    assert await read_monitor("127.0.0.1", "ME", port=port) == ServerStorage(GIB, 5, "c")
    assert await read_monitor("127.0.0.1", "ANOTHER", port=port) is None
    for text in (b"not found", b"[]", b'{"server_id": 3}', b'{"server_id": "ME"}'):
        body[:] = text
        assert await read_monitor("127.0.0.1", "ME", port=port) is None
    assert await read_monitor("127.0.0.1", "ME", port=1) is None


def test_what_the_runs_own_server_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.max_file_bytes is 1073741824, but streams\.\*_bytes add up to"):
        check_budgets(RunConfig(server=ServerConfig(max_file_bytes=GIB)))
    with pytest.raises(ConfigError, match=r"streams\.replicas is 3, but the run's own server is one"):
        check_budgets(RunConfig(streams=StreamsConfig(replicas=3)))
    check_budgets(RunConfig(server=ServerConfig(max_file_bytes=WANTED)))
