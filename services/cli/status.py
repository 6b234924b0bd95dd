"""`lachesis status`: one snapshot of a run, as tables or JSON."""

from collections.abc import Callable, Sequence

import anyio
from rich.text import Text

from lachesis.pipeline.config.run import RunConfig
from lachesis.services.cli.columns import FULL, Column, print_columns
from lachesis.services.cli.options import Options
from lachesis.services.cli.output import human_bytes, human_seconds, print_json, print_table, printable
from lachesis.services.cli.snapshot import Snapshot, take
from lachesis.services.connect import LOOK_S, open_run
from lachesis.services.live.evaluations import evaluation_summary
from lachesis.services.live.overview import barren
from lachesis.services.live.services import Quantiles, ServiceStatus

__all__ = ["run_status"]

_LEGEND = (
    "groups of rollouts and times since each process started (`lachesis top`: of late). lag: still to pass the stage; "
    "held: in it; again: delivered more than once; dead: given up; wait: from stored to taken up"
)
_STYLES = {"ok": "green", "silent": "red", "unknown": "yellow", "waiting": "red", "backpressure": "yellow"}


def run_status(options: Options, *, as_json: bool) -> None:
    """Print the snapshot."""
    snapshot = anyio.run(_take, options.config())
    if as_json:
        print_json(snapshot)
    else:
        _print(snapshot)


async def _take(config: RunConfig) -> Snapshot:
    async with open_run(config, f"{config.run}.status", patience_s=LOOK_S, needs_jetstream=False) as history:
        return await take(history, config)


def _print(snapshot: Snapshot) -> None:
    if snapshot.ended:
        print(f"run {snapshot.run} has ended; what follows is how it stood then")
    else:
        print(f"run {snapshot.run} on nats-server {snapshot.server_version}, {snapshot.server}")
    for problem in snapshot.problems:
        print(f"problem  {printable(problem)}")
    print(f"policy   {_policy(snapshot)}")
    print(f"trainer  {_trainer(snapshot)}")
    print(f"ledger   {_ledger(snapshot)}")
    for evaluation in snapshot.evaluations:
        print(f"held out {printable(evaluation_summary(evaluation))}{_beside(snapshot.reward)}")
    promoted = snapshot.ledger.promoted if snapshot.ledger else None
    if promoted is not None:
        print(f"judged   by revision {promoted.revision} from sequence {promoted.first} on, promoted by {promoted.by}")
    for warning in [*barren(snapshot.ledger.outcomes if snapshot.ledger else {}), *snapshot.warnings]:
        print(f"warning  {printable(warning)}")
    print()
    print_columns(_columns(snapshot.services))
    for row in snapshot.services:
        for note in row.notes:
            print(f"{row.service}: {printable(note)}")
    if not snapshot.ended:
        print(_LEGEND)
    print()
    if snapshot.streams is None:
        return
    if not snapshot.streams:
        print("no streams yet: lachesis init")
        return
    streams = (
        (row.name, row.messages, human_bytes(row.bytes), human_bytes(row.max_bytes), _share(row.bytes, row.max_bytes))
        for row in snapshot.streams
    )
    print_table(("stream", "messages", "bytes", "budget", "full"), streams)


def _beside(reward: float | None) -> str:
    return "" if reward is None else f"; training reward {reward:.3g}"


def _columns(rows: Sequence[ServiceStatus]) -> list[Column]:
    def figures(name: str, cell: Callable[[ServiceStatus], object], least: int = 0, most: int = FULL) -> Column:
        cells = [cell(row) for row in rows]
        return Column(name, [Text("-" if one is None else str(one)) for one in cells], least=least, most=most)

    return [
        Column("service", [Text(printable(row.service)) for row in rows]),
        Column("state", [Text(row.state, style=_STYLES.get(row.state, "")) for row in rows]),
        figures("replicas", lambda row: len(row.instances) or None, least=2),
        figures("lag", lambda row: row.lag),
        figures("held", lambda row: row.in_flight, least=2),
        figures("handled", lambda row: row.handled),
        figures("again", lambda row: row.redelivered, least=1),
        figures("dead", lambda row: row.dead, least=1),
        figures("wait p50/p95/p99", lambda row: _times(row.wait), least=FULL),
        figures("process p50/p95/p99", lambda row: _times(row.process), least=FULL),
        figures("wait p99", lambda row: human_seconds(row.wait.p99), most=FULL - 1),
        figures("process p99", lambda row: human_seconds(row.process.p99), most=FULL - 1),
    ]


def _policy(snapshot: Snapshot) -> str:
    policy = snapshot.policy
    if policy is None:
        return "not known" if snapshot.problems else "none published yet"
    return f"step {policy.step}, {policy.version}, {policy.age_s:.0f} s ago"


def _trainer(snapshot: Snapshot) -> str:
    trainer = snapshot.trainer
    if trainer is None:
        row = next((row for row in snapshot.services if row.service == "trainer"), None)
        if row is None or row.state in {"silent", "ended", "unknown"}:
            return "not known" if snapshot.problems else "no checkpoint"
        taken = row.metrics.get("train/step")
        return "no checkpoint yet" if taken is None else f"step {taken:.0f}, no checkpoint yet"
    voids = f", {trainer.voids} void" if trainer.voids else ""
    dropped = f", {trainer.dropped} groups of the last ones dropped (see the log)" if trainer.dropped else ""
    return f"step {trainer.step} durable, batches {trainer.batches}{voids}{dropped}, {trainer.age_s:.0f} s ago"


def _ledger(snapshot: Snapshot) -> str:
    ledger = snapshot.ledger
    if ledger is None:
        return "not known" if snapshot.problems else "empty"
    outcomes = ", ".join(f"{count} {kind}" for kind, count in ledger.outcomes.items()) or "none"
    return (
        f"entry {ledger.index}, batches {ledger.batches}, every rollout up to {ledger.watermark} has its outcome, "
        f"{ledger.age_s:.0f} s ago; groups: {outcomes}{_lengths(snapshot)}"
    )


def _lengths(snapshot: Snapshot) -> str:
    """Say how long the groups are that are dropped as stale, beside those that are trained; empty while none is."""
    metrics = next((row.metrics for row in snapshot.services if row.service == "batcher"), {})
    stale, batched = (metrics.get(f"batching/tokens_per_sequence/{kind}") for kind in ("stale", "batched"))
    if stale is None or batched is None:
        return ""
    return f"; tokens a sequence: {batched:.0f} trained, {stale:.0f} dropped as stale"


def _times(times: Quantiles) -> str | None:
    if times.p50 is None:
        return None
    return " / ".join(human_seconds(value) or "-" for value in (times.p50, times.p95, times.p99))


def _share(part: int, whole: int) -> str | None:
    return f"{100 * part / whole:.1f} %" if whole > 0 else None
