"""What begins and ends to stand in the way of a run is posted, by the supervisor's word or the heartbeats'."""

import json
import time

import anyio
import anyio.lowlevel
import httpx
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.notice_webhook import NoticeWebhook
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.schemas.notices import Notice

pytestmark = pytest.mark.hostile

FROZEN = Notice(key="silent/1", source="batcher", what="batcher is silent", mend="go on", stops=True)
HALTED = Notice(key="sums stopped", source="health", what="environment sums is halted", stops=True)
RAISES = Notice(key="unrated", source="scorer", what="rater mine: KeyError")


def beat(lab, service: str, *notices: Notice) -> bytes:
    stage = StageVitals(notices=list(notices))
    return encode(
        Heartbeat(
            host="h",
            schema_version=1,
            run=lab.run,
            service=service,
            instance="1-a",
            pid=1,
            time_ns=time.time_ns(),
            stage=stage,
        )
    )


@pytest.mark.parametrize(("service", "notices"), [("supervisor", (FROZEN, HALTED)), ("scorer", (RAISES,))])
async def test_a_notice_is_posted_when_it_begins_and_when_it_is_over(lab, tmp_path, monkeypatch, service, notices):
    file = tmp_path / "url"
    file.write_text("https://hooks.example/secret")
    posted = []
    answers = [503]

    def take(request: httpx.Request) -> httpx.Response:
        if answers:
            return httpx.Response(answers.pop())
        posted.append(json.loads(request.content))
        return httpx.Response(200)

    monkeypatch.setattr("lachesis.pipeline.health.notice_webhook._LOOK_S", 0.01)
    monkeypatch.setattr("lachesis.pipeline.notices.changes._GONE_S", 0.1)
    config = HealthConfig(webhook_file=str(file))

    async def send(service) -> None:
        await NoticeWebhook(service, config, httpx.MockTransport(take)).send_changes()

    async with lab.running(send, "health"):
        subject = subjects.heartbeat(lab.run, service, "1-a")

        async def until_posted(count: int, *said: Notice) -> None:
            async def is_posted() -> bool:
                await lab.bus.broadcast(subject, beat(lab, service, *said))
                return len(posted) >= count

            await lab.until(is_posted)

        await until_posted(1, *notices)
        await until_posted(2)
    assert [[one["what"] for one in post["begun"]] for post in posted] == [[notices[0].what], []]
    assert [[one["what"] for one in post["ended"]] for post in posted] == [[], [notices[0].what]]
    assert posted[0]["text"].splitlines()[1].startswith("begun: ")


@pytest.mark.parametrize("answer", ["redirect", "never", "endless", "away"])
async def test_a_server_that_is_not_honest_learns_nothing_and_holds_nothing_up(lab, tmp_path, monkeypatch, answer):
    file = tmp_path / "url"
    file.write_text("https://hooks.example/secret")
    asked, notes = [], []

    async def endless():
        while True:
            await anyio.lowlevel.checkpoint()
            yield b" " * 1000

    async def take(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if len(asked) > 1 or answer == "endless":
            return httpx.Response(200, content=endless())
        if answer == "never":
            await anyio.sleep_forever()
        if answer == "away":
            raise httpx.ConnectError(f"cannot reach {request.url}")
        return httpx.Response(307, headers={"location": "http://elsewhere.example/"})

    monkeypatch.setattr("lachesis.pipeline.health.notice_webhook._LOOK_S", 0.01)
    monkeypatch.setattr("lachesis.pipeline.health.webhook.TIMEOUT_S", 0.2)
    config = HealthConfig(webhook_file=str(file))

    async def send(service) -> None:
        service.set_problem = lambda _, text: notes.append(text)
        await NoticeWebhook(service, config, httpx.MockTransport(take)).send_changes()

    async with lab.running(send, "health"):
        subject = subjects.heartbeat(lab.run, "supervisor", "1-a")

        async def is_over() -> bool:
            await lab.bus.broadcast(subject, beat(lab, "supervisor", FROZEN))
            return None in notes

        await lab.until(is_over)
    assert set(asked) == {"https://hooks.example/secret"}
    expected = {"redirect": "status 307", "never": "TimeoutError", "endless": "", "away": "ConnectError"}[answer]
    said = " ".join(note for note in notes if note)
    assert expected in said
    assert "secret" not in said
