"""What telemetry costs a stage: processor time per message at several sampling ratios, beside none at all.

    python tests/benchmarks/telemetry.py

A stage without work of its own reads groups from a real nats-server and stores annotations. "none" is the same stage
without stamps and histograms; at the other rows the spans go to a real OTLP receiver (gRPC) in another process. The
times are those of the stage's process, exporting thread included. Each row is measured `--rounds` times, the rows in
turn; the table gives the medians. Exits with 1 if stamps alone cost more than 1.25 times no telemetry.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.runtime.rollouts import StoredRollout
from lachesis.pipeline.runtime.service import open_service
from lachesis.pipeline.runtime.stateless import StatelessStage, run_stateless
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.otlp import OtlpExporter, open_otlp
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupScore, ScoreEvent, Stamp
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

ROWS: dict[str, float | None] = {"none": None, "stamps": None, "ratio 0": 0.0, "0.01": 0.01, "0.1": 0.1, "1.0": 1.0}
MOST = 1.25


def a_group(i: int) -> RolloutGroup:
    """A group of 4 samples of 64 tokens."""
    n = 4 * 64
    return RolloutGroup(
        id=new_group_id(),
        run="bench",
        env="sums",
        item=str(i),
        producer="bench",
        epoch=1,
        counter=i,
        policy_versions=["0-a-b"],
        sequences=Sequences(
            offsets=as_bytes([0, 64, 128, 192, 256], "int32"),
            tokens=as_bytes(list(range(n)), "int32"),
            loss_mask=pack_mask([k % 64 > 0 for k in range(n)]),
            logprobs=as_bytes([-0.5 if k % 64 else 0.0 for k in range(n)], "float32"),
            finish_reasons=["stop"] * 4,
            version_spans=[VersionSpan(k, 0, 0) for k in range(4)],
        ),
        tokenizer_hash="t",
        started_ns=time.time_ns(),
        messages=[[Message(role="user", content="1+1"), Message(role="assistant", content="2")]] * 4,
    )


async def fill(bus: Bus, count: int) -> None:
    async with anyio.create_task_group() as tasks:
        for i in range(count):
            group = a_group(i)
            headers = {PLAN_HEADER: Plan.of(group).pack()}

            async def store(group: RolloutGroup = group, headers: dict[str, str] = headers) -> None:
                await bus.publish(subjects.rollout("bench", "sums"), encode(group), msg_id=group.id, headers=headers)

            tasks.start_soon(store)


async def measure(bus: Bus, name: str, count: int, tracing: Tracing, *, stamps: bool) -> float:
    """Run the stage over everything stored and return microseconds of processor time per message."""

    async def handle(rollout: StoredRollout) -> GroupScore:
        group = rollout.group
        return GroupScore(
            group=group.id,
            seq=rollout.seq,
            item=group.item,
            policy_step=0,
            scores=[1.0] * 4,
            ratings={},
            lengths=[64] * 4,
        )

    def event(env: str, groups: list[GroupScore]) -> ScoreEvent:
        return ScoreEvent(run="bench", env=env, revision="live", ensemble="e", raters={}, groups=groups)

    def stamp(item: GroupScore, times: Stamp) -> GroupScore:
        return msgspec.structs.replace(item, stamps=[times]) if stamps else item

    stage = StatelessStage(kind="score", handle=handle, event=event, stamp=stamp, concurrency=64)
    async with open_service(bus, name, "bench", tracing=tracing) as service, anyio.create_task_group() as tasks:
        if not stamps:
            service.vitals.done = lambda *_, **__: None  # type: ignore[method-assign]
        began = time.process_time()
        tasks.start_soon(run_stateless, service, stage)
        while service.vitals.emitted < count:
            if service.vitals.dead:
                async with bus.read(subjects.EVENTS, ["rl.dead.>"], follow=False) as letters:
                    raise SystemExit((await anext(aiter(letters))).data.decode(errors="replace")[:900])
            await anyio.sleep(0.01)
        sink = tracing.sink
        while isinstance(sink, OtlpExporter) and sink.pending:  # noqa: ASYNC110 - another thread empties it
            await anyio.sleep(0.01)
        spent = time.process_time() - began
        service.drain()
    return spent / count * 1e6


async def compare(url: str, count: int, rounds: int) -> int:
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    dropped = 0
    with tempfile.TemporaryDirectory(prefix="lachesis bench ") as folder:
        async with (
            EmbeddedServer(Path(folder)) as server,
            await connect(server.url, run="bench", name="b", token=server.token) as bus,
        ):
            await bus.ensure_streams(StreamsConfig())
            await fill(bus, count)
            for turn in range(rounds):
                for i, (name, ratio) in enumerate(ROWS.items()):
                    otlp = None
                    if ratio is not None:
                        config = TelemetryConfig(endpoint=url, ratio=ratio, slow_s=3600.0)
                        otlp = open_otlp(config, {"service.name": "bench"})
                        tracing = Tracing(config, otlp)
                    else:
                        tracing = Tracing()
                    found[name].append(await measure(bus, f"s{turn}-{i}", count, tracing, stamps=name != "none"))
                    if otlp is not None:
                        otlp.close()
                        dropped += otlp.dropped
    base = statistics.median(found["none"])
    print(f"{count} groups, medians of {rounds} rounds; spans dropped: {dropped}")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name:8} {median:7.1f} us a message  {median / base:5.2f}x")
    return int(statistics.median(found["stamps"]) / base > MOST or dropped > 0)


def receive() -> None:
    """Be the receiver: print where it listens, and end with standard input."""
    from otlp import receiving

    with receiving("grpc") as received:
        print(received.url, flush=True)
        sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive()
        return
    command = [sys.executable, __file__, "--receive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdin is not None
        code = anyio.run(compare, receiver.stdout.readline().strip(), arguments.groups, arguments.rounds)
        receiver.stdin.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
