"""One rollout, one trace: through every service, each a process, to a real OTLP receiver."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from integration.harness import RUN, Run
from integration.servers import Supervised
from otlp import Received, receiving

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.telemetry.sampling import is_sampled
from lachesis.schemas import subjects
from lachesis.schemas.annotations import ScoreEvent, TeacherEvent
from lachesis.schemas.catalog import CHANNELS
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

STEPS = 6
CLOCKS_NS = 200_000_000
"""Each process knows the server's time to half an exchange with it, which is long on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def traced_run(folder: Path, received: Received, ratio: float, steps: int = STEPS, **settings: object) -> Run:
    folder.mkdir()
    environ = {"OTEL_METRIC_EXPORT_INTERVAL": "500", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    patience = {"telemetry.close_s": 60.0}  # what is left at the end is delivered, however busy the machine
    sets = {"telemetry.endpoint": received.url, "telemetry.ratio": ratio, **patience, **settings}
    return Run(folder, steps, Supervised(folder), sets=sets, environ=environ)


def run_traced(folder: Path, received: Received, ratio: float, **settings: object) -> Run:
    with traced_run(folder, received, ratio, **settings) as run:
        run.start()
        assert run.process is not None
        assert run.process.wait(400) == 0, run.tail()
    return run


def traces(received: Received) -> dict[str, list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {}
    for service, span in received.spans:
        found.setdefault(span.trace_id.hex(), []).append((service, span))
    return found


def values(span: Any) -> dict[str, Any]:
    """Return a span's attributes; lists stay as OTLP has them."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


class Streams:
    """What the streams say became of the run's rollouts. `stored` are the groups of ROLLOUTS, `outcomes` what the
    ledger says of them, `redelivered` those that a stage has handled again.
    """

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.redelivered: set[str] = set()

    @classmethod
    async def read(cls, run: Run) -> "Streams":
        """Read the streams of a run that has ended."""
        found = cls()
        async with run.servers.afterwards("test") as bus:
            await found._read(bus, run.step())
        return found

    async def _read(self, bus: NatsBus, steps: int) -> None:
        seqs: dict[int, str] = {}
        rollouts = [subjects.rollout(RUN)]
        async with bus.read(subjects.ROLLOUTS, rollouts, headers_only=True, follow=False) as messages:
            async for message in messages:
                seqs[message.seq] = Plan.unpack(message.headers.get(PLAN_HEADER)).group
        self.stored = set(seqs.values())
        async with bus.read(subjects.LEDGER, [subjects.ledger(RUN, "main")], follow=False) as messages:
            async for message in messages:
                entry = decode(LedgerEntry, message.data)
                if entry.batch is not None:
                    trained = "trained" if entry.batch.number < steps else "unfinished"
                    self.outcomes |= {ref.group: trained for ref in entry.batch.groups}
                self.outcomes |= {seqs[one.seq]: one.kind for one in entry.outcomes}
        kinds: list[tuple[subjects.Kind, type[ScoreEvent | TeacherEvent]]]
        kinds = [("score", ScoreEvent), ("teacher", TeacherEvent)]
        for kind, event in kinds:
            async with bus.read(subjects.EVENTS, [subjects.event(kind, RUN, "live")], follow=False) as messages:
                async for message in messages:
                    for item in decode(event, message.data).groups:
                        if item.stamps[-1].attempt > 1:
                            self.redelivered.add(item.group)

    def outcome(self, group: str) -> str:
        return self.outcomes.get(group, "unfinished")


RATERS = ("letters", "repetition")
NAMES = {
    "rollout", "generate", "assemble batch", "train.consume", "train.step", "forward_backward", "optimizer.step",
    "publish_weights", "store_weights", "update_weights", "llm_request", "queue", "generation", "chat policy",
    "prompt_logprobs teacher", *(f"score {rater}" for rater in RATERS),
    *(f"{work} {channel.address}" for work in ("publish", "queue.wait", "process") for channel in CHANNELS),
}  # fmt: skip
"""Every name that a span may have. None of them says which run or environment it is of."""
SERVICES = {
    f"lachesis-{service}"
    for service in (
        "environment", "scorer", "teacher", "normalizer", "batcher", "trainer", "evaluator", "inference-policy",
        "inference-teacher", "inference-eval",
    )
}  # fmt: skip


def check_all(received: Received) -> None:
    """What holds of every span and trace that a run has left, once it has ended."""
    for _, span in received.spans:
        # Jaeger calls a span without a duration one that ends before it begins
        assert span.start_time_unix_nano < span.end_time_unix_nano, span
    assert {span.name for _, span in received.spans} <= NAMES
    assert {service for service, _ in received.spans} <= SERVICES
    exported = {(span.trace_id, span.span_id) for _, span in received.spans}
    for service, span in received.spans:
        if span.parent_span_id:
            assert (span.trace_id, span.parent_span_id) in exported, f"{service}: {span.name} is an orphan"
        for link in span.links:
            assert (link.trace_id, link.span_id) in exported, f"{service}: {span.name} links to nothing"
    assert len(exported) == len(received.spans)  # and none is exported twice


def roots(received: Received) -> dict[str, dict[str, Any]]:
    """Return the attributes of the rollouts' roots by group."""
    found = {span.trace_id.hex(): values(span) for _, span in received.spans if span.name == "rollout"}
    assert all(about["rl.group.id"] == group for group, about in found.items())
    return found


def groups_traced(received: Received) -> set[str]:
    """Return the groups of which there is any span: a batch's trace has none with a group."""
    batches = {span.trace_id for _, span in received.spans if span.name in {"assemble batch", "train.step"}}
    return {span.trace_id.hex() for _, span in received.spans if span.trace_id not in batches}


MESSAGE = {"messaging.system", "messaging.destination.name", "messaging.destination.template", "rl.run"}
OPERATION = {*MESSAGE, "messaging.operation.name", "messaging.operation.type", "server.address", "server.port"}
DELIVERY = {"rl.group.id", "rl.delivery.attempt", "rl.queue.wait_s"}
CONSUMED = {"messaging.message.id", "messaging.consumer.group.name"}
ENV = {"rl.env.name"}
ANSWERED = {
    "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
    "http.response.status_code", "rl.policy.versions",
}  # fmt: skip


def check_attributes(spans: Sequence[tuple[str, Any]], group: str, resources: dict[str, dict[str, str]]) -> None:
    """What every span of a rollout's trace says, by service and kind of span."""
    found = {(service.removeprefix("lachesis-"), span.name.partition(" ")[0]): values(span) for service, span in spans}
    publishes = {*OPERATION, *ENV, "messaging.message.id", "messaging.message.body.size"}
    in_ledger = publishes - ENV
    expected = {
        ("environment", "generate"): {"rl.group.size", "rl.policy.version", *ENV},
        ("environment", "chat"): {
            "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
        },
        ("inference-policy", "llm_request"): ANSWERED,
        ("inference-policy", "queue"): set(),
        ("inference-policy", "generation"): set(),
        ("environment", "publish"): publishes,
        ("scorer", "queue.wait"): MESSAGE | ENV,
        ("scorer", "process"): OPERATION | DELIVERY | CONSUMED | ENV,
        ("scorer", "score"): {"rl.rater", "rl.samples", "rl.missing"},
        ("scorer", "publish"): publishes,
        ("teacher", "queue.wait"): MESSAGE | ENV,
        ("teacher", "process"): OPERATION | DELIVERY | CONSUMED | ENV,
        ("teacher", "prompt_logprobs"): {
            "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.input_tokens",
        },
        ("inference-teacher", "llm_request"): ANSWERED,
        ("inference-teacher", "queue"): set(),
        ("inference-teacher", "generation"): set(),
        ("teacher", "publish"): publishes,
        ("normalizer", "queue.wait"): MESSAGE | ENV,
        ("normalizer", "process"): OPERATION | DELIVERY | ENV | {"messaging.message.id"},
        ("normalizer", "publish"): publishes,
        ("batcher", "queue.wait"): MESSAGE | ENV,
        ("batcher", "process"): OPERATION | DELIVERY | ENV,
        ("batcher", "publish"): in_ledger,
        ("trainer", "queue.wait"): MESSAGE,
        ("trainer", "train.consume"): {
            *OPERATION, "rl.group.id", "rl.train.step", "rl.batch.id", "rl.train.trace_id",
        },
    }  # fmt: skip
    told = {key: about.keys() for key, about in found.items() if key != ("environment", "rollout")}
    assert told == expected
    servers = {(about["server.address"], about["server.port"]) for about in found.values() if "server.port" in about}
    assert len(servers) == 1
    assert {about["rl.group.id"] for about in found.values() if "rl.group.id" in about} == {group}
    assert {about["rl.env.name"] for about in found.values() if "rl.env.name" in about} == {"sums"}
    assert {about["rl.run"] for about in found.values() if "rl.run" in about} == {RUN}
    published = [values(span) for _, span in spans if span.name.startswith("publish ")]
    assert {about["messaging.destination.name"]: about["messaging.message.id"].partition(":")[0] for about in published
            } == {
        "rl.rollout.killed.sums": "ROLLOUTS",
        "rl.score.killed.live.sums": "EVENTS",
        "rl.logprobs.killed.live.sums": "TEACHER",
        "rl.teacher.killed.live.sums": "EVENTS",
        "rl.reward.killed.live.sums": "EVENTS",
        "rl.ledger.killed.main": "LEDGER",
    }  # fmt: skip
    process = {"service.namespace", "service.instance.id", "host.name", "rl.run"}
    services = ("scorer", "teacher", "normalizer", "trainer", "inference-policy")
    assert all(resources[f"lachesis-{service}"].keys() >= process for service in services)


async def test_a_sampled_rollout_is_one_trace_over_all_processes_and_the_others_are_none(tmp_path: Path) -> None:
    ratio = 0.5
    with receiving("grpc") as received:
        run = run_traced(tmp_path / "a run", received, ratio, **{"telemetry.slow_s": 3600.0})
    check_all(received)
    streams = await Streams.read(run)
    kept = roots(received)
    assert {group for group in streams.stored if is_sampled(group, ratio)} <= kept.keys()
    assert groups_traced(received) == kept.keys()  # nothing is exported of any other
    again = delivered_again(received)
    for group in kept.keys() & streams.stored:
        about, outcome = kept[group], streams.outcome(group)
        assert about["rl.outcome"] == (outcome if outcome in {"trained", "unfinished"} else "dropped"), about
        match about["rl.sampling.reason"]:  # what happens to a group on a slow machine has its trace kept at any ratio
            case "ratio":
                assert is_sampled(group, ratio), about
                assert reason(streams, group) in {None, "redelivered"}, about
            case "redelivered":
                assert group in again, about
            case "late":  # its batch waited no longer for the teacher
                assert outcome in {"trained", "unfinished"}, about
            case why:
                assert why == reason(streams, group), about
    abandoned = kept.keys() - streams.stored  # by a drain that did not wait any longer
    assert all(kept[group]["rl.outcome"] in {"dropped", "unfinished"} for group in abandoned)

    whole = traces(received)
    trained = [trace for trace in whole.values() if any(span.name == "train.consume" for _, span in trace)]
    trace = max(trained, key=lambda trace: len({(service, span.name) for service, span in trace}))
    spans = {(service.removeprefix("lachesis-"), span.name): span for service, span in trace}
    root = spans["environment", "rollout"]
    assert root.parent_span_id == b""
    rollout, score, reward, ledger = (
        "rl.rollout.{run}.{env}", "rl.score.{run}.{revision}.{env}", "rl.reward.{run}.{revision}.{env}",
        "rl.ledger.{run}.{trainer}",
    )  # fmt: skip
    attributes = values(root)
    assert attributes.keys() >= {
        *("rl.group.id", "rl.group.size", "rl.env.name", "rl.policy.version", "rl.outcome", "rl.e2e_s"),
        *("rl.train.step", "rl.staleness", "rl.sampling.reason", "rl.run"),
    }
    kinds = {name.partition(" ")[0]: span.kind for (_, name), span in spans.items()}
    assert kinds == {  # of OTLP: 1 is internal, 2 server, 3 client, 5 consumer
        "rollout": 1, "generate": 1, "chat": 3, "llm_request": 2, "queue": 1, "generation": 1, "publish": 3,
        "queue.wait": 1, "process": 5, "score": 1, "prompt_logprobs": 3, "train.consume": 5,
    }  # fmt: skip
    under_root = {
        ("environment", "generate"),
        ("scorer", f"queue.wait {rollout}"),
        ("scorer", f"process {rollout}"),
        ("teacher", f"queue.wait {rollout}"),
        ("teacher", f"process {rollout}"),
        ("normalizer", f"queue.wait {score}"),
        ("normalizer", f"process {score}"),
        ("batcher", f"queue.wait {reward}"),
        ("batcher", f"process {reward}"),
        ("trainer", f"queue.wait {ledger}"),
        ("trainer", "train.consume"),
    }
    assert {key for key, span in spans.items() if span.parent_span_id == root.span_id} == under_root
    assert all(root.start_time_unix_nano - CLOCKS_NS <= span.start_time_unix_nano for span in spans.values())

    def below(service: str, name: str) -> set[tuple[str, str]]:
        ids = {span.span_id for where, span in trace if (where, span.name) == (f"lachesis-{service}", name)}
        return {(where.removeprefix("lachesis-"), span.name) for where, span in trace if span.parent_span_id in ids}

    assert below("environment", "generate") == {("environment", "chat policy"), ("environment", f"publish {rollout}")}
    assert below("environment", "chat policy") == {("inference-policy", "llm_request")}
    assert below("inference-policy", "llm_request") == {
        ("inference-policy", "queue"), ("inference-policy", "generation"),
    }  # fmt: skip
    scored = below("scorer", f"process {rollout}")
    assert scored == {("scorer", f"publish {score}"), *(("scorer", f"score {rater}") for rater in RATERS)}
    assert ("teacher", "prompt_logprobs teacher") in below("teacher", f"process {rollout}")
    assert below("teacher", "prompt_logprobs teacher") == {("inference-teacher", "llm_request")}

    check_attributes(trace, root.trace_id.hex(), received.resources)

    link = spans["trainer", "train.consume"].links[0]
    batch = {span.name: span for _, span in whole[link.trace_id.hex()]}
    assembled, step = batch["assemble batch"], batch["train.step"]
    assert link.span_id == step.span_id
    assert step.parent_span_id == assembled.span_id
    named = {one.string_value for one in values(assembled)["rl.group.ids"].values}
    for linking in (assembled, step):
        linked = {back.trace_id.hex() for back in linking.links}
        assert root.trace_id.hex() in linked
        assert linked == {group for group in named if is_sampled(group, ratio)} | (
            named & kept.keys() if linking is step else set()
        )
    assert values(assembled).keys() >= {"rl.group.ids", "rl.batch.id", "rl.run"}
    for name in ("forward_backward", "optimizer.step", "publish_weights"):
        assert batch[name].parent_span_id == step.span_id
        assert values(batch[name])["rl.train.step"] == values(step)["rl.train.step"]
    stored = batch["store_weights"]
    assert stored.parent_span_id == step.span_id
    assert stored.start_time_unix_nano >= batch["publish_weights"].start_time_unix_nano
    updates = [(service, span) for service, span in received.spans if span.name == "update_weights"]
    assert {service for service, _ in updates} >= {"lachesis-inference-policy"}
    steps = {span.span_id: values(span)["rl.train.step"] for _, span in received.spans if span.name == "train.step"}
    for _, span in updates:
        about = values(span)
        assert steps[span.parent_span_id] == about["rl.train.step"] == int(about["rl.policy.version"].split("-")[0])

    wait = received.metrics["lachesis-scorer", "lachesis.stage.wait"].exponential_histogram.data_points[0]
    assert wait.count > 0
    assert wait.exemplars


def test_at_ratio_0_a_slow_rollout_is_kept_whole(tmp_path: Path) -> None:
    with receiving("http/protobuf") as received:
        run_traced(
            tmp_path / "slow run", received, 0.0, **{"telemetry.slow_s": 0.001, "telemetry.protocol": "http/protobuf"}
        )
    check_all(received)
    kept = [trace for trace in traces(received).values() if any(span.name == "train.consume" for _, span in trace)]
    assert len(kept) == STEPS * 4
    for trace in kept:
        names = {span.name for _, span in trace}
        assert {"rollout", "generate", "process rl.rollout.{run}.{env}"} <= names
        assert {"process rl.score.{run}.{revision}.{env}", "process rl.reward.{run}.{revision}.{env}"} <= names
    for about in roots(received).values():
        assert about["rl.sampling.reason"] in {"slow", "redelivered", "stale", "failed"}


async def test_at_ratio_0_the_traces_of_what_a_killed_teacher_held_are_kept_and_no_others(tmp_path: Path) -> None:
    settings = {"telemetry.slow_s": 3600.0}
    with receiving("grpc") as received, traced_run(tmp_path / "a run", received, 0.0, 10_000, **settings) as run:
        run.start()
        await run.wait_for_step(1)
        async with run.servers.during("test") as bus:
            with stopped(run.pids()["inference-teacher"]):
                await until_held(bus, subjects.durable("teacher", RUN, "live"))
                teacher = run.pids()["teacher"]
                os.kill(teacher, signal.SIGKILL)
                await run.wait_until_back("teacher", teacher)
            await until_redelivered(bus)
        await run.wait_for_step(run.step() + 8)  # so that they end
    check_all(received)
    streams = await Streams.read(run)
    expected = {group: why for group in streams.stored if (why := reason(streams, group)) is not None}
    kept = {group: about["rl.sampling.reason"] for group, about in roots(received).items()}
    again = delivered_again(received)
    # what was stored just before the kill, and not acknowledged, comes again too, and its second annotation is dropped
    assert {group: why for group, why in kept.items() if group in expected or group not in again} == expected
    assert {group for group, why in kept.items() if why == "redelivered"} <= again
    assert again >= streams.redelivered & expected.keys()
    assert again
    assert groups_traced(received) == kept.keys()


def delivered_again(received: Received) -> set[str]:
    """Return the groups in whose traces a stage says that it got them more than once."""
    return {
        span.trace_id.hex() for _, span in received.spans if values(span).get("rl.delivery.attempt", 1) > 1
    }  # fmt: skip


def reason(streams: Streams, group: str) -> str | None:
    """Return why a rollout's trace is to be kept at ratio 0, None if it is not."""
    match streams.outcome(group):
        case "unfinished" | "duplicate":
            return None
        case "stale":
            return "stale"
        case "dead" | "unscorable" | "oversized" | "lease_expired":
            return "failed"
    return "redelivered" if group in streams.redelivered else None


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process still, as one that hangs is."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_held(bus: NatsBus, durable: str) -> None:
    """Wait until the replicas of a stage hold something that they cannot finish."""
    with anyio.fail_after(120):
        while (await bus.lag(subjects.ROLLOUTS, durable)).unacked == 0:  # noqa: ASYNC110 - nothing to wait on
            await anyio.sleep(0.05)


async def until_redelivered(bus: NatsBus) -> None:
    """Wait until the teacher has handled a rollout that was delivered to it before."""
    with anyio.fail_after(120):
        async with bus.read(subjects.EVENTS, [subjects.event("teacher", RUN, "live")]) as messages:
            async for message in messages:
                if any(item.stamps[-1].attempt > 1 for item in decode(TeacherEvent, message.data).groups):
                    return
