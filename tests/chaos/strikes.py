"""Striking a run: what each action does to its target, and how long the target takes to work again."""

import math
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import psutil
from anyio.abc import TaskGroup
from chaos.recovery import Observer
from chaos.schedule import CONNECTION, SERVER, SUPERVISOR, Strike
from integration.cluster.nodes import Cluster, leader_of, settled
from integration.harness import Run, alive, until

from lachesis.schemas import subjects
from lachesis.services.planned_processes import planned_processes
from lachesis.services.process.service_process import EXIT_DRAIN_TIMEOUT, EXIT_DRAINED, EXIT_FENCED, EXIT_STARTUP

__all__ = ["Striker", "Tally", "kind_of", "percentile"]

_UNASKED = Path(__file__).parents[1] / "integration" / "unasked.py"
_GIVE_UP_S = 180.0
"""After so long, whatever was struck is called lost."""
_SECOND_SERVER = (
    "import anyio, sys\nfrom pathlib import Path\nfrom lachesis.pipeline.bus.embedded import EmbeddedServer\n"
    "from lachesis.pipeline.errors import StartupError\n"
    "try:\n    anyio.run(EmbeddedServer(Path(sys.argv[1])).start)\nexcept StartupError:\n    sys.exit(2)\n"
)


def kind_of(target: str) -> str:
    """Return the kind of process that `target` is one of: "scorer" of "scorer-2", "inference" of "inference-eval"."""
    return target if target in {SERVER, SUPERVISOR, CONNECTION} else target.partition("-")[0]


def percentile(values: list[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


@dataclass
class Tally:
    """What was done, and how long it took to recover from, seconds, by action and kind. `lost` says what never did."""

    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    recovery: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(count for (action, _), count in self.struck.items() if action == "kill")

    def add(self, other: "Tally") -> None:
        self.struck += other.struck
        for key, values in other.recovery.items():
            self.recovery[key] += values
        self.lost += other.lost


def _sent(pid: int, number: signal.Signals) -> bool:
    """Send a signal, and return whether there was a process to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Striker:
    """Strikes one run; recoveries are followed by `tasks`. `services` are the processes that its supervisor runs."""

    def __init__(self, run: Run, observer: Observer, tasks: TaskGroup) -> None:
        self.run = run
        self.services = [planned.name for planned in planned_processes(run.load_config())]
        self.observer = observer
        self.tally = Tally()
        self._tasks = tasks
        self._struck: Counter[str] = Counter()
        self._pending = 0

    async def strike(self, strike: Strike) -> None:
        """Strike, and return as soon as the next one may follow."""
        if strike.target == SUPERVISOR and strike.action != "duplicate":
            await self.recovered()  # it takes everything along, so nothing else is under way
            await self._supervisor(strike)
        elif strike.action == "duplicate" and not (strike.target == SERVER and self._nodes):
            self._follow(self._duplicate(strike), strike)
        elif strike.target == CONNECTION:
            self._follow(self._connections(strike), strike)
        elif strike.action == "freeze":
            pid = await self._victim(strike)
            self._follow(self._freeze(strike, pid), strike)
        else:
            number = signal.SIGKILL if strike.action == "kill" else signal.SIGTERM
            pid = await self._victim(strike)
            while not _sent(pid, number):  # it has ended meanwhile, by another strike
                pid = await self._victim(strike)
            self._follow(self._return(strike, pid, anyio.current_time()), strike)
        self.tally.struck[strike.action, kind_of(strike.target)] += 1

    async def up(self, target: str) -> None:
        """Wait until `target` has started, so that a strike meets it at work: all that have heartbeats."""
        if target not in {CONNECTION, SUPERVISOR}:
            await until(lambda: self.run.pids().get(target) in self.observer.started, _GIVE_UP_S)

    async def recovered(self) -> None:
        """Wait until nothing that was struck is still away."""
        await until(lambda: self._pending == 0, 2 * _GIVE_UP_S)

    def _follow(self, recovery: Awaitable[None], strike: Strike) -> None:
        async def follow() -> None:
            with anyio.move_on_after(_GIVE_UP_S) as waiting:
                await recovery
            self._pending -= 1
            if waiting.cancelled_caught:
                self.tally.lost.append(f"{strike.target} did not recover in {_GIVE_UP_S:.0f} s from {strike}")

        self._pending += 1
        self._struck[strike.target] += 1
        self._tasks.start_soon(follow)

    @property
    def _nodes(self) -> bool:
        """Whether the run stands on a cluster."""
        return isinstance(self.run.servers, Cluster)

    async def _victim(self, strike: Strike) -> int:
        """Return the pid of the process that is meant, waiting while it is between two lives.

        Of a cluster, which may lose one node at a time, the one that leads some stream, once every copy is whole.
        """
        target = strike.target
        if target == SERVER and self._nodes:
            bus = self.observer.bus
            await settled(bus, list(subjects.STREAMS))
            target = await leader_of(bus, list(subjects.STREAMS)[int(strike.choice * len(subjects.STREAMS))])
        with anyio.fail_after(_GIVE_UP_S):
            while not ((pid := self.run.pids().get(target, 0)) and alive(pid)):  # noqa: ASYNC110 - other processes
                await anyio.sleep(0.05)
        return pid

    def _measured(self, strike: Strike, since: float, before: int) -> None:
        """Take the recovery down, unless the target was struck again on the way."""
        if self._struck[strike.target] == before:
            self.tally.recovery[strike.action, kind_of(strike.target)].append(anyio.current_time() - since)

    async def _return(self, strike: Strike, pid: int, since: float) -> None:
        before = self._struck[strike.target]
        if kind_of(strike.target) == SERVER:
            await until(lambda: not alive(pid), _GIVE_UP_S)
            await self.observer.probe()
        else:
            await self.observer.until_back(strike.target, pid, self.run.pids)
        self._measured(strike, since, before)

    async def _freeze(self, strike: Strike, pid: int) -> None:
        before = self._struck[strike.target]
        try:
            os.kill(pid, signal.SIGSTOP)
            await anyio.sleep(strike.seconds)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # killed while it was frozen
        since = anyio.current_time()
        if kind_of(strike.target) == SERVER:
            await self.observer.probe()
        else:
            await self.observer.wait(lambda: self.observer.heard.get(pid, 0.0) > since or not alive(pid))
        if alive(pid):
            self._measured(strike, since, before)

    async def _connections(self, strike: Strike) -> None:
        proxy = self.run.servers.proxies[int(strike.choice * len(self.run.servers.proxies))]
        before = self._struck[CONNECTION]
        if strike.action == "silence":
            answers_only, cut = strike.choice < 0.5, strike.choice * 2 % 1 < 0.5
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(proxy.silence, strike.seconds, answers_only=answers_only))
                if cut:
                    await anyio.sleep(strike.seconds * 0.9)
                    proxy.cut()
        else:
            proxy.cut()
        since = anyio.current_time()
        silent = {SUPERVISOR, *self.run.servers.pids()}
        await self.observer.until_all_heard(since, self.run.pids, silent)
        self._measured(strike, since, before)

    async def _supervisor(self, strike: Strike) -> None:
        run = self.run
        assert run.process is not None
        if strike.action == "freeze":
            run.process.send_signal(signal.SIGSTOP)
            await anyio.sleep(strike.seconds)
            run.process.send_signal(signal.SIGCONT)
            return
        since = anyio.current_time()
        before = run.pids()
        run.process.send_signal(signal.SIGTERM if strike.action == "restart" else signal.SIGKILL)
        await run.wait(_GIVE_UP_S)
        if run.servers.supervised:
            await until(lambda: not any(alive(pid) for pid in run.servers.pids().values()), _GIVE_UP_S)
        run.start()
        if strike.action == "restart":
            await self.observer.connect()  # a server that ended in order begins at another address

        def is_back(name: str) -> bool:
            pid = run.pids().get(name)
            return pid is not None and pid != before.get(name) and pid in self.observer.started

        with anyio.move_on_after(_GIVE_UP_S) as waiting:
            await self.observer.wait(lambda: all(map(is_back, self.services)))
        if waiting.cancelled_caught:
            self.tally.lost.append(f"not everything came back in {_GIVE_UP_S:.0f} s from {strike}:\n{run.tail()}")
        else:
            self.tally.recovery[strike.action, SUPERVISOR].append(anyio.current_time() - since)

    async def _duplicate(self, strike: Strike) -> None:
        """Start a second instance, let it live for a while, and end it. It may be refused or fenced, never fail.

        A single writer is started as at the same moment as the first, or it would be refused by name every time.
        """
        run = self.run
        kind = kind_of(strike.target)
        with (run.folder / "duplicates.log").open("ab") as log:
            if kind == SERVER:
                config = psutil.Process(await self._victim(strike)).cmdline()[-1]
                store = config.rpartition("/")[0]
                second = subprocess.Popen(  # noqa: ASYNC220 - does not wait
                    [sys.executable, "-c", _SECOND_SERVER, store], stdout=log, stderr=log, env=run.environ
                )
            elif kind == SUPERVISOR:
                second = run.spawn("up", log=log)
            else:
                part = strike.target.partition("-")[2]
                command = ["run", kind, *([part] if part and not part.isdigit() else [])]
                second = run.spawn(*command, log=log, program=(str(_UNASKED),))
        started = self.observer.started
        await self.observer.wait(lambda: second.pid in started or second.poll() is not None)
        await anyio.sleep(strike.seconds)
        if second.poll() is None:
            second.send_signal(signal.SIGKILL if strike.choice < 0.5 else signal.SIGTERM)
        await until(lambda: second.poll() is not None, _GIVE_UP_S)
        # SIGTERM may meet one that has just been fenced, after its handlers were taken down
        ended = {0, EXIT_FENCED, EXIT_DRAINED, EXIT_DRAIN_TIMEOUT, -signal.SIGKILL, -signal.SIGTERM}
        expected = {EXIT_STARTUP} if kind in {SERVER, SUPERVISOR} else ended
        if second.returncode not in expected:
            self.tally.lost.append(f"a second {strike.target} ended with code {second.returncode}")
