"""Every HTTP route of inference server, gateway, endpoint and page, used in hostile ways: it refuses and goes on.

The routes are those of the applications themselves, so that a new one is used, too.
"""

import importlib.util
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fuzz.mutate import JSON
from unit.extensions.endpoint.test_recording import recorded

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.extensions.atropos.gateway import app as gateway_app
from lachesis.pipeline.extensions.endpoint.logic.dialects import DIALECTS
from lachesis.pipeline.extensions.endpoint.server import EndpointServer, LiveSession
from lachesis.pipeline.inference.access import CONTROL_PATHS
from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.serving.app import SAMPLING_PATHS
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.services.web import app as web_app
from lachesis.testing import FakeInference

_spec = importlib.util.spec_from_file_location(
    "gateway_world", Path(__file__).parents[2] / "unit" / "extensions" / "atropos" / "gateway" / "conftest.py"
)
_gateway = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_gateway)

TOKEN = "canary-route-55ac"
KEY = "canary-key-9f31"
FROM_ELSEWHERE = [
    {"host": "evil.example"}, {"host": "evil.example:8000"}, {"host": "127.0.0.1.evil.example"}, {"host": ""},
    {"host": "[::1"}, {"host": "localhost@evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"},
    {"origin": "http://127.0.0.1"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
]  # fmt: skip
WITHOUT_TOKEN = [
    {}, {"authorization": ""}, {"authorization": "Bearer"},
    {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Bearer {TOKEN[:-1]}"}, {"authorization": TOKEN},
    {"authorization": f"Bearer  {TOKEN.upper()}"}, {"authorization": "Basic ==="},
    {"authorization": "Basic " + "A" * 9000},
    {"authorization": "Bearer \xff\xfe"}, {"cookie": f"token={TOKEN}"}, {"x-api-key": TOKEN},
]  # fmt: skip
BODIES = [
    b"", b"\x00", b"\xff\xfe", b"[]", b"null", b"1", b'""', b'{"": 1}', b'{"a":' * 5000, *JSON,
    b'{"update_info": {"path": "../../../etc/passwd", "version": "1-a-b"}}',
    b'{"update_info": {"path": "/etc/shadow", "version": "\\u001b[2J"}}',
    b'{"prompt": {"$gt": ""}, "messages": [], "token_ids": [-1], "tokens": [99999999]}',
]  # fmt: skip
PATHS = ["/..%2f..%2fetc/passwd", "/%00", "/pause%0d%0ax: y", "/" + "a" * 9000]
INFERENCE = [
    *(("GET", path) for path in ("/health", "/v1/models", "/is_paused", "/weight_info")),
    *(("POST", path) for path in ("/tokenize", "/detokenize", *sorted(SAMPLING_PATHS), *sorted(CONTROL_PATHS))),
]
GATEWAY = [
    *(("GET", path) for path in ("/", "/wandb_info", "/info", "/status", "/status-env", "/latest_example", "/batch")),
    *(("POST", path) for path in ("/register-env", "/disconnect-env", "/scored_data", "/scored_data_list")),
    ("POST", "/register"),
    ("GET", "/reset_data"),
    ("GET", "/curriculum"),
]  # fmt: skip
PAGE = [
    *(("GET", path) for path in ("/", "/page.css", "/page.js", "/icon.svg")),
    *(("GET", f"/api/{path}") for path in ("run", "series", "alerts", "groups", "groups/{group}")),
    *(("GET", f"/api/{path}") for path in ("revisions", "comparison")),
]  # fmt: skip
ENDPOINT = [
    ("POST", "/sessions"),
    *((method, prefix + path) for prefix in ("", "/s/{key}") for method, path in (
        *(("POST", path) for path in DIALECTS), ("POST", "/v1/messages/count_tokens"), ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"), ("GET", "/task"), ("POST", "/reward"), ("POST", "/end"),
    )),
]  # fmt: skip

Asked = tuple[str, str]


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="0-a-b",
                config=EngineConfig()) as engine:  # fmt: skip
        folder = tmp_path_factory.mktemp("weights")
        yield build_app(policy, engine, model_name="tiny", weights_folder=folder, token=TOKEN, key=KEY,
                        hosts=frozenset())  # fmt: skip


@pytest.fixture
async def inference(application: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://127.0.0.1") as http:
        yield http
        assert (await http.get("/health")).status_code == 200
        paused = await http.get("/is_paused", headers={"authorization": f"Bearer {KEY}"})
        assert paused.json() == {"is_paused": False}


@pytest.fixture
async def gateway(make_lab: Any, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    async with MemoryBus() as bus:
        world = _gateway.World(make_lab(bus))
        await world.policy()
        config = world.config(needs_token=True, token_file=str(tmp_path / "token"))
        async with world.gateway(config) as http:
            yield http
            answer = await http.get("/status", headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 200
            assert not await world.groups()


def endpoint_server() -> EndpointServer:
    return EndpointServer("127.0.0.1", 0, token=TOKEN, hold_s=0.01)


@pytest.fixture
async def endpoint() -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an endpoint that serves a session, whose key is `KEY`, by an inference server that is fake."""
    server, inference = endpoint_server(), FakeInference(lambda *_: "well")
    live = LiveSession(recorded(inference), {"prompt": "?"}, takes_rewards=True, reward_name="reward", key=KEY)
    async with server.running(), live.recorded.answering():
        with server.serving(live):
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                yield http
                assert (await http.get("/task", headers={"x-api-key": KEY})).json() == {"prompt": "?"}
                chat = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
                answer = await http.post("/v1/chat/completions", headers={"x-api-key": KEY}, json=chat)
                assert answer.json()["choices"][0]["message"]["content"] == "well"


class Anything:
    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


def page_app() -> Any:
    return web_app.build_app(Anything(), hosts=(), token=TOKEN, cookie="page")  # type: ignore[arg-type]


def test_every_route_is_asked(application: Any) -> None:
    def of(app: Any) -> set[Asked]:
        return {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}

    assert of(application) == set(INFERENCE)
    assert of(gateway_app.build_app(Anything())) == set(GATEWAY)
    assert of(endpoint_server().app()) == set(ENDPOINT)
    assert of(page_app()) == set(PAGE)


def refused(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, answer.text
    assert TOKEN not in answer.text
    assert KEY not in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(("method", "path"), INFERENCE)
async def test_the_inference_server_answers_no_page_and_no_foreign_name(
    inference: httpx.AsyncClient, method: str, path: str
) -> None:
    for headers in FROM_ELSEWHERE:
        asked = {**headers, "authorization": f"Bearer {TOKEN}"}
        refused(await inference.request(method, path, headers=asked, content=b"{}"), 403)


@pytest.mark.parametrize(("method", "path"), [asked for asked in INFERENCE if asked[1] != "/health"])
async def test_the_inference_server_answers_nobody_without_key_or_token(
    inference: httpx.AsyncClient, method: str, path: str
) -> None:
    for headers in WITHOUT_TOKEN:
        for secret in (TOKEN, KEY):
            altered = {name: value.replace(TOKEN, secret) for name, value in headers.items()}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in altered.items()]
            refused(await inference.request(method, path, headers=raw, content=b"{}"), 401)


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
async def test_the_inference_server_changes_nothing_without_the_token(inference: httpx.AsyncClient, path: str) -> None:
    for headers in [*WITHOUT_TOKEN, {"authorization": f"Bearer {KEY}"}]:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        refused(await inference.post(path, headers=raw, content=b"{}"), 401)


@pytest.mark.parametrize(("method", "path"), INFERENCE)
async def test_the_inference_server_outlives_any_body(inference: httpx.AsyncClient, method: str, path: str) -> None:
    bearing = {"authorization": f"Bearer {TOKEN}"}
    for body in BODIES:
        answer = await inference.request(method, path, headers=bearing, content=body)
        assert answer.status_code < 500, (body[:80], answer.text)
        assert "Traceback" not in answer.text
    await inference.post("/resume", headers=bearing)


async def test_no_path_leads_past_the_routes(inference: httpx.AsyncClient, gateway: httpx.AsyncClient) -> None:
    bearing = {"authorization": f"Bearer {TOKEN}"}
    for path in PATHS:
        for method in ("GET", "POST", "PUT", "DELETE", "TRACE", "OPTIONS"):
            for http in (inference, gateway):
                refused(await http.request(method, path, headers=bearing), 400, 404, 405)


@pytest.mark.parametrize(("method", "path"), GATEWAY)
async def test_the_gateway_answers_nobody_without_the_token_nor_pages(
    gateway: httpx.AsyncClient, method: str, path: str
) -> None:
    for headers in WITHOUT_TOKEN:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        refused(await gateway.request(method, path, headers=raw, content=b"{}"), 401)
    for headers in FROM_ELSEWHERE:
        asked = {**headers, "authorization": f"Bearer {TOKEN}"}
        refused(await gateway.request(method, path, headers=asked, content=b"{}"), 400, 403)


@pytest.mark.parametrize(("method", "path"), [asked for asked in GATEWAY if asked[0] == "POST"])
async def test_the_gateway_outlives_any_body(gateway: httpx.AsyncClient, method: str, path: str) -> None:
    for body in BODIES:
        for coding in ({}, {"content-encoding": "gzip"}, {"content-type": "text/plain"}):
            headers = {"authorization": f"Bearer {TOKEN}", **coding}
            answer = await gateway.request(method, path, headers=headers, content=body)
            assert answer.status_code < 500 or path == "/register", (body[:80], answer.text)
            assert "Traceback" not in answer.text


@pytest.mark.slow
async def test_the_endpoint_answers_nobody_without_a_key_nor_pages(endpoint: httpx.AsyncClient) -> None:
    for method, path in ENDPOINT:
        secret, wrong = (TOKEN, KEY) if path == "/sessions" else (KEY, TOKEN)
        for headers in WITHOUT_TOKEN:
            altered = {name: value.replace(TOKEN, secret) for name, value in headers.items() if name != "x-api-key"}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in altered.items()]
            refused(
                await endpoint.request(method, path.format(key=f"{KEY}x", model="policy"), headers=raw, content=b"{}"),
                401,
            )
        bearing = {"authorization": f"Bearer {wrong}"}
        refused(
            await endpoint.request(method, path.format(key=wrong, model="policy"), headers=bearing, content=b"{}"), 401
        )
        for headers in FROM_ELSEWHERE:
            asked = {**headers, "authorization": f"Bearer {secret}"}
            refused(
                await endpoint.request(method, path.format(key=KEY, model="policy"), headers=asked, content=b"{}"),
                400,
                403,
            )


@pytest.mark.slow
async def test_the_endpoint_outlives_any_body(endpoint: httpx.AsyncClient) -> None:
    for method, path in ENDPOINT:
        bearing = {"authorization": f"Bearer {TOKEN if path == '/sessions' else KEY}"}
        for body in BODIES:
            answer = await endpoint.request(method, path.format(key=KEY, model="policy"), headers=bearing, content=body)
            assert answer.status_code < 500 or path == "/sessions", (path, body[:80], answer.text)
            assert "Traceback" not in answer.text


@pytest.mark.parametrize(("method", "path"), PAGE)
async def test_the_page_answers_no_other_page_and_tells_nothing_without_the_token(method: str, path: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(page_app()), base_url="http://127.0.0.1") as http:
        for headers in FROM_ELSEWHERE:
            answer = await http.request(method, path, headers={**headers, "cookie": f"page={TOKEN}"})
            refused(answer, 403)
            assert "default-src 'self'" in answer.headers["content-security-policy"]
        for headers in [*WITHOUT_TOKEN, {"authorization": f"Bearer {TOKEN}"}, {"cookie": f"page={TOKEN}x"}]:
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            refused(await http.request(method, path, headers=raw), 401 if path.startswith("/api") else 200)
        for given in (f"{TOKEN}x", TOKEN[:-1], "", "\xff", "%00"):
            refused(await http.request(method, path, params={"token": given}), 401)
        for other in ("POST", "PUT", "DELETE", "PATCH", "TRACE"):
            refused(await http.request(other, path, headers={"cookie": f"page={TOKEN}"}), 405)
