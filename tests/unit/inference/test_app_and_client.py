"""Server and client over HTTP: the fields of vLLM, weight updates, errors, hang-ups, capability probe."""

import socket
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from functools import partial

import anyio
import httpx
import numpy as np
import pytest
import torch
import uvicorn

from lachesis.pipeline.errors import AccessError, InfrastructureError, StartupError, UnreadableAnswerError
from lachesis.pipeline.inference.access import CONTROL_PATHS
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.serving import text_tokenizer
from lachesis.pipeline.inference.serving.app import SAMPLING_PATHS
from lachesis.pipeline.model.digest import DIGEST_LENGTH
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.model.weight_files import write_weights
from lachesis.pipeline.runtime.http import http_within
from lachesis.schemas.errors import DataError

URL = "http://test"
HI = [{"role": "user", "content": "hi there"}]


@pytest.fixture
def app(policy, start_engine, tmp_path):
    """The application over a running engine; `app.state.engine` is that engine."""
    with start_engine(max_waiting_requests=3) as engine:
        application = build_app(policy, engine, model_name="tiny", weights_folder=tmp_path / "weights")
        application.state.engine = engine
        yield application


@pytest.fixture
def open_client(app):
    return partial(InferenceClient, ClientConfig(url=URL), transport=httpx.ASGITransport(app))


@pytest.fixture
def raw(app):
    """A plain HTTP client, to look at what travels."""
    return partial(httpx.AsyncClient, base_url=URL, transport=httpx.ASGITransport(app))


def alone(policy, prompt, tokens):
    with torch.no_grad():
        values, _ = token_logprobs(policy.model, torch.tensor([[*prompt, *tokens]]), 1.0)
    return values[0, len(prompt) :].numpy()


async def test_generate_returns_ids_logprobs_text_and_spans(open_client, policy):
    async with open_client() as client:
        prompt = await client.tokenize(HI)
        assert prompt == policy.tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
        samples = await client.generate(prompt, 5, SamplingParams(max_tokens=7, seed=1))
        assert await client.weight_version() == samples[0].weight_versions[0].version
    assert len(samples) == 5
    for sample in samples:
        assert sample.token_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert sample.logprobs == pytest.approx(alone(policy, prompt, sample.token_ids), abs=1e-5)
        assert sample.text == policy.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert sample.finish_reason in {"stop", "length"}
        assert [(s.start, s.end) for s in sample.weight_versions] == [(0, len(sample.token_ids))]


async def test_prompt_logprobs_equal_a_forward_pass(open_client, policy):
    tokens = [1, 9, 8, 7, 30, 31]
    async with open_client() as client:
        values = await client.prompt_logprobs(tokens)
        single = await client.prompt_logprobs([1])
    assert values.dtype == np.float32
    assert values[0] == 0
    assert values[1:] == pytest.approx(alone(policy, tokens[:1], tokens[1:]), abs=1e-5)
    assert single.tolist() == [0]


@pytest.mark.parametrize(("url", "proxied"), [("http://127.0.0.1:1", False), ("http://inference:1", True)])
async def test_a_proxy_is_not_asked_for_a_server_on_this_machine(url, proxied, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with InferenceClient(ClientConfig(url=url)) as client:
        assert bool(client._http._mounts) == proxied


async def test_detokenize_and_readiness(open_client):
    async with open_client() as client:
        assert await client.ready()
        assert await client.detokenize(await client.tokenize(HI)) == "<|bos|>hi there<|sep|>"


async def test_wire_fields_are_those_of_vllm(raw):
    async with raw() as http:
        body = {"token_ids": [1, 5], "sampling_params": {"n": 2, "max_tokens": 3, "logprobs": 2, "ignore_eos": True}}
        answer = (await http.post("/inference/v1/generate", json=body)).json()
        choice = answer["choices"][1]
        assert (choice["index"], choice["finish_reason"], len(choice["token_ids"])) == (1, "length", 3)
        assert choice["weight_versions"] == [{"version": "0-first-000000000000", "start": 0, "end": 3}]
        entry = choice["logprobs"]["content"][0]
        assert entry["token_id"] == choice["token_ids"][0]
        assert len(entry["top_logprobs"]) == 2
        body["sampling_params"] = {"max_tokens": 1, "prompt_logprobs": 1}
        scores = (await http.post("/inference/v1/generate", json=body)).json()["prompt_logprobs"]
        assert scores[0] is None
        assert scores[1]["5"]["logprob"] < 0
        models = (await http.get("/v1/models")).json()["data"]
        assert (models[0]["id"], models[0]["max_model_len"]) == ("tiny", 96)
        counted = (await http.post("/tokenize", json={"prompt": "abc"})).json()
        assert (counted["count"], len(counted["tokens"]), counted["max_model_len"]) == (3, 3, 96)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", b"{"),
        ("/inference/v1/generate", b'{"token_ids": [], "sampling_params": {}}'),
        ("/inference/v1/generate", b'{"token_ids": [-1], "sampling_params": {}}'),
        ("/inference/v1/generate", b'{"token_ids": [100000], "sampling_params": {}}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"temprature": 1}}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"n": 0}}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"top_p": 0}}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"max_tokens": 96}}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {}, "stream": true}'),
        ("/tokenize", b"{}"),
        ("/tokenize", b'{"messages": [{"role": "user"}]}'),
        ("/tokenize", b'{"messages": [7]}'),
        ("/tokenize", b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("/detokenize", b'{"tokens": [-1]}'),
        ("/detokenize", b'{"tokens": [99999999999]}'),
        ("/pause?mode=nap", b""),
        ("/update_weights", b'{"update_info": {"path": "x", "version": "1-a-b"}}'),
        ("/finish_weight_update", b"{}"),
    ],
)
async def test_bad_requests_get_400_and_the_server_goes_on(raw, path, body):
    async with raw() as http:
        answer = await http.post(path, content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200


async def test_weight_update_changes_weights_and_version_and_resumes(open_client, policy, tmp_path):
    other = build_tiny_policy(5, width=32, layers=2, max_length=96)
    tensors = policy_tensors(other.model)
    version = policy_version(3, "x", tensors)
    path = write_weights(tensors, tmp_path / "weights", version)
    async with open_client() as client:
        await client.update_weights(str(path), str(version))
        assert await client.weight_version() == str(version)
        sample = (await client.generate([1, 5, 6], 1, SamplingParams(max_tokens=5)))[0]
    assert sample.weight_versions[0].version == str(version)
    assert sample.logprobs == pytest.approx(alone(other, [1, 5, 6], sample.token_ids), abs=1e-5)


async def test_refused_weights_leave_version_and_service_as_they_were(open_client, policy, tmp_path):
    tensors = policy_tensors(policy.model)
    version = policy_version(3, "x", tensors)
    outside = write_weights(tensors, tmp_path / "elsewhere", version)
    few = {"lm_head.weight": torch.zeros(2, 2)}
    small = policy_version(4, "x", few)
    incomplete = write_weights(few, tmp_path / "weights", small)
    sneaky = tmp_path / "weights" / ".." / "elsewhere" / outside.name
    async with open_client() as client:
        before = await client.weight_version()
        for path, name, text in [
            (outside, version, "alone"),
            (sneaky, version, "alone"),
            (incomplete, small, "missing"),
            (tmp_path / "weights" / "gone.safetensors", version, "404"),
            (incomplete, "nonsense", "policy version"),
        ]:
            with pytest.raises(DataError, match=text):
                await client.update_weights(str(path), str(name))
        assert await client.weight_version() == before
        assert await client.generate([1], 1, SamplingParams(max_tokens=2))


async def test_full_queue_is_503_with_retry_after_and_infrastructure_to_the_client(app, raw, open_client):
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
    async with raw() as http, open_client() as client, anyio.create_task_group() as tasks:
        await client.pause("keep")
        for _ in range(3):
            tasks.start_soon(partial(http.post, "/inference/v1/generate", json=body))
        with anyio.fail_after(10):
            while app.state.engine.waiting < 3:
                await anyio.lowlevel.checkpoint()
        refused = await http.post("/inference/v1/generate", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        with pytest.raises(InfrastructureError, match="503"):
            await client.generate([1], 1)
        await client.resume()


async def test_failed_engine_is_unhealthy(app, raw, open_client, policy):
    with torch.no_grad():
        policy.model.model.embed_tokens.weight.fill_(torch.nan)
    async with open_client() as client, raw() as http:
        with pytest.raises(InfrastructureError):
            await client.generate([1], 1)
        assert (await http.get("/health")).status_code == 503
        assert not await client.ready()


async def test_probe_tells_what_the_server_is(open_client, policy):
    async with open_client() as client:
        found = await client.probe()
    assert (found.model, found.max_model_len) == ("tiny", 96)
    assert found.tokenizer_hash == policy.tokenizer_hash
    assert found.weight_version == "0-first-000000000000"


def answering(routes):
    """A client of a server that answers fixed (status, JSON) pairs by path, 404 elsewhere."""

    def answer(request):
        status, body = routes.get(request.url.path, (404, {"detail": "Not Found"}))
        return httpx.Response(status, json=body)

    return InferenceClient(ClientConfig(url=URL), transport=httpx.MockTransport(answer))


MODELS = (200, {"data": [{"id": "m", "max_model_len": 8}]})
TOKENS = (200, {"count": 1, "max_model_len": 8, "tokens": [1]})


@pytest.mark.parametrize(
    "routes",
    [
        {"/v1/models": MODELS},
        {"/v1/models": (200, {"data": []})},
        {"/v1/models": MODELS, "/tokenize": TOKENS},
        {
            "/v1/models": MODELS,
            "/tokenize": TOKENS,
            "/inference/v1/generate": (200, {"choices": [{"index": 0, "text": "a"}]}),
        },
    ],
)
async def test_generic_openai_server_is_refused_with_advice(routes):
    async with answering(routes) as client:
        with pytest.raises((StartupError, UnreadableAnswerError), match=r"cannot serve a trainer.*--enable-scale-out"):
            await client.probe()


def choice(**changes):
    values = {
        "index": 0,
        "token_ids": [5, 6],
        "text": "ab",
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]},
        "weight_versions": [{"version": "v", "start": 0, "end": 2}],
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ([], "0 samples, 1 were requested"),
        ([choice(token_ids=None)], "left out"),
        ([choice(logprobs=None)], "left out"),
        ([choice(logprobs={"content": [{"token": "a", "logprob": -1.0}]})], "1 logprobs"),
        ([choice(weight_versions=None)], "do not cover"),
        ([choice(weight_versions=[{"version": "v", "start": 0, "end": 1}])], "do not cover"),
        ([choice(weight_versions=[{"version": "v", "start": 1, "end": 2}])], "do not cover"),
        ([choice(token_ids=[5, 6, 7])], "2 logprobs, finite or not, for 3 tokens"),
        ([choice(logprobs={"content": [{"token": "a", "logprob": 1.0}] * 2})], "no probability"),
        ([choice(token_ids=[], logprobs={"content": []}, weight_versions=[])], "without a token"),
        ("nonsense", "something else.*It begins"),
    ],
)
async def test_answers_that_break_the_contract_are_waited_out(choices, text):
    async with answering({"/inference/v1/generate": (200, {"choices": choices})}) as client:
        with pytest.raises(UnreadableAnswerError, match=text):
            await client.generate([1], 1)


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, b"<html>Bad Gateway</html>", "It begins '<html>Bad Gateway"),
        (404, b"<html>default backend</html>", "404. It begins '<html>default"),
        (200, b'{"tokens": [1', "It begins '{\"tokens\": \\[1'"),
        (200, b"", "It begins ''"),
        (302, b"", "302"),
        (200, b'"' + b"x" * (20 << 20), "more than [0-9]+ bytes"),
    ],
    ids=["html", "html 404", "truncated", "empty", "redirect", "large"],
)
async def test_nonsense_is_quoted_and_waited_out(status, body, text):
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    async with InferenceClient(ClientConfig(url=URL), transport=transport) as client:
        with pytest.raises(UnreadableAnswerError, match=text) as raised:
            await client.tokenize([{"role": "user", "content": "a"}])
        assert len(str(raised.value)) < 600


async def test_where_a_redirect_leads_is_said():
    headers = {"location": "https://elsewhere.example/" + "x" * 5000}
    transport = httpx.MockTransport(lambda _: httpx.Response(307, headers=headers))
    async with InferenceClient(ClientConfig(url=URL), transport=transport) as client:
        with pytest.raises(UnreadableAnswerError, match=r"307, which leads to .https://elsewhere") as raised:
            await client.tokenize(HI)
    assert len(str(raised.value)) < 1000


async def test_a_body_that_drips_is_bounded_by_the_time_of_the_whole_answer():
    async def drip():
        while True:
            await anyio.sleep(0.01)
            yield b" "

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=drip()))
    async with InferenceClient(ClientConfig(url=URL, timeout=0.2), transport=transport) as client:
        with anyio.fail_after(60), pytest.raises(InfrastructureError, match="no whole answer within"):
            await client.tokenize([])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, DataError),
        (401, AccessError),
        (403, AccessError),
        (404, UnreadableAnswerError),
        (408, InfrastructureError),
        (429, InfrastructureError),
        (500, InfrastructureError),
    ],
)
async def test_status_codes_are_sorted_into_retry_and_not(status, kind):
    async with answering({"/tokenize": (status, {})}) as client:
        with pytest.raises(kind, match=str(status)):
            await client.tokenize(HI)


@pytest.mark.parametrize(
    "said",
    ["The model `policy` does not exist.", "unknown model 'policy'", "Model policy not found", "code: model_not_found"],
)
async def test_a_server_that_serves_another_model_by_now_is_waited_for(said):
    async with answering({"/tokenize": (400, {"detail": said})}) as client:
        with pytest.raises(UnreadableAnswerError, match="400"):
            await client.tokenize(HI)


async def test_refused_connection_and_timeout_are_infrastructure(free_tcp_port):
    async with InferenceClient(ClientConfig(url=f"http://127.0.0.1:{free_tcp_port}")) as client:
        with pytest.raises(InfrastructureError, match="ConnectError"):
            await client.generate([1], 1)
        assert not await client.ready()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with InferenceClient(ClientConfig(url=url, timeout=0.1)) as client:
            with pytest.raises(InfrastructureError, match=r"ReadTimeout|no whole answer"):
                await client.generate([1], 1)


async def test_hanging_up_drops_the_work(app):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        async with InferenceClient(ClientConfig(url=f"http://127.0.0.1:{listener.getsockname()[1]}")) as client:
            with anyio.fail_after(10):
                while not await client.ready():
                    await anyio.lowlevel.checkpoint()
            await client.pause("keep")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.generate, [1], 1)
                with anyio.fail_after(10):
                    while app.state.engine.waiting == 0:
                        await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            with anyio.fail_after(10):
                while app.state.engine.waiting:
                    await anyio.lowlevel.checkpoint()
            await client.resume()
            assert await client.generate([1], 1, SamplingParams(max_tokens=2))
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_client_needs_no_torch():
    code = "import sys; import lachesis.pipeline.inference.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "\xff"}'),
        ("/tokenize", b'{"prompt": ' + b"[" * 100_000),
        ("/tokenize", b'{"messages": [{"role": "user", "content": {"deep": [1]}}]}'),
        ("/tokenize", b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}"),
        ("/detokenize", b'{"tokens": [9223372036854775808]}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"seed": ' + b"9" * 4000 + b"}}"),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"temperature": 1e999}}'),
        ("/detokenize", b'{"tokens": [' + b"1," * (9 << 20) + b"1]}"),  # more than any request of sense
    ],
)
async def test_a_hostile_body_is_the_fault_of_who_sent_it(raw, path, body):
    async with raw() as client:
        answer = await client.post(path, content=body)
        assert answer.status_code == 400
        assert len(answer.content) < 2000
        assert (await client.get("/health")).status_code == 200


async def test_a_path_that_is_none_is_refused(raw):
    async with raw() as client:
        await client.post("/start_weight_update")
        for path in ("a\0b", "x/" * 5000):
            update = {"update_info": {"path": path, "version": "1-a-b"}}
            assert (await client.post("/update_weights", json=update)).status_code in {400, 404}


@pytest.mark.parametrize(
    "tokens", [b"[2147483648]", b"[-1]", b"[9223372036854775808]", b'["\xff"]', b"[" * 100_000, b"[1e999]"]
)
async def test_answers_that_no_column_holds_are_waited_out(tokens):
    """They ended the environment that sent the request, instead of costing it one group."""
    generated = b'{"choices": [{"index": 0, "text": "", "token_ids": ' + tokens + b"}]}"
    counted = b'{"count": 1, "max_model_len": 9, "tokens": ' + tokens + b"}"

    def answer(request):
        return httpx.Response(200, content=counted if request.url.path == "/tokenize" else generated)

    async with InferenceClient(ClientConfig(url=URL), transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(UnreadableAnswerError):
            await client.tokenize(HI)
        with pytest.raises(UnreadableAnswerError):
            await client.generate([1], 1)


UPDATE_PATHS = (
    *("/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/reset_prefix_cache", "/resume"),
)
RIGHT, OTHER = "b" * 64, "c" * 64


def updated(*workers):
    """A client of a fake vLLM whose workers say that of their weights, and the paths that were requested."""
    routes, asked = dict.fromkeys(UPDATE_PATHS, (200, {})), []
    routes["/collective_rpc"] = (200, {"results": list(workers)})

    def answer(request):
        asked.append(request.url.path)
        status, body = routes[request.url.path]
        return httpx.Response(status, json=body)

    return InferenceClient(ClientConfig(url=URL), transport=httpx.MockTransport(answer)), asked


@pytest.mark.parametrize("workers", [[{"digest": RIGHT}] * 2, [{"digest": OTHER, "rounded": OTHER}]])
async def test_vllm_goes_on_once_every_worker_computes_with_the_weights_of_the_version(workers):
    client, asked = updated(*workers)
    async with client:
        assert await client.update_weights("/w/1", f"1-a-{RIGHT[:DIGEST_LENGTH]}") is None
    assert asked[-2:] == ["/collective_rpc", "/resume"]


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        (
            [{"digest": RIGHT}, {"digest": OTHER}],
            f"policy 1-a-{RIGHT[:DIGEST_LENGTH]}, .* is {OTHER[:DIGEST_LENGTH]}, not {RIGHT[:DIGEST_LENGTH]}",
        ),
        ([{"digest": RIGHT, "rounded": OTHER}], f"digest is {RIGHT[:DIGEST_LENGTH]}, not {OTHER[:DIGEST_LENGTH]}"),
        ([], "which weights it computes with is not known"),
        (["no such method"], "which weights it computes with is not known"),
    ],
)
async def test_vllm_stays_paused_where_a_worker_computes_with_other_weights_or_does_not_say(workers, reason):
    client, asked = updated(*workers)
    async with client:
        with pytest.raises(InfrastructureError, match=reason):
            await client.update_weights("/w/1", f"1-a-{RIGHT[:DIGEST_LENGTH]}")
    assert asked[-1] == "/collective_rpc"


async def test_weights_that_vllm_holds_in_a_form_of_its_own_are_named_and_served():
    client, asked = updated({"unknown": ["experts.0.weight"]})
    async with client:
        assert "1 tensors in a form of its own (experts.0.weight)" in await client.update_weights("/w/1", "1-a-b")
    assert asked[-1] == "/resume"


def received(line):
    """What the server says next. It may hang up on what it never read, which resets the connection: it says no more."""
    try:
        return line.recv(65536)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{}{}{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n{}\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"\x00\xff\x00\xff" * 100,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
    ],
)
def test_lies_about_lengths_leave_the_server_serving(served, request_bytes):
    with (
        socket.create_connection(served, timeout=10) as line,
        suppress(ConnectionError),
    ):  # which it may end at any byte
        line.sendall(request_bytes)
        line.shutdown(socket.SHUT_WR)
        while line.recv(65536):
            pass
    assert httpx.get(f"http://{served[0]}:{served[1]}/health").status_code == 200


@pytest.fixture
def served(app):
    """The address of the application behind a real uvicorn."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=partial(server.run, [listener]))
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


async def test_requests_for_tokens_and_logprobs_are_told_of(served):
    told = []
    url = f"http://{served[0]}:{served[1]}"
    async with InferenceClient(ClientConfig(url=url), requested=told.append) as client:
        tokens = await client.tokenize([{"role": "user", "content": "a"}])
        await client.generate(tokens, 3, SamplingParams(max_tokens=2))
        await client.prompt_logprobs(tokens)
        with pytest.raises(DataError):
            await client.generate([], 2)
    assert [(call.items, call.failed, call.payload is None) for call in told] == [
        (3, False, False), (1, False, False), (0, True, True),
    ]  # fmt: skip
    assert all(call.seconds > 0 for call in told)


@pytest.fixture
def guarded(tmp_path):
    """An application as the service builds it, with a token, for the host `inference` alone."""
    policy = build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64)
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="0-a-b") as engine:
        yield build_app(policy, engine, model_name="tiny", weights_folder=tmp_path, token="secret", hosts={"inference"})


def http_of(app, host="inference"):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}:8000")


async def test_what_changes_the_state_takes_the_token(guarded):
    async with http_of(guarded) as http:
        for path in CONTROL_PATHS:
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret"}):
                answer = await http.post(path, headers=headers, json={})
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
            assert (await http.post(path, headers={"Authorization": "Bearer secret"}, json={})).status_code != 401
        assert (await http.get("/is_paused")).status_code == 200
    for token, refused in (("secret", False), (None, True)):
        transport = httpx.ASGITransport(guarded)
        client = InferenceClient(ClientConfig(url="http://inference"), token=token, transport=transport)
        async with client:
            try:
                await client.resume()
            except AccessError:
                assert refused
            else:
                assert not refused


@pytest.mark.slow
async def test_with_a_key_nobody_else_is_answered_and_the_key_changes_no_state(policy, tmp_path):
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="0-a-b") as engine:
        app = build_app(policy, engine, model_name="tiny", weights_folder=tmp_path, token="secret", key="key")
        async with http_of(app) as http:
            assert (await http.get("/health")).status_code == 200
            for path in (*SAMPLING_PATHS, "/tokenize", "/v1/models", "/nowhere"):
                for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "key"}):
                    answer = await http.post(path, headers=headers, json={})
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                    assert "inference.ROLE.key_file" in answer.json()["error"]["message"]
        for token, samples, controls in ((None, False, False), ("key", True, False), ("secret", True, True)):
            transport = httpx.ASGITransport(app)
            async with InferenceClient(ClientConfig(url="http://i"), token=token, transport=transport) as client:
                assert await client.ready()
                for allowed, asked in (
                    (samples, client.probe), (samples, partial(client.generate, [1, 20], 2)), (controls, client.resume)
                ):  # fmt: skip
                    with nullcontext() if allowed else pytest.raises(AccessError, match="401"):
                        await asked()


async def test_no_page_is_answered_not_by_a_name_that_leads_here_either(guarded):
    for host, status in (("inference", 200), ("localhost", 200), ("127.0.0.1", 200), ("evil.example", 403)):
        async with http_of(guarded, host) as http:
            assert (await http.get("/health")).status_code == status
            for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                assert (await http.post("/tokenize", headers=headers, json={"prompt": "a"})).status_code == 403


async def test_text_that_no_context_holds_is_refused_before_it_is_read(guarded):
    async with http_of(guarded) as http:
        for body in (
            {"prompt": "a" * 1_000_000},
            {"messages": [{"role": "user", "content": "a" * 500_000}] * 2},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 1_000_000}]}]},
        ):
            answer = await http.post("/tokenize", json=body)
            assert (answer.status_code, "a context of 64 tokens holds" in answer.text) == (400, True)
        answer = await http.post("/detokenize", json={"tokens": [5] * 65})
        assert (answer.status_code, "the context has 64" in answer.text) == (400, True)


async def test_the_server_answers_while_text_is_read(guarded, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def slowly(*_):
        began.set()
        go_on.wait(30)
        return [1]

    monkeypatch.setattr(text_tokenizer.TextTokenizer, "_encode", slowly)
    monkeypatch.setattr(text_tokenizer, "_SHORT_CHARS", 0)
    async with http_of(guarded) as http, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(http.post, "/tokenize", json={"messages": HI}))
        await anyio.to_thread.run_sync(began.wait)
        assert (await http.get("/health")).status_code == 200
        go_on.set()


def test_headers_that_do_not_come_end_the_connection(app):
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", http=http_within(0.2))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=partial(server.run, [listener]))
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=30) as line:
            line.sendall(b"GET /health HTTP/1.1\r\nx: ")
            assert line.recv(4096).startswith(b"HTTP/1.1 408")
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
