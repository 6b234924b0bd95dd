"""The trainer on a hand-written ledger: order, exactness over kills, what it refuses."""

import inspect
import shutil
import threading
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
import torch
from stages import run_trainer

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.config.run import EnvironmentConfig, InferenceConfig, RunConfig, TrainingConfig
from lachesis.pipeline.errors import (
    CheckpointError,
    FencedError,
    HistoryLostError,
    InfrastructureError,
    LedgerError,
    OutOfMemoryError,
)
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.ledger.checkpoint_state import best_checkpoint, known_checkpoints, latest_checkpoint
from lachesis.pipeline.ledger.checkpoint_sums import write_sums
from lachesis.pipeline.model import host_memory
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.model.policy import ModelSetup, build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, rounded, weights_digest
from lachesis.pipeline.model.weight_files import read_weights
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer import last_evaluation, torch_backend, train_loop, unreported_steps
from lachesis.pipeline.trainer import stage as stage_module
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.publication import PolicyPublisher
from lachesis.pipeline.weights import sender as sender_module
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.pipeline.weights.download import WeightsReceiver
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import GENESIS, TrainReport

STEPS = 6


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("model")
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, folder)
    return folder, policy.tokenizer_hash


@pytest.fixture
def config(tmp_path, model):
    return RunConfig(
        run="r",
        folder=str(tmp_path),
        model=str(model[0]),
        training=TrainingConfig(
            steps=STEPS, checkpoint_every=2, learner=LearnerConfig(learning_rate=1e-2), weights_kept=100
        ),
    )


def a_batch(lab, model, number, groups=2):
    draw = np.random.default_rng(number)
    return [
        lab.group(
            100 * number + n,
            samples=2,
            tokens=int(draw.integers(4, 9)),
            tokenizer_hash=model[1],
        )
        for n in range(groups)
    ]


async def fill(lab, model, steps=STEPS):
    await lab.extend_ledger(*(a_batch(lab, model, number) for number in range(steps)))


async def reports(lab):
    subject = subjects.state("r", "trainer", subjects.LIVE, "main")
    async with lab.bus.read(subjects.LEDGER, [subject], follow=False) as messages:
        return [decode(TrainReport, message.data) async for message in messages]


def weights_after(config):
    checkpoint = load_checkpoint(latest_checkpoint(config.path / "checkpoints"), config.training.learner)
    return checkpoint.state.step, weights_digest(checkpoint.policy.model.state_dict())


def forget(lab, subject):
    """Make the broker lose every message of a subject of LEDGER."""
    log = lab.bus._logs[subjects.LEDGER]
    log._last_of.pop(subject)
    log._ids.clear()
    for seq in [seq for seq, message in log._messages.items() if message.subject == subject]:
        del log._messages[seq]


@pytest.fixture
async def uninterrupted(lab, model, config, tmp_path):
    """Weights after all steps, and the groups of each, of a trainer that nothing happened to."""
    await fill(lab, model)
    calm = msgspec.structs.replace(config, folder=str(tmp_path / "calm"))
    trained = []
    with recording(trained):
        await run_trainer(Service(lab.bus, "trainer", "r"), calm)
    step, digest = weights_after(calm)
    assert step == STEPS
    forget(lab, subjects.state("r", "trainer", subjects.LIVE, "main"))  # another life begins: this one never was
    lab.bus._entries.clear()
    return digest, trained


@contextmanager
def recording(trained, on_step=None):
    """Note the groups of every batch that the optimizer took, and call `on_step` with their number so far."""
    step = Learner.step

    def recorded(learner, batch):
        metrics = step(learner, batch)
        trained.append(batch.group_ids)
        if on_step:
            on_step(len(trained))
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", recorded)
        yield


async def test_a_trainer_kept_waiting_makes_a_checkpoint(lab, model, config, monkeypatch):
    """It may wait for room that only a checkpoint can make."""
    monkeypatch.setattr(train_loop, "_IDLE_S", 0.2)
    await fill(lab, model, 3)

    async def reported(step):
        return [report.step for report in await reports(lab)][-1:] == [step]

    async with lab.running(lambda service: run_trainer(service, config), "trainer"):
        await lab.until(lambda: reported(3))  # two are due every second step
        await fill_on(lab, model, 3)
        await lab.until(lambda: reported(4))
    steps = [report.step for report in await reports(lab)]  # a slow machine keeps it waiting more often
    assert steps == sorted(set(steps))
    assert set(steps) >= {2, 3, 4}
    assert weights_after(config)[0] == 4


async def fill_on(lab, model, number):
    await lab.extend_ledger(a_batch(lab, model, number))


async def test_it_trains_in_order_publishes_checkpoints_and_reports(lab, model, config, monkeypatch):
    published = []
    put = lab.bus.put

    async def watched(key, value, **kwargs):
        published.append(decode(PolicyRecord, value))
        return await put(key, value, **kwargs)

    monkeypatch.setattr(lab.bus, "put", watched)
    await fill(lab, model)
    trained = []
    with recording(trained):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert [ids[0] for ids in trained] == [f"{100 * number:032x}" for number in range(STEPS)]
    versions = [record.policy_version for record in published]
    assert [version.step for version in versions] == list(range(STEPS + 1))
    assert len({version.lineage for version in versions}) == 1
    assert len({version.digest for version in versions}) == STEPS + 1
    assert {record.tokenizer_hash for record in published} == {model[1]}
    found = await reports(lab)
    assert [report.step for report in found] == [2, 4, 6]
    assert [report.ledger_index for report in found] == [3, 7, 11]
    assert found[-1].policy_version == published[-1].version
    rows = (config.path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(row)["train/step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("learner", "steps"),
    [
        ({"max_step_kl": 1e-12}, [1, 2, 3, 6]),  # every step is too large: the first two are reported at once
        ({"max_step_kl": 1e-12, "on_large_step": "shorten"}, [3, 6]),
        ({"max_step_kl": 100.0}, [3, 6]),
    ],
)
async def test_the_first_two_steps_that_are_too_large_are_reported_at_once(lab, model, config, learner, steps):
    """The health checks learn of it by the report. The other checkpoints stay at multiples of `checkpoint_every`."""
    await fill(lab, model)
    training = msgspec.structs.replace(
        config.training, checkpoint_every=3, learner=LearnerConfig(learning_rate=1e-2, **learner)
    )
    await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=training))
    found = await reports(lab)
    assert [report.step for report in found] == steps
    assert [mismatch.step_kl is not None for report in found for mismatch in report.mismatches] == [True] * STEPS


async def test_slow_steps_are_checkpointed_more_often_unless_that_takes_long(lab, model, config, monkeypatch):
    await fill(lab, model)
    training = msgspec.structs.replace(config.training, checkpoint_every=100, checkpoint_after_s=1e-9)
    monkeypatch.setattr(unreported_steps, "_TIMES_AS_LONG", 0)
    await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=training))
    assert [report.step for report in await reports(lab)] == list(range(1, STEPS + 1))


async def test_checkpoints_that_take_long_are_seldom(lab, model, config, monkeypatch):
    await fill(lab, model)
    training = msgspec.structs.replace(config.training, checkpoint_every=100, checkpoint_after_s=1e-9)
    monkeypatch.setattr(unreported_steps, "_TIMES_AS_LONG", 1e9)
    await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=training))
    assert len(await reports(lab)) < STEPS


def limited_memory(patch, tokens):
    """Let passes over more than so many padded tokens run out of memory."""
    ran = SampledLogprobs._compute

    def compute(self, tokens_BT, *args):
        if torch.is_grad_enabled() and tokens_BT.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return ran(self, tokens_BT, *args)

    patch.setattr(SampledLogprobs, "_compute", compute)


@pytest.mark.slow
async def test_a_trainer_that_runs_out_of_memory_goes_on_in_smaller_micro_batches(
    lab, model, config, monkeypatch, caplog
):
    await fill(lab, model)
    service = Service(lab.bus, "trainer", "r")
    with monkeypatch.context() as patch:
        limited_memory(patch, 20)
        await run_trainer(service, config)
    found = await reports(lab)
    assert [report.step for report in found] == [2, 4, 6]
    ((first, tokens),) = found[-1].numerics.microbatches
    assert first == 0
    assert tokens <= 20
    rows = [msgspec.json.decode(row) for row in (config.path / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["train/microbatch_tokens"] for row in rows] == [tokens] * STEPS
    assert f"micro-batches have at most {tokens} tokens instead of 1,024" in service.vitals.status_text
    assert len([text for text in caplog.messages if "memory ran out" in text]) == 1

    await fill_on(lab, model, STEPS)  # its next life begins with what fits
    longer = msgspec.structs.replace(config.training, steps=STEPS + 1)
    await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=longer))
    assert (await reports(lab))[-1].numerics.microbatches == ((STEPS, tokens),)


@pytest.mark.slow
async def test_a_trainer_without_enough_memory_for_one_sequence_ends_with_the_reason(lab, model, config, monkeypatch):
    await fill(lab, model)
    limited_memory(monkeypatch, 2)
    with pytest.raises(
        OutOfMemoryError, match="one sequence of 13 tokens alone does not fit into memory: 2,147,483,648"
    ):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert await reports(lab) == []


@pytest.mark.parametrize("copy", [2, 3])
async def test_a_trainer_without_memory_for_its_copies_ends_with_the_reason(lab, model, config, monkeypatch, copy):
    await fill(lab, model)
    allocate, asked = host_memory.allocate, []

    def allocated(forms, **about):
        asked.append(any("/" in name for name in forms))
        if len(asked) == copy:
            raise MemoryError("Unable to allocate 12.0 GiB for an array")
        return allocate(forms, **about)

    monkeypatch.setattr(host_memory, "allocate", allocated)
    longer = msgspec.structs.replace(config.training, checkpoint_every=1)
    with pytest.raises(OutOfMemoryError, match=r"the copy of what a checkpoint holds .*`lachesis plan` counts"):
        await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=longer))
    assert asked == [False, *[True] * (copy - 1)]


async def test_a_trainer_without_memory_for_a_copy_for_servers_says_so(lab, model, config, monkeypatch):
    def allocated(forms, **about):
        raise MemoryError("Unable to allocate 12.0 GiB for an array")

    monkeypatch.setattr(host_memory, "allocate", allocated)
    with pytest.raises(OutOfMemoryError, match="the copy of the weights for servers does not fit into memory: Unable"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)


def an_evaluation(step, rates):
    return EvalEvent(
        run="r",
        env="sums",
        revision="live",
        policy_version=f"{step}-a-d",
        policy_step=step,
        items=len(rates),
        k=1,
        temperature=1.0,
        avg=sum(rates) / len(rates),
        pass_at_k=0.5,
        tasks=list(range(len(rates))),
        task_successes=rates,
        task_judged=[1] * len(rates),
        started_ns=step,
        ended_ns=step + 1,
    )


async def evaluate_best_at_2(lab):
    for event in (an_evaluation(0, [0, 1]), an_evaluation(2, [1, 1]), an_evaluation(4, [0, 1])):
        await lab.bus.publish(subjects.event("eval", "r", "live", "sums"), encode(event), msg_id=f"{event.policy_step}")


def evaluated(config, kept=1):
    training = msgspec.structs.replace(config.training, checkpoints_kept=kept)
    return msgspec.structs.replace(config, environments={"sums": EnvironmentConfig(kind="x")}, training=training)


async def test_the_checkpoint_of_the_best_held_out_rate_is_kept_and_named(lab, model, config):
    await fill(lab, model)
    await evaluate_best_at_2(lab)
    await run_trainer(Service(lab.bus, "trainer", "r"), evaluated(config))
    folder = config.path / "checkpoints"
    assert [state.step for _, state in known_checkpoints(folder)] == [STEPS, 2]
    assert best_checkpoint(folder).name == "step-00000002"
    assert weights_after(config)[0] == STEPS, "the newest is gone on with, not the best"


async def test_an_evaluation_that_comes_between_two_checkpoints_saves_the_first(lab, model, config, monkeypatch):
    """Of one checkpoint kept, the best would else be removed as the next is written."""
    await fill(lab, model)
    await evaluate_best_at_2(lab)
    catch_up, asked = EvaluationReader.catch_up, []

    async def late(reader):
        asked.append(reader)
        return [] if len(asked) <= 2 else await catch_up(reader)  # before and after the checkpoint of step 2

    monkeypatch.setattr(EvaluationReader, "catch_up", late)
    await run_trainer(Service(lab.bus, "trainer", "r"), evaluated(config))
    assert [state.step for _, state in known_checkpoints(config.path / "checkpoints")] == [STEPS, 2]


@pytest.fixture(autouse=True)
def _no_evaluator_is_waited_for_long(monkeypatch):
    monkeypatch.setattr(last_evaluation, "SILENCE_S", 0.2)


async def test_the_log_ends_with_the_evaluation_of_the_last_policy(lab, model, config, monkeypatch):
    monkeypatch.setattr(last_evaluation, "SILENCE_S", 60.0)
    await fill(lab, model)
    config = evaluated(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_trainer, Service(lab.bus, "trainer", "r"), config)

        async def last_reported():
            return STEPS in [report.step for report in await reports(lab)]

        await lab.until(last_reported)
        (*_, before) = rows_of(config)
        assert not [name for name in before if name.startswith("eval/")]
        event = an_evaluation(STEPS, [1, 1])  # the evaluator takes longer than the trainer
        await lab.bus.publish(subjects.event("eval", "r", "live", "sums"), encode(event), msg_id="last")
    rows = rows_of(config)
    assert [row["train/step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    interval = {"eval/sums/low": pytest.approx(0.3424, abs=1e-4), "eval/sums/high": 1.0}
    assert rows[-1] == before | interval | {"eval/sums/avg@1": 1.0, "eval/sums/pass@1": 0.5, "eval/sums/step": 6.0}


def rows_of(config):
    return [msgspec.json.decode(row) for row in (config.path / "metrics.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("how", ["away", "rolled back"])
async def test_evaluations_that_cannot_be_read_keep_no_checkpoint_from_being_written(
    lab, model, config, monkeypatch, how
):
    await fill(lab, model)
    read = lab.bus.read

    def failing(stream, *args, **kwargs):
        if stream == subjects.EVENTS:
            raise InfrastructureError("down") if how == "away" else HistoryLostError("gone")
        return read(stream, *args, **kwargs)

    monkeypatch.setattr(lab.bus, "read", failing)
    await run_trainer(Service(lab.bus, "trainer", "r"), evaluated(config))
    assert weights_after(config)[0] == STEPS
    assert best_checkpoint(config.path / "checkpoints") is None


async def live_until_killed(lab, config):
    async with lab.running(lambda service: run_trainer(service, config), "trainer") as service:
        lab.alive = service
        await lab.until(lambda: dead(service))


@contextmanager
def dying_at_checkpoint(lab, step, *, before=False):
    """Kill the trainer that is alive at the checkpoint of `step`: before it is begun, or once it is on disk."""
    write = stage_module.write_checkpoint

    def writing(folder, state, *args, **kwargs):
        if state.step == step and before:
            anyio.from_thread.run_sync(lab.alive.kill)
            raise lab.Killed
        path = write(folder, state, *args, **kwargs)
        if state.step == step:
            anyio.from_thread.run_sync(lab.alive.kill)
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module, "write_checkpoint", writing)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("die_at", range(1, STEPS))
async def test_a_trainer_killed_in_mid_step_goes_on_with_the_same_batches_to_the_same_bits(
    lab, config, uninterrupted, die_at
):
    digest, calm = uninterrupted
    trained = []

    def kill(steps):
        if steps == die_at:
            anyio.from_thread.run_sync(lab.alive.kill)  # after the optimizer moved, before anything was noted

    with recording(trained, kill):
        await live_until_killed(lab, config)
    first, rest = trained[:die_at], []
    found = known_checkpoints(config.path / "checkpoints")
    resumed_at = found[0][1].step if found else 0
    due = (die_at - 1) // 2 * 2
    assert resumed_at in {due, max(0, due - 2)}, "the newest may still have been under way"
    with recording(rest):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert first == calm[:die_at]
    assert rest == calm[resumed_at:]
    assert weights_after(config) == (STEPS, digest)
    assert [report.step for report in await reports(lab)] == [2, 4, 6]


async def dead(service):
    return service.bus.dead


@pytest.mark.parametrize("step", [2, 4, 6])
@pytest.mark.parametrize("moment", ["before the checkpoint", "before the report"])
async def test_a_trainer_killed_around_a_checkpoint_goes_on_to_the_same_bits(lab, config, uninterrupted, step, moment):
    digest, calm = uninterrupted
    with dying_at_checkpoint(lab, step, before=moment == "before the checkpoint"):
        await live_until_killed(lab, config)
    assert step not in [report.step for report in await reports(lab)]
    rest = []
    with recording(rest):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert rest == calm[step if moment == "before the report" else step - 2 :]
    assert weights_after(config) == (STEPS, digest)
    assert [report.step for report in await reports(lab)] == [2, 4, 6]


CRASH_POINTS = {  # where, what, whether before or after it, and how to tell the step from its arguments
    "weights copied": (PolicyPublisher, "_publish", "before", lambda _, step, tensors: step),
    "weights stored": (sender_module, "write_new_weights", "after", lambda tensors, folder, step, *_: step),
    "policy announced": (BatchFeed, "publish_weights", "after", lambda _, version, *about: version.step),
    "checkpoint copied": (stage_module._Trainer, "_save", "before", lambda _, step, *about: step),
    "checkpoint written": (stage_module, "write_checkpoint", "after", lambda folder, state, *_, **about: state.step),
    "checkpoint reported": (BatchFeed, "report_trained", "after", lambda _, **about: about["step"]),
}


@contextmanager
def dying_at(lab, point, at):
    """Kill the trainer that is alive once it comes to `point` of step `at`."""
    where, name, when, step_of = CRASH_POINTS[point]
    call = getattr(where, name)

    async def dying(*args, **about):
        due = step_of(*args, **about) == at
        if not (due and when == "before"):
            await call(*args, **about)
        if due:
            lab.alive.kill()
            raise lab.Killed

    def dying_in_thread(*args, **about):
        found = call(*args, **about)
        if step_of(*args, **about) == at:
            anyio.from_thread.run_sync(lab.alive.kill)
            raise lab.Killed
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, dying if inspect.iscoroutinefunction(call) else dying_in_thread)
        yield


@contextmanager
def watching_records(lab):
    """Yield the policy records that are published from now on; the weights of each must be there by then."""
    records, put = [], lab.bus.put

    async def watched(key, value, **about):
        record = decode(PolicyRecord, value)
        assert record.version in record.weights
        assert await anyio.Path(record.weights).exists(), f"{record.version} is announced without its weights"
        records.append(record)
        return await put(key, value, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.bus, "put", watched)
        yield records


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("step", [2, STEPS])
async def test_a_trainer_killed_behind_its_steps_loses_and_doubles_nothing(lab, config, uninterrupted, point, step):
    digest, calm = uninterrupted
    rest = []
    with watching_records(lab) as records:
        with dying_at(lab, point, step):
            await live_until_killed(lab, config)
        found = known_checkpoints(config.path / "checkpoints")
        resumed_at = found[0][1].step if found else 0
        with recording(rest):
            await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert rest == calm[resumed_at:]
    assert weights_after(config) == (STEPS, digest)
    assert [report.step for report in await reports(lab)] == [2, 4, 6]
    lives = {record.policy_version.lineage: [] for record in records}
    for record in records:
        lives[record.policy_version.lineage].append(record.policy_version.step)
    killed, resumed = lives.values()
    assert killed == list(range(len(killed)))
    assert killed[-1] >= step - 1, "the announcement was at most one version behind"
    assert resumed == list(range(resumed_at, STEPS + 1))
    assert len({record.version for record in records}) == len(records)


@contextmanager
def held_up(name, where, at, step_of):
    """Hold up a call of a worker thread for step `at` until the yielded event is set."""
    call, release = getattr(where, name), threading.Event()

    def waiting(*args, **about):
        if step_of(*args, **about) == at:
            assert release.wait(60)
        return call(*args, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, waiting)
        try:
            yield release
        finally:
            release.set()


async def test_the_next_step_is_taken_while_weights_are_stored_and_no_further_one(lab, model, config):
    where, name, _, step_of = CRASH_POINTS["weights stored"]
    await fill(lab, model)
    trained = []
    with watching_records(lab) as records, recording(trained), held_up(name, where, 2, step_of) as release:
        async with lab.running(lambda service: run_trainer(service, config), "trainer"):
            await lab.until(lambda: count_is(trained, 3))
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert len(trained) == 3
            assert [record.policy_version.step for record in records] == [0, 1]
            release.set()
            await lab.until(lambda: reported(lab, 3))
    assert [record.policy_version.step for record in records] == list(range(STEPS + 1))
    announced = {record.policy_version.step: record.version for record in records}
    for report in await reports(lab):  # what step 3 has made of the weights is not in those of step 2
        assert report.policy_version == announced[report.step]


async def count_is(found, count):
    return len(found) == count


async def test_steps_are_taken_while_a_checkpoint_is_written_and_reported_behind_it(lab, model, config):
    where, name, _, step_of = CRASH_POINTS["checkpoint written"]
    await fill(lab, model)
    trained = []
    with watching_records(lab) as records, recording(trained), held_up(name, where, 2, step_of) as release:
        async with lab.running(lambda service: run_trainer(service, config), "trainer"):
            await lab.until(lambda: count_is(trained, 4))
            assert await reports(lab) == []
            release.set()
            await lab.until(lambda: reported(lab, 3))
    announced = {record.policy_version.step: record.version for record in records}
    found = await reports(lab)
    assert [(report.step, report.next_batch, report.ledger_index) for report in found] == [
        (2, 2, 3),
        (4, 4, 7),
        (6, 6, 11),
    ]
    assert [report.policy_version for report in found] == [announced[2], announced[4], announced[6]]
    assert [[times.batch for times in report.steps] for report in found] == [[0, 1], [2, 3], [4, 5]]
    for path, state in known_checkpoints(config.path / "checkpoints"):
        assert load_checkpoint(path, config.training.learner).state.policy_version == announced[state.step]


async def test_a_trainer_that_drains_ends_once_its_weights_and_checkpoint_are_out(lab, model, config):
    weights, checkpoint = CRASH_POINTS["weights stored"], CRASH_POINTS["checkpoint written"]
    await fill(lab, model)
    trained = []
    with (
        watching_records(lab) as records,
        recording(trained),
        held_up(weights[1], weights[0], 3, weights[3]) as weights_go_on,
        held_up(checkpoint[1], checkpoint[0], 2, checkpoint[3]) as checkpoint_goes_on,
    ):
        async with lab.running(lambda service: run_trainer(service, config), "trainer") as service:
            await lab.until(lambda: count_is(trained, 4))
            service.drain()
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert await reports(lab) == []
            weights_go_on.set()
            checkpoint_goes_on.set()
    assert [record.policy_version.step for record in records] == [0, 1, 2, 3, 4]
    found = await reports(lab)
    assert [report.step for report in found] == [2, 4]
    assert found[-1].policy_version == records[-1].version
    assert weights_after(config)[0] == 4


async def test_an_upload_that_fails_is_tried_again_while_the_next_step_is_taken(lab, model, config, monkeypatch):
    await fill(lab, model)
    write, tried = sender_module.write_new_weights, []

    def failing(tensors, folder, step, *about):
        tried.append(step)
        if step == 2 and tried.count(2) < 3:
            raise InfrastructureError("the store is away")
        return write(tensors, folder, step, *about)

    monkeypatch.setattr(sender_module, "write_new_weights", failing)
    with watching_records(lab) as records:
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert tried == [0, 1, 2, 2, 2, 3, 4, 5, 6]
    assert [record.policy_version.step for record in records] == list(range(STEPS + 1))
    assert [report.step for report in await reports(lab)] == [2, 4, 6]


@pytest.mark.parametrize("point", ["policy announced", "checkpoint reported"])
async def test_a_trainer_that_is_fenced_behind_its_steps_ends_with_that_alone(lab, model, config, monkeypatch, point):
    where, name, _, step_of = CRASH_POINTS[point]
    call = getattr(where, name)

    async def fenced(*args, **about):
        if step_of(*args, **about) == 2:
            raise FencedError("another trainer has taken over")
        await call(*args, **about)

    await fill(lab, model)
    monkeypatch.setattr(where, name, fenced)
    trained = []
    with recording(trained), pytest.raises(FencedError, match="another trainer"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert len(trained) < STEPS


class SharingServer:
    """An inference server on the trainer's segment: it has the version that was announced last."""

    def __init__(self, bus):
        self.bus = bus

    async def weight_version(self):
        return decode(PolicyRecord, (await self.bus.value("policy")).value).version

    async def pause(self, mode):
        assert mode == "keep"


@pytest.mark.slow
async def test_shared_weights_are_digested_as_they_were_after_their_step(lab, model, config, monkeypatch):
    """They are not copied: the next step begins, and changes them once the server has the version."""
    await fill(lab, model)
    monkeypatch.setattr(lab.bus, "put", recorded_put(lab, records := []))
    calm = msgspec.structs.replace(config, folder=f"{config.folder}/calm")
    await run_trainer(Service(lab.bus, "trainer", "r"), calm)
    digests = [record.policy_version.digest for record in records]
    forget(lab, subjects.state("r", "trainer", subjects.LIVE, "main"))
    lab.bus._entries.clear()
    records.clear()

    async def current(directory):
        return SharingServer(lab.bus)

    monkeypatch.setattr(InferenceDirectory, "current", current)
    vllm = {"policy": InferenceConfig(kind="vllm")}
    shared = msgspec.structs.replace(config, inference=vllm, weights=WeightsConfig(transport="shared_memory"))
    await run_trainer(Service(lab.bus, "trainer", "r"), shared)
    assert [record.policy_version.digest for record in records] == digests
    assert not list((shared.path / "weights").glob("*.safetensors"))


def recorded_put(lab, records):
    put = lab.bus.put

    async def recorded(key, value, **about):
        records.append(decode(PolicyRecord, value))
        return await put(key, value, **about)

    return recorded


async def test_two_lives_never_share_a_policy_version(lab, model, config):
    await fill(lab, model)
    trained = []

    def kill(steps):
        if steps == 3:
            anyio.from_thread.run_sync(lab.alive.kill)

    with recording(trained, kill):
        await live_until_killed(lab, config)
    versions = {path.stem for path in (config.path / "weights").iterdir()}
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    again = {path.stem for path in (config.path / "weights").iterdir()} - versions
    lineages = [{PolicyVersion.parse(version).lineage for version in group} for group in (versions, again)]
    assert len(lineages[0]) == len(lineages[1]) == 1
    assert lineages[0] != lineages[1]


async def test_a_drain_checkpoints_and_reports_what_was_trained(lab, model, config):
    await fill(lab, model, steps=3)
    async with lab.running(lambda service: run_trainer(service, config), "trainer") as service:
        await lab.until(lambda: handled(service, 3))
    assert (service.vitals.handled, service.vitals.emitted) == (6, 6)  # groups, two a step
    assert [report.step for report in await reports(lab)] == [2, 3]
    assert weights_after(config)[0] == 3


async def test_a_trainer_that_goes_on_has_the_template_of_its_servers_not_that_of_its_checkpoint(lab, model, config):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    before = load_model(model[0], ModelSetup(chat_template=template)).tokenizer_hash
    assert before != model[1]
    await lab.extend_ledger(*(a_batch(lab, (model[0], before), number) for number in range(2)))
    first = msgspec.structs.replace(config, chat_template=template)
    async with lab.running(lambda service: run_trainer(service, first), "trainer") as service:
        await lab.until(lambda: handled(service, 2))
    assert weights_after(config)[0] == 2
    assert decode(PolicyRecord, (await lab.bus.value("policy")).value).tokenizer_hash == before
    await lab.extend_ledger(a_batch(lab, model, 2))
    async with lab.running(lambda service: run_trainer(service, config), "trainer") as service:
        await lab.until(lambda: handled(service, 1))
    assert decode(PolicyRecord, (await lab.bus.value("policy")).value).tokenizer_hash == model[1]


async def handled(service, count):
    """Whether so many steps are done."""
    return service.vitals.process.count >= count


async def test_a_batch_whose_payload_is_gone_is_void_and_the_step_goes_on(lab, model, config):
    await lab.extend_ledger(a_batch(lab, model, 0))
    first = await lab.store(lab.group(999))
    await lab.bus.trim(subjects.ROLLOUTS, [], before=first)  # after the batcher, before the trainer
    await lab.extend_ledger(*(a_batch(lab, model, number) for number in range(1, STEPS)))
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    found = await reports(lab)
    assert [void.batch for void in found[0].voids] == [0]
    assert "is gone from ROLLOUTS" in found[0].voids[0].reason
    assert [report.step for report in found] == [2, 4, 6]
    assert not found[1].voids


async def test_a_batch_of_another_tokenizer_is_void(lab, config):
    await lab.extend_ledger([lab.group(1, tokenizer_hash="another")])
    short = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, steps=1))
    await run_trainer(Service(lab.bus, "trainer", "r"), short)
    (report,) = await reports(lab)
    assert [void.batch for void in report.voids] == [0]
    assert report.step == 1


async def test_a_void_survives_a_kill_before_its_report(lab, model, config):
    await lab.extend_ledger([lab.group(1, tokenizer_hash="another")], a_batch(lab, model, 1))
    with dying_at_checkpoint(lab, 2):
        await live_until_killed(lab, config)
    assert not await reports(lab)
    async with lab.running(lambda service: run_trainer(service, config), "trainer"):
        await lab.until(lambda: reported(lab, 1))
    (report,) = await reports(lab)
    assert [void.batch for void in report.voids] == [0]


async def reported(lab, count):
    return len(await reports(lab)) >= count


async def test_a_report_newer_than_the_checkpoint_is_refused(lab, model, config):
    await fill(lab, model)
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    shutil.rmtree(config.path / "checkpoints")
    with pytest.raises(CheckpointError, match="step 6 was reported"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)


async def test_a_checkpoint_of_other_weights_than_were_reported_is_refused(lab, model, config, tmp_path):
    await fill(lab, model)
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    other = msgspec.structs.replace(
        config,
        folder=str(tmp_path / "other"),
        run="other",
    )
    shutil.copytree(config.path / "checkpoints", other.path / "checkpoints")
    state = other.path / "checkpoints" / "step-00000006" / "trainer.json"
    found = msgspec.json.decode(state.read_bytes())
    version = PolicyVersion.parse(found["policy_version"])
    renamed = PolicyVersion(version.step, "elsewhere", version.digest)
    state.write_bytes(msgspec.json.encode(found | {"lineage": "elsewhere", "policy_version": str(renamed)}))
    write_sums(state.parent)
    mine = msgspec.structs.replace(other, run="r")
    with pytest.raises(CheckpointError, match="was reported as"):
        await run_trainer(Service(lab.bus, "trainer", "r"), mine)


async def test_a_checkpoint_that_disagrees_with_the_ledger_is_refused(lab, model, config):
    await fill(lab, model)
    short = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, steps=2))
    await run_trainer(Service(lab.bus, "trainer", "r"), short)
    state = config.path / "checkpoints" / "step-00000002" / "trainer.json"
    found = msgspec.json.decode(state.read_bytes())
    state.write_bytes(msgspec.json.encode(found | {"ledger_position": 0, "chain_hash": GENESIS}))
    write_sums(state.parent)
    with pytest.raises(CheckpointError, match="batch 0 follows step 2"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)


async def test_of_two_trainers_the_older_is_told_and_publishes_nothing_more(lab, model, config, tmp_path, monkeypatch):
    lineages = []
    put = lab.bus.put

    async def watched(key, value, **kwargs):
        revision = await put(key, value, **kwargs)
        lineages.append(decode(PolicyRecord, value).policy_version.lineage)
        return revision

    monkeypatch.setattr(lab.bus, "put", watched)
    await fill(lab, model, steps=2)
    second = msgspec.structs.replace(config, folder=str(tmp_path / "second"))

    async def older(service):
        with pytest.raises(FencedError):
            await run_trainer(service, config)
        service.kill()

    async with lab.running(older, "trainer") as first:
        await lab.until(lambda: reported(lab, 1))  # and waits for more
        shutil.copytree(config.path / "checkpoints", second.path / "checkpoints")
        async with lab.running(lambda service: run_trainer(service, second), "trainer") as newer:
            await lab.until(lambda: running(newer))
            await lab.extend_ledger(*(a_batch(lab, model, number) for number in range(2, STEPS)))
            await lab.until(lambda: dead(first))
            await lab.until(lambda: reported(lab, 3))
    found = await reports(lab)
    assert [report.step for report in found] == [2, 4, 6]
    assert [report.term == first.instance for report in found] == [True, False, False]
    assert lineages == [*[lineages[0]] * 3, *[lineages[-1]] * 5]


async def running(service):
    return service.vitals.state == "ok"


async def test_a_ledger_that_was_replaced_is_refused(lab, model, config):
    await fill(lab, model)
    short = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, steps=2))
    await run_trainer(Service(lab.bus, "trainer", "r"), short)
    forget(lab, subjects.ledger("r", "main"))  # another history takes its place
    await lab.extend_ledger(*(a_batch(lab, model, number + 50) for number in range(STEPS)))
    with pytest.raises(LedgerError, match="replaced"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)


async def test_a_ledger_that_lost_entries_is_refused(lab, model, config):
    await fill(lab, model, steps=2)
    short = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, steps=2))
    await run_trainer(Service(lab.bus, "trainer", "r"), short)
    log = lab.bus._logs[subjects.LEDGER]
    log._last_of[subjects.ledger("r", "main")] = 1
    for seq in [seq for seq in log._messages if seq > 1]:
        del log._messages[seq]
    log._last_of.pop(subjects.state("r", "trainer", subjects.LIVE, "main"))
    with pytest.raises(LedgerError, match="lost history"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)


async def test_a_broken_link_is_refused(lab, model, config):
    await fill(lab, model, steps=3)
    log = lab.bus._logs[subjects.LEDGER]
    removed = next(seq for seq, message in log._messages.items() if message.subject == subjects.ledger("r", "main"))
    del log._messages[removed + 2]
    with pytest.raises(LedgerError):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_go_through_the_runs_own_server_where_the_configuration_says_so(
    lab, model, config, tmp_path, dtype
):
    config = msgspec.structs.replace(config, weights=WeightsConfig(transport="nats", dtype=dtype))
    config = msgspec.structs.replace(config, streams=StreamsConfig(weights_bytes=16 << 20))
    await fill(lab, model)
    await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert not (config.path / "weights").exists()
    record = decode(PolicyRecord, (await lab.bus.value("policy")).value)
    assert record.policy_version.step == STEPS
    checkpoint = load_checkpoint(latest_checkpoint(config.path / "checkpoints"), config.training.learner)
    expected = policy_tensors(checkpoint.policy.model)
    path = await WeightsReceiver(lab.bus, "r", tmp_path / "elsewhere").path_of(record)
    found = read_weights(path, record.policy_version, expected)
    assert weights_digest(rounded(found, dtype)) == weights_digest(rounded(expected, dtype))


async def test_a_long_step_says_how_far_it_has_come(lab, model, config, monkeypatch):
    monkeypatch.setattr(torch_backend, "_LONG_STEP_S", 0.0)
    small = LearnerConfig(learning_rate=1e-2, max_tokens_per_microbatch=1)
    config = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, steps=1, learner=small))
    await fill(lab, model, steps=1)
    service, go_on, passes = Service(lab.bus, "trainer", "r"), threading.Event(), []
    compute = Learner._pass

    def stopping(learner, *args):
        passes.append(learner.passed)
        if len(passes) == 3:
            assert go_on.wait(60)
        return compute(learner, *args)

    monkeypatch.setattr(Learner, "_pass", stopping)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_trainer, service, config)
        try:
            with anyio.fail_after(60):
                while "computes sequence 3 of 4" not in service.vitals.notes.get("step", ""):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        finally:
            go_on.set()
    assert service.vitals.notes.get("step") is None
    assert passes == [(0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 4, 4)]
