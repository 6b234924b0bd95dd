"""Held-out tasks by default: never drawn, evaluated on a schedule of each environment, and no end of the run."""

from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import msgspec
import numpy as np
import pytest
from stages import run_evaluator

from lachesis import Environment, Task
from lachesis.pipeline.config.evaluation_sources import held_out_tasks
from lachesis.pipeline.config.run import EnvironmentConfig, EvaluationConfig, RunConfig, TrainingConfig
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback
from lachesis.pipeline.curriculum.stage import items_of
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.environment.held_out import kept_record
from lachesis.pipeline.environment.prompts_record import note_changed_prompts
from lachesis.pipeline.environment.stage import _Producer
from lachesis.pipeline.evaluator import evaluated_env
from lachesis.pipeline.evaluator import stage as evaluator_module
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.control import CurriculumSnapshot, PolicyRecord
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

pytestmark = pytest.mark.outside

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x"), "words": EnvironmentConfig(kind="x")},
    evaluate=EvaluationConfig(every_steps=10, items_between=4, samples=2),
    training=TrainingConfig(steps=30),
)


class Pool(Environment):
    def __len__(self):
        return 100

    def task(self, index):
        return Task(item=f"{index}", prompt=f"say {index}", task={"answer": str(index)})

    def reward(self, task, session):
        return float(session.text == "yes")


HELD_OUT = held_out_tasks(CONFIG, "sums", Pool().item_keys()).tasks


# never drawn


@pytest.mark.parametrize("wanted", ["all", "held out", "one"])
async def test_a_held_out_task_is_never_drawn_whatever_the_curriculum_says(lab, wanted):
    weights = np.zeros(100, np.float32)
    weights[{"all": slice(None), "held out": HELD_OUT, "one": HELD_OUT[:1]}[wanted]] = 1.0

    async def follow(service):
        settings = CONFIG.environments["sums"]
        producer = service.producer = _Producer(
            service,
            "sums",
            Pool(),
            settings,
            InferenceDirectory(1.0),
            producer="p",
            holder="p",
            held_out=HELD_OUT,
            seed=0,
        )
        async with service.until_drained():
            await producer.follow_curriculum()

    async with lab.running(follow, "environment") as service:
        await lab.until(lambda: _true(hasattr(service, "producer")))
        drawn = [draw for _ in range(20) for draw in service.producer.sampler.sample(50, service.producer.rng)]
        assert not {draw.item for draw in drawn} & set(HELD_OUT.tolist())
        snapshot = CurriculumSnapshot(
            run="r", env="sums", revision="live", id="s", observed=1, strategy="s", weights=as_bytes(weights, "float32")
        )
        await lab.bus.put(keys.curriculum("live", "sums"), encode(snapshot))
        await lab.until(lambda: _true(service.producer.sampler.snapshot_id == "s"))
        drawn = [draw for _ in range(20) for draw in service.producer.sampler.sample(50, service.producer.rng)]
    assert not {draw.item for draw in drawn} & set(HELD_OUT.tolist())
    assert {draw.item for draw in drawn} == set(range(100)) - set(HELD_OUT.tolist())
    assert all(draw.probability == pytest.approx(1 / 90) for draw in drawn)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_weighs_held_out_tasks(strategy):
    items = replace(items_of(Pool(), HELD_OUT), difficulty=np.arange(100.0))
    made = load_strategy(items, CurriculumConfig(strategy=strategy))
    for n in range(300):
        item = int(np.setdiff1d(np.arange(100), HELD_OUT)[n % 90])
        made.observe(
            ItemFeedback(id=f"{n}", env="e", item=item, skill=None, n=8, success=n % 3 / 2, policy_step=n // 30)
        )
    assert not made.snapshot().weights[HELD_OUT].any()
    assert made.snapshot().weights.sum() == pytest.approx(100)
    assert made.metrics()["curriculum/effective_items"] <= 90


@pytest.mark.slow
def test_exploring_still_reaches_the_tasks_that_were_not_seen_for_long():
    """Never seen, held-out tasks would take nearly the whole of what is there for exploring."""
    made = load_strategy(items_of(Pool(), HELD_OUT), CurriculumConfig(strategy="irt", explore=0.5))
    drawable = np.setdiff1d(np.arange(100), HELD_OUT)
    rarely = int(drawable[0])
    for n in range(4000):  # all are solved by half, all but one were seen recently
        item = int(drawable[1 + n % 89])
        made.observe(ItemFeedback(id=f"{n}", env="e", item=item, skill=None, n=8, success=0.5, policy_step=0))
    weights = made.snapshot().weights
    assert weights[rarely] / weights.sum() > 0.2


# evaluated


class Server(FakeInference):
    """An evaluation server that any weights fit."""

    def __init__(self, reply):
        super().__init__(reply, version="0-none-none")
        self.loaded = []

    async def weight_version(self):
        return self.version

    async def update_weights(self, path, version):
        self.loaded.append(version)
        self.version = version

    async def current(self):
        return self


@pytest.fixture
def world(monkeypatch):
    class World:
        server = Server(lambda prompt, call: "yes" if call % 2 else "no")
        envs = {"x": Pool}

    @asynccontextmanager
    async def role(*_, **__):
        yield World.server

    monkeypatch.setattr(evaluator_module, "open_configured_role", role)
    monkeypatch.setattr(evaluated_env, "load_environment", lambda kind, _: World.envs[kind]())
    return World


def evaluator(config):
    return lambda service: run_evaluator(service, config)


async def publish(lab, step):
    record = PolicyRecord(run="r", version=f"{step}-a-d{step}", weights="/w", tokenizer_hash="t", written_ns=1)
    await lab.bus.put(keys.POLICY, encode(record))


async def measured(lab, env):
    return await lab.events("eval", EvalEvent, env)


def evaluated(lab, step, *envs):
    async def condition():
        return all([step in [event.policy_step for event in await measured(lab, env)] for env in envs])

    return condition


async def _true(value):
    return value


async def test_without_an_evaluation_table_the_held_out_tasks_are_evaluated(lab, world):
    await publish(lab, 0)
    async with lab.running(evaluator(CONFIG), "evaluator", drain=False) as service:
        for step in (0, 10, 30):
            await publish(lab, step)
            await lab.until(evaluated(lab, step, "sums", "words"))
    for env in ("sums", "words"):
        events, chosen = await measured(lab, env), held_out_tasks(CONFIG, env, Pool().item_keys()).tasks.tolist()
        assert [event.tasks for event in events] == [chosen, chosen[:4], chosen]
        assert all(event.task_judged == [2] * event.items for event in events)
        assert all(sum(event.task_successes) / (2 * event.items) == event.avg for event in events)
        assert all(event.error is not None for event in events)
        assert service.vitals.metrics[f"eval/{env}/avg@2"] == events[-1].avg
        assert service.vitals.metrics[f"eval/{env}/error"] == events[-1].error
    assert events[0].tasks == (await measured(lab, "sums"))[0].tasks, "equal tasks, so none is trained on by the other"


async def test_a_success_rater_judges_held_out_tasks_too(lab, world):
    """Half of the answers are "yes", which the environment takes for right and the run's rater does not."""
    config = msgspec.structs.replace(
        CONFIG,
        environments={"sums": EnvironmentConfig(kind="x", success_rater="exact_match")},
        scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    )
    await publish(lab, 0)
    async with lab.running(evaluator(config), "evaluator"):
        await lab.until(evaluated(lab, 0, "sums"))
    (event,) = await measured(lab, "sums")
    assert (event.avg, event.greedy) == (0.0, 0.0)


async def test_an_environment_that_was_evaluated_before_a_kill_is_not_evaluated_again_with_the_others(lab, world):
    """Killed between the first environment and the second: only the second is evaluated by the next life."""

    class Words(Pool):
        def task(self, index):
            return Task(item=f"{index}", prompt=f"spell {index}")

    asked = []

    def reply(prompt, call):
        asked.append(prompt)
        return "yes"

    world.server, world.envs["words"] = Server(reply), Words
    config = msgspec.structs.replace(
        CONFIG, environments={"sums": CONFIG.environments["sums"], "words": EnvironmentConfig(kind="words")}
    )
    await publish(lab, 0)
    async with lab.running(evaluator(config), "evaluator") as service:
        await lab.until(evaluated(lab, 0, "sums"))
        service.kill()
    assert await measured(lab, "words") == []
    asked.clear()
    async with lab.running(evaluator(config), "evaluator") as service:
        await lab.until(evaluated(lab, 0, "words"))
        assert service.vitals.metrics["eval/sums/step"] == 0.0  # what was measured before is still shown
    assert asked
    assert not [prompt for prompt in asked if "say" in prompt]
    assert len(await measured(lab, "sums")) == len(await measured(lab, "words")) == 1


async def test_a_pool_that_is_too_small_is_told_and_left_out(lab, world):
    class Few(Pool):
        def __len__(self):
            return 20

    world.envs["few"] = Few
    config = msgspec.structs.replace(
        CONFIG, environments={"few": EnvironmentConfig(kind="few"), "sums": CONFIG.environments["sums"]}
    )
    await publish(lab, 0)
    async with lab.running(evaluator(config), "evaluator") as service:
        await lab.until(evaluated(lab, 0, "sums"))
        said = lab.said(service)
        await publish(lab, 30)
    assert "environment few is not evaluated: of its 20 tasks fewer than 8" in said
    assert "evaluate.held_out" in said
    assert await measured(lab, "few") == []


@pytest.mark.parametrize(("seed", "most", "doubted"), [(0, 200, False), (0, 9, False), (1, 200, True)])
async def test_tasks_that_were_trained_on_before_they_were_held_out_are_told(lab, world, seed, most, doubted):
    await publish(lab, 0)
    async with lab.running(evaluator(CONFIG), "evaluator"):
        await lab.until(evaluated(lab, 0, "sums", "words"))
    again = msgspec.structs.replace(CONFIG, seed=seed, evaluate=msgspec.structs.replace(CONFIG.evaluate, items=most))
    async with lab.running(evaluator(again), "evaluator") as service:
        await lab.until(lambda: _true(service.vitals.state == "ok"))
        said = lab.said(service)
    assert ("environment sums is evaluated on other tasks than up to step 0" in said) == doubted


async def test_where_only_raters_judge_they_judge_evaluations_too(lab, world):
    """By the rater that tells success, and the threshold that the environment's settings give."""

    class Unrewarded(Pool):
        def reward(self, task, session):
            return {}

    world.envs["unrewarded"] = Unrewarded
    world.server = Server(lambda prompt, call: "yes" * (1 + call % 2))
    raters = [{"rater": "format", "params": {"pattern": "(yes){2}"}}, {"rater": "repetition"}]
    own = {"kind": "unrewarded", "scoring": {"raters": raters}, "success_rater": "format", "success_threshold": 0.5}
    config = msgspec.structs.replace(CONFIG, environments={"own": msgspec.convert(own, EnvironmentConfig)})
    await publish(lab, 0)
    async with lab.running(evaluator(config), "evaluator"):
        await lab.until(evaluated(lab, 0, "own"))
    (event,) = await measured(lab, "own")
    assert event.task_successes == [1] * 10
    assert event.task_judged == [2] * 10


@pytest.mark.parametrize("broken", ["task", "score", "nothing judges"])
async def test_an_environment_that_cannot_be_evaluated_never_ends_the_run(lab, world, broken):
    class Broken(Pool):
        def task(self, index):
            if broken == "task":
                raise KeyError(index)
            return super().task(index)

        def reward(self, task, session):
            return {} if broken == "nothing judges" else 1.0

    if broken == "score":

        async def score(self, task, session):
            raise ZeroDivisionError

        Broken.score = score
    world.envs["broken"] = Broken
    config = msgspec.structs.replace(
        CONFIG, environments={"broken": EnvironmentConfig(kind="broken"), "sums": CONFIG.environments["sums"]}
    )
    await publish(lab, 0)
    async with lab.running(evaluator(config), "evaluator", drain=False) as service:
        await lab.until(evaluated(lab, 0, "sums"))
        assert "policy 0-a-d0 was not evaluated on broken" in lab.said(service)
        await publish(lab, 30)
        await lab.until(evaluated(lab, 30, "sums"))
        assert "policy 0-a-d0" not in lab.said(service)
        assert "policy 30-a-d30 was not evaluated on broken" in lab.said(service)
    assert await measured(lab, "broken") == []


async def test_a_task_that_a_bug_costs_is_not_judged_and_the_others_are(lab, world):
    class Odd(Pool):
        broken = 0

        def task(self, index):
            if index == self.broken:
                raise KeyError(index)
            return super().task(index)

    def held_out(broken):
        Odd.broken = broken
        return held_out_tasks(CONFIG, "sums", Odd().item_keys()).tasks.tolist()

    Odd.broken = next(broken for broken in range(100) if broken in held_out(broken))
    place = held_out(Odd.broken).index(Odd.broken)
    world.envs["x"] = Odd
    await publish(lab, 0)
    async with lab.running(evaluator(CONFIG), "evaluator"):
        with anyio.fail_after(60):
            await lab.until(evaluated(lab, 0, "sums"))
    (event,) = await measured(lab, "sums")
    assert event.task_judged == [0 if n == place else 2 for n in range(10)]
    assert event.unjudged == 3  # two sampled answers and the greedy one


@pytest.mark.parametrize("step", [10, 10**9])
async def test_an_evaluation_of_a_policy_that_there_never_was_stops_no_later_one(lab, world, step):
    """A holder of the evaluator's key may store one, which lies there for ever."""
    await publish(lab, 0)
    async with lab.running(evaluator(CONFIG), "evaluator"):
        await lab.until(evaluated(lab, 0, "sums", "words"))
    real, *_ = await measured(lab, "sums")
    forged = msgspec.structs.replace(real, policy_step=step, policy_version=f"{step}-a-d{step}")
    await lab.bus.publish(subjects.event("eval", "r", "live", "sums"), encode(forged), msg_id="forged")
    async with lab.running(evaluator(CONFIG), "evaluator", drain=False):
        await publish(lab, 30)
        await lab.until(evaluated(lab, 30, "sums", "words"))
    assert [event.policy_step for event in await measured(lab, "sums")] == [0, step, 30]


# prompts that are made in another way


class Asked(Pool):
    def __init__(self, system, size=100, answers=0, reverse=False):
        self.system, self.size, self.answers, self.reverse = system, size, answers, reverse

    def __len__(self):
        return self.size

    def task(self, index):
        task = super().task(self.size - 1 - index if self.reverse else index)
        prompt = [Message(role="system", content=self.system), *task.messages]
        return Task(item=task.item, prompt=prompt, task={"answer": self.answers if task.item == "7" else 0})

    def item_keys(self):
        keys = Pool().item_keys()[: self.size]
        return keys[::-1] if self.reverse else keys


@pytest.mark.parametrize(
    ("env", "tokenizer", "named"),
    [
        (Asked("a"), "1+aa", None),
        (Asked("a", 90), "1+aa", "not those of the last start (100 then, 90 now)"),
        (Asked("a", reverse=True), "1+aa", "in another order"),
        (Asked("a", answers=1), "1+aa", "what raters are given with them is another"),
        (Asked("a", answers=1, reverse=True), "1+aa", "what raters are given with them is another"),
        (Asked("b"), "1+aa", "system message"),
        (Asked("a"), "2+aa", "chat template changed"),
        (Asked("a"), "1+bb", "chat_template_kwargs changed"),
        (Asked("a"), "1", "chat_template_kwargs changed"),
        (Asked("b"), "2", "prompts and the tokenizer or its chat template and chat_template_kwargs changed"),
    ],
)
async def test_prompts_that_are_made_in_another_way_than_at_the_last_start_are_named(lab, env, tokenizer, named):
    async def start(env, tokenizer):
        service = Service(lab.bus, "environment", lab.run)
        await note_changed_prompts(service, "sums", env, env.item_keys(), tokenizer)
        return lab.said(service) or None

    assert await start(Asked("a"), "1+aa") is None
    note = await start(env, tokenizer)
    assert note is None if named is None else named in note
    assert await start(env, tokenizer) is None, "it is said at the start after the change"


def test_a_copy_that_cannot_be_read_is_refused_and_is_not_called_missing(tmp_path):
    assert kept_record(tmp_path, "sums") is None
    (tmp_path / "held_out.sums.msgpack").mkdir()
    with pytest.raises(ConfigError, match=r"held_out\.sums\.msgpack says which tasks are held out, and cannot be read"):
        kept_record(tmp_path, "sums")
