"""Trainers over HTTP: what each is handed, when it counts as trained, and what a kill at any write leaves."""

import gzip
import json
import threading
from functools import partial

import anyio
import anyio.to_thread
import msgspec
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extensions.atropos.gateway.batch_response import BatchResponse
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.pipeline.extensions.atropos.gateway.protocol import RegisterTrainer
from lachesis.pipeline.extensions.atropos.gateway.settings import gateway_settings
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.pipeline.extensions.atropos.gateway.trainers import Trainers
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ledger import TrainReport

pytestmark = pytest.mark.outside

KEYS = {
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
}  # fmt: skip
STOCK = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "starting_step": 0,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 7,
    "num_steps": 20,
}


def observing(world, **gateway):
    return msgspec.structs.replace(world.config(**gateway), mode="observe")


async def form(lab, first, count):
    """Form batches of two groups of four each; sequence tokens name the batch: 10 + number * 2."""
    for number in range(first, first + count):
        await lab.extend_ledger([lab.group(2 * number + i, env="words", samples=4) for i in range(2)])


def number_of(batch):
    """The number of a batch that `form` made."""
    return (batch[0]["tokens"][0][0] - 10) // 2


async def register(http, user="lachesis", **changes):
    answer = await http.post("/register", json=STOCK | changes, auth=(user, "t"))
    assert answer.status_code == 200, answer.text
    return answer.json()["uuid"]


async def ask(http, user="lachesis"):
    answer = (await http.get("/batch", auth=(user, "t"))).json()
    return answer["batch"]


async def collect(http, user="lachesis"):
    """Collect batches as the stock trainer does: until the answer is that there is none."""
    found = []
    while (batch := await ask(http, user)) is not None:
        found.append(number_of(batch))
    return found


async def report_of(lab):
    subject = subjects.state("r", "trainer", subjects.LIVE, "main")
    report, _, _ = await read_last_event(lab.bus, subjects.LEDGER, subject, TrainReport, lambda _: True)
    return report


async def policy_of(lab):
    return decode(PolicyRecord, (await lab.bus.value(keys.POLICY)).value)


async def test_a_stock_trainer_gets_every_batch_in_order_and_what_it_asks_after_is_trained(new_run, lab):
    await form(lab, 0, 3)
    async with new_run.gateway(observing(new_run)) as http:
        assert (await http.get("/batch")).json() == {
            "status": "error", "message": "Trainer not registered. Call /register first.", "batch": [],
        }  # fmt: skip
        assert (await http.get("/wandb_info")).json() == {"group": None, "project": None}
        uuid = await register(http)
        assert uuid.bit_length() > 64
        assert await register(http) == uuid
        for number in range(3):
            assert await collect(http) == [number], "one batch, so that it is trained before the next is asked for"
            report = await report_of(lab)
            assert (report.next_batch if report else 0) == number, "it is not trained yet"
        assert await collect(http) == []
        report = await report_of(lab)
        assert (report.next_batch, report.checkpoint, report.voids) == (3, "checkpoints", [])
        assert (await policy_of(lab)).policy_version.step == 3
        with anyio.fail_after(30):
            while (await http.get("/status")).json()["current_step"] != 3:  # noqa: ASYNC110 - it watches the policy
                await anyio.sleep(0.01)
        assert (await http.get("/wandb_info")).json() == {"group": "g", "project": "p"}
        body = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 4}
        answer = (await http.post("/register-env", json=body)).json()
        assert (answer["num_steps"], answer["checkpoint_interval"]) == (20, 7)
        assert (await http.get("/latest_example")).json()["tokens"][0][0] == 10 + 5


async def test_a_batch_says_what_the_pipeline_computed_in_the_fields_that_trainers_read(new_run, lab):
    await form(lab, 0, 1)
    async with new_run.gateway(observing(new_run)) as http:
        await register(http)
        one, other = await ask(http)
    assert set(one) == KEYS
    assert len(one["tokens"]) + len(other["tokens"]) == 8
    assert one["scores"] == [1.0, -1.0, 1.0, -1.0]
    assert one["advantages"][1] == [0.0, -1.0, -1.0, -1.0]
    assert one["masks"][0] == [-100, *one["tokens"][0][1:]]
    assert one["inference_logprobs"][0] == [1.0, -1.0, -1.0, -1.0]
    assert one["messages"][0] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


async def test_members_of_a_name_get_disjoint_batches_and_every_name_the_whole_stream(new_run, lab):
    await form(lab, 0, 4)
    async with new_run.gateway(observing(new_run)) as http:
        for user in ("lachesis", "main.second", "study"):
            await register(http, user)
        first, second = await collect(http), await collect(http, "main.second")
        assert (first, second) == ([0], [1])
        assert await collect(http, "main.second") == [2]
        assert await report_of(lab) is None, "batch 0 is not trained yet, so nothing after it counts"
        assert await collect(http) == [3]
        assert (await report_of(lab)).next_batch == 2, "batch 2 is still with the second"
        seen = []
        while batches := await collect(http, "study"):
            seen += batches
        assert seen == [0, 1, 2, 3]
        assert (await report_of(lab)).next_batch == 2, "only the run's own name says what is trained"
        for user in ("a b", "stranger"):
            assert (await http.get("/batch", auth=(user, "t"))).json()["status"] == "error"
        assert await lab.bus.value(stored_key("consumer-stranger")) is None, "a question alone leaves nothing behind"


async def test_names_that_read_a_run_are_bounded(new_run, lab):
    async with new_run.gateway(observing(new_run)) as http:
        for n in range(15):
            await register(http, f"reader-{n}")
        refused = await http.post("/register", json=STOCK, auth=("reader-15", "t"))
        assert refused.status_code == 422
        await register(http, "reader-0.second")


async def test_a_trainer_that_starts_again_gets_the_batch_again_that_it_held(new_run, lab):
    await form(lab, 0, 2)
    async with new_run.gateway(observing(new_run)) as http:
        await register(http)
        await register(http, "main.other")
        assert await collect(http) == [0]
        await register(http, num_steps=30)
        assert await collect(http) == [0]
        assert await collect(http) == [1]
        body = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 4}
        assert (await http.post("/register-env", json=body)).json()["num_steps"] == 30


async def test_another_batch_size_is_refused_by_name_and_a_reset_forgets_nothing_trained(new_run, lab):
    await form(lab, 0, 1)
    async with new_run.gateway(observing(new_run)) as http:
        refused = await http.post("/register", json=STOCK | {"batch_size": 16})
        assert refused.status_code == 422
        assert "batching.batch_size = 16" in refused.text
        await register(http)
        assert await collect(http) == [0]
        assert await collect(http) == []
        await http.get("/reset_data")
        assert (await http.get("/batch")).json()["status"] == "error"
        await register(http)
        assert await collect(http) == []


async def test_a_batch_of_which_nothing_can_be_trained_is_void_and_others_lack_what_is_gone(new_run, lab):
    entries = await lab.extend_ledger([lab.group(0, samples=4)], [lab.group(n, samples=4) for n in (1, 2)])
    last = entries[-1].batch.groups[-1]
    await lab.bus.trim(subjects.ROLLOUTS, [subjects.rollout("r", "sums")], before=last.seq)
    async with new_run.gateway(observing(new_run)) as http:
        await register(http)
        (group,) = await ask(http)
        assert group["tokens"][0][0] == 12
        assert await collect(http) == []
        await collect(http)
    subject = subjects.state("r", "trainer", subjects.LIVE, "main")
    async with lab.bus.read(subjects.LEDGER, [subject], follow=False) as messages:
        reports = [decode(TrainReport, message.data) async for message in messages]
    assert [void.batch for report in reports for void in report.voids] == [0]
    assert [(drops.batch, len(drops.seqs)) for report in reports for drops in report.drops] == [(1, 1)]


ELSEWHERE = {"X-Forwarded-For": "192.0.2.1"}
"""As a proxy on the gateway's machine passes on a client of another machine."""


async def test_a_large_batch_is_compressed_for_a_client_of_another_machine_that_takes_it_so(new_run, lab):
    await lab.extend_ledger([lab.group(n, samples=4, tokens=2000) for n in range(2)])
    async with new_run.gateway(observing(new_run)) as http:
        await register(http)
        async with http.stream("GET", "/batch", headers={"Accept-Encoding": "gzip", **ELSEWHERE}) as answer:
            raw = b"".join([part async for part in answer.aiter_raw()])
        assert answer.headers["content-encoding"] == "gzip"
        plain = json.loads(gzip.decompress(raw))["batch"]
        await register(http)  # else it is trained
        async with http.stream("GET", "/batch", headers={"Accept-Encoding": "identity", **ELSEWHERE}) as answer:
            assert json.loads(b"".join([part async for part in answer.aiter_raw()]))["batch"] == plain
        await register(http)
        async with http.stream("GET", "/batch", headers={"Accept-Encoding": "gzip"}) as answer:
            assert json.loads(b"".join([part async for part in answer.aiter_raw()]))["batch"] == plain


async def test_fault_8_compressing_a_batch_holds_up_nobody(new_run, lab, monkeypatch):
    answered, compressing = threading.Event(), threading.Event()

    def compress(data, level):
        compressing.set()
        assert answered.wait(30), "nobody was answered meanwhile"
        return gzip_compress(data, level)

    gzip_compress = gzip.compress
    monkeypatch.setattr(gzip, "compress", compress)
    await form(lab, 0, 1)
    async with new_run.gateway(observing(new_run)) as http:
        await register(http)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(http.get, "/batch", headers=ELSEWHERE))
            await anyio.to_thread.run_sync(compressing.wait)
            assert (await http.get("/status")).status_code == 200
            answered.set()


@pytest.mark.slow
@pytest.mark.parametrize("call", range(1, 13))
async def test_a_kill_at_any_write_loses_no_batch_and_repeats_none(new_run, lab, call):
    """The gateway dies before its `call`-th write, and the trainer asks again as the stock one does."""
    await form(lab, 0, 3)
    config, trained, held = observing(new_run), [], []

    async def train(http, until):
        while len(trained) < until:
            batch = await ask(http)
            if batch is not None:
                held.append(number_of(batch))
            else:
                trained.extend(held)
                held.clear()

    async with new_run.gateway(config) as http:
        await register(http)
        bus, writes, patience = new_run.service.bus, 0, anyio.CancelScope()

        def dying(name):
            real = getattr(bus, name)

            async def write(*args, **kwargs):
                nonlocal writes
                writes += 1
                if writes == call:
                    new_run.service.kill()
                    patience.cancel()
                return await real(*args, **kwargs)

            return write

        bus.put, bus.commit = dying("put"), dying("commit")
        with patience:
            await train(http, 3)
        new_run.service.kill()
    async with new_run.gateway(config) as http:
        await train(http, 3)
        assert trained == [0, 1, 2]
        while (report := await report_of(lab)) is None or report.next_batch < 3:
            assert await ask(http) is None
        assert (await policy_of(lab)).policy_version.step == 3


async def test_of_two_replies_under_way_the_later_one_alone_may_be_received(lab):
    await form(lab, 0, 2)
    config = RunConfig(run="r", mode="observe", batching=BatchingConfig(batch_size=8))
    service = Service(lab.bus, "gateway", "r")
    trainers = Trainers(service, gateway_settings(config), await GatewayStore.open(lab.bus, []))
    await trainers.register("", RegisterTrainer(**STOCK))
    early, late = await trainers.next_batch(""), await trainers.next_batch("")
    assert early.data == late.data
    assert not await trainers.record_receipt(early, received=True)
    assert await trainers.record_receipt(late, received=True)
    assert not await trainers.record_receipt(early, received=False), "its client left, after it had the later one"
    assert await trainers.next_batch("") is None
    assert (await trainers.next_batch("")).number == 1


class Connection:
    """The server's side of a client that leaves when `leaves` says so: before or while the reply is noted."""

    def __init__(self, leaves=None, *, notes=True):
        self.leaves = leaves
        self.gone = leaves == "before"
        self.notes = notes
        self.noted = []
        self.sent = b""
        self.whole = False

    async def receive(self):
        if self.gone:
            return {"type": "http.disconnect"}
        return await anyio.sleep_forever()

    async def send(self, message):
        self.sent += message.get("body", b"")
        self.whole = message.get("more_body") is False

    async def note(self, *, received):
        self.noted.append(received)
        self.gone = self.gone or self.leaves == "meanwhile"
        return self.notes

    async def reply(self):
        scope = {"type": "http", "method": "GET", "headers": []}
        await BatchResponse(b'{"batch": 1}', {}, self.note)(scope, self.receive, self.send)
        return self.whole, self.noted


async def test_a_reply_is_whole_only_for_a_client_that_was_there_when_it_was_noted():
    assert await Connection().reply() == (True, [True])
    assert await Connection("before").reply() == (False, [])
    assert await Connection("meanwhile").reply() == (False, [True, False])
    unnoted = Connection(notes=False)
    assert await unnoted.reply() == (False, [True])
    with pytest.raises(json.JSONDecodeError):
        json.loads(unnoted.sent)
