"""A policy that no server can load, and before which there is none, is published again."""

from types import SimpleNamespace

import anyio
import pytest

from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.publication import PolicyPublisher
from lachesis.pipeline.trainer.refused_policy import refused_version, republish_refused
from lachesis.pipeline.trainer.serial_jobs import SerialJobs
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.schemas.notices import REFUSED_POLICY, Notice

REFUSED = Notice(key=REFUSED_POLICY, source="x", what="its weights are cut off", stops=True, version="0-a-b")


def beat(service: str, *notices: Notice, time_ns: int = 1 << 60) -> Heartbeat:
    return Heartbeat(
        host="h",
        schema_version=1,
        run="r",
        service=service,
        instance="1",
        pid=1,
        time_ns=time_ns,
        stage=StageVitals(notices=list(notices)),
    )


@pytest.mark.parametrize(
    ("heard", "version"),
    [
        (beat("inference-policy", REFUSED), "0-a-b"),
        (beat("inference-policy"), None),
        (beat("inference-teacher", REFUSED), None),
        (beat("inference-policy", Notice(key=REFUSED_POLICY, source="x", what="policy 3-a-b was refused")), None),
        (
            beat(
                "inference-policy", Notice(key=REFUSED_POLICY, source="x", what="policy 3-a-b was refused", stops=True)
            ),
            None,
        ),
        (beat("inference-policy", Notice(key="disk", source="x", what="the disk is full", stops=True)), None),
    ],
)
def test_only_a_server_that_has_no_policy_at_all_refuses_for_good(heard: Heartbeat, version: str | None) -> None:
    assert refused_version(heard) == version


@pytest.mark.parametrize("seconds", [range(12), [3600, 3601, 0, 1]], ids=["one server", "a clock behind"])
async def test_a_refused_policy_is_published_again_and_not_with_each_heartbeat(lab, monkeypatch, seconds):
    ns = 1 << 60
    beats = [beat("inference-policy", REFUSED, time_ns=ns + s * 10**9) for s in seconds]

    async def heard(bus, run, service):
        for one in beats:
            yield one

    monkeypatch.setattr("lachesis.pipeline.trainer.refused_policy.listen_to_heartbeats", heard)
    published = []

    async def publish_again(version):
        await anyio.lowlevel.checkpoint()
        published.append(version)

    await republish_refused(Service(lab.bus, "trainer", "r"), publish_again)
    assert published == ["0-a-b", "0-a-b"]


@pytest.mark.parametrize(("refused", "again"), [("1-a-b", []), ("2-a-c", [2])])
async def test_only_the_newest_policy_is_published_again_also_while_it_comes_out(monkeypatch, refused, again):
    published = []

    async def publish(_, step, tensors):
        await anyio.lowlevel.checkpoint()
        published.append(step)

    monkeypatch.setattr(PolicyPublisher, "_publish", publish)
    async with anyio.create_task_group() as tasks:
        publisher = object.__new__(PolicyPublisher)
        publisher.shared, publisher._newest = None, (2, {})
        publisher._publishing, publisher._publications = anyio.Lock(), SerialJobs(tasks)
        publisher._feed = SimpleNamespace(policy=SimpleNamespace(version="1-a-b"))
        publisher._sender = SimpleNamespace(forget=lambda: None)

        async def announce():
            await anyio.sleep(0.01)
            publisher._feed.policy = SimpleNamespace(version="2-a-c")

        await publisher._publications.start(announce)
        await publisher.publish_again(refused)
    assert published == again
