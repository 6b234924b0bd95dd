"""The evaluator: when it measures, that it does not repeat itself, and that it leaves rollouts and ledger alone."""

from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import msgspec
import pytest
from stages import run_evaluator

from lachesis import Environment, Task
from lachesis.pipeline.config.run import EnvironmentConfig, EvaluationConfig, RunConfig, TrainingConfig
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.evaluator import evaluated_env
from lachesis.pipeline.evaluator import stage as evaluator_module
from lachesis.pipeline.evaluator.schedule import Schedule
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError

PLAN = EvaluationConfig(every_steps=10, items=6, items_between=3, samples=2)
CONFIG = RunConfig(
    run="r",
    evaluation={"held": EnvironmentConfig(kind="x"), "out": EnvironmentConfig(kind="x")},
    evaluate=PLAN,
    training=TrainingConfig(steps=30),
)


@pytest.mark.parametrize(
    ("last", "done", "step", "items"),
    [
        (30, None, 0, 6),  # the first policy
        (30, None, 7, 6),  # or the first that could be evaluated
        (30, 0, 9, None),
        (30, 0, 10, 3),
        (30, 0, 25, 3),
        (30, 13, 19, None),
        (30, 13, 20, 3),  # at the multiples, however late the one before was
        (30, 25, 30, 6),  # the last, however soon after
        (30, 30, 30, None),  # once
        (30, 30, 10, None),
        (None, 20, 29, None),
        (None, 20, 30, 3),
    ],
)
def test_schedule(last, done, step, items):
    assert Schedule(PLAN, last, done).due(step) == items


class Held(Environment):
    def __len__(self):
        return 8

    def task(self, index):
        return Task(item=f"{index}", prompt=f"say {index}")

    def reward(self, task, session):
        return float(session.text == "yes")


class Server(FakeInference):
    """An evaluation server. Answers yes by the step of the policy it holds."""

    def __init__(self):
        super().__init__(lambda prompt, call: "yes" if call % 2 else "no", version="0-none-none")
        self.loaded = []
        self.failing = []
        self.not_compared = None

    async def weight_version(self):
        return self.version

    async def update_weights(self, path, version):
        if self.failing:
            raise self.failing.pop(0)
        self.loaded.append((path, version))
        self.version = version
        return self.not_compared

    async def current(self):
        return self


@pytest.fixture
def server(monkeypatch):
    made = Server()

    @asynccontextmanager
    async def role(*_, **__):
        yield made

    monkeypatch.setattr(evaluator_module, "open_configured_role", role)
    monkeypatch.setattr(evaluated_env, "load_environment", lambda *_: Held())
    return made


def evaluator(service):
    return run_evaluator(service, CONFIG)


async def publish(lab, step, lineage="a", weights=None):
    record = PolicyRecord(
        run="r",
        version=f"{step}-{lineage}-d{step}",
        weights=str(weights or f"/w/{step}"),
        tokenizer_hash="t",
        written_ns=1,
    )
    await lab.bus.put(keys.POLICY, encode(record))


async def measured(lab, env="held"):
    return [(event.policy_step, event.items) for event in await lab.events("eval", EvalEvent, env)]


def evaluated(lab, step):
    async def condition():
        found = [dict(await measured(lab, env)) for env in ("held", "out")]
        return all(step in of_env for of_env in found)

    return condition


async def test_the_first_the_last_and_some_between_are_measured_and_nothing_else_is_written(lab, server):
    await publish(lab, 0)
    async with lab.running(evaluator, "evaluator", drain=False):  # it ends by itself after the last
        for step in (0, 4, 10, 15, 22, 30):
            await publish(lab, step)
            if step in (0, 10, 22, 30):
                await lab.until(evaluated(lab, step))
            else:
                await anyio.sleep(0.05)
    for env in ("held", "out"):
        assert await measured(lab, env) == [(0, 6), (10, 3), (22, 3), (30, 6)]
    for stream in (subjects.LEDGER, subjects.ROLLOUTS, subjects.TEACHER):
        assert (await lab.bus.usage(stream)).messages == 0
    assert (await lab.bus.usage(subjects.EVENTS)).messages == 8
    first = (await lab.events("eval", EvalEvent, "held"))[0]
    assert (first.k, first.policy_version) == (2, "0-a-d0")
    assert 0 < first.avg < 1
    assert first.greedy is not None
    assert (await lab.events("eval", EvalEvent, "held"))[1].greedy is None


async def test_what_was_measured_is_not_measured_again_after_a_restart(lab, server):
    await publish(lab, 0)
    async with lab.running(evaluator, "evaluator"):
        await lab.until(evaluated(lab, 0))
    asked = len(server.requests)
    async with lab.running(evaluator, "evaluator") as service:
        await lab.until(lambda: _true(service.vitals.state == "ok"))
        await publish(lab, 5)
        await anyio.sleep(0.05)
    assert len(server.requests) == asked
    assert await measured(lab) == [(0, 6)]
    await publish(lab, 30)
    async with lab.running(evaluator, "evaluator", drain=False):
        pass
    async with lab.running(evaluator, "evaluator", drain=False):  # ends at once: there is nothing left to measure
        pass
    assert await measured(lab) == [(0, 6), (30, 6)]


async def cut_short(lab, server, folder):
    """Kill the evaluator in its evaluation of the first policy; return the file of its weights."""
    weights, answers = folder / "0.safetensors", server.generate
    weights.write_bytes(b"first")
    server.generate = hang
    await publish(lab, 0, weights=weights)
    async with lab.running(evaluator, "evaluator") as service:
        await lab.until(lambda: _true(bool(server.loaded)))
        service.kill()
    server.generate = answers
    return weights


async def test_a_first_evaluation_that_a_kill_cuts_short_is_begun_again(lab, server, tmp_path):
    """Though training has gone on, and the weights were pruned."""
    weights = await cut_short(lab, server, tmp_path)
    weights.unlink()
    await publish(lab, 12)
    async with lab.running(evaluator, "evaluator"):
        await lab.until(evaluated(lab, 12))
    assert await measured(lab) == [(0, 6), (12, 3)]
    kept = Path(server.loaded[-2][0])
    assert server.loaded[-2][1] == "0-a-d0"
    assert kept.parent == CONFIG.path / "weights" / "first"
    assert not kept.parent.exists()


@pytest.mark.parametrize("damage", [lambda kept: kept.with_name("policy.bin").write_bytes(b"?"), Path.unlink])
async def test_a_kept_policy_that_is_damaged_is_none(lab, server, tmp_path, damage):
    await cut_short(lab, server, tmp_path)
    damage(Path(server.loaded[-1][0]))
    await publish(lab, 12)
    async with lab.running(evaluator, "evaluator"):
        await lab.until(evaluated(lab, 12))
    assert await measured(lab) == [(12, 6)]


async def hang(*_, **__):
    await anyio.sleep_forever()


async def _true(value):
    return value


async def test_a_digest_that_could_not_be_compared_is_said_until_one_is(lab, server):
    server.not_compared = "vLLM holds 3 tensors in a form of its own"
    async with lab.running(evaluator, "evaluator") as service:
        await publish(lab, 0)
        await lab.until(evaluated(lab, 0))
        assert server.not_compared in lab.said(service)
        server.not_compared = None
        await publish(lab, 10)
        await lab.until(evaluated(lab, 10))
        assert lab.said(service) == ""
        await publish(lab, 30)


async def test_a_drain_ends_the_wait_and_an_evaluation_under_way(lab, server):
    with anyio.fail_after(5):
        async with lab.running(evaluator, "evaluator"):
            await anyio.sleep(0.02)

    server.generate = hang
    await publish(lab, 0)
    with anyio.fail_after(5):
        async with lab.running(evaluator, "evaluator"):
            await lab.until(lambda: _true(bool(server.loaded)))
    assert not await measured(lab)


async def test_a_server_that_is_down_is_waited_for_and_refused_weights_are_passed_over(lab, server):
    server.failing = [InfrastructureError("down"), InfrastructureError("down"), DataError("it may have been pruned")]
    await publish(lab, 0)
    async with lab.running(evaluator, "evaluator") as service:
        await lab.until(lambda: _true(not server.failing))
        assert service.vitals.retried == 2
        await publish(lab, 3)
        await lab.until(evaluated(lab, 3))
        assert lab.said(service) == ""
    assert await measured(lab) == [(3, 6)]


@pytest.mark.parametrize("kind", [DataError, AccessError])
async def test_a_last_policy_that_is_refused_does_not_hold_the_run_open(lab, server, kind):
    server.failing = [kind("damaged")]
    await publish(lab, 30)
    with anyio.fail_after(5):
        async with lab.running(evaluator, "evaluator", drain=False):
            pass
    assert not await measured(lab)


async def test_where_the_trainer_is_anothers_it_goes_on_after_the_last_policy(lab, server):
    config = msgspec.structs.replace(CONFIG, mode="observe")
    await publish(lab, 30)
    async with lab.running(lambda service: run_evaluator(service, config), "evaluator"):
        await lab.until(evaluated(lab, 30))
        await publish(lab, 40)
        await lab.until(evaluated(lab, 40))


@pytest.mark.parametrize(
    ("avg", "rater", "told"), [(0.0, None, True), (0.01, None, True), (0.2, None, False), (0.0, "numeric", False)]
)
def test_a_rate_near_zero_by_an_environments_own_judgement_names_the_way_to_have_a_rater_judge(avg, rater, told):
    settings = EnvironmentConfig(kind="x", success_rater=rater)
    note = evaluator_module._failing(
        SimpleNamespace(name="sums", evaluated=SimpleNamespace(settings=settings)), SimpleNamespace(avg=avg)
    )
    assert bool(note) == told
    assert not told or "name it in environments.sums.success_rater" in note


async def test_a_prompt_beyond_the_context_costs_its_own_task_alone(lab, server, monkeypatch):
    async def context():
        return 300

    server.max_model_len = context
    task = Held.task
    monkeypatch.setattr(
        Held, "task", lambda env, index: task(env, index) if index != 1 else Task(item="1", prompt="x" * 400)
    )
    await publish(lab, 0)
    async with lab.running(evaluator, "evaluator") as service:
        await lab.until(evaluated(lab, 0))
        assert "held: 1 held-out tasks leave no room" in lab.said(service)
    (event,) = await lab.events("eval", EvalEvent, "held")
    assert (event.items, event.unjudged) == (6, 3)
    assert event.tasks[1] == 1
    assert event.task_judged[1] == 0
