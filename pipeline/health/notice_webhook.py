"""Posts to the webhook which notices of the run begin and end.

The notices are the supervisor's if one runs, else those that the health service derives from heartbeats. A post that
cannot be delivered is retried until it can. One post after it then has the notices that began or ended meanwhile,
without those that did both: notices are a state, and are in the run's summary in any case. Notices that an environment
is kept from training are left out, since an alert reports that.
"""

import time
from contextlib import aclosing

import httpx
import msgspec

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.webhook import RETRIES, TIMEOUT_S, post_to_webhook
from lachesis.pipeline.notices.board import NoticeBoard
from lachesis.pipeline.notices.changes import NoticeChanges
from lachesis.pipeline.notices.facts import ExpectedRun, Moment
from lachesis.pipeline.notices.text import notice_lines
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.runtime.retries import RetryWait, retry_outages
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog
from lachesis.schemas.notices import Notice

__all__ = ["STOPPED_TOPIC", "NoticeNotification", "NoticeWebhook"]

STOPPED_TOPIC = "stopped"
"""Ends the topic of the notice of an environment that is kept from training."""
_LOOK_S = 1.0
_WEBHOOK_TOPIC = "webhook"


class NoticeNotification(msgspec.Struct, frozen=True, kw_only=True):
    """A post: the notices that began, those that ended, and all that hold. `text` is for people."""

    run: str
    revision: str
    begun: list[Notice]
    ended: list[Notice]
    open: list[Notice]
    text: str


class NoticeWebhook:
    """Sends the notices of one run. After a restart it sends those that hold again."""

    def __init__(
        self, service: Service, config: HealthConfig, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._service = service
        self._config = config
        self._transport = transport
        self._heard = HeartbeatLog()
        self._board = NoticeBoard(ExpectedRun())
        self._changes = NoticeChanges()
        self._posted = 0

    async def send_changes(self) -> None:
        """Send until the service drains."""
        async with (
            self._service.until_drained(),
            httpx.AsyncClient(timeout=TIMEOUT_S, transport=self._transport) as http,
            background() as tasks,
        ):
            tasks.start_soon(self._listen)
            while True:
                begun, ended = self._changes.update(self._notices(), time.monotonic())
                if begun or ended:
                    await self._send(http, begun, ended)
                await sleep_until_tick(_LOOK_S)

    async def _listen(self) -> None:
        async with aclosing(listen_to_heartbeats(self._service.bus, self._service.run)) as beats:
            async for beat in beats:
                self._heard.add(beat, time.monotonic())
                self._board.hear(beat, time.monotonic())

    def _notices(self) -> list[Notice]:
        now_s = time.monotonic()
        derived = self._board.notices(Moment(now_s, time.time_ns()))
        said = self._heard.supervisor_notices(now_s)
        return [one for one in (derived if said is None else said) if not _is_reported_elsewhere(one)]

    async def _send(self, http: httpx.AsyncClient, begun: list[Notice], ended: list[Notice]) -> None:
        run, revision, now_ns = self._service.run, self._service.revision, time.time_ns()
        lines = [*(f"begun: {line}" for line in notice_lines(begun, now_ns))]
        lines += [f"over: {one.source}: {one.what}" for one in ended]
        notification = NoticeNotification(
            run=run,
            revision=revision,
            begun=begun,
            ended=ended,
            open=self._changes.open,
            text="\n".join([f"run {run}", *lines]),
        )
        self._posted += 1
        key = f"{run}.{revision}.{self._service.instance}.{self._posted}"
        retrying = retry_outages(
            "send notices to the webhook", self._report_wait, policy=RETRIES, draining=self._service.draining
        )
        await retrying(post_to_webhook, http, self._config, notification, key, notification.text)
        self._service.set_problem(_WEBHOOK_TOPIC, None)

    def _report_wait(self, wait: RetryWait) -> None:
        self._service.set_problem(_WEBHOOK_TOPIC, str(wait))


def _is_reported_elsewhere(notice: Notice) -> bool:
    return notice.source == "health" and (notice.key.endswith(STOPPED_TOPIC) or notice.key == _WEBHOOK_TOPIC)
