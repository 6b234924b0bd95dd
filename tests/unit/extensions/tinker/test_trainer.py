"""The trainer at Tinker against the contract server: order, exactness over kills of trainer and server, refusals."""

import gc
import json
import warnings

import anyio
import msgspec
import numpy as np
import pytest
from stages import run_trainer
from tinker_contract.process import KEY, ContractServer
from unit.extensions.tinker.test_figures import SEED_NAMES
from unit.trainer.test_stage import reports

from lachesis.pipeline.config.extended import run_config_type, training_config_type
from lachesis.pipeline.errors import AccessError, InfrastructureError, StartupError, leaves
from lachesis.pipeline.extensions.tinker.config import TinkerConfig
from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint, state_of
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError

pytest.importorskip("tinker", reason="the extra `tinker` is not installed")

STEPS = 5

pytestmark = [
    pytest.mark.slow,
    # the SDK leaves the connection by which it asks for its settings to be collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, folder)
    return folder, policy.tokenizer_hash


@pytest.fixture(autouse=True)
def _unclosed():
    """Collect what the SDK leaves within the test that may ignore it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
async def server(tmp_path, model):
    server = ContractServer(tmp_path / "tinker", model[0])
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
def config(tmp_path, model, server, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return run_config_type()(
        run="r",
        folder=str(tmp_path / "run"),
        model=str(model[0]),
        training=training_config_type()(
            backend="tinker",
            steps=STEPS,
            checkpoint_every=2,
            tinker=TinkerConfig(base_model="tiny", url=server.url, learning_rate=1e-2),
        ),
    )


def a_batch(lab, model, number):
    draw = np.random.default_rng(number)
    return [
        lab.group(100 * number + n, samples=2, tokens=int(draw.integers(4, 9)), tokenizer_hash=model[1])
        for n in range(2)
    ]


async def fill(lab, model, steps=STEPS):
    await lab.extend_ledger(*(a_batch(lab, model, number) for number in range(steps)))


def state_path(config):
    path = latest_checkpoint(config.path / "checkpoints")
    return json.loads((path / "tinker.json").read_text())["state"]


async def test_it_trains_in_order_and_what_it_saves_differs_step_by_step(lab, model, config, server):
    await fill(lab, model)
    with anyio.fail_after(120):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    steps = server.requests("forward_backward")
    assert [int(each["sequences"][0][:32], 16) // 100 for each in steps] == list(range(STEPS))
    assert steps[0]["sequences"] == [f"{n:032x}/{sample}.{sample}.0" for n in (0, 1) for sample in (0, 1)]
    assert len(server.requests("optim_step")) == STEPS
    assert len(server.requests("sampler_weights")) == STEPS + 1
    weights = {path.read_bytes() for path in server.folder.glob("*/sampler_weights/*/weights")}
    assert len(weights) == STEPS + 1
    found = await reports(lab)
    assert [report.step for report in found] == [2, 4, 5]
    assert found[-1].mismatches[0].ratio is not None
    assert state_of(latest_checkpoint(config.path / "checkpoints")).step == STEPS
    rows = [json.loads(line) for line in (config.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/step" in row]
    assert len(steps) == STEPS
    for row in steps:
        assert row.keys() >= SEED_NAMES - {"reward/mean"}, "the groups of this test have no score"
        assert row["train/loss"] == pytest.approx(row["tinker/loss:sum"] / row["train/tokens"])
        assert row["logprobs/mean_training"] == pytest.approx(row["logprobs/mean"] - row["logprobs/diff"])


async def test_a_server_that_was_killed_and_a_trainer_that_begins_again_train_no_batch_twice(
    lab, model, config, server, tmp_path
):
    """Models in training are gone with the server: the trainer ends, and goes on from its newest checkpoint."""
    await fill(lab, model, 3)
    ended_by = []

    async def train_until_the_server_forgets():
        try:
            await run_trainer(Service(lab.bus, "trainer", "r"), config)
        except (InfrastructureError, BaseExceptionGroup) as error:
            ended_by.extend(leaves(error))

    async def three_steps():
        return [report.step for report in await reports(lab)] == [2] and len(server.requests("optim_step")) == 3

    with anyio.fail_after(900):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train_until_the_server_forgets)
            await lab.until(three_steps, 100)
            await server.kill()
            await server.start()
            await lab.extend_ledger(*(a_batch(lab, model, number) for number in (3, 4)))
        assert [type(error) for error in ended_by] == [InfrastructureError]
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    (loaded,) = server.requests("load_weights")
    assert loaded["optimizer"]
    models = {}
    for each in server.requests("forward_backward"):
        models.setdefault(each["model"], []).append(int(each["sequences"][0][:32], 16) // 100)
    assert list(models.values()) == [[0, 1, 2], [2, 3, 4]]  # the third step of the first was in no checkpoint
    assert [report.step for report in await reports(lab)] == [2, 4, 5]
    after = server.folder / state_path(config).removeprefix("tinker://") / "weights"
    calm = msgspec.structs.replace(config, folder=str(tmp_path / "calm"))
    forget(lab, subjects.state("r", "trainer", subjects.LIVE, "main"))
    lab.bus._entries.clear()
    await run_trainer(Service(lab.bus, "trainer", "r"), calm)
    undisturbed = server.folder / state_path(calm).removeprefix("tinker://") / "weights"
    assert after != undisturbed
    assert after.read_bytes() == undisturbed.read_bytes()


async def test_a_batch_that_tinker_refuses_is_void_and_the_run_goes_on_as_if_it_had_never_been(
    lab, model, config, server, tmp_path
):
    """The third of five, after which nothing was saved but the first two: the others are trained once more, or once."""
    await fill(lab, model)
    (server.folder / "refused").write_text(f"{200:032x}")
    with anyio.fail_after(900):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    assert len(server.requests("refused")) == 1
    found = await reports(lab)
    assert [report.step for report in found] == [2, 4, 5]
    (void,) = [void for report in found for void in report.voids]
    assert void.batch == 2
    assert "Tinker refused the batch" in void.reason
    assert "tokens are out of range" in void.reason
    models = {}
    for each in server.requests("forward_backward"):
        models.setdefault(each["model"], []).append(int(each["sequences"][0][:32], 16) // 100)
    assert list(models.values()) == [[0, 1], [3, 4]]
    figures = [json.loads(line).get("train/step") for line in (config.path / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in figures if step] == [1, 2, 4, 5]


async def test_a_refused_batch_takes_no_trained_step_with_it(lab, model, config, server):
    """The fourth, when the third is in no saved state yet: the third is trained again, on the state of the second."""
    await fill(lab, model)
    (server.folder / "refused").write_text(f"{300:032x}")
    with anyio.fail_after(900):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    models = {}
    for each in server.requests("forward_backward"):
        models.setdefault(each["model"], []).append(int(each["sequences"][0][:32], 16) // 100)
    assert list(models.values()) == [[0, 1, 2], [2, 4]]
    assert [[void.batch for void in report.voids] for report in await reports(lab)] == [[], [3], []]


async def test_where_every_batch_is_refused_the_trainer_ends_and_says_so(lab, model, config, server):
    await fill(lab, model)
    (server.folder / "refused").write_text("\n".join(f"{100 * number:032x}" for number in range(STEPS)))
    with anyio.fail_after(900), pytest.raises((ConfigError, BaseExceptionGroup)) as ended:
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    (leaf,) = leaves(ended.value)
    assert isinstance(leaf, ConfigError)
    assert "Tinker refused 3 batches in a row, 2 the last of them" in str(leaf)
    assert "tokens are out of range" in str(leaf)


async def test_states_that_no_checkpoint_names_are_deleted_at_tinker(lab, model, config, server):
    training = msgspec.structs.replace(config.training, checkpoint_every=1, checkpoints_kept=2)
    config = msgspec.structs.replace(config, training=training)
    await fill(lab, model)
    with anyio.fail_after(900):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    checkpoints = config.path / "checkpoints"
    named = {json.loads(path.read_text())["state"] for path in checkpoints.glob("step-*/tinker.json")}
    there = {f"tinker://{path.relative_to(server.folder)}" for path in server.folder.glob("*/weights/*")}
    assert len(named) == 2
    assert there == named == set(json.loads((checkpoints / "tinker_states.json").read_text()))
    assert len(server.requests("delete")) == STEPS - 2


async def test_a_state_that_cannot_be_deleted_is_tried_again(lab, model, config, server):
    """What is on record and gone at Tinker is no error; what is there goes with the next checkpoint."""
    checkpoints = config.path / "checkpoints"
    checkpoints.mkdir(parents=True)
    left = server.folder / "of-before" / "weights" / "s"
    left.mkdir(parents=True)
    record = ["tinker://of-before/weights/s", "tinker://of-before/weights/gone"]
    (checkpoints / "tinker_states.json").write_text(json.dumps(record))
    await fill(lab, model, 2)
    training = msgspec.structs.replace(config.training, steps=2)
    with anyio.fail_after(900):
        await run_trainer(Service(lab.bus, "trainer", "r"), msgspec.structs.replace(config, training=training))
    assert not left.exists()
    assert json.loads((checkpoints / "tinker_states.json").read_text()) == [state_path(config)]


async def test_a_key_that_is_missing_or_refused_ends_the_start_with_one_clear_error(lab, config, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(StartupError, match="the variable TINKER_API_KEY holds no key; set it"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    monkeypatch.setenv("TINKER_API_KEY", "sk-of-another")
    with pytest.raises(StartupError, match="begins with tml-"):
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-nobody")
    with pytest.raises((AccessError, BaseExceptionGroup)) as refused:
        await run_trainer(Service(lab.bus, "trainer", "r"), config)
    (leaf,) = leaves(refused.value)
    assert isinstance(leaf, AccessError)
    assert "check the key in TINKER_API_KEY" in str(leaf)
    assert "tml-of-nobody" not in str(leaf)


def forget(lab, subject):
    """Make the broker lose every message of a subject of LEDGER."""
    log = lab.bus._logs[subjects.LEDGER]
    log._last_of.pop(subject)
    log._ids.clear()
    for seq in [seq for seq, message in log._messages.items() if message.subject == subject]:
        del log._messages[seq]
