"""Posts changes of alerts to a URL.

It posts in order, each at least once, also after a kill or an outage of either side.

Its position is kept in the run's bucket after each alert event, and holds back the trimming of alerts. A run that gets
a webhook only later does not post earlier alerts. A failed delivery is reported in the heartbeat, and retried until it
succeeds. A post that the other side refuses as such (400, 413, 422) is logged and left out, because it would hold back
all later ones. Alerts stay in EVENTS in any case.
"""

import logging
from pathlib import Path

import anyio
import httpx
import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.alert_changes import AlertNotification, next_notification
from lachesis.pipeline.runtime.retries import RetryWait, WaitLog, retry_outages
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stored_values import decode_value
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import AlertEvent, SentAlerts
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import SchemaError

__all__ = ["RETRIES", "TIMEOUT_S", "AlertWebhook", "post_to_webhook", "webhook_url"]

log = logging.getLogger("lachesis")

TIMEOUT_S = 10.0
"""For one request from its beginning to its answer, however slowly that comes."""
RETRIES = RetryPolicy(first_s=0.5, longest_s=30.0, jitter=0.5)
_REFUSED = frozenset({400, 413, 422})


def webhook_url(config: HealthConfig) -> str:
    """Return the URL in the configured file. Raises `StartupError` when there is none in it."""
    path = Path(config.webhook_file or "")
    try:
        url = read_small_text(path).strip()
    except OSError as error:
        raise StartupError(f"health.webhook_file: {path}: {error.strerror}") from error
    try:
        if httpx.URL(url).scheme in {"http", "https"} and httpx.URL(url).host:
            return url
    except httpx.InvalidURL:
        pass
    raise StartupError(f"health.webhook_file: {path} must hold one URL that begins with http:// or https://")


class AlertWebhook:
    """Sends the alerts of one run and revision. Raises `StartupError` when it has no URL."""

    def __init__(
        self, service: Service, config: HealthConfig, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        webhook_url(config)
        self._service = service
        self._config = config
        self._transport = transport
        self._log_wait = WaitLog()
        self._sent = SentAlerts(run=service.run, revision=service.revision, seq=0)
        self._revision = 0

    async def send_changes(self) -> None:
        """Send until the service drains."""
        bus, subject = self._service.bus, subjects.event("alert", self._service.run, self._service.revision)
        async with (
            self._service.until_drained(),
            httpx.AsyncClient(timeout=TIMEOUT_S, transport=self._transport) as http,
        ):
            await self._service.retrying("read what was sent to the webhook")(self._restore)
            async with bus.read(subjects.EVENTS, [subject], start=self._sent.seq + 1) as messages:
                async for message in messages:
                    await self._send(http, message)

    async def _restore(self) -> None:
        """Load the position of an earlier life; a first life begins with alerts from now on."""
        entry = await self._service.bus.value(keys.webhook(self._service.revision))
        sent = decode_value(SentAlerts, entry, keys.webhook(self._service.revision))
        if entry is not None and sent is not None:
            self._sent, self._revision = sent, entry.revision
            return
        newest = (await self._service.bus.usage(subjects.EVENTS)).last
        await self._store(self._sent.replace(seq=newest))

    async def _store(self, sent: SentAlerts) -> None:
        key = keys.webhook(self._service.revision)
        self._revision = await self._service.bus.put(key, encode(sent), revision=self._revision)
        self._sent = sent

    async def _send(self, http: httpx.AsyncClient, message: StoredMessage) -> None:
        try:
            event = decode(AlertEvent, message.data)
        except SchemaError as error:
            log.warning("an alert at sequence %d cannot be read, and is not sent: %s", message.seq, error)
            return
        notification, sent = next_notification(self._sent, event, message.seq, self._config.webhook_from)
        if notification is not None:
            retrying = retry_outages(
                "send an alert to the webhook", self._report_wait, policy=RETRIES, draining=self._service.draining
            )
            await retrying(self._post, http, notification)
            self._service.set_problem("webhook", None)
            figures = self._service.vitals.metrics
            figures["health/webhook/sent"] = figures.get("health/webhook/sent", 0.0) + 1
        await self._service.retrying("store what was sent to the webhook")(self._store, sent)

    def _report_wait(self, wait: RetryWait) -> None:
        self._service.set_problem("webhook", str(wait))
        self._log_wait(wait)

    async def _post(self, http: httpx.AsyncClient, notification: AlertNotification) -> None:
        key = f"{notification.run}.{notification.revision}.{notification.seq}"
        await post_to_webhook(http, self._config, notification, key, notification.text)


async def post_to_webhook(
    http: httpx.AsyncClient, config: HealthConfig, content: msgspec.Struct, key: str, text: str
) -> None:
    """Post `content` as JSON once; `key` is the same for the same content, `text` is its form in a log.

    Raises `InfrastructureError` when it was not accepted; no text names the URL, which is a secret.
    """
    try:
        url = webhook_url(config)  # it may have been replaced meanwhile
    except StartupError as error:
        raise InfrastructureError(str(error)) from error
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    try:
        body = msgspec.json.encode(content)
        with anyio.fail_after(TIMEOUT_S):
            async with http.stream("POST", url, content=body, headers=headers) as response:
                status = response.status_code
    except (httpx.HTTPError, TimeoutError) as error:
        raise InfrastructureError(f"the webhook is away: {type(error).__name__}") from None
    if status in _REFUSED:
        log.error("the webhook refuses an alert with status %d; it is not sent again: %s", status, text)
    elif not 200 <= status < 300:
        raise InfrastructureError(f"the webhook answers with status {status}; health.webhook_file names its URL")
