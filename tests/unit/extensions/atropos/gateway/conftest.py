"""What an Atropos environment sends, and a gateway on a bus in memory, with a governor that a test opens and closes."""

import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig
from lachesis.pipeline.extensions.atropos.gateway.settings import gateway_settings
from lachesis.pipeline.extensions.atropos.gateway.stage import run_gateway
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest, PolicyRecord
from lachesis.schemas.rollout import RolloutGroup


def scored(n: int = 4, *, seed: int = 0, length: int = 6, prompt: int = 2, **changes: Any) -> dict[str, Any]:
    """A group as atroposlib sends it: prompts masked with -100 and given the logprob 1.0."""
    rows = [[100 + seed, *(7 + (seed + i + t) % 50 for t in range(1, length))] for i in range(n)]
    data = {
        "tokens": rows,
        "masks": [[-100] * prompt + row[prompt:] for row in rows],
        "scores": [float(i % 2) for i in range(n)],
        "advantages": None,
        "ref_logprobs": None,
        "messages": [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] for _ in rows],
        "generation_params": {"temperature": 1.0},
        "inference_logprobs": [[1.0] * prompt + [-0.5] * (length - prompt) for _ in rows],
        "overrides": None,
        "group_overrides": None,
        "images": None,
        "something_new": "dropped",
    }
    return data | changes


class Governor:
    """Grants leases while it is open, and notes them."""

    def __init__(self) -> None:
        self.open = True
        self.contended = False
        self.closed: set[str] = set()
        self.granted: list[LeaseRequest] = []
        self.released: list[str | None] = []
        self.refusals = 0

    async def answer(self, data: bytes) -> bytes:
        request = decode(LeaseRequest, data)
        if request.op == "acquire" and request.env in self.closed:
            self.refusals += 1
            return encode(
                LeaseReply(granted=False, retry_s=0.01, reason="halted", closed=True, contended=self.contended)
            )
        if request.op == "acquire" and not self.open:
            self.refusals += 1
            return encode(LeaseReply(granted=False, retry_s=0.01, reason="closed", contended=self.contended))
        if request.op == "acquire":
            self.granted.append(request)
        if request.op == "release":
            self.released.append(request.lease)
        lease = request.lease or f"lease-{len(self.granted)}"
        return encode(LeaseReply(granted=True, lease=lease, expires_s=30.0, contended=self.contended))


class World:
    """One run `r` with a foreign environment `words` on a bus in memory."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.bus: Bus = lab.bus
        self.governor = Governor()
        self.service: Any = None

    def config(self, *envs: str, **gateway: Any) -> RunConfig:
        settings = {"port": 0, "needs_token": False, **gateway}
        return run_config_type()(
            run="r",
            environments={env: EnvironmentConfig(kind="gateway", longest_tokens=64) for env in envs or ("words",)},
            batching=BatchingConfig(batch_size=8),
            gateway=GatewayConfig(**settings),
        )

    async def policy(self, step: int = 0, *, written_ns: int = 1) -> None:
        record = PolicyRecord(run="r", version=f"{step}-a-b", weights="w", tokenizer_hash="tok", written_ns=written_ns)
        await self.bus.put(keys.POLICY, encode(record))

    @asynccontextmanager
    async def gateway(self, config: RunConfig | None = None, **client: Any) -> AsyncIterator[httpx.AsyncClient]:
        """A gateway and a client of it. `self.service` is its service, to be killed."""
        settings = config or self.config()
        async with (
            self.bus.serve(subjects.lease("r"), self.governor.answer),
            self.lab.running(partial(_run, config=settings), "gateway") as service,
        ):
            self.service = service
            await self.lab.until(lambda: _true(service.vitals.metrics.get("gateway/port")))
            url = f"http://127.0.0.1:{service.vitals.metrics['gateway/port']}"
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, **client) as http:
                yield http

    async def registered(self, http: httpx.AsyncClient, name: str = "words", **changes: Any) -> int:
        body = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": 4, **changes}
        answer = (await http.post("/register-env", json=body)).json()
        assert answer["status"] == "success", answer
        return int(answer["env_id"])

    async def groups(self, env: str = "words") -> list[RolloutGroup]:
        async with self.bus.read(subjects.ROLLOUTS, [subjects.rollout("r", env)], follow=False) as stored:
            return [decode(RolloutGroup, message.data) async for message in stored]

    async def until(self, condition: Callable[[], bool], seconds: float = 40) -> None:
        with anyio.fail_after(seconds):
            while not condition():  # noqa: ASYNC110 - it is about an HTTP server, which offers nothing to wait on
                await anyio.sleep(0.005)


async def _run(service: Any, *, config: RunConfig) -> None:
    await run_gateway(service, gateway_settings(config))


async def _true(value: Any) -> bool:
    return bool(value)


def zipped(data: Any) -> dict[str, Any]:
    """The arguments of a request with a compressed body, as the client sends it from 1 KiB on."""
    body = gzip.compress(json.dumps(data).encode())
    return {"content": body, "headers": {"Content-Type": "application/json", "Content-Encoding": "gzip"}}


@pytest.fixture
def make_scored():
    return scored


@pytest.fixture
def as_gzip():
    return zipped


@pytest.fixture
def new_run(lab):
    """A run whose trainer has not started."""
    return World(lab)


@pytest.fixture
async def world(new_run):
    await new_run.policy()
    return new_run
