"""A producer's leases against the real governor."""

import time

import anyio
from stages import run_governor

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.schemas.codec import decode
from lachesis.schemas.control import LeaseRequest


async def test_a_short_lease_is_held_for_as_long_as_its_group_takes(lab):
    lease_s = 1.0
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=lease_s),
    )
    async with (
        lab.running(lambda service: run_governor(service, config), "governor") as governor,
        lab.running(lambda service: service.draining.wait(), "environment") as service,
        anyio.create_task_group() as tasks,
    ):
        leases = ProducerLeases(service, "p", "sums")
        tasks.start_soon(leases.renew)
        with anyio.fail_after(10):
            assert await leases.acquire(8, 100) is not None
        await anyio.sleep(3 * lease_s)  # generating
        figures = governor.vitals.metrics
        assert (figures["flow/leased"], figures["flow/expired"]) == (8, 0)
        tasks.cancel_scope.cancel()


async def test_the_next_governor_takes_over_what_a_producer_holds(lab):
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=2.0),
    )

    def governor():
        return lab.running(lambda service: run_governor(service, config), "governor")

    async with lab.running(lambda service: service.draining.wait(), "environment") as service:
        leases = ProducerLeases(service, "p", "sums")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.renew)
            async with governor() as first:
                assert await leases.acquire(3, 100) is not None
                first.kill()
            async with governor() as second:
                await lab.until(lambda: _holds(second, 3))
                assert await leases.acquire(5, 100) is not None  # granted once no other lease can be about
                assert (second.vitals.metrics["flow/expired"], second.vitals.metrics["flow/late"]) == (0, 0)
            tasks.cancel_scope.cancel()


async def test_a_request_that_finds_no_room_waits_at_the_governor_and_is_granted_once_there_is_some(lab, monkeypatch):
    """One group fills the capacity. Of five that wait, one request is under way, and it is seldom repeated.

    Two try at first, since one was just granted.
    """
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=60.0, retry_s=0.05),
    )
    requests, under_way, most, granted = [], 0, 0, []
    async with (
        lab.running(lambda service: run_governor(service, config), "governor") as governor,
        lab.running(lambda service: service.draining.wait(), "environment") as service,
    ):
        leases = ProducerLeases(service, "p", "sums")
        send = service.bus.request

        async def request(subject, data, **options):
            nonlocal under_way, most
            asked = decode(LeaseRequest, data)
            requests.append(asked.op)
            waits = asked.op == "acquire"
            under_way, most = under_way + waits, max(most, under_way + waits)
            try:
                return await send(subject, data, **options)
            finally:
                under_way -= waits

        monkeypatch.setattr(service.bus, "request", request)

        async def acquire_weights_lock():
            lease = await leases.acquire(8, 100)
            granted.append(lease)
            await leases.release(lease)

        first = await leases.acquire(8, 100)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(acquire_weights_lock)
            # one request is looked at again and again, where each look took a request of its own
            await lab.until(lambda: _refused(governor, 2 * requests.count("acquire") + 2))
            assert not granted
            await leases.release(first)
    assert len(set(granted)) == 5
    assert most == 2
    assert requests.count("acquire") < 16
    assert requests.count("release") == 6


async def test_requests_go_side_by_side_while_they_are_granted(lab, monkeypatch):
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=64, max_staleness=0),
    )
    async with (
        lab.running(lambda service: run_governor(service, config), "governor"),
        lab.running(lambda service: service.draining.wait(), "environment") as service,
    ):
        assert await ProducerLeases(service, "first", "sums").acquire(8, 100), "the governor answers now"
        leases, send, held = ProducerLeases(service, "p", "sums"), service.bus.request, []
        further = anyio.Event()

        async def request(*arguments, **options):
            nonlocal further
            held.append(go := anyio.Event())
            further.set()
            further = anyio.Event()
            await go.wait()
            return await send(*arguments, **options)

        monkeypatch.setattr(service.bus, "request", request)
        at_once = []
        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(leases.acquire, 8, 100)
            for wanted in (1, 2, 4):
                with anyio.fail_after(20):
                    while len(held) < wanted:
                        await further.wait()
                await anyio.wait_all_tasks_blocked()
                at_once.append(len(held))
                for go in held:
                    go.set()
                held.clear()
    assert at_once == [1, 2, 4]


async def test_a_large_group_that_was_refused_is_not_overtaken_by_those_after_it(lab):
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=60.0, retry_s=0.05),
    )
    granted = []
    async with (
        lab.running(lambda service: run_governor(service, config), "governor") as governor,
        lab.running(lambda service: service.draining.wait(), "environment") as service,
    ):
        leases = ProducerLeases(service, "p", "sums")

        async def acquire(sequences):
            lease = await leases.acquire(sequences, 100)
            granted.append(sequences)
            await leases.release(lease)

        first, second = await leases.acquire(4, 100), await leases.acquire(4, 100)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acquire, 8)
            await lab.until(lambda: _refused(governor, 1))
            for _ in range(3):
                tasks.start_soon(acquire, 2)
            await leases.release(first)  # room enough for each of those that came later
            await lab.until(lambda: _refused(governor, 8))
            assert granted == []
            await leases.release(second)
    assert granted == [8, 2, 2, 2]


async def _refused(governor, times):
    return governor.vitals.metrics.get("flow/refused", 0) >= times


async def _holds(governor, sequences):
    return governor.vitals.metrics.get("flow/leased") == sequences


async def test_a_producer_that_was_stopped_learns_that_its_lease_has_ended(lab, monkeypatch):
    """It asks only if its lease was not renewed in time; a renewal by another process, its supervisor say, counts."""
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=1.0),
    )
    stopped_s = 0.0
    monkeypatch.setattr("lachesis.pipeline.environment.leases.boottime_s", lambda: time.monotonic() + stopped_s)
    async with (
        lab.running(lambda service: run_governor(service, config), "governor") as governor,
        lab.running(lambda service: service.draining.wait(), "environment") as service,
    ):
        leases = ProducerLeases(service, "p", "sums")
        lease = await leases.acquire(8, 100)
        requests = governor.vitals.handled
        assert await leases.is_held(lease)
        assert governor.vitals.handled == requests
        stopped_s = 60.0
        assert await leases.is_held(lease), "the governor, which did not stop, holds it still"

        async def expired():
            return governor.vitals.metrics["flow/expired"] > 0

        await lab.until(expired)
        stopped_s = 120.0
        assert not await leases.is_held(lease)
        lost: list[str] = []
        leases.on_lost = lost.append
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.renew)

            async def is_told():
                return bool(lost)

            await lab.until(is_told)
            tasks.cancel_scope.cancel()
        assert lost[0] == lease, "without a call, too"


async def test_all_leases_are_renewed_together(lab, monkeypatch):
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=1.0),
    )
    under_way, most, renewed = 0, 0, set()
    async with (
        lab.running(lambda service: run_governor(service, config), "governor"),
        lab.running(lambda service: service.draining.wait(), "environment") as service,
        anyio.create_task_group() as tasks,
    ):
        leases = ProducerLeases(service, "p", "sums")
        request = leases._request

        async def counted(one, *arguments):
            nonlocal under_way, most
            under_way, most = under_way + 1, max(most, under_way + 1)
            try:
                reply = await request(one, *arguments)
            finally:
                under_way -= 1
            assert reply.granted
            renewed.add(one.lease)
            return reply

        async def all_are_renewed():
            return renewed == held

        held = {await leases.acquire(1, 100) for _ in range(8)}
        monkeypatch.setattr(leases, "_request", counted)
        tasks.start_soon(leases.renew)
        await lab.until(all_are_renewed)
        assert most == len(held)
        tasks.cancel_scope.cancel()
