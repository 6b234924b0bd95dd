"""How a run stands at one moment: what `status` shows, gathered from the bus in one go.

Reads the bus and the run's configuration and returns a `RunState`. Nothing is written. A consumer is made only where a
stream is nearly full, to say who filled it.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio

from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.streams import StreamDescription
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.config.evaluation_sources import evaluation_names
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import DamagedError, InfrastructureError, NotFoundError, StartupError
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.inference.directory import registered_servers
from lachesis.pipeline.ledger.rollbacks import describe_rollback
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.notices import Notice
from lachesis.services.observe.evaluations import evaluation_rows, evaluation_warnings
from lachesis.services.observe.lost_generation import LostGeneration
from lachesis.services.observe.notices import NoticeWatch, outcome_notices
from lachesis.services.observe.overview import by_outcome
from lachesis.services.observe.progress import newest_figures
from lachesis.services.observe.run_state import (
    LedgerStatus,
    PolicyStatus,
    RunState,
    StreamStatus,
    TrainerStatus,
    fields_of_step,
)
from lachesis.services.observe.services import ServiceStatus, merge
from lachesis.services.planned_processes import planned_services
from lachesis.services.preflight.cluster import cluster_problems
from lachesis.services.preflight.exhaustion import find_exhaustion
from lachesis.services.run.connect import (
    NATS_FOLDER,
    RunHistory,
    is_trained,
    open_run,
    other_runs,
    recent_heartbeats,
    server_version,
    unknown_run,
)
from lachesis.services.run.notices_file import read_notices
from lachesis.services.run.store import find_lost_store
from lachesis.services.stage_settings import ledger_settings

__all__ = [
    "ANSWER_S",
    "look_at_run",
    "notices_of_run",
    "read_run_state",
    "run_state_of_folder",
]

ANSWER_S = 3.0
"""Seconds in which a look is over, whatever is dead: with the start of Python and the end of connections, five."""
_REACH_S = 2.0
"""Seconds of them to find a server, or to start one for the history of a run that has ended."""
_PATIENCE_S = 0.8
"""Seconds to wait for the server that the run had last, and for each of its answers."""
_LATE_ANSWER_S = 0.6
"""Seconds, where an answer takes milliseconds, after which the cause of its absence is queried."""


async def look_at_run(config: RunConfig, show: Callable[[RunState], None]) -> None:
    """Call `show` with the snapshot, `ANSWER_S` after the call at the latest.

    The connection is closed after that.

    Parts that the server has not answered by then are not known, and `problems` says why. If it cannot be reached at
    all, the snapshot comes from the run's folder. Raises `NotFoundError` when the server has other runs and knows
    nothing of this one, `StartupError` where there is neither server nor folder, `AccessError` when it refuses the
    credentials.
    """
    until_s = anyio.current_time() + ANSWER_S
    async with AsyncExitStack() as stack:
        history, reason = None, f"{_server_of(config)} does not answer"
        try:
            with anyio.move_on_after(_REACH_S):
                opened = open_run(config, f"{config.run}.status", patience_s=_PATIENCE_S, needs_jetstream=False)
                history = await stack.enter_async_context(opened)
        except StartupError as error:
            reason = str(error)
            if not newest_figures(config.path):
                raise
        show(
            await read_run_state(history, config, until_s)
            if history is not None
            else run_state_of_folder(config, reason)
        )


def _server_of(config: RunConfig) -> str:
    if config.nats is not None:
        return f"the server at {without_secrets(config.nats.url)}"
    try:
        endpoint = read_endpoint(config.path / NATS_FOLDER)
    except StartupError:
        return f"a server that was started to read the history in {config.path}"
    return f"the run's server (pid {endpoint.pid}, {endpoint.url})"


def run_state_of_folder(config: RunConfig, problem: str) -> RunState:
    """Return what the run's folder shows when its server cannot be queried; `problem` says why."""
    return RunState(
        run=config.run,
        steps=config.training.steps,
        problems=[problem],
        services=merge([], planned_services(config), absent="unknown"),
        notices=_notices_without_server(config, problem),
        **fields_of_step(newest_figures(config.path)),
    )


def _notices_without_server(config: RunConfig, problem: str) -> list[Notice]:
    watch = NoticeWatch(config)
    watch.report_server(problem)
    return watch.notices(time.monotonic())


async def read_run_state(history: RunHistory, config: RunConfig, until_s: float) -> RunState:
    """Return the snapshot by `until_s` of the event loop's clock.

    It listens to heartbeats first if the run may still go on.

    What the server does not answer by then is not known, and `problems` says why. Raises `NotFoundError` when the
    server has other runs and knows nothing of this one.
    """
    bus, ended = history
    look = _RunReader(bus, until_s)
    planned = planned_services(config)
    heard = HeartbeatLog()
    reader = EvaluationReader(bus, config.run, config.revision, evaluation_names(config))
    beats_s = until_s - anyio.current_time()
    clustered = config.nats is not None and len(bus.client.servers) > 1
    await look.gather(
        {
            "others": lambda: other_runs(bus, config),
            "streams": bus.describe_streams,
            **(
                {}
                if ended
                else {"beats": lambda: recent_heartbeats(bus, config.run, planned, heard, silence_s=beats_s)}
            ),
            "trained": lambda: is_trained(bus, config),
            "ledger": lambda: _ledger(bus, config),
            "policy": lambda: _policy(bus, config),
            "trainer": lambda: _trainer(bus, config),
            "evaluations": reader.catch_up,
            "inference": lambda: registered_servers(bus),
            "lost": lambda: find_lost_store(bus, config),
            "exhausted": lambda: find_exhaustion(bus, config, (*subjects.STREAMS, subjects.BUCKET)),
            **({"copies": lambda: cluster_problems(bus)} if clustered else {}),
            **({"rolled back": lambda: describe_rollback(bus, ledger_settings(config))} if ended else {}),
        }
    )
    found = look.found
    beats = heard.newest()
    if not beats and found.get("others"):
        raise unknown_run(config.run, found["others"])
    problems = look.problems
    if found.get("lost"):
        problems = [f"{found['lost'].text}. {found['lost'].mend}", *problems]
    if found.get("rolled back"):
        problems = [found["rolled back"], *problems]
    silent = set(planned) - {beat.service for beat in beats}
    finished = bool(found.get("trained"))
    ended = ended or (not beats and finished)
    if silent and not ended and not problems:
        problems = found.get("copies", [])
    url = bus.client.connected_url
    absent = "ended" if ended else "finished" if finished else "unknown" if problems else "silent"
    services = merge(beats, planned, absent=absent)
    trainer = found.get("trainer")
    known = fields_of_step(newest_figures(config.path) | _training_figures(services))
    known["step"] = max((one for one in (known["step"], trainer and trainer.step) if one is not None), default=None)
    known["evaluations"] = evaluation_rows(reader.evaluations)
    return RunState(
        run=config.run,
        ended=ended,
        finished=finished,
        steps=config.training.steps,
        server=without_secrets(url.geturl()) if url else "",
        server_version=server_version(bus),
        problems=problems,
        streams=[_stream(stream) for stream in found["streams"]] if "streams" in found else None,
        services=services,
        ledger=found.get("ledger"),
        lost_generation=LostGeneration.of(beats),
        policy=found.get("policy"),
        trainer=trainer,
        inference={} if ended else found.get("inference", {}),
        warnings=list(evaluation_warnings(reader.evaluations, config.path).values()),
        notices=outcome_notices(found["ledger"].outcomes if found.get("ledger") else {})
        if ended
        else _derived_notices(config, heard, found, problems, finished=finished),
        **known,
    )


def _derived_notices(
    config: RunConfig, heard: HeartbeatLog, found: Mapping[str, Any], problems: Sequence[str], *, finished: bool
) -> list[Notice]:
    """Return the notices by the supervisor or, where none speaks, by what this look has found."""
    watch = NoticeWatch(config, grace_s=0.0, expects=not finished and not problems)
    watch.hear_all(heard)
    watch.report_server(problems[0] if problems else None)
    watch.report_exhaustion(found.get("exhausted", []))
    return watch.notices(time.monotonic())


async def notices_of_run(bus: NatsBus, config: RunConfig) -> list[Notice]:
    """Return the notices of a run that goes on.

    At once where its supervisor says them, else after a moment.
    """
    said = read_notices(config.path)
    if said is not None:
        return said
    heard = HeartbeatLog()
    planned = planned_services(config)
    if not await recent_heartbeats(bus, config.run, planned, heard) and await is_trained(bus, config):
        return []
    return _derived_notices(config, heard, {}, (), finished=False)


def _training_figures(services: list[ServiceStatus]) -> dict[str, float]:
    """Return what the services say of steps and rewards, which is newer than what the folder says, or there is none."""
    return {
        name: value
        for row in services
        for name, value in row.metrics.items()
        if name.startswith("reward/") or (row.service == "trainer" and name == "train/step")
    }


class _RunReader:
    """Asks several things at once, and why there is no answer once one is late."""

    def __init__(self, bus: NatsBus, until_s: float) -> None:
        self.found: dict[str, Any] = {}
        self.problems: list[str] = []
        self._bus = bus
        self._until_s = until_s

    async def gather(self, questions: Mapping[str, Callable[[], Awaitable[Any]]]) -> None:
        """Take in each answer; what has none in time is left out."""
        left, asked = set(questions), set(questions)
        reason: str | None = None
        done = anyio.Event()

        async def ask(name: str, question: Callable[[], Awaitable[Any]]) -> None:
            with suppress(InfrastructureError):
                try:
                    self.found[name] = await question()
                except NotFoundError:
                    pass  # no such stream yet
                except (DamagedError, SchemaError) as error:
                    self.problems.append(str(error))
                left.discard(name)
            asked.discard(name)
            if not asked:
                done.set()

        async def explain() -> None:
            nonlocal reason
            await anyio.sleep(_LATE_ANSWER_S)
            if left - {"beats"}:
                reason = await self._bus.explain(subjects.LEDGER)

        async with background() as tasks:
            tasks.start_soon(explain)
            for name, question in questions.items():
                tasks.start_soon(ask, name, question)
            with anyio.move_on_after(self._until_s - anyio.current_time()):
                await done.wait()
        if left - {"beats", "copies"}:
            self.problems.append(f"{reason or 'the server does not answer'}; what is missing here is not known")


def _stream(stream: StreamDescription) -> StreamStatus:
    usage = stream.usage
    return StreamStatus(
        name=stream.name,
        messages=usage.messages,
        bytes=usage.bytes,
        max_bytes=usage.max_bytes,
        first=usage.first,
        last=usage.last,
        replicas=stream.replicas,
    )


async def _ledger(bus: NatsBus, config: RunConfig) -> LedgerStatus | None:
    run, trainer = config.run, config.training.name
    entry, seq, _ = await read_last_event(
        bus,
        subjects.LEDGER,
        subjects.ledger(run, trainer),
        LedgerEntry,
        lambda one: (one.run, one.trainer) == (run, trainer),
    )
    if entry is None:
        return None
    return LedgerStatus(
        index=entry.index,
        batches=entry.next_batch,
        watermark=entry.watermark,
        outcomes=by_outcome(entry.totals),
        age_s=_age((await bus.get(subjects.LEDGER, seq)).time_ns),
        promoted=entry.promoted or None,
    )


async def _policy(bus: NatsBus, config: RunConfig) -> PolicyStatus | None:
    entry = await bus.value(keys.POLICY)
    if entry is None:
        return None
    record = decode(PolicyRecord, entry.value)
    return PolicyStatus(version=record.version, step=record.policy_version.step, age_s=_age(record.written_ns))


async def _trainer(bus: NatsBus, config: RunConfig) -> TrainerStatus | None:
    trainer = config.training.name
    subject = subjects.state(config.run, "trainer", subjects.LIVE, trainer)
    report, seq, _ = await read_last_event(
        bus, subjects.LEDGER, subject, TrainReport, lambda one: one.run == config.run
    )
    if report is None:
        return None
    return TrainerStatus(
        step=report.step,
        batches=report.next_batch,
        voids=len(report.voids),
        dropped=sum(len(drops.seqs) for drops in report.drops),
        policy_version=report.policy_version,
        checkpoint=report.checkpoint,
        age_s=_age((await bus.get(subjects.LEDGER, seq)).time_ns),
    )


def _age(then_ns: int) -> float:
    return round((time.time_ns() - then_ns) / 1e9, 3)
