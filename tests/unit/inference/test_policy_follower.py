"""Following the policy: what cannot be read or loaded is passed over, and the next record counts."""

from functools import partial

import anyio
import pytest
import torch
from unit.spans import Sink

from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.inference import policy_follower as follower_module
from lachesis.pipeline.inference.policy_follower import follow_policy
from lachesis.pipeline.inference.weights_lock import acquire_weights_lock
from lachesis.pipeline.model.tensors import check_coverage
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.spans import batch_trace, span_id
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError


class Server:
    """An inference server that knows of one damaged file; its own directory as well."""

    def __init__(self):
        self.loaded = []

    async def current(self):
        return self

    async def update_weights(self, path, version):
        if path == "damaged":
            raise DataError("torn")
        self.loaded.append(version)

    async def weight_version(self):
        return self.loaded[-1]


async def test_records_that_cannot_be_read_or_loaded_are_passed_over(lab):
    server, loaded = Server(), anyio.Event()
    async with lab.running(lambda service: follow_until_drained(service, server, loaded), "inference"):
        for weights in (None, "damaged", "whole"):
            record = PolicyRecord(run="r", version="1-a-b", weights=str(weights), tokenizer_hash="t", written_ns=1)
            await lab.bus.put(keys.POLICY, encode(record) if weights else b"\xc1")
            await lab.bus.changed(until=lab.bus.now() + 0.02)
        with anyio.fail_after(10):
            await loaded.wait()
    assert server.loaded == ["1-a-b"]


async def test_weights_that_can_never_fit_end_the_server_with_the_reason(lab):
    class Other(Server):
        async def update_weights(self, path, version):
            check_coverage({"a": torch.zeros(2)}, {"a": torch.zeros(2), "lm_head.weight": torch.zeros(2)}, "the file")

    record = PolicyRecord(run="r", version="1-a-b", weights="w", tokenizer_hash="t", written_ns=1)
    await lab.bus.put(keys.POLICY, encode(record))
    refused = pytest.RaisesExc(ConfigError, match=r"cannot take .*1 missing: lm_head.weight.*inference.policy.model")
    with pytest.RaisesGroup(refused, flatten_subgroups=True):
        async with lab.running(lambda service: follow_until_drained(service, Other(), anyio.Event()), "inference"):
            await anyio.sleep_forever()


async def as_named(record):
    return record.weights


async def follow_until_drained(service, server, loaded, path_of=as_named, max_behind=None):
    async with service.until_drained():
        await follow_policy(service, server, loaded, "main", path_of=path_of, max_behind=max_behind)


class Scripted:
    """A server that first raises what `fail` holds; `gate` delays it."""

    def __init__(self, *fail, gate=None):
        self.loaded = []
        self.fail = list(fail)
        self.gate = gate
        self.says = []  # other versions that it names as its own, before the right one
        self.paused = False

    async def current(self):
        return self

    async def pause(self, mode):
        assert mode == "keep"
        self.paused = True

    async def weight_version(self):
        return self.says.pop(0) if self.says else self.loaded[-1][1]

    async def update_weights(self, path, version):
        if self.gate:
            await self.gate.wait()
        if self.fail:
            raise self.fail.pop(0)
        self.loaded.append((path, version))
        self.paused = False


async def publish(lab, step):
    record = PolicyRecord(run="r", version=f"{step}-a-b", weights=f"/w/{step}", tokenizer_hash="t", written_ns=1)
    await lab.bus.put(keys.POLICY, encode(record))


async def no_path(record):
    raise AssertionError("shared weights have no file")


async def test_weights_in_shared_memory_are_taken_by_their_pointer_and_in_turn(lab, tmp_path):
    server, loaded, pointer = Scripted(), anyio.Event(), tmp_path / "shared_memory.json"

    async def follow(service):
        async with service.until_drained():
            await follow_policy(service, server, loaded, "main", path_of=no_path, shared=pointer)

    async with lab.running(follow, "inference"):
        with await acquire_weights_lock(tmp_path):
            await publish(lab, 1)
            await lab.bus.changed(until=lab.bus.now() + 0.05)
            assert server.loaded == []  # the trainer has its turn
        with anyio.fail_after(10):
            await loaded.wait()
    assert server.loaded == [(str(pointer), "1-a-b")]


def has_loaded(server, count):
    async def condition():
        return len(server.loaded) >= count

    return condition


async def test_each_new_policy_is_loaded_and_the_first_is_told_of(lab):
    server, loaded = Scripted(), anyio.Event()
    async with lab.running(lambda service: follow_until_drained(service, server, loaded), "inference") as service:
        await lab.bus.changed(until=lab.bus.now() + 0.02)
        assert not loaded.is_set()
        for step in (0, 1):
            await publish(lab, step)
            await lab.until(has_loaded(server, step + 1))
        assert loaded.is_set()
        assert service.vitals.metrics["policy/step"] == 1
    assert server.loaded == [("/w/0", "0-a-b"), ("/w/1", "1-a-b")]


async def test_of_several_missed_only_the_newest_is_loaded(lab):
    server = Scripted(gate=anyio.Event())
    async with lab.running(lambda service: follow_until_drained(service, server, anyio.Event()), "inference"):
        await publish(lab, 0)
        await lab.bus.changed(until=lab.bus.now() + 0.02)
        for step in range(1, 6):
            await publish(lab, step)
        server.gate.set()
        await lab.until(has_loaded(server, 2))
    assert [version for _, version in server.loaded] == ["0-a-b", "5-a-b"]


@pytest.mark.parametrize("kind", [DataError, AccessError])
async def test_a_refused_first_policy_leaves_the_server_unannounced(lab, kind):
    server, loaded = Scripted(kind("it may have been pruned")), anyio.Event()

    async def noted():
        return lab.said(service) != ""

    async with lab.running(lambda service: follow_until_drained(service, server, loaded), "inference") as service:
        await publish(lab, 0)
        await lab.until(noted)
        assert not loaded.is_set()
        assert "pruned" in lab.said(service)
        await publish(lab, 1)
        await lab.until(has_loaded(server, 1))
        assert loaded.is_set()


async def test_a_refused_first_policy_is_tried_again(lab, monkeypatch):
    monkeypatch.setattr(follower_module, "_REFUSED_S", 0.01)
    server, loaded = Scripted(*[DataError("torn")] * 3), anyio.Event()
    await publish(lab, 0)
    async with lab.running(lambda service: follow_until_drained(service, server, loaded), "inference") as service:
        with anyio.fail_after(30):
            await loaded.wait()
        assert not service.vitals.problems


async def test_a_later_policy_that_was_refused_is_tried_again_where_none_follows(lab, monkeypatch):
    """A run whose server has old weights generates what is too stale to train on, so no newer policy ever comes."""
    monkeypatch.setattr(follower_module, "_REFUSED_S", 0.01)
    server = Scripted()
    async with lab.running(
        lambda service: follow_until_drained(service, server, anyio.Event()), "inference"
    ) as service:
        await publish(lab, 0)
        await lab.until(has_loaded(server, 1))
        server.fail = [DataError("torn")] * 3
        said = []
        monkeypatch.setattr(service, "set_problem", lambda topic, text, **more: said.append((topic, text, more)))
        await publish(lab, 1)
        await lab.until(has_loaded(server, 2))
    stops = [more.get("stops", False) for _, text, more in said if text is not None]
    assert stops == [False, True, True], "the trainer publishes again what stops the run"


async def test_a_server_that_is_down_is_waited_for(lab):
    server = Scripted(*[InfrastructureError("down")] * 3)
    await publish(lab, 0)
    async with lab.running(lambda service: follow_until_drained(service, server, anyio.Event()), "inference"):
        await lab.until(has_loaded(server, 1))


async def test_weights_that_cannot_be_loaded_do_not_keep_newer_ones_waiting(lab):
    class Choosing(Scripted):
        async def update_weights(self, path, version):
            if version == "0-a-b":
                raise InfrastructureError("it computes with other weights than those of policy 0-a-b")
            await super().update_weights(path, version)

    server = Choosing()
    await publish(lab, 0)
    async with lab.running(
        lambda service: follow_until_drained(service, server, anyio.Event()), "inference"
    ) as service:
        await lab.until(lambda: _true("other weights" in lab.said(service)))
        await publish(lab, 1)
        await lab.until(has_loaded(server, 1))
        await lab.until(lambda: _true(lab.said(service) == ""))
    assert server.loaded == [("/w/1", "1-a-b")]


async def test_a_drain_ends_the_wait_for_a_server_that_is_down(lab):
    server = Scripted(*[InfrastructureError("down")] * 1000)
    await publish(lab, 0)
    service = Service(lab.bus, "inference", "r")

    async def retried():
        return service.vitals.retried >= 2

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(follow_policy, path_of=as_named), service, server, anyio.Event(), "main")
            await lab.until(retried)
            service.drain()


async def test_an_update_is_a_span_of_the_step_that_made_the_weights(lab):
    server, sink = Scripted(InfrastructureError("down"), DataError("it may have been pruned")), Sink()
    async with lab.running(partial(follow_until_drained, server=server, loaded=anyio.Event()), "inference") as service:
        service.tracing = Tracing(TelemetryConfig(ratio=0.0), sink)
        await publish(lab, 0)
        await lab.until(lambda: _true("pruned" in lab.said(service)))
        for step in (1, 2, 3):
            await publish(lab, step)
            await lab.until(has_loaded(server, step))
    assert [span.error for span in sink.spans] == [None] * 3
    traces = [batch_trace("r", "main", step - 1) for step in (1, 2, 3)]
    assert [span.trace for span in sink.spans] == traces  # no step made those of step 0
    assert [span.parent for span in sink.spans] == [span_id(trace, "train.step") for trace in traces]
    assert {span.name for span in sink.spans} == {"update_weights"}
    assert [span.attributes["rl.policy.version"] for span in sink.spans] == ["1-a-b", "2-a-b", "3-a-b"]
    assert [span.attributes["rl.train.step"] for span in sink.spans] == [1, 2, 3]


async def _true(value):
    return value


async def test_a_server_that_names_other_weights_after_an_update_is_updated_again(lab):
    server, loaded = Scripted(), anyio.Event()
    server.says = ["0-x-y"]
    await publish(lab, 0)
    async with lab.running(lambda service: follow_until_drained(service, server, loaded), "inference"):
        with anyio.fail_after(20):
            await loaded.wait()
    assert server.loaded == [("/w/0", "0-a-b")] * 2


async def test_a_server_that_falls_too_far_behind_is_paused_until_it_has_newer_weights(lab):
    server, gate, loaded = Scripted(), anyio.Event(), anyio.Event()

    async def slow(record):
        if record.version != "0-a-b":
            await gate.wait()
        return record.weights

    async def follow(service):
        await follow_until_drained(service, server, loaded, slow, max_behind=2)

    async with lab.running(follow, "inference") as service:
        await publish(lab, 0)
        await loaded.wait()
        for step in (1, 2):
            await publish(lab, step)
            await lab.bus.changed(until=lab.bus.now() + 0.02)
        assert not server.paused
        await publish(lab, 3)
        await lab.until(lambda: _true(server.paused))
        assert "3 steps behind" in lab.said(service)
        gate.set()
        await lab.until(lambda: _true(server.loaded[-1][1] == "3-a-b"))
        await lab.until(lambda: _true(not server.paused))
        assert lab.said(service) == ""
