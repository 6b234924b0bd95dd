"""Simulates a load event by event, and compares it with what `lachesis plan --groups-per-s` says.

    .venv/bin/python tests/benchmarks/load_simulation.py

Groups arrive at random times (Poisson) and pass through queues: environments, the leader of ROLLOUTS, scorers, the
leader of EVENTS, the normalizer, the batcher, the leader of LEDGER, which gets whole batches, and the trainer's feed.
The governor, the curriculum and health work beside that path. A process that finds several groups in its queue takes
them together. The price of a lone message is paid by a group that finds its process idle. So the simulation has no
formula for the share of lone messages, as the plan has: that comes out of its queues. Each process has a core. What is
compared: how busy each process is at 1, 10 and 1,000 times a load of 10 groups a second; and at the last of these,
which is more than a run can carry, which process is the bottleneck and how many groups a second come out.
"""

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Mapping

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.services.run.load_costs import ProcessCost, read_costs
from lachesis.services.run.load_messages import GroupShape, measure_messages
from lachesis.services.run.load_plan import (
    ENVIRONMENT,
    FEED,
    SERVER,
    SEVERAL,
    Load,
    LoadPlan,
    leader_costs,
    plan_load,
    process_costs,
)

LOADS = (10.0, 100.0, 10_000.0)
PATH = (
    ENVIRONMENT, "leader of ROLLOUTS", "scorer", "leader of EVENTS", "normalizer", "batcher", "leader of LEDGER", FEED,
)  # fmt: skip
BESIDE = {"leader of ROLLOUTS": ("governor",), "normalizer": ("curriculum", "health")}
"""Services that are sent what leaves a process, in addition to the next one of the path."""
_TOGETHER = 64
"""Groups that a process takes from its queue at once, at most."""


class SimulatedLoad(msgspec.Struct, frozen=True):
    """What a simulation found: groups a second that came out, and by process how busy it was, as a share of its time,
    and how many groups a second it can carry: those that it had by the time that it was busy.
    """

    groups_per_s: float
    utilisation: dict[str, float]
    capacity: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """Of the processes that are one by design the one with the least capacity."""
        return min((name for name in self.capacity if name not in SEVERAL), key=lambda name: self.capacity[name])


class _Process:
    """`free` processes of one kind, which share a queue and take as many groups at once as a `batch` has, or more."""

    def __init__(self, cost: ProcessCost, free: int, batch: int) -> None:
        self.cost, self.free, self.batch = cost, free, batch
        self.count, self.queue, self.gathers = free, deque[int](), False
        self.busy_s, self.groups = 0.0, 0

    def take(self, *, lone: bool) -> tuple[list[int], float]:
        """Return the groups that it works on next, and for how many seconds."""
        most = max(self.batch, min(_TOGETHER, len(self.queue)) // self.count)
        taken = [self.queue.popleft() for _ in range(min(most, len(self.queue)))]
        spent_s = (len(taken) * self.cost.group_ms + lone * self.batch * self.cost.lone_ms) / 1e3
        self.busy_s, self.groups, self.free = self.busy_s + spent_s, self.groups + len(taken), self.free - 1
        return taken, spent_s


class _Simulation:
    def __init__(self, costs: Mapping[str, ProcessCost], counts: Mapping[str, int], batch: int) -> None:
        self.processes = {
            name: _Process(cost, counts.get(name, 1), batch if name in {"leader of LEDGER", FEED} else 1)
            for name, cost in costs.items()
        }
        self.now_s, self.done, self.last_s = 0.0, 0, 0.0
        self._following = dict(itertools.pairwise(PATH))
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, list[int] | None]] = []
        """Time, order, process, and the groups that are finished; none yet (None): one arrives; []: enough gathered."""

    def arrive(self, time_s: float) -> None:
        """Let a group arrive at a time."""
        heapq.heappush(self._events, (time_s, next(self._order), ENVIRONMENT, None))

    def run(self) -> None:
        """Go on until nothing happens any more."""
        while self._events:
            self.now_s, number, name, finished = heapq.heappop(self._events)
            if finished is None:
                self._queue(name, number)
            elif finished:
                self._finish(name, finished)
            else:
                self.processes[name].gathers = False
                self._start(name, lone=True)

    def _queue(self, name: str, number: int) -> None:
        process = self.processes[name]
        process.queue.append(number)
        if not process.cost.gather_s:
            self._start(name, lone=True)
        elif process.free and not process.gathers:
            process.gathers = True
            heapq.heappush(self._events, (self.now_s + process.cost.gather_s, next(self._order), name, []))

    def _start(self, name: str, *, lone: bool) -> None:
        process = self.processes[name]
        while process.free and len(process.queue) >= process.batch:
            taken, spent_s = process.take(lone=lone)
            heapq.heappush(self._events, (self.now_s + spent_s, next(self._order), name, taken))

    def _finish(self, name: str, finished: list[int]) -> None:
        self.processes[name].free += 1
        further = [one for one in (self._following.get(name), *BESIDE.get(name, ())) if one in self.processes]
        for number in finished:
            for one in further:
                self._queue(one, number)
        if name == FEED:
            self.done, self.last_s = self.done + len(finished), self.now_s
        self._start(name, lone=False)


def simulate(
    costs: Mapping[str, ProcessCost], counts: Mapping[str, int], groups_per_s: float, groups: int, batch: int
) -> SimulatedLoad:
    """Return what becomes of groups that arrive at a rate. `counts`: processes by name, one where it is not named."""
    draw, simulation, time_s = random.Random(0), _Simulation(costs, counts, batch), 0.0
    for _ in range(groups):
        time_s += draw.expovariate(groups_per_s)
        simulation.arrive(time_s)
    simulation.run()
    utilisation, capacity = {}, {}
    for name, process in simulation.processes.items():
        idle = process.cost.idle_ms / 1e3
        utilisation[name] = process.busy_s / process.count / simulation.now_s + idle
        capacity[name] = (1 - idle) * process.count * process.groups / process.busy_s
    return SimulatedLoad(simulation.done / simulation.last_s, utilisation, capacity)


def plan_of(rate: float, shape: GroupShape) -> tuple[LoadPlan, dict[str, ProcessCost]]:
    """Return the plan of a load on nodes with more than enough cores, and the costs that it counts with."""
    config, costs = RunConfig(), read_costs()
    load = Load(groups_per_s=rate, shape=shape, budgets=config.streams.budgets(), cores=1024)
    messages = measure_messages(shape, config, rate)
    by_process = {**process_costs(load, messages, costs), **leader_costs(load, messages, costs)}
    del by_process[SERVER]  # its work is that of the leaders
    return plan_load(load, messages, costs), by_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20_000)
    groups, shape = parser.parse_args().groups, GroupShape(samples=8, tokens=1024, raters=3)
    for rate in LOADS:
        plan, costs = plan_of(rate, shape)
        planned = {one.name: one for one in (*plan.processes, *plan.leaders)}
        found = simulate(costs, {name: planned[name].count for name in SEVERAL if name in costs}, rate, groups, 16)
        print(f"{rate:,g} groups/s arrive, {found.groups_per_s:,.0f} came out")
        if plan.fits:
            for name, busy in found.utilisation.items():
                said = planned[name].utilisation
                print(f"  {name:20} busy {busy:7.2%}, planned {said:7.2%}, {said / busy - 1:+.0%}")
        else:
            print(f"  bottleneck {found.bottleneck}, planned {plan.bottleneck}")
            print(f"  at most {found.groups_per_s:,.0f}/s, planned {plan.full_at:,.0f}/s, "
                  f"{plan.full_at / found.groups_per_s - 1:+.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
