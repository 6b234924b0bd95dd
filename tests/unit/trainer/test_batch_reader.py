"""`lachesis.batches` and the example trainer loop, on a hand-written ledger."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lachesis
from lachesis.pipeline.errors import CheckpointError, FencedError, LedgerError, StartupError
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.model.weight_files import read_weights
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import TrainReport

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_loop.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, folder)
    return folder, policy.tokenizer_hash


async def fill(lab, model, steps):
    for number in range(steps):
        await lab.extend_ledger([lab.group(10 * number + n, tokenizer_hash=model[1]) for n in range(2)])


async def last_report(lab):
    stored = await lab.bus.last(subjects.LEDGER, subjects.state("r", "trainer", subjects.LIVE, "main"))
    return decode(TrainReport, stored.data)


async def take(batches, count):
    found = []
    with anyio.fail_after(60):
        async for batch in batches:
            found.append(batch)
            if len(found) == count:
                break
    return found


async def test_a_plain_loop_gets_the_batches_in_order_as_tensors(lab, model):
    await fill(lab, model, 3)
    found = await take(lachesis.batches("r", nats=lab.bus), 3)
    assert [batch.number for batch in found] == [0, 1, 2]
    packed = found[1].packed
    assert packed.group_ids == tuple(f"{n:032x}" for n in (10, 10, 11, 11))
    assert packed.tokens_BT.shape == (4, 4)
    assert packed.tokens_BT[0].tolist() == [20, 21, 22, 23]
    assert packed.mask_BT[0].tolist() == [False, True, True, True]
    assert packed.advantages_BT[:, 1].tolist() == [1.0, -1.0, 1.0, -1.0]


async def test_a_loop_left_inside_a_timeout_leaves_nothing_behind(lab, model):
    await fill(lab, model, 2)
    with anyio.fail_after(60):
        async with anyio.create_task_group():
            async for batch in lachesis.batches("r", nats=lab.bus):
                if batch.number == 1:
                    break
    with anyio.move_on_after(0.05) as scope:
        async for _ in lachesis.batches("r", nats=lab.bus):
            pass
    assert scope.cancelled_caught


async def test_it_goes_on_after_the_last_commit(lab, model):
    await fill(lab, model, 4)
    async with lachesis.batches("r", nats=lab.bus) as batches:
        assert batches.committed is None
        first, second = await take(batches, 2)
        await first.commit(policy_version="1-a-b", checkpoint="one")
        await second.commit(policy_version="2-a-b", checkpoint="two", step=20)
    async with lachesis.batches("r", nats=lab.bus) as batches:
        assert (batches.committed.step, batches.committed.checkpoint) == (20, "two")
        assert [batch.number for batch in await take(batches, 2)] == [2, 3]
    report = await last_report(lab)
    assert (report.next_batch, report.ledger_index, report.policy_version) == (2, 3, "2-a-b")


async def test_a_commit_covers_everything_before_it_and_cannot_be_taken_back(lab, model):
    await fill(lab, model, 3)
    async with lachesis.batches("r", nats=lab.bus) as batches:
        first, second = await take(batches, 2)
        first.void("its images are gone")
        await second.commit(policy_version="2-a-b", checkpoint="two")
        for batch in (first, second):
            with pytest.raises(CheckpointError, match="committed already"):
                await batch.commit(policy_version="1-a-b", checkpoint="one")
        assert [(void.batch, void.reason) for void in (await last_report(lab)).voids] == [(0, "its images are gone")]
        *_, third = await take(batches, 1)
        await third.commit(policy_version="3-a-b", checkpoint="three")
    assert (await last_report(lab)).next_batch == 3
    assert not (await last_report(lab)).voids


async def test_a_position_kept_elsewhere_is_resumed_and_checked(lab, model):
    await fill(lab, model, 4)
    (first, _) = await take(lachesis.batches("r", nats=lab.bus), 2)
    found = await take(lachesis.batches("r", nats=lab.bus, position=first.position), 2)
    assert [batch.number for batch in found] == [1, 2]
    other = type(first.position)(first.position.entries, "f" * 64)
    with pytest.raises(LedgerError):
        await take(lachesis.batches("r", nats=lab.bus, position=other), 1)


async def test_of_two_trainers_of_one_name_one_is_told(lab, model):
    await fill(lab, model, 2)
    async with lachesis.batches("r", nats=lab.bus) as one, lachesis.batches("r", nats=lab.bus) as two:
        (mine,), (theirs,) = await take(one, 1), await take(two, 1)
        await theirs.commit(policy_version="1-b-b", checkpoint="two")
        with pytest.raises(FencedError):
            await mine.commit(policy_version="1-a-b", checkpoint="one")
    assert (await last_report(lab)).checkpoint == "two"


async def test_published_weights_are_readable_under_their_name(lab, model, tmp_path):
    await fill(lab, model, 1)
    network = AutoModelForCausalLM.from_pretrained(model[0])
    tokenizer = AutoTokenizer.from_pretrained(model[0])
    async with lachesis.batches("r", nats=lab.bus) as batches:
        versions = [await batches.publish(network, tokenizer, tmp_path)]
        (batch,) = await take(batches, 1)
        with torch.no_grad():
            network.lm_head.weight.add_(1.0)
        versions.append(await batch.publish(network, tokenizer, tmp_path))
    record = decode(PolicyRecord, (await lab.bus.value(keys.POLICY)).value)
    assert record.version == versions[1]
    assert [int(version.split("-")[0]) for version in versions] == [0, 1]
    assert record.tokenizer_hash == model[1]
    read_weights(record.weights, record.policy_version, policy_tensors(network))


async def test_a_batch_whose_payload_is_gone_raises_where_it_is_used(lab, model):
    await fill(lab, model, 1)
    await lab.bus.trim(subjects.ROLLOUTS, [], before=await lab.store(lab.group(999)))
    await fill(lab, model, 0)
    (batch,) = await take(lachesis.batches("r", nats=lab.bus), 1)
    with pytest.raises(DataError, match="is gone from ROLLOUTS"):
        _ = batch.packed


async def test_without_a_server_it_says_so(tmp_path):
    with pytest.raises(StartupError, match="no server runs"):
        await take(lachesis.batches("r", folder=tmp_path), 1)


async def test_unopened_batches_say_how_to_open_them(lab):
    with pytest.raises(RuntimeError, match="async with"):
        _ = lachesis.batches("r", nats=lab.bus).committed


async def test_the_example_trains_publishes_and_resumes(lab, model, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("trainer_loop", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    await fill(lab, model, 3)
    with anyio.fail_after(60):
        await example.train("r", str(model[0]), str(tmp_path), nats=lab.bus, steps=2)
        assert (await last_report(lab)).next_batch == 2
        before = AutoModelForCausalLM.from_pretrained((await last_report(lab)).checkpoint)
        await example.train("r", str(model[0]), str(tmp_path), nats=lab.bus, steps=3)
    report = await last_report(lab)
    assert report.next_batch == 3
    after = AutoModelForCausalLM.from_pretrained(report.checkpoint)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0:", "1:", "2:"]
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_importing_the_package_needs_neither_torch_nor_numpy():
    code = (
        "import sys, lachesis; assert {'batches', 'rater', 'Environment'} <= set(lachesis.__all__); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
