"""The trainer of shared weights: it changes them while a server that has the last ones is paused, and not otherwise."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from lachesis.pipeline.errors import InfrastructureError, ServerAwayError
from lachesis.pipeline.inference.weights_lock import acquire_weights_lock
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.shared_memory import SegmentReader, WeightSegment, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.pipeline.trainer.publication import PolicyPublisher
from lachesis.pipeline.trainer.serial_jobs import SerialJobs
from lachesis.pipeline.trainer.shared_weights import SharedWeights


class Service:
    def __init__(self):
        self.draining = anyio.Event()

        self.problems = {}

    def set_problem(self, topic, text, **details):
        self.problems[topic] = text, details


class Server:
    """An inference server, its own directory as well. `asked` is set once its version was requested."""

    def __init__(self):
        self.version = "default"
        self.away = False
        self.paused = False
        self.asked = anyio.Event()

    async def current(self):
        return self

    async def weight_version(self):
        self.asked.set()
        if self.away:
            raise ServerAwayError("nobody listens")
        return self.version

    async def pause(self, mode):
        assert mode == "keep"
        self.paused = True


class World:
    def __init__(self, folder):
        self.folder = folder
        self.service, self.server = Service(), Server()
        self.model = build_tiny_policy(0, width=32, layers=1, max_length=32).model
        self.segment = WeightSegment.share(self.model)
        self.shared = SharedWeights(self.service, self.segment, self.server, folder)
        self.version = policy_version(0, "a", policy_tensors(self.model))
        self.shared.publish(self.version)
        self.steps = []

    async def step(self):
        await anyio.to_thread.run_sync(self._step)

    def _step(self):
        with self.shared.changing():
            self.steps.append(self.server.paused)

    @asynccontextmanager
    async def stepping(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.step)
            yield


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.segment.close(tmp_path)


async def test_weights_change_once_the_server_has_the_last_ones_and_is_paused(world):
    async with world.stepping():
        await world.server.asked.wait()
        assert world.steps == []
        world.server.version = str(world.version)
    assert world.steps == [True]


async def test_a_server_that_is_away_holds_the_step_up_until_it_is_back_on_the_last_weights(world):
    world.server.version, world.server.away = str(world.version), True
    async with world.stepping():
        await world.server.asked.wait()
        assert (world.steps, world.server.paused) == ([], False)
        world.server.away = False
    assert world.steps == [True]


async def test_no_weights_change_while_an_update_is_under_way(world):
    """Else the update's end would resume the server that the trainer has paused."""
    turn = await acquire_weights_lock(world.folder)
    async with world.stepping():
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        world.server.version = str(world.version)
        assert not world.server.asked.is_set()  # as long as the turn is another's
        turn.close()
    assert world.steps == [True]


async def test_a_trainer_that_drains_does_not_wait_for_a_server(world):
    world.service.draining.set()
    with pytest.raises(InfrastructureError, match=r"the step was given up, .* it has policy default, not yet 0-a-"):
        await world.step()
    assert world.steps == []


async def test_no_weights_change_before_those_of_the_last_step_have_their_version(world):
    """Its digest is computed from them as they lie there, while the next step begins."""
    world.server.version = str(world.version)
    world.shared.begin_version()
    async with world.stepping():
        for _ in range(10):
            await anyio.sleep(0.001)
        assert (world.steps, world.server.paused) == ([], False)
        world.shared.publish(world.version)
    assert world.steps == [True]


@pytest.mark.parametrize("damaged", [b"{}", None])
async def test_a_pointer_that_was_damaged_or_deleted_is_written_again_once_its_policy_is_refused(world, damaged):
    pointer = segment_pointer(world.folder)
    if damaged is not None:
        pointer.write_bytes(damaged)
    async with anyio.create_task_group() as tasks:
        publisher = object.__new__(PolicyPublisher)
        publisher.shared, publisher._newest = world.shared, (0, {})
        publisher._publishing, publisher._publications = anyio.Lock(), SerialJobs(tasks)
        publisher._feed = SimpleNamespace(policy=SimpleNamespace(version=str(world.version)))
        await publisher.publish_again("1-of-an-earlier-life")
        assert not pointer.exists() or pointer.read_bytes() == damaged
        await publisher.publish_again(str(world.version))
    reader = SegmentReader(pointer)
    assert reader.generation == world.segment.generation
    reader.check_version(world.version)


async def test_a_trainer_ends_once_the_server_has_its_last_weights_which_end_with_it(world):
    """A run that has taken all its steps is started again: its server has no others."""
    async with anyio.create_task_group() as tasks:
        ended = anyio.Event()

        async def end():
            await world.shared.wait_until_served()
            ended.set()

        tasks.start_soon(end)
        await world.server.asked.wait()
        assert not ended.is_set()
        world.server.version = str(world.version)
        with anyio.fail_after(60):
            await ended.wait()
    assert not world.server.paused
    world.server.away = True
    world.service.draining.set()
    with anyio.fail_after(60):
        await world.shared.wait_until_served()
