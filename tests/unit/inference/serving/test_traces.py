"""The reference server's spans: below the client's, from its `traceparent`, with queue and generation in them."""

import httpx
import pytest
from unit.spans import Sink

from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.serving.traces import TracedRequests
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.recorder import not_recording, recording, traced
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import new_group_id

GENERATE = "/inference/v1/generate"


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
async def client(policy, start_engine, tmp_path, lab, sink):
    service = Service(lab.bus, "inference-policy", "r", tracing=Tracing(TelemetryConfig(), sink))
    with start_engine() as engine:
        app = build_app(policy, engine, model_name="policy", weights_folder=tmp_path / "weights")
        transport = httpx.ASGITransport(TracedRequests(app, service, "policy", {GENERATE}))
        async with InferenceClient(ClientConfig(url="http://test"), transport=transport) as made:
            yield made


async def test_a_request_for_a_sampled_group_leaves_its_wait_and_its_generation(client, sink):
    group = new_group_id()
    with recording(Clock(), "environment-words", group, "ab" * 8) as chats, traced("chat policy", "client"):
        await client.generate([5, 6, 7], 2, SamplingParams(max_tokens=4, ignore_eos=True))
    request, queued, generated = sink.spans
    (chat,) = chats
    assert [(span.name, span.kind) for span in sink.spans] == [
        ("llm_request", "server"), ("queue", "internal"), ("generation", "internal"),
    ]  # fmt: skip
    assert {span.trace for span in sink.spans} == {group}
    assert {span.service for span in sink.spans} == {"inference-policy"}
    assert (request.parent, queued.parent, generated.parent) == (chat.id, request.id, request.id)
    assert len({span.id for span in (chat, *sink.spans)}) == 4
    assert chat.start_ns - Clock().now_ns() < 0 < request.start_ns
    assert request.start_ns <= queued.start_ns <= queued.end_ns == generated.start_ns < generated.end_ns
    assert generated.end_ns <= request.end_ns
    about = request.attributes
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (3, 8)
    assert len(about["rl.policy.versions"]) == 1


async def test_a_request_of_no_sampled_group_and_other_routes_leave_nothing(client, sink):
    await client.generate([5], 1, SamplingParams(max_tokens=1))
    with not_recording(new_group_id()):
        await client.generate([5], 1, SamplingParams(max_tokens=1))
    with recording(Clock(), "environment-words", new_group_id(), "ab" * 8):
        await client.detokenize([5])
    assert sink.spans == []


async def test_a_request_that_is_refused_says_so(client, sink):
    with recording(Clock(), "environment-words", new_group_id(), "ab" * 8), pytest.raises(DataError):
        await client.generate([], 1, SamplingParams(max_tokens=1))
    (request,) = sink.spans
    assert (request.error, request.attributes["http.response.status_code"]) == ("answered with 400", 400)
