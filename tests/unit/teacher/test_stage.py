"""The teacher stage: arrays in place, one failing sequence alone, a server that is down, another tokenizer."""

import anyio
import numpy as np
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.inference.client import Capabilities
from lachesis.pipeline.teacher import stage as stage_module
from lachesis.pipeline.teacher.stage import run_teacher
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, TeacherEvent, TeacherLogprobs
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, InfrastructureError

CONFIG = RunConfig(run="r")


class Server:
    """A teacher whose logprob of a token is minus a hundredth of it; `fail` may raise or change an answer."""

    def __init__(self):
        self.tokenizer_hash = "tok"
        self.up = True
        self.calls = 0
        self.fail = lambda tokens, answer: answer

    async def current(self):
        return self

    async def probe(self):
        if not self.up:
            raise InfrastructureError("connection refused")
        return Capabilities(model="big", max_model_len=99, weight_version="0-a-b", tokenizer_hash=self.tokenizer_hash)

    async def prompt_logprobs(self, tokens):
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        if not self.up:
            raise InfrastructureError("connection refused")
        answer = np.array([0.0, *(-token / 100 for token in tokens[1:])], np.float32)
        return self.fail(tokens, answer)


@pytest.fixture
def server(monkeypatch):
    found = Server()

    class Role:
        def __init__(self, *_, **__):
            pass

        async def __aenter__(self):
            return found

        async def __aexit__(self, *_):
            return None

    monkeypatch.setattr(stage_module, "open_role", Role)
    return found


def teacher(service):
    return run_teacher(service, CONFIG)


async def pointers(lab):
    return [item for event in await lab.events("teacher", TeacherEvent) for item in event.groups]


def pointed(lab, count):
    async def condition():
        return len(await pointers(lab)) + len(await lab.events("dead", DeadLetter)) >= count

    return condition


async def arrays(lab, pointer):
    return decode(TeacherLogprobs, (await lab.bus.get(subjects.TEACHER, pointer.stored)).data)


async def test_every_tokens_logprob_lies_where_the_pointer_says(lab, server):
    group = lab.group(1, samples=3, tokens=5)
    seq = await lab.store(group)
    async with lab.running(teacher, "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert (pointer.group, pointer.seq, pointer.missing, pointer.reason) == (group.id, seq, [], None)
    stored = await arrays(lab, pointer)
    expected = [0.0 if t % 5 == 0 else -token / 100 for t, token in enumerate(11 + t for t in range(15))]
    assert stored.values().tolist() == pytest.approx(expected)
    assert (stored.group, stored.teacher, stored.missing) == (group.id, "big", [])


@pytest.mark.parametrize("how", ["refused", "too short", "not finite"])
async def test_one_failing_sequence_leaves_the_others(lab, server, how):
    def fail(tokens, answer):
        if tokens[0] != 15:  # the second of three
            return answer
        match how:
            case "refused":
                raise DataError("prompt too long")
            case "too short":
                return answer[:-1]
            case _:
                return answer * np.nan

    server.fail = fail
    await lab.store(lab.group(1, samples=3, tokens=4))
    async with lab.running(teacher, "teacher"):
        await lab.until(pointed(lab, 1))
    assert not await lab.events("dead", DeadLetter)
    (pointer,) = await pointers(lab)
    assert pointer.missing == [1]
    assert pointer.reason
    values = (await arrays(lab, pointer)).values()
    assert values[1:4].all()
    assert not values[4:8].any()
    assert values[9:12].all()


async def test_a_server_that_is_down_is_waited_for(lab, server):
    await lab.store(lab.group(1))
    async with lab.running(teacher, "teacher") as service:
        await lab.until(lambda: _true(service.vitals.state == "ok" or server.calls))
        server.up = False
        before = server.calls
        await lab.store(lab.group(2))
        await lab.until(lambda: _true(server.calls >= before + 4))
        assert service.vitals.state == "waiting"
        server.up = True
        await lab.until(pointed(lab, 2))
    assert sorted(pointer.missing for pointer in await pointers(lab)) == [[], []]


async def _true(value):
    return value


async def test_a_drain_ends_the_wait_for_a_server(lab, server):
    server.up = False
    with anyio.fail_after(5):
        async with lab.running(teacher, "teacher") as service:
            await lab.until(lambda: _true(service.vitals.retried >= 2))


async def test_a_teacher_of_another_tokenizer_is_refused_without_asking_it(lab, server):
    server.tokenizer_hash = "another"
    await lab.store(lab.group(1))
    async with lab.running(teacher, "teacher"):
        await lab.until(pointed(lab, 1))
    (pointer,) = await pointers(lab)
    assert pointer.stored is None
    assert "tokenizer" in pointer.reason
    assert server.calls == 0


async def test_a_second_delivery_points_at_the_same_arrays(lab, server):
    await lab.store(lab.group(1))
    async with lab.running(teacher, "teacher") as service:
        service.bus.acks = False
        await lab.until(pointed(lab, 1))
    lab.bus.advance(31)
    async with lab.running(teacher, "teacher") as service:
        await lab.until(lambda: _true(service.vitals.handled == 1))
    assert len({pointer.stored for pointer in await pointers(lab)}) == 1
    assert (await lab.bus.usage(subjects.TEACHER)).messages == 1
