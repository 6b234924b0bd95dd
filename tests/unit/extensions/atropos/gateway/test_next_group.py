"""While environments compete, a client is answered once there is a lease for the group that it makes next."""

from functools import partial
from typing import cast

import anyio
import httpx
import pytest
from unit.extensions.atropos.gateway.test_stage import outstanding

from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.extensions.atropos.gateway.lease_queue import LeaseQueue
from lachesis.pipeline.extensions.atropos.gateway.policies import PolicyVersions

pytestmark = pytest.mark.outside


class Leases:
    """Grants one lease."""

    is_contended, is_closed = True, False

    def __init__(self):
        self.released = []

    async def request_lease(self, *_, **__):
        return "one", 0.0

    async def release(self, lease):
        self.released.append(lease)


async def stored(world, n=1):
    async def there():
        return len(await world.groups()) == n

    await world.lab.until(there)


async def test_the_answer_waits_for_the_next_lease_and_the_next_group_for_nothing(world, make_scored):
    world.governor.contended = True
    async with world.gateway() as http:
        first = await http.post("/scored_data", json=make_scored(seed=1))
        assert first.json() == {"status": "received"}
        assert [request.policy_step for request in world.governor.granted] == [0, None], "one is not generated yet"
        await world.until(lambda: world.service.vitals.metrics["gateway/generating_sequences"] == 4)
        world.governor.open = False
        answers = []

        async def post():
            answers.append(await http.post("/scored_data", json=make_scored(seed=2)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await stored(world, 2)
            await world.until(lambda: world.governor.refusals > 2)
            assert not answers, "it is stored, and its client may not make the next one yet"
            world.governor.open = True
        assert answers[0].json() == {"status": "received"}
        assert [group.lease for group in await world.groups()] == ["lease-1", "lease-2"]


async def test_a_client_of_a_halted_environment_is_answered_at_once(world, make_scored):
    world.governor.contended = True
    async with world.gateway() as http:
        async with anyio.create_task_group() as tasks:
            world.governor.open = False
            tasks.start_soon(partial(http.post, "/scored_data", json=make_scored()))
            await world.until(lambda: world.governor.refusals > 2)
            world.governor.open = True
            await stored(world)
            world.governor.open = False
            world.governor.closed = {"words"}
        assert len(await world.groups()) == 1


async def test_a_client_alone_waits_for_its_next_lease_only_while_there_is_no_room(world, make_scored):
    answers = []
    async with world.gateway() as http:
        await http.post("/scored_data", json=make_scored(seed=1))
        assert len(world.governor.granted) == 1, "the room is not used up, so none is kept for the next"

        async def post():
            answers.append(await http.post("/scored_data", json=make_scored(seed=2)))

        async with anyio.create_task_group() as tasks:
            world.governor.open = False
            tasks.start_soon(post)
            await world.until(lambda: world.governor.refusals > 2)
            world.governor.open = True
            await stored(world, 2)
        assert [request.policy_step for request in world.governor.granted] == [0, 0, None]
        await http.post("/scored_data", json=make_scored(seed=3))
        assert len(world.governor.granted) == 3, "it has the kept lease, and there was room again: none is kept"
        await http.post("/scored_data", json=make_scored(seed=4))
        assert len(world.governor.granted) == 4


async def test_a_stored_group_is_answered_with_success_however_long_there_is_no_lease_for_the_next(world, make_scored):
    world.governor.contended = True
    async with world.gateway(world.config(hold_s=0.5)) as http:
        assert (await http.post("/scored_data", json=make_scored(seed=1))).status_code == 200
        world.governor.open = False
        answer = await http.post("/scored_data", json=make_scored(seed=2))  # it has the lease that was kept for it
        assert (answer.status_code, answer.json()) == (200, {"status": "received"})
        assert (await http.post("/scored_data", json=make_scored(seed=3))).status_code == 503


async def test_leases_of_clients_that_leave_are_given_back(world, make_scored):
    world.governor.contended = True
    async with world.gateway() as http:
        number = await world.registered(http)
        await http.post("/scored_data", json=make_scored(seed=1, env_id=number))
        assert (await http.post("/disconnect-env", json={"env_id": number})).json() == {"status": "success"}
        assert world.governor.released == ["lease-2"]
        await http.post("/scored_data", json=make_scored(seed=2))
        await http.get("/reset_data")
        assert world.governor.released == ["lease-2", "lease-4"]


async def test_a_drain_gives_back_the_leases_of_groups_to_come(world, make_scored):
    """The next gateway knows nothing of them: they would take room until they expire."""
    world.governor.contended = True
    async with world.gateway() as http:
        await http.post("/scored_data", json=make_scored(seed=1))
        assert world.governor.released == []
        world.service.drain()
        await world.until(lambda: world.governor.released == ["lease-2"])


async def test_a_client_that_hung_up_gets_no_lease(world, make_scored):
    world.governor.contended = True
    async with world.gateway() as http:
        await http.post("/scored_data", json=make_scored(seed=1))
        world.governor.open = False
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/scored_data", json=make_scored(seed=2), timeout=1.0)
        await stored(world, 2)
        world.governor.open = True
        await world.until(lambda: len(world.governor.released) == 1)
        await world.until(lambda: world.service.vitals.metrics["gateway/generating_sequences"] == 0)


async def test_an_environment_whose_clients_wait_for_their_next_lease_is_not_silent(world, make_scored, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.logic.silence._UNKNOWN_S", 0.05)
    monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.stage._FIGURES_S", 0.01)
    world.governor.contended = True
    async with world.gateway() as http:
        await http.post("/scored_data", json=make_scored(seed=1))
        world.governor.open = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(http.post, "/scored_data", json=make_scored(seed=2)))
            await stored(world, 2)
            said = []
            monkeypatch.setattr(world.service, "mark_waiting", lambda state, _: said.append(state))
            await world.until(lambda: len(said) > 30)
            assert set(said) == {"backpressure"}
            world.governor.open = True


async def test_the_lease_that_was_too_small_for_its_group_is_given_back(world, make_scored):
    world.governor.contended = True
    async with world.gateway() as http:
        await http.post("/scored_data", json=make_scored(seed=1))
        await http.post("/scored_data", json=make_scored(seed=2, length=60))
        assert world.governor.released == ["lease-2"]
        assert [group.lease for group in await world.groups()] == ["lease-1", "lease-3"]


async def test_a_lease_that_comes_when_the_time_of_its_request_is_up_is_given_back():
    leases = Leases()
    queue = LeaseQueue(cast("ProducerLeases", leases), PolicyVersions(), anyio.Event())

    async def is_gone():
        await anyio.sleep_forever()

    with anyio.move_on_after(0.05):
        await queue.wait_for_next(None, 4, is_gone)
    assert (leases.released, queue.unused_sequences, queue.is_waiting) == (["one"], 0, False)


async def test_leases_for_groups_to_come_do_not_count_as_waiting(world, make_scored):
    """Environments end or throttle themselves by that figure; these groups are what they are about to make."""
    world.governor.contended = True
    async with world.gateway() as http:
        await http.post("/scored_data", json=make_scored())

        async def shown():
            await outstanding(world, 8)  # one stored, one leased
            return (await http.get("/status")).json()["queue_size"] == 4

        await world.lab.until(shown)


async def test_the_lease_for_the_next_group_is_as_large_as_those_before_but_not_as_one_that_got_none(
    world, make_scored
):
    world.governor.contended = True
    async with world.gateway(world.config(hold_s=0.3)) as http:
        await http.post("/scored_data", json=make_scored(seed=1))
        usual = world.governor.granted[-1].bytes
        await http.post("/scored_data", json=make_scored(seed=2, length=4))
        assert usual > world.governor.granted[-1].bytes > 0.9 * usual
        world.governor.open = False
        assert (await http.post("/scored_data", json=make_scored(seed=3, length=60))).status_code == 503
        world.governor.open = True
        await http.post("/scored_data", json=make_scored(seed=4))
        assert world.governor.granted[-1].bytes <= usual
