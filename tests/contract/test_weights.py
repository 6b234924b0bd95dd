"""Weights through the run's own server: what is sent arrives, as a whole or as differences, and old versions go."""

import os
from pathlib import Path

import anyio
import pytest
from contract.weights import MIB, RUN, CountingBus, CutBus, Trainer, check

from lachesis.pipeline.errors import FencedError, InfrastructureError, NotFoundError
from lachesis.pipeline.model.safetensors_files import weights_path
from lachesis.pipeline.weights import checked_files, download
from lachesis.pipeline.weights.checked_files import CheckedFiles
from lachesis.pipeline.weights.download import WeightsReceiver
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.subjects import WEIGHTS
from lachesis.schemas.weights import WeightsHead, head_seq


async def test_differences_arrive_bit_for_bit(bus, tmp_path):
    trainer, receiver = Trainer(bus), WeightsReceiver(bus, RUN, tmp_path)
    for _ in range(4):
        assert await check(receiver, *await trainer.step()) == "float32"
    assert [sent.is_delta for sent in trainer.sent] == [False, True, True, True]
    assert max(sent.size for sent in trainer.sent[1:]) < 0.8 * trainer.sent[0].size
    assert len(list(tmp_path.glob("*.safetensors"))) == 3, "older files go"
    assert not list(tmp_path.glob(".*partial"))


async def test_rounded_weights_take_half_and_are_widened_to_what_the_model_has(bus, tmp_path):
    trainer, receiver = Trainer(bus, dtype="bfloat16"), WeightsReceiver(bus, RUN, tmp_path)
    for _ in range(3):
        assert await check(receiver, *await trainer.step()) == "bfloat16"
    assert trainer.sent[0].plain_size < MIB + 1024
    assert trainer.sent[2].size < 0.5 * trainer.sent[0].size


async def test_a_server_without_the_base_starts_from_the_newest_whole_version(bus, tmp_path):
    trainer = Trainer(bus, full_every=3)
    records = [await trainer.step() for _ in range(5)]
    assert [sent.is_delta for sent in trainer.sent] == [False, True, True, False, True]
    counting = CountingBus(bus)
    await check(WeightsReceiver(counting, RUN, tmp_path / "late"), *records[-1])
    chunks = [len(decode(WeightsHead, (await bus.get(WEIGHTS, head_seq(one.location))).data).chunks)
              for one in trainer.sent]  # fmt: skip
    assert counting.chunks == sum(chunks[3:])
    receiver = WeightsReceiver(bus, RUN, tmp_path / "early")
    await check(receiver, *records[1])
    await check(receiver, *records[2])


async def test_several_missed_versions_are_made_up_for_by_their_differences(bus, tmp_path):
    trainer, counting = Trainer(bus), CountingBus(bus)
    receiver = WeightsReceiver(counting, RUN, tmp_path)
    await check(receiver, *await trainer.step())
    whole, counting.chunks = counting.chunks, 0
    for _ in range(3):
        record = await trainer.step()
    await check(receiver, *record)
    assert 0 < counting.chunks <= 3 * whole
    assert (await bus.get(WEIGHTS, head_seq(record[0].weights))).subject == subjects.weights_heads(RUN)


@pytest.mark.parametrize("damage", ["gone", "torn", "other bytes"])
async def test_a_damaged_base_is_fetched_anew(bus, tmp_path, damage):
    trainer, receiver = Trainer(bus), WeightsReceiver(bus, RUN, tmp_path)
    first, _ = await trainer.step()
    path = weights_path(tmp_path, first.policy_version)
    await receiver.path_of(first)
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-100] if damage == "torn" else data[:-1] + bytes([data[-1] ^ 1]))
    await check(receiver, *await trainer.step())


async def test_a_download_that_is_cut_off_goes_on_where_it_was(bus, tmp_path):
    trainer, counting = Trainer(bus), CountingBus(bus, fails_at=1)
    record = await trainer.step()
    with pytest.raises(InfrastructureError, match="lost"):
        await WeightsReceiver(counting, RUN, tmp_path).path_of(record[0])
    assert not list(tmp_path.glob("*.safetensors"))
    await check(WeightsReceiver(counting, RUN, tmp_path), *record)  # another life of the server
    head = decode(WeightsHead, (await bus.get(WEIGHTS, head_seq(record[0].weights))).data)
    assert counting.chunks == len(head.chunks) == 2


async def test_what_lies_damaged_of_a_download_is_thrown_away(bus, tmp_path):
    trainer, counting = Trainer(bus), CountingBus(bus, fails_at=1)
    record = await trainer.step()
    receiver = WeightsReceiver(counting, RUN, tmp_path)
    with pytest.raises(InfrastructureError, match="lost"):
        await receiver.path_of(record[0])
    (partial,) = tmp_path.glob(".*partial")
    partial.write_bytes(bytes(len(partial.read_bytes())))
    with pytest.raises(InfrastructureError, match="fetching them again"):
        await receiver.path_of(record[0])
    await check(receiver, *record)


async def test_weights_under_a_version_that_is_not_theirs_are_refused(bus, tmp_path):
    trainer, receiver = Trainer(bus), WeightsReceiver(bus, RUN, tmp_path)
    record, _ = await trainer.step()
    version = PolicyVersion(7, "a", "0" * 12)
    tensors = {name: tensor + 1 for name, tensor in trainer.tensors.items()}
    sent = await trainer.uploader.send(version, tensors)
    wrong = PolicyRecord(run=RUN, version=str(version), weights=sent.location, tokenizer_hash="t", written_ns=1)
    with pytest.raises(DataError, match="digest"):
        await receiver.path_of(wrong)
    mixed = PolicyRecord(run=RUN, version=str(version), weights=record.weights, tokenizer_hash="t", written_ns=1)
    with pytest.raises(DataError, match="does not hold"):
        await receiver.path_of(mixed)
    assert not weights_path(tmp_path, version).exists()


async def test_old_versions_expire_by_number(bus, tmp_path):
    trainer = Trainer(bus, kept=2, full_every=2)
    records = [await trainer.step() for _ in range(6)]
    receiver = WeightsReceiver(bus, RUN, tmp_path)
    for expired in records[:4]:
        with pytest.raises(NotFoundError):
            await receiver.path_of(expired[0])
    await check(receiver, *records[4])
    await check(receiver, *records[5])


@pytest.mark.slow
async def test_the_stream_stays_within_its_bytes(bus, tmp_path):
    budget = 5 * MIB
    trainer, receiver = Trainer(bus, budget=budget, kept=100), WeightsReceiver(bus, RUN, tmp_path)
    most = 0
    for _ in range(7):
        record = await trainer.step(size=1e-2)
        most = max(most, (await bus.usage(WEIGHTS)).bytes)
        await check(receiver, *record)
    assert budget / 2 < most <= budget
    late = WeightsReceiver(bus, RUN, tmp_path / "late")
    await check(late, *record)
    assert sum(not sent.is_delta for sent in trainer.sent) > 1, "a chain outgrew the budget"


async def test_what_never_fits_is_said(bus):
    with pytest.raises(ConfigError, match=r"streams\.weights_bytes"):
        await Trainer(bus, budget=3 * MIB).step()


async def test_a_trainer_that_starts_anew_sends_a_whole_version_and_fences_the_one_before(bus, tmp_path):
    old, receiver = Trainer(bus), WeightsReceiver(bus, RUN, tmp_path)
    for _ in range(2):
        await check(receiver, *await old.step())
    new = Trainer(bus, lineage="b")
    record = await new.step()
    await check(receiver, *record)
    assert not new.sent[0].is_delta
    with pytest.raises(FencedError):
        await old.step()
    await check(receiver, *await new.step())


async def test_an_upload_that_nobody_finished_makes_room_for_the_next(bus, tmp_path):
    trainer = Trainer(CutBus(bus, chunks=1), budget=6 * MIB)
    with pytest.raises(InfrastructureError):
        await trainer.step()
    receiver = WeightsReceiver(bus, RUN, tmp_path)
    again = Trainer(bus, budget=6 * MIB, lineage="b")
    for _ in range(4):
        await check(receiver, *await again.step())
    assert (await bus.usage(WEIGHTS)).bytes <= 6 * MIB


async def test_an_upload_is_tried_again_after_an_outage(bus, tmp_path):
    trainer = Trainer(CutBus(bus, chunks=2))
    receiver = WeightsReceiver(bus, RUN, tmp_path)
    await check(receiver, *await trainer.step())
    with pytest.raises(InfrastructureError):
        await trainer.step()
    await check(receiver, *await trainer.step())
    assert not trainer.sent[1].is_delta


async def test_a_head_that_cannot_be_read_stops_nobody(bus, tmp_path):
    await bus.publish(subjects.weights_heads(RUN), b"\xc1", msg_id="x")
    await check(WeightsReceiver(bus, RUN, tmp_path), *await Trainer(bus).step())


async def test_of_the_services_of_a_machine_one_fetches_and_the_others_find_the_file(bus, tmp_path, monkeypatch):
    trainer, counting, digested = Trainer(bus), CountingBus(bus), []
    monkeypatch.setattr(download, "check_file", lambda *about: digested.append(about))
    receivers = [WeightsReceiver(counting, RUN, tmp_path) for _ in range(3)]
    paths = []
    for _ in range(2):
        record, tensors = await trainer.step()
        head = decode(WeightsHead, (await bus.get(WEIGHTS, head_seq(record.weights))).data)
        counting.chunks = 0

        async def fetch(receiver, record):
            paths.append(await receiver.path_of(record))

        async with anyio.create_task_group() as tasks:
            for receiver in receivers:
                tasks.start_soon(fetch, receiver, record)
        assert counting.chunks == len(head.chunks)
        await check(WeightsReceiver(counting, RUN, tmp_path), record, tensors)  # and of another life of one of them
        assert counting.chunks == len(head.chunks)
    assert len(paths) == 6
    assert len(set(paths)) == 2
    assert not digested, "a file is digested as it is written, and not again"


def flip_last_bit(path):
    """As a disk does it that forgets: nothing says that the file has changed."""
    before, data = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_a_base_that_was_damaged_after_it_was_checked_is_fetched_anew(bus, tmp_path):
    trainer, receiver = Trainer(bus), WeightsReceiver(bus, RUN, tmp_path)
    first, _ = await trainer.step()
    path = Path(await receiver.path_of(first))
    flip_last_bit(path)
    await check(receiver, *await trainer.step())


def test_a_file_that_changed_or_was_checked_before_the_system_started_is_checked_again(tmp_path, monkeypatch):
    path = tmp_path / "1-a-b.safetensors"
    path.write_bytes(b"weights")
    assert path not in CheckedFiles(tmp_path)
    CheckedFiles(tmp_path).add(path)
    files = CheckedFiles(tmp_path)
    assert path in files
    os.utime(path, ns=(1, 1))
    assert path not in files
    files.add(path)
    assert path in files
    (tmp_path / "boot").write_text("another life\n")
    monkeypatch.setattr(checked_files, "_BOOT_ID", tmp_path / "boot")
    assert path not in CheckedFiles(tmp_path)


def test_a_record_names_a_file_or_a_head():
    assert head_seq("/runs/r/weights/1-a-b.safetensors") is None
    assert head_seq("nats:17") == 17
    for wrong in ("nats:", "nats:0", "nats:-1", "nats:x", "nats:" + "9" * 30):
        with pytest.raises(DataError):
            head_seq(wrong)


async def test_a_record_that_names_a_file_is_passed_on(bus, tmp_path):
    record = PolicyRecord(run=RUN, version="1-a-b", weights="/w/1", tokenizer_hash="t", written_ns=1)
    assert await WeightsReceiver(bus, RUN, tmp_path / "unmade").path_of(record) == "/w/1"
    assert not (tmp_path / "unmade").exists()
    assert encode(record)
