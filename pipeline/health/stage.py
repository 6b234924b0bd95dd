"""The health service: turns the event streams into alerts, one fenced commit a window.

One writer an environment. It reads scores, rewards, dead letters, evaluations, ledger entries and the trainer's
reports, and no payload: the scores' signals hold the statistics of tokens and logprobs that checks need. An alert event
holds the results of all checks for a window, or of one check for an evaluation, the environment's resulting status, and
the whole state, so a restart reads the open windows again and gets the same results. A request to resume (key-value)
becomes an event here too: a service that needs an environment's status reads only its newest alert event.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import anyio
import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.evaluator.evaluation_reader import decode_evaluation
from lachesis.pipeline.health.ledger_reader import LEDGER_REPAIR_HINT, LedgerReader
from lachesis.pipeline.health.logic.alert_novelty import AlertNovelty
from lachesis.pipeline.health.logic.monitor import CHECKS, LEDGER_CHECK, EnvMonitor
from lachesis.pipeline.health.notice_webhook import STOPPED_TOPIC, NoticeWebhook
from lachesis.pipeline.health.settings import HealthSettings
from lachesis.pipeline.health.webhook import AlertWebhook
from lachesis.pipeline.ledger.audit import LedgerProblem
from lachesis.pipeline.runtime.commitlog import RestoredState
from lachesis.pipeline.runtime.inputs import InputSource
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateful import BackgroundTask, CommitReceipt, StatefulStage
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import Alert, AlertEvent, EnvironmentStanding, ResumeRequest
from lachesis.schemas.annotations import DeadLetter, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.values import unpack

__all__ = ["GATHER_S", "AlertWriter", "run_health"]

log = logging.getLogger("lachesis")

_LOOK = "`lachesis health` names groups to look at"
_LEDGER_S = 5.0
"""Seconds between two looks at the ledger."""
GATHER_S = 1.0
"""How long a window that can be checked may wait for more, seconds."""
_PROBLEMS = 64
"""Problems of the ledger that are remembered."""
_KINDS: tuple[subjects.Kind, ...] = ("score", "reward", "dead")
"""Events of an environment that checks read."""


async def run_health(service: Service, settings: HealthSettings) -> None:
    """Judge every environment of the run until the service drains."""
    config = settings.config
    webhook = AlertWebhook(service, config) if config.webhook_file is not None else None
    writers = [AlertWriter(service, settings, env) for env in settings.environments]
    for writer in writers:
        await writer.open()
    async with background() as watching, anyio.create_task_group() as tasks:
        if webhook is not None:
            watching.start_soon(webhook.send_changes)
            watching.start_soon(NoticeWebhook(service, config).send_changes)
        if LEDGER_CHECK not in config.off:
            watching.start_soon(_watch_ledger, service, settings, writers)
        for writer in writers:
            tasks.start_soon(writer.follow)


async def _watch_ledger(service: Service, settings: HealthSettings, writers: Sequence["AlertWriter"]) -> None:
    """Verify the ledger; alert every environment if it has a fault. Runs until cancelled."""
    rules = replace(settings.rules, since_ns=service.now_ns())
    reader = LedgerReader(service.bus, service.run, settings.trainer, rules)
    found: list[LedgerProblem] = []
    while True:
        try:
            new = await reader.verify_new_entries()
        except InfrastructureError as error:
            service.set_problem("ledger unread", f"the ledger is not verified: {error}")
        else:
            service.set_problem("ledger unread", None)
            found = [*found, *(problem for problem in new if problem not in found)][-_PROBLEMS:]
            _show_ledger(service, reader, found, new)
            try:
                for writer in writers if new else ():
                    await writer.store_ledger_alert(new)
            except InfrastructureError:
                if not service.draining.is_set():
                    raise
                return  # the next start finds it again
        await sleep_until_tick(_LEDGER_S)


def _show_ledger(
    service: Service, reader: LedgerReader, found: Sequence[LedgerProblem], new: Sequence[LedgerProblem]
) -> None:
    figures = service.vitals.metrics
    figures["ledger/verified_entries"] = reader.entries
    figures["ledger/problems"] = len(found)
    breaks = any(problem.breaks for problem in found)
    figures["ledger/broken"] = float(breaks)
    service.set_problem(
        "ledger",
        None if not found else "the ledger is broken" if breaks else "something is wrong with the ledger",
        why=_in_words(found),
        mend=LEDGER_REPAIR_HINT if breaks else "`lachesis verify` says more",
        stops=breaks,
    )
    for problem in new:
        log.error("%s: %s", LEDGER_CHECK, problem.text)


def _in_words(problems: Sequence[LedgerProblem]) -> str:
    more = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
    return "; ".join(problem.text for problem in problems[:2]) + more


class AlertWriter(StatefulStage[AlertEvent]):
    """The single writer of one environment's alerts. The cursors follow a stream's last window that was checked."""

    name = "health"
    kind = "alert"

    def __init__(self, service: Service, settings: HealthSettings, env: str) -> None:
        super().__init__(service, env, AlertEvent, (subjects.EVENTS, subjects.LEDGER))
        own = settings.environments[env]
        self.monitor = EnvMonitor(settings.config, own.run)
        self.evaluations = [subjects.event("eval", service.run, service.revision, name) for name in own.evaluations]
        self._trainer = settings.trainer
        self._next = dict(self.cursors)
        self._state = b""
        self._found: list[Alert] = []
        self._news = AlertNovelty()
        self._why: dict[str, str] = {}
        """By check why it gave an alert last."""

    async def restore(self, restored: RestoredState) -> None:
        """Take over the last commit, which holds the whole state."""
        state = restored.deltas[-1] if restored.deltas else restored.state
        if state is not None:
            self.monitor.load_state_dict(unpack("health state", state))
        self._next = dict(self.cursors)
        self._show_standing(self.monitor.standing)
        await self.service.retrying("read evaluations")(self._remember_evaluations)

    def sources(self) -> list[InputSource]:
        """Return the sources: events derived from the environment, its evaluations, the ledger and reports."""
        run, revision = self.service.run, self.service.revision
        derived = [subjects.event(kind, run, revision, self.env) for kind in _KINDS]
        trainer = [subjects.ledger(run, self._trainer), subjects.state(run, "trainer", subjects.LIVE, self._trainer)]
        return [
            InputSource(
                subjects.EVENTS, [*derived, *self.evaluations], self.cursors[subjects.EVENTS], gather_s=GATHER_S
            ),
            InputSource(subjects.LEDGER, trainer, self.cursors[subjects.LEDGER], gather_s=GATHER_S),
        ]

    def tasks(self) -> list[BackgroundTask]:
        """Return the task that follows the requests to resume."""
        return [self.watch_requests]

    async def _remember_evaluations(self) -> None:
        """Take in the evaluations that were checked before. All still exist, except deleted ones."""
        if not self.evaluations:
            return
        async with self.service.bus.read(subjects.EVENTS, self.evaluations, follow=False) as messages:
            async for message in messages:
                if message.seq >= self.cursors[subjects.EVENTS]:
                    return  # it comes again
                try:
                    self.monitor.remember(decode_evaluation(message))
                except SchemaError as error:
                    self.service.set_note("input", f"left out: {error}")

    async def feed(self, message: StoredMessage) -> None:
        """Feed one input message to the monitor."""
        self._next[message.stream] = message.seq + 1
        self._found = self._feed(message)
        self.service.set_note("input", None)

    async def advance(self) -> None:
        """Commit the result of an evaluation, and the window that the message completed."""
        found, self._found = self._found, []
        if found:  # the open window stays open: the cursor does not move
            await self._write("groups", found)
        if self.monitor.window_full:
            await self._write("groups", self.monitor.evaluate(), subjects.EVENTS)
        if self.monitor.batches_full:
            await self._write("batches", self.monitor.judge_batches(), subjects.LEDGER)

    async def reject(self, message: StoredMessage, error: DataError) -> None:
        """Leave the message out: its dead letter is written by the stage that needs it."""
        self.service.set_note("input", f"left out: {error}")

    async def commit(self) -> None:
        """Write nothing: windows are committed one by one, as they fill."""

    def state(self) -> bytes:
        """Return the state that the last commit holds."""
        return self._state

    def _feed(self, message: StoredMessage) -> list[Alert]:
        """Take in a message, and return its immediate result, if any: that of an evaluation."""
        if message.subject.startswith("rl.state."):
            self.monitor.trained(decode(TrainReport, message.data).mismatches)
            return []
        if message.stream == subjects.LEDGER:
            entry = decode(LedgerEntry, message.data)
            batch = entry.batch
            if entry.stale:
                self.monitor.record_stale(entry.stale.get(self.env, []))
            if batch is not None:
                self.monitor.batch(batch.number, [ref for ref in batch.groups if ref.env == self.env])
            return []
        match message.subject.split(".")[1]:
            case "score":
                scored = decode(ScoreEvent, message.data)
                if scored.promoted is not None and scored.promoted > self.monitor.promoted:
                    self.monitor.promote(scored.promoted)
                for score in scored.groups:
                    self.monitor.score(score)
                    self.service.vitals.handled += 1
            case "reward":
                event = decode(RewardEvent, message.data)
                for reward in event.groups:
                    self.monitor.reward(reward, event.advantage)
            case "eval":
                return self.monitor.judge_evaluation(decode_evaluation(message))
            case _:
                self.monitor.dead(decode(DeadLetter, message.data))
        return []

    async def watch_requests(self) -> None:
        """Apply each request to resume, once. Runs until cancelled."""
        async with self.service.bus.watch(keys.resume(self.env)) as requests:
            async for entry in requests:
                async with self.turn:
                    if entry.revision <= self.monitor.resumed:
                        continue
                    try:
                        after = decode(ResumeRequest, entry.value).after
                    except SchemaError as error:
                        self.service.set_problem("resume", f"a request to resume cannot be read: {error}")
                        continue
                    self.service.set_problem("resume", None)
                    self.monitor.resume(entry.revision, after)
                    self.cursors = dict(self._next)
                    log.info("%s goes on, with the rollouts after %d", self.env, after)
                    try:
                        await self._write("resume", [])
                    except InfrastructureError:
                        if not self.service.draining.is_set():
                            raise
                        return  # the next start reads the request again

    async def store_ledger_alert(self, problems: Sequence[LedgerProblem]) -> None:
        """Store an alert of the ledger's faults."""
        breaks = sum(problem.breaks for problem in problems)
        alert = Alert(
            check=LEDGER_CHECK,
            severity="warn",
            value=float(breaks),
            threshold=0.0,
            reason=_in_words(problems),
            windows=1,
        )
        async with self.turn:
            await self._write("batches", [alert])

    async def _write(
        self, source: Literal["groups", "batches", "resume"], results: list[Alert], stream: str | None = None
    ) -> None:
        """Write the results, the environment's resulting status, and the state after the window."""
        if stream is not None:
            self.cursors = {**self.cursors, stream: self._next[stream]}
        monitor = self.monitor
        self._state = msgspec.msgpack.encode(monitor.state_dict())
        await self.write(
            AlertEvent(
                run=self.service.run,
                env=self.env,
                revision=self.service.revision,
                commit=self.next_commit(self._state),
                window=max(0, monitor.windows.get(source, 0) - 1),
                groups=monitor.groups,
                source=source,
                results=results,
                standing=monitor.standing,
            )
        )

    def report(self, event: AlertEvent, receipt: CommitReceipt) -> None:
        """Put the figures into the heartbeat, and faults into the log."""
        self.service.vitals.emitted += 1
        figures = self.service.vitals.metrics
        for result in event.results:
            self._show_warning(result, event.standing)
            if result.value is not None:
                figures[f"health/{self.env}/{result.check}"] = result.value
        if event.source == "resume":
            for check in CHECKS:
                self.service.set_problem(f"{self.env} {check}", None)
        figures[f"health/{self.env}/groups"] = event.groups
        self._why |= {alert.check: alert.reason for alert in event.alerts}
        self._show_standing(event.standing)
        if event.alerts:
            counted = f"health/{self.env}/alerts"
            figures[counted] = figures.get(counted, 0.0) + len(event.alerts)
        for alert in self._news.pick(event.results):
            log.log(
                logging.INFO if alert.severity == "inform" else logging.WARNING,
                "%s %s: %s: %s (%s)", alert.severity, self.env, alert.check, alert.reason, ", ".join(alert.examples),
            )  # fmt: skip

    def _show_warning(self, result: Alert, standing: EnvironmentStanding) -> None:
        """Raise a notice of a warning until the check finds it over. What stops the environment has one already."""
        if result.severity == "idle" or result.check == LEDGER_CHECK:
            return  # nothing to judge by: the last result still holds; and a broken ledger has a notice of its own
        text = f"environment {self.env}: {result.check}: {result.reason}"
        warns = result.severity not in {"ok", "inform"} and not (standing.stops and standing.cause == result.check)
        self.service.set_problem(f"{self.env} {result.check}", text if warns else None, mend=_LOOK)

    def _show_standing(self, standing: EnvironmentStanding) -> None:
        """Put where the environment stands into the heartbeat, and why it is kept from training."""
        figures = self.service.vitals.metrics
        figures[f"health/{self.env}/quarantined"] = float(standing.quarantined_from is not None)
        figures[f"health/{self.env}/halted"] = float(standing.halted)
        self.service.vitals.stopped[self.env] = standing.stops
        effect = "nothing of it is generated" if standing.halted else "what it generates is not trained"
        how = " and ".join(standing.stops)
        self.service.set_problem(
            f"{self.env} {STOPPED_TOPIC}",
            f"environment {self.env} is {how} by the health check {standing.cause}, so {effect}" if how else None,
            why=self._why.get(standing.cause or "", ""),
            mend=f"fix the cause (`lachesis health` shows it), then `lachesis resume {self.env}`",
            held_up=["trainer"],
            stops=True,
        )
