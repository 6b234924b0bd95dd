"""Conversations under way survive the kill of their process at every line: nothing is generated or run twice."""

from collections import Counter
from contextlib import asynccontextmanager
from itertools import product

import anyio
import msgspec
import pytest
from stages import run_environment, run_governor

from lachesis import Environment, Task
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.environment import stage as stage_module
from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.left_groups import records_calls
from lachesis.pipeline.environment.tools import tool
from lachesis.pipeline.errors import ServerAwayError
from lachesis.pipeline.evaluator.config import EvaluationConfig
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.inference.client import Capabilities
from lachesis.pipeline.inference.identity import IdentityGuard, ObservedServer
from lachesis.schemas import keys, subjects
from lachesis.schemas.calls import CALL_HEADER, CallKey, GroupStart, SessionCall, ToolResults
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import EpochRecord, PolicyRecord
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import RolloutGroup

TURNS = 3
SETTINGS = EnvironmentConfig(kind="agent", samples=2, concurrency=1, longest_tokens=4096, max_new_tokens=500)


SHORT_LEASES = FlowConfig(lease_s=0.5)


def config(flow=None, **changes):
    return RunConfig(
        run="r",
        flow=flow or FlowConfig(),
        environments={"agent": msgspec.structs.replace(SETTINGS, **changes)},
        batching=BatchingConfig(batch_size=64 if flow is None else 4096, max_staleness=4),
        evaluate=EvaluationConfig(held_out=0),  # or the prompt that a test changes may be held out when it goes on
    )


class Agent(Environment):
    """Calls a tool in each turn; what ran is counted by sample-independent names."""

    def __init__(self):
        self.ran = Counter()
        self.rated = Counter()
        self.noise = ""

    def __len__(self):
        return 1000

    def task(self, index):
        return Task(item=f"item-{index}", prompt=f"task {index} {self.noise}")

    @tool
    def spend(self, what: str) -> str:
        self.ran[what] += 1
        return f"spent {what}{self.noise}"

    def reward(self, task, session):
        self.rated[task.item] += 1
        session.reward_turn(0.5, turn=1)
        return float(len(session.replies))


class Inference(FakeInference):
    where = "inference server http://fake"
    tokenizer_hash = "tok"

    def __init__(self):
        super().__init__(self.say)
        self.guard = IdentityGuard()
        self.away = 0
        self.said = Counter()

    def say(self, prompt, call):
        if self.away:
            self.away -= 1
            raise ServerAwayError("killed")
        self.said[prompt] += 1
        turn = prompt.count("<tool>")
        name = f"{prompt.count('x')}-{call}"
        call = {"name": "spend", "arguments": {"what": f"{turn} {name}"}}
        return f"<tool_call>{msgspec.json.encode(call).decode()}</tool_call>" if turn < TURNS - 1 else f"done {name}"

    async def observe(self, probe, *, version=False):
        return ObservedServer(
            model="policy", engine="lachesis", tokenizer_hash="tok", weight_version=self.version if version else None
        )

    async def probe(self, sampling=None):
        return Capabilities(model="m", max_model_len=4096, weight_version=self.version, tokenizer_hash="tok")

    async def current(self):
        return self


@pytest.fixture
def agent(monkeypatch):
    made = Agent()
    monkeypatch.setattr(stage_module, "load_environment", lambda *_: made)
    return made


@pytest.fixture
async def inference(lab, monkeypatch):
    made = Inference()

    @asynccontextmanager
    async def role(*_, **__):
        yield made

    monkeypatch.setattr(stage_module, "open_configured_role", role)
    record = PolicyRecord(run="r", version="0-a-b", weights="w", tokenizer_hash="tok", written_ns=1)
    await lab.bus.put(keys.POLICY, encode(record))
    return made


def environment(settings=None):
    return lambda service: run_environment(service, settings or config(), "agent")


def killed(lab, at, *, after):
    """Return an environment that is killed as it stores its message number `at`: before, or just after it is stored."""

    async def live(service):
        count = 0

        def mortal(publish):
            async def stored(*args, **kwargs):
                nonlocal count
                count += 1
                is_last = count == at
                if is_last and not after:
                    service.kill()
                ack = await publish(*args, **kwargs)
                if is_last and after:
                    service.kill()
                    await anyio.sleep_forever()
                return ack

            return stored

        service.bus.publish = mortal(service.bus.publish)
        service.bus.publish_large = mortal(service.bus.publish_large)
        await run_environment(service, config(), "agent")

    return lab.running(live, "environment")


async def rollouts(lab):
    async with lab.bus.read(subjects.ROLLOUTS, [subjects.rollout("r", "agent")], follow=False) as messages:
        return [decode(RolloutGroup, message.data) async for message in messages]


async def records(lab):
    async with lab.bus.read(subjects.CALLS, [subjects.call("r", "agent")], follow=False) as messages:
        return [(CallKey.unpack(message.headers[CALL_HEADER]), message.data) async for message in messages]


def at_least(lab, count):
    async def condition():
        return len(await rollouts(lab)) >= count

    return condition


def governor(lab, settings=None):
    return lab.running(lambda service: run_governor(service, settings or config()), "governor")


class ForkingAgent(Agent):
    """Two branches run at once from its first turn, each with a tool of its own, beside the conversation itself."""

    async def rollout(self, task, session):
        await session.generate()
        session.add("x")
        async with anyio.create_task_group() as tasks:
            for n in range(2):
                tasks.start_soon(self.branch, task, session.fork(), n)
            tasks.start_soon(super().rollout, task, session)

    async def branch(self, task, branch, n):
        branch.add("x" * n)
        await super().rollout(task, branch)
        branch.reward_turn(float(n))

    def reward(self, task, session):
        return 0.0


class RepeatableAgent(ForkingAgent):
    @tool(repeatable=True)
    def spend(self, what: str) -> str:
        return f"spent {what}"


RECORDS_OF_A_FORKED_GROUP = 1 + 2 * (1 + 3 * (TURNS + TURNS - 1)) + 2 + 1 + 1
"""Start, calls and results of tools of the trunk and three branches, ends of samples, rollout, end."""


@pytest.mark.parametrize("at", [2, 5, 9, 14, 19, 24, 30, RECORDS_OF_A_FORKED_GROUP - 2])
async def test_every_branch_goes_on_where_a_kill_left_it(lab, inference, monkeypatch, at) -> None:
    agent = RepeatableAgent()
    monkeypatch.setattr(stage_module, "load_environment", lambda *_: agent)
    async with governor(lab):
        async with killed(lab, at, after=True) as service:
            await lab.until(lambda: _true(service.bus.dead))
        said = sum(inference.said.values())
        stored = sum(key.kind == "call" for key, _ in await records(lab))
        async with lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 1))
        calls = [decode(SessionCall, data) for key, data in await records(lab) if key.kind == "call"]
    first = (await rollouts(lab))[0]
    mine = [call for call in calls if call.group == first.id]
    assert len(mine) == 2 * (1 + 3 * TURNS), "no answer that was stored is generated again"
    assert Counter(call.fork for call in mine) == {"": 2 * (1 + TURNS), "0": 2 * TURNS, "1": 2 * TURNS}
    assert "diverged" not in first.metadata
    assert said - stored <= 2 * 3, "what was under way in each branch"
    assert first.sequences.sample_index == [0] * 3 + [1] * 3
    tree, rewards = first.sequences.turn_parents, first.sequences.turn_rewards
    for parents, values in zip(tree, rewards, strict=True):
        assert len(parents) == 1 + 3 * TURNS
        assert (parents.count(-1), parents.count(0)) == (1, 3)
        assert sorted(values) == [0.0] * (3 * TURNS) + [1.0]
    assert first.sequences.turns().max() == 3 * TURNS


@pytest.mark.parametrize("at", [9, 17, 24])
async def test_no_branch_runs_a_tool_twice(lab, inference, monkeypatch, at) -> None:
    agent = ForkingAgent()
    monkeypatch.setattr(stage_module, "load_environment", lambda *_: agent)
    async with governor(lab):
        async with killed(lab, at, after=True) as service:
            await lab.until(lambda: _true(service.bus.dead))
        async with lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 1))
    assert set(agent.ran.values()) == {1}
    assert len((await rollouts(lab))[0].sequences.turn_parents) == 2


RECORDS_OF_A_GROUP = 1 + 2 * TURNS + 2 * (TURNS - 1) + 2 + 1 + 1
"""Start, calls, results of tools, ends of samples, rollout, end."""


def stopped(lab, at, *, after, goes_on):
    """Return an environment that is stopped as it stores its message number `at`, until `goes_on` is set.

    Before that is stored, or just after. Nothing that it sends meanwhile arrives, nor any answer.
    """

    async def live(service):
        count, runs = 0, anyio.Event()
        runs.set()

        def stoppable(send, *, counts=True):
            async def sent(*args, **kwargs):
                nonlocal count, runs
                await runs.wait()
                count += counts
                is_last = counts and count == at
                if is_last:
                    runs = goes_on
                if is_last and not after:
                    await runs.wait()
                answer = await send(*args, **kwargs)
                await runs.wait()
                return answer

            return sent

        service.bus.publish = stoppable(service.bus.publish)
        service.bus.publish_large = stoppable(service.bus.publish_large)
        service.bus.request = stoppable(service.bus.request, counts=False)
        await run_environment(service, config(flow=SHORT_LEASES), "agent")

    return lab.running(live, "environment")


RECORDS = {"start": GroupStart, "call": SessionCall, "tools": ToolResults}


def made_again(records, starts):
    """Return how many recorded calls belong to samples that begin again: a tool may have run and left no result."""
    found = {}
    for start in starts:
        known = [record for seq, record in records if seq <= start.known_seq]
        calls = Counter(record.session for record in known if isinstance(record, SessionCall))
        tools = Counter(record.session for record in known if isinstance(record, ToolResults))
        found |= {session: count for session, count in calls.items() if tools[session] < count < TURNS}
    return sum(found.values())


@pytest.mark.parametrize("has_run_out", [False, True])
@pytest.mark.parametrize(
    "stop", list(product([2, 3, 5, RECORDS_OF_A_GROUP - 2, RECORDS_OF_A_GROUP - 1], [False, True]))
)
async def test_a_process_that_was_only_stopped_doubles_nothing_of_what_another_one_goes_on_with(
    lab, agent, inference, stop, has_run_out
) -> None:
    """The other one, of the same number, comes before its lease has run out, or after; then they work in turn."""
    (at, after), first_goes_on, second_goes_on = stop, anyio.Event(), anyio.Event()

    begun = {}  # by item the groups of it, also those that are under way at the end
    known = {}  # by group its records, each with its sequence

    async def follow():
        async with lab.bus.read(subjects.CALLS, [subjects.call("r", "agent")]) as messages:
            async for message in messages:
                key = CallKey.unpack(message.headers[CALL_HEADER])
                if key.kind in RECORDS:
                    record = decode(RECORDS[key.kind], message.data)
                    known.setdefault(key.group, []).append((message.seq, record))
                if key.kind == "start":
                    begun.setdefault(record.item, set()).add(key.group)

    async def is_under_way():
        return any(key.kind == "start" for key, _ in await records(lab))

    async def has_ended():
        return service.vitals.metrics.get("flow/expired", 0) > 0

    async with (
        governor(lab, config(flow=SHORT_LEASES)) as service,
        stopped(lab, at, after=after, goes_on=first_goes_on),
        background() as tasks,
    ):
        tasks.start_soon(follow)
        await lab.until(is_under_way)
        if has_run_out and at < RECORDS_OF_A_GROUP - 1:
            await lab.until(has_ended)
        starts = len(await records(lab))
        async with stopped(lab, 1, after=True, goes_on=second_goes_on):

            async def has_begun():
                return len(await records(lab)) > starts

            await lab.until(has_begun)
            first_goes_on.set()
            await lab.until(at_least(lab, 3))
            second_goes_on.set()
            await lab.until(at_least(lab, len(await rollouts(lab)) + 3))
    stored = await rollouts(lab)
    assert max(Counter(group.id for group in stored).values()) == 1
    assert len({(one.producer, one.epoch, one.counter) for one in stored}) == len(stored)
    said = Counter(m.content for one in stored for talk in one.messages for m in talk if m.role == "assistant")
    assert max(said.values()) == 1, "no answer is in two groups"
    assert set(agent.ran.values()) == {1}, "no tool ran twice"
    for one in stored:
        opening = f"<user>{one.messages[0][0].content}<end>"
        if begun[one.item] == {one.id}:
            sampled = sum(count for prompt, count in inference.said.items() if prompt.startswith(opening))
            starts = [record for _, record in known[one.id] if isinstance(record, GroupStart)]
            allowed = 2 * TURNS + made_again(known[one.id], starts) + 2 * (len(starts) - 1)
            assert sampled <= allowed, "what was under way when a life ended"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, RECORDS_OF_A_GROUP + 1))
async def test_a_group_goes_on_where_a_kill_left_it(lab, agent, inference, at, after) -> None:
    async with governor(lab):
        async with killed(lab, at, after=after) as service:
            await lab.until(lambda: _true(service.bus.dead))
        begun = [key.group for key, _ in await records(lab) if key.kind == "start"]
        said = sum(inference.said.values())
        calls = sum(key.kind == "call" for key, _ in await records(lab))
        async with lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 2))
    stored = await rollouts(lab)
    assert max(Counter(group.id for group in stored).values()) == 1
    assert len({(one.producer, one.epoch, one.counter) for one in stored}) == len(stored)
    if begun:
        assert stored[0].id == begun[0], "the first group is that which was under way"
    first = stored[0]
    assert [len(talk) for talk in first.messages] == [2 * TURNS] * 2
    assert "diverged" not in first.metadata
    assert set(agent.ran.values()) == {1}, "no tool ran twice"
    lost = said - calls if begun else 0  # answers that were not stored yet as the process died
    assert 0 <= lost <= 2
    assert first.sequences.rewards == {"environment": [TURNS, TURNS]}
    assert first.sequences.turn_rewards == [[0.0, 0.5, 0.0]] * 2
    assert set(first.sequences.finish_reasons) == {"stop"}


async def test_an_inference_server_that_was_killed_costs_no_finished_turn(lab, agent, inference, monkeypatch) -> None:
    """Its lost samples go on from their last answer, also in another attempt at the group."""
    monkeypatch.setattr(stage_module, "CollectConfig", _impatient)
    say = inference.reply

    def reply(prompt, call):
        if prompt.count("<tool>") == 1 and not inference.struck:
            inference.struck = True
            inference.away = 40  # tries of a request, refills of the samples, and attempts at the group
        return say(prompt, call)

    inference.struck = False
    inference.reply = reply
    async with governor(lab), lab.running(environment(), "environment"):
        await lab.until(at_least(lab, 1))
        starts = [key.group for key, _ in await records(lab) if key.kind == "start"]
    (first, *_) = await rollouts(lab)
    assert inference.away == 0
    assert starts.count(first.id) > 1, "it was taken up again"
    assert set(agent.ran.values()) == {1}
    assert max(inference.said.values()) == 2, "the prompts of the two samples' first turns are the same"


def _impatient(**settings):
    return CollectConfig(**{**settings, "attempts": 2, "backoff_s": 0.001})


async def seconds_recorded(lab):
    """Return the seconds of generation that a killed process has left in the log."""
    found = sum(decode(SessionCall, data).seconds for key, data in await records(lab) if key.kind == "call")
    assert found > 0
    return found


async def test_a_conversation_that_asks_something_else_is_sampled_from_there_and_named(lab, agent, inference) -> None:
    async with governor(lab):
        async with killed(lab, 7, after=True) as service:
            await lab.until(lambda: _true(service.bus.dead))
        agent.noise = " another day"
        recorded_s = await seconds_recorded(lab)
        async with lab.running(environment(), "environment") as service:
            await lab.until(at_least(lab, 1))
            await lab.until(lambda: _true(service.vitals.metrics.get("environment/agent/diverged")))
            figures = dict(service.vitals.metrics)
    first = (await rollouts(lab))[0]
    assert figures["environment/agent/diverged"] == 2
    assert figures["environment/agent/lost_seconds"] == pytest.approx(recorded_s)
    assert figures["environment/agent/resumed_seconds"] == 0
    assert set(first.metadata["diverged"]) == {"0", "1"}
    assert "call 0" in first.metadata["diverged"]["0"]
    assert all(talk[0].content.endswith("another day") for talk in first.messages)


async def test_a_conversation_that_asks_something_else_is_given_up_where_that_is_set(lab, agent, inference) -> None:
    async with governor(lab):
        async with killed(lab, 7, after=True) as service:
            await lab.until(lambda: _true(service.bus.dead))
        agent.noise = " another day"
        recorded_s = await seconds_recorded(lab)
        async with lab.running(environment(config(diverged="give_up")), "environment") as service:
            await lab.until(at_least(lab, 1))
            await lab.until(lambda: _true(service.vitals.metrics.get("environment/agent/lost_seconds")))
            figures = dict(service.vitals.metrics)
    assert figures["environment/agent/lost_seconds"] == pytest.approx(recorded_s)
    assert figures["environment/agent/resumed_seconds"] == 0
    first = (await rollouts(lab))[0]
    assert "diverged" not in first.metadata
    assert first.metadata["lost_samples"] == {"refilled": [0, 1], "left_out": []}


async def test_a_tool_that_may_have_run_is_not_run_again_and_its_sample_begins_anew(lab, agent, inference) -> None:
    spent = []

    async def spend(what):
        spent.append(what)
        if len(spent) == 3:
            service.kill()
            await anyio.sleep_forever()
        return f"spent {what}"

    async with governor(lab):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Agent, "tools", property(lambda self: {"spend": spend}))
            async with lab.running(environment(), "environment") as service:
                await lab.until(lambda: _true(service.bus.dead))
        async with lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 1))
    first = (await rollouts(lab))[0]
    assert set(agent.ran) & set(spent) == set(), "nothing that may have run ran again"
    assert len(first.metadata["lost_samples"]["refilled"]) >= 1


class Stateful(Agent):
    """Its tool counts in memory, so that it has to run again."""

    @tool(repeatable=True)
    def spend(self, what: str) -> str:
        self.ran[what] += 1
        return f"spent {what}"


async def test_a_repeatable_tool_runs_again_and_leaves_no_record(lab, inference, monkeypatch) -> None:
    agent = Stateful()
    monkeypatch.setattr(stage_module, "load_environment", lambda *_: agent)
    async with governor(lab):
        async with killed(lab, 4, after=True) as service:  # one of the two samples has a second call, and no end
            await lab.until(lambda: _true(service.bus.dead))
        assert {key.kind for key, _ in await records(lab)} == {"start", "call"}
        async with lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 1))
    first = (await rollouts(lab))[0]
    assert "lost_samples" not in first.metadata
    assert max(agent.ran.values()) == 2


async def test_a_place_of_the_epoch_goes_on_with_its_group(lab, agent, inference) -> None:
    settings = msgspec.structs.replace(config(), curriculum=CurriculumConfig(strategy="epoch"))

    async def live(service):
        publish, count = service.bus.publish, 0

        async def stored(*args, **kwargs):
            nonlocal count
            count += 1
            if count == 6:
                service.kill()
            return await publish(*args, **kwargs)

        service.bus.publish = stored
        await run_environment(service, settings, "agent")

    async with governor(lab, settings):
        async with lab.running(live, "environment") as service:
            await lab.until(lambda: _true(service.bus.dead))
        (begun,) = [key.group for key, _ in await records(lab) if key.kind == "start"]
        async with lab.running(environment(settings), "environment"):
            await lab.until(at_least(lab, 3))
    stored = await rollouts(lab)
    assert stored[0].id == begun
    assert [(group.producer, group.epoch, group.counter) for group in stored[:3]] == [
        ("epoch-agent", 0, place) for place in range(3)
    ]
    record = decode(EpochRecord, (await lab.bus.value(keys.epoch("agent"))).value)
    assert len(record.claims) <= 1


async def test_a_group_that_ends_each_life_is_given_up_and_counted(lab, agent, inference, caplog) -> None:
    """Say, a tool that crashes the process: the group must not end it for ever."""
    begun = None
    async with governor(lab):
        for life in range(5):

            async def live(service, life=life):
                async def die(prompt_ids, n, sampling=None):
                    service.kill()
                    await anyio.sleep_forever()

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(inference, "generate", die)
                    await run_environment(service, config(), "agent")

            async with lab.running(live, "environment") as service:
                await lab.until(lambda service=service: _true(service.bus.dead))
            groups = [key.group for key, _ in await records(lab) if key.kind == "start"]
            begun = begun or groups[0]
        assert groups[-1] != begun
    assert f"group {begun} does not go on" in caplog.text
    assert "lives in a row have ended" in caplog.text


async def test_calls_go_once_their_group_is_stored(lab, agent, inference) -> None:
    async with governor(lab) as service:
        async with lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 3))
        await lab.until(lambda: _one_left(lab))
        await lab.until(lambda: _true(service.vitals.metrics.get("flow/trimmed_messages/CALLS", 0) > 20))


async def _one_left(lab):
    return len(await records(lab)) == 1  # the last of a subject is never deleted


async def test_each_call_is_stored_before_its_conversation_goes_on(lab, agent, inference) -> None:
    seen = []
    respond = Agent.respond

    async def look(self, task, session, reply):
        stored = [decode(SessionCall, data) for key, data in await records(lab) if key.kind == "call"]
        seen.append(reply.text in [call.text for call in stored])
        return await respond(self, task, session, reply)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "respond", look)
        async with governor(lab), lab.running(environment(), "environment"):
            await lab.until(at_least(lab, 1))
    assert len(seen) >= 2 * (TURNS - 1)
    assert all(seen)


@pytest.mark.parametrize("record", ["auto", "never"])
async def test_a_lease_keeps_room_for_the_calls_that_are_recorded(lab, agent, inference, monkeypatch, record) -> None:
    """Renewals name it again, so that a governor that has started again keeps it, too."""
    settings, asked = config(record=record), []
    answer = Governor.answer_request

    def noted(self, request, now_s):
        asked.append((request.op, request.calls))
        return answer(self, request, now_s)

    monkeypatch.setattr(Governor, "answer_request", noted)
    gate, generate = anyio.Event(), inference.generate

    async def slow(*args, **options):
        await gate.wait()
        return await generate(*args, **options)

    monkeypatch.setattr(inference, "generate", slow)
    async with governor(lab, settings), lab.running(environment(settings), "environment"):
        await lab.until(lambda: _true("renew" in dict(asked)))
        gate.set()
        await lab.until(at_least(lab, 1))
    wanted = settings.environments["agent"].calls_bytes if record == "auto" else 0
    assert {calls for op, calls in asked if op != "release"} == {wanted}


class OneTurn(Environment):
    def __len__(self):
        return 1


class Outside(Agent):
    resumable = False


@pytest.mark.parametrize(
    ("env", "record", "recorded"),
    [
        (OneTurn(), "auto", False),
        (OneTurn(), "always", True),
        (Agent(), "auto", True),
        (Agent(), "never", False),
        (Outside(), "auto", False),
    ],
)
def test_conversations_of_several_turns_are_recorded_unless_set_otherwise(env, record, recorded) -> None:
    assert records_calls("e", env, msgspec.structs.replace(SETTINGS, record=record)) is recorded


def test_what_cannot_go_on_cannot_be_set_to_be_recorded() -> None:
    with pytest.raises(ConfigError, match=r"environments\.e\.record"):
        records_calls("e", Outside(), msgspec.structs.replace(SETTINGS, record="always"))


async def _true(value):
    return value
