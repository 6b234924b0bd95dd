"""The webhook: in order, each change at least once, through outages, refusals and kills."""

from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest

from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.health import webhook
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.health.webhook import AlertWebhook, webhook_url
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import Alert, AlertEvent, EnvironmentStanding, SentAlerts, Severity
from lachesis.schemas.annotations import Commit
from lachesis.schemas.codec import decode, encode

pytestmark = pytest.mark.hostile

URL = "https://hooks.example/services/secret"


class Receiver(httpx.AsyncBaseTransport):
    """Answers with `answers`, one after the other, then with 200; an exception is raised."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.taken: list[tuple[str, AlertNotification]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        assert str(request.url) == URL
        if answer == 200:
            body = msgspec.json.decode(await request.aread(), type=AlertNotification)
            self.taken.append((request.headers["Idempotency-Key"], body))
        return httpx.Response(answer)

    @property
    def severities(self) -> list[str]:
        return [notification.changes[0].severity for _, notification in self.taken]


@pytest.fixture
def settings(tmp_path: Path) -> HealthConfig:
    (tmp_path / "url").write_text(f"{URL}\n")
    return HealthConfig(webhook_file=str(tmp_path / "url"), webhook_from="warn")


async def publish(lab, *severities: Severity) -> None:
    for severity in severities:
        last = await lab.bus.last(subjects.EVENTS, subjects.event("alert", "r", "live", "sums"))
        seq = last.seq if last else 0
        event = AlertEvent(
            run="r", env="sums", revision="live", commit=Commit(term="t", index=seq, cursors={}, delta=b"", crc32=0),
            window=seq,
            groups=64, source="groups", results=[Alert(check="collapse", severity=severity)],
            standing=EnvironmentStanding(),
        )  # fmt: skip
        await lab.bus.publish(subjects.event("alert", "r", "live", "sums"), encode(event), msg_id=f"alert{seq}")


def sending(settings: HealthConfig, receiver: Receiver):
    return lambda service: AlertWebhook(service, settings, receiver).send_changes()


def sent_up_to(lab, seq: int):
    async def condition() -> bool:
        entry = await lab.bus.value(keys.webhook("live"))
        return entry is not None and decode(SentAlerts, entry.value).seq >= seq

    return condition


def taken(receiver: Receiver, count: int):
    async def condition() -> bool:
        return len(receiver.taken) >= count

    return condition


async def test_changes_come_in_order_once_and_not_those_before_it_was_configured(lab, settings):
    await publish(lab, "halt")
    receiver = Receiver()
    async with lab.running(sending(settings, receiver), "health"):
        await lab.until(sent_up_to(lab, 1))
        await publish(lab, "warn", "warn", "quarantine", "ok")
        await lab.until(sent_up_to(lab, 5))
    assert receiver.severities == ["warn", "quarantine", "ok"]
    assert [key for key, _ in receiver.taken] == ["r.live.2", "r.live.4", "r.live.5"]


async def test_an_outage_is_said_and_waited_out_and_the_url_is_never_said(lab, settings, caplog):
    receiver = Receiver(httpx.ConnectError(f"cannot reach {URL}"), 503, 404)
    async with lab.running(sending(settings, receiver), "health") as service:
        notes: list[str] = []
        problem = service.set_problem
        service.set_problem = lambda name, text: (notes.append(text or ""), problem(name, text))
        await lab.until(sent_up_to(lab, 0))
        await publish(lab, "warn")
        await lab.until(taken(receiver, 1))
        await lab.until(sent_up_to(lab, 1))
        assert service.vitals.metrics["health/webhook/sent"] == 1
    said = "".join(notes)
    for expected in ("the webhook is away: ConnectError", "answers with status 503", "answers with status 404"):
        assert expected in said
    assert notes[-1] == ""
    assert "secret" not in said + caplog.text


async def test_an_answer_that_never_ends_is_given_up_and_a_redirect_is_not_followed(lab, settings, monkeypatch):
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.05)

    class Trickling(Receiver):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.answers and self.answers[0] == 0:
                self.answers.pop(0)
                await anyio.sleep_forever()
            answer = await super().handle_async_request(request)
            answer.headers["location"] = "http://elsewhere.example/"
            return answer

    receiver = Trickling(0, 302)
    async with lab.running(sending(settings, receiver), "health") as service:
        notes: list[str] = []
        service.set_problem = lambda _, text: notes.append(text or "")
        await lab.until(sent_up_to(lab, 0))
        await publish(lab, "warn")
        await lab.until(taken(receiver, 1))
    assert "the webhook is away: TimeoutError" in "".join(notes)
    assert "answers with status 302" in "".join(notes)


async def test_no_body_of_an_answer_is_read(lab, settings, monkeypatch):
    monkeypatch.setattr(webhook, "TIMEOUT_S", 5.0)
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            await anyio.lowlevel.checkpoint()
            yield b" " * 1000

    class Endless(Receiver):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await super().handle_async_request(request)
            return httpx.Response(answer.status_code, content=endless())

    receiver = Endless(200, 400, 503)
    async with lab.running(sending(settings, receiver), "health"):
        await lab.until(sent_up_to(lab, 0))
        await publish(lab, "warn", "halt", "ok")
        await lab.until(sent_up_to(lab, 3))
    assert receiver.severities == ["warn", "ok"]
    assert sent == 0


async def test_what_is_refused_as_such_does_not_hold_back_what_follows(lab, settings, caplog):
    receiver = Receiver(400)
    async with lab.running(sending(settings, receiver), "health"):
        await lab.until(sent_up_to(lab, 0))
        await publish(lab, "warn", "halt")
        await lab.until(taken(receiver, 1))
    assert receiver.severities == ["halt"]
    assert "refuses an alert with status 400" in caplog.text
    assert "secret" not in caplog.text


async def test_a_kill_between_the_post_and_its_record_posts_it_again_under_the_same_key(lab, settings):
    receiver = Receiver()
    async with lab.running(sending(settings, receiver), "health"):
        await lab.until(sent_up_to(lab, 0))
    await publish(lab, "warn", "halt")
    async with lab.running(sending(settings, receiver), "health") as service:
        await lab.until(taken(receiver, 1))
        service.kill()
    async with lab.running(sending(settings, receiver), "health"):
        await lab.until(sent_up_to(lab, 2))
    seen = dict(receiver.taken)
    assert list(seen) == ["r.live.1", "r.live.2"]
    assert [one.changes[0].before for one in seen.values()] == ["ok", "warn"]


@pytest.mark.parametrize(
    "content",
    ["", "hooks.example/secret", "file:///etc/secret", "https:///secret", "ftp://h/secret", "https://h:secret/"],
)
def test_a_file_without_a_url_is_named_at_the_start(tmp_path, content):
    file = tmp_path / "url"
    with pytest.raises(StartupError, match=r"health\.webhook_file: .*url: No such file"):
        webhook_url(HealthConfig(webhook_file=str(file)))
    file.write_text(content)
    with pytest.raises(StartupError, match="must hold one URL that begins with http") as refused:
        webhook_url(HealthConfig(webhook_file=str(file)))
    assert "secret" not in str(refused.value)
