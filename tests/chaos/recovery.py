"""When the struck work again: heartbeats of every service, and a probe that publishes to the servers.

Recovery of a service: from the strike (of a frozen one: from its being let go) to the first heartbeat of its next life
that says it has started (of a frozen one: to its next heartbeat). Of a server: to the first publish acknowledged
to a client that was connected before. Of the supervisor: until every service has started again. Of a connection that
was cut: until every service was heard again.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus
from integration.harness import RUN
from integration.servers import Servers

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat

__all__ = ["Observer", "observe"]

_PROBE = subjects.state(RUN, "chaos", subjects.LIVE, "0")


class Observer:
    """What was heard, by pid; `wait` waits for what is still to be heard."""

    bus: NatsBus

    def __init__(self, servers: Servers, tasks: TaskGroup) -> None:
        self._servers = servers
        self._tasks = tasks
        self._listening = anyio.CancelScope()
        self.heard: dict[int, float] = {}
        """When the newest heartbeat of each process came, on anyio's clock."""
        self.started: dict[int, float] = {}
        """When each process said first that it had started."""
        self.governor: dict[str, float] | None = None
        """The figures of the newest heartbeat of a governor."""
        self._late: dict[int, tuple[int, int]] = {}
        self._news = anyio.Event()

    async def connect(self) -> None:
        """Connect, once more where the servers are not where they were."""
        self._listening.cancel()
        self._listening = anyio.CancelScope()
        await self._tasks.start(self._listen, self._listening)

    async def _listen(self, scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        with scope:
            async with self._servers.during("observer") as self.bus, self.bus.listen(subjects.heartbeat(RUN)) as beats:
                task_status.started()
                async for message in beats:
                    self.hear(decode(Heartbeat, message.data))

    @property
    def late(self) -> int:
        """Groups that came when their lease had run out, as the governors counted them once they had caught up."""
        return sum(last - first for first, last in self._late.values())

    def hear(self, beat: Heartbeat) -> None:
        now = anyio.current_time()
        self.heard[beat.pid] = now
        if beat.stage.state != "starting":
            self.started.setdefault(beat.pid, now)
        if beat.service == "governor":
            self.governor = dict(beat.metrics)
            if beat.pid in self.started:
                late = int(beat.metrics.get("flow/late", 0))
                self._late[beat.pid] = self._late.get(beat.pid, (late, late))[0], late
        news, self._news = self._news, anyio.Event()
        news.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which heartbeats bring about, holds."""
        while not condition():
            with anyio.move_on_after(0.05):  # it may be about the processes' pids as well
                await self._news.wait()

    async def until_back(self, name: str, old: int, pids: Callable[[], Mapping[str, int]]) -> None:
        """Wait until another process than `old` has the name `name` and has started."""
        await self.wait(lambda: (pid := pids().get(name, old)) != old and pid in self.started)

    async def until_all_heard(self, since: float, pids: Callable[[], Mapping[str, int]], silent: set[str]) -> None:
        """Wait until every process but the `silent` ones was heard after `since`."""
        await self.wait(
            lambda: all(self.heard.get(pid, 0.0) > since for name, pid in pids().items() if name not in silent)
        )

    async def probe(self) -> None:
        """Return once the servers have stored something new."""
        await self.bus.publish(_PROBE, b"", msg_id=secrets.token_hex(8))


@asynccontextmanager
async def observe(servers: Servers) -> AsyncIterator[Observer]:
    """Listen to every heartbeat of the run while the context is open."""
    async with anyio.create_task_group() as tasks:
        observer = Observer(servers, tasks)
        await observer.connect()
        yield observer
        tasks.cancel_scope.cancel()
