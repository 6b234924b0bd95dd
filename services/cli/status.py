"""`lachesis status`: one snapshot of a run, as tables or JSON."""

import time
from collections.abc import Callable, Iterator, Sequence

import anyio
from rich.text import Text

from lachesis.pipeline.notices.text import notice_lines
from lachesis.services.cli.columns import FULL_DETAIL, TableColumn, print_columns
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.observe.evaluations import evaluation_summary
from lachesis.services.observe.live_run_state import look_at_run
from lachesis.services.observe.lost_generation import describe_lost_generation
from lachesis.services.observe.rewards import describe_rewards
from lachesis.services.observe.run_state import STATUS_FIELDS, RunState, StreamStatus, project
from lachesis.services.observe.services import Quantiles, ServiceStatus
from lachesis.services.output import human_bytes, human_seconds, print_json, print_table, printable

__all__ = ["status"]

_LEGEND = (
    "groups of rollouts and times since each process started (`lachesis top`: recently). lag: still to pass the stage; "
    "held: in it; again: delivered more than once; dead: given up; wait: from stored to start of handling"
)
_STYLES = {"ok": "green", "waiting": "red", "backpressure": "yellow"}
_ABSENT = {
    "silent": "silent, so dead, cut off, or held up by code of its own",
    "unknown": "not known, since the server does not answer for all",
    "finished": "ended, as the last step is taken",
}
"""By the state of services of which nothing is heard what that means; those of a run that has ended need no word."""


@with_options
def status(options: Options, as_json: Json = False) -> None:
    """Show the state of a run: streams, services, ledger, policy, trainer."""
    anyio.run(look_at_run, options.config(), _print_json if as_json else _print)


def _print_json(snapshot: RunState) -> None:
    print_json(project(snapshot, STATUS_FIELDS))


def _print(snapshot: RunState) -> None:
    print(_headline(snapshot))
    for problem in snapshot.problems:
        print(f"problem  {printable(problem)}")
    for name, text in _facts(snapshot):
        print(f"{name:8} {printable(text)}")
    for line in notice_lines(snapshot.notices, time.time_ns()):
        print(f"notice   {printable(line)}")
    for warning in snapshot.warnings:
        print(f"warning  {printable(warning)}")
    _print_services(snapshot.services)
    if snapshot.streams is not None:
        _print_streams(snapshot.streams)


def _headline(snapshot: RunState) -> str:
    step, steps = snapshot.step, snapshot.steps
    of = "" if steps is None or step is None else f" of {steps}"
    where = f", on nats-server {snapshot.server_version}, {snapshot.server}" if snapshot.server else ""
    at = "before its first step" if step is None else f"at step {step}"
    if snapshot.finished:
        going = "" if snapshot.ended else f"; its services are about to end{where}"
        return f"run {snapshot.run} finished {at}{going}"
    if snapshot.ended:
        return f"run {snapshot.run} has ended {at}{of}; what follows is how it stood then"
    return f"run {snapshot.run} {at}{of}{where}"


def _facts(snapshot: RunState) -> Iterator[tuple[str, str]]:
    """Yield what is known of the training and how far it is recorded; of what is not, why."""
    if rewards := describe_rewards(snapshot.reward, snapshot.rewards):
        yield "reward", rewards
    for evaluation in snapshot.evaluations:
        yield "held out", evaluation_summary(evaluation)
    for name, known, text in (
        ("policy", snapshot.policy, _policy), ("trainer", snapshot.trainer, _trainer),
        ("ledger", snapshot.ledger, _ledger),
    ):  # fmt: skip
        if known is not None or not snapshot.problems:  # else it was not answered, which is said already
            yield name, text(snapshot)
    if lost := describe_lost_generation(snapshot.lost_generation):
        yield "lost", lost
    if snapshot.inference:
        yield "servers", ", ".join(f"{role} {url}" for role, url in snapshot.inference.items())
    promoted = snapshot.ledger.promoted if snapshot.ledger else None
    if promoted is not None:
        yield "judged", f"by revision {promoted.revision} from sequence {promoted.first} on, promoted by {promoted.by}"


def _print_services(services: Sequence[ServiceStatus]) -> None:
    """Print the services that speak as a table, and name the others."""
    there = [row for row in services if row.instances]
    if there:
        print()
        print_columns(_columns(there))
        for row in there:
            for note in row.notes:
                print(f"{row.service}: {printable(note)}")
        print(_LEGEND)
    for state, meaning in _ABSENT.items():
        names = [row.service for row in services if row.state == state]
        if names:
            print(f"\n{meaning}: {printable(', '.join(names))}")


def _print_streams(rows: Sequence[StreamStatus]) -> None:
    if not rows:
        print("\nno streams yet: lachesis init")
        return
    streams = [
        (row.name, row.messages, human_bytes(row.bytes), human_bytes(row.max_bytes), _share(row.bytes, row.max_bytes))
        for row in rows
        if row.messages
    ]
    if streams:
        print()
        print_table(("stream", "messages", "bytes", "budget", "full"), streams)
    else:
        print("\nnothing is stored yet")


def _columns(rows: Sequence[ServiceStatus]) -> list[TableColumn]:
    def figures(
        name: str, cell: Callable[[ServiceStatus], object], least: int = 0, most: int = FULL_DETAIL
    ) -> TableColumn:
        cells = [cell(row) for row in rows]
        return TableColumn(name, [Text("-" if one is None else str(one)) for one in cells], least=least, most=most)

    columns = [
        figures("replicas", lambda row: len(row.instances), least=2),
        figures("lag", lambda row: row.lag),
        figures("held", lambda row: row.in_flight, least=2),
        figures("handled", lambda row: row.handled),
        figures("again", lambda row: row.redelivered, least=1),
        figures("dead", lambda row: row.dead, least=1),
        figures("wait p50/p95/p99", lambda row: _times(row.wait), least=FULL_DETAIL),
        figures("process p50/p95/p99", lambda row: _times(row.process), least=FULL_DETAIL),
        figures("wait p99", lambda row: human_seconds(row.wait.p99), most=FULL_DETAIL - 1),
        figures("process p99", lambda row: human_seconds(row.process.p99), most=FULL_DETAIL - 1),
    ]
    return [
        TableColumn("service", [Text(printable(row.service)) for row in rows]),
        TableColumn("state", [Text(row.state, style=_STYLES.get(row.state, "")) for row in rows]),
        *(column for column in columns if any(cell.plain != "-" for cell in column.cells)),
    ]


def _policy(snapshot: RunState) -> str:
    policy = snapshot.policy
    if policy is None:
        return "none published yet"
    return f"step {policy.step}, {policy.version}, {policy.age_s:.0f} s ago"


def _trainer(snapshot: RunState) -> str:
    trainer = snapshot.trainer
    if trainer is None:
        row = next((row for row in snapshot.services if row.service == "trainer"), None)
        if row is None or not row.instances:
            return "no checkpoint"
        taken = row.metrics.get("train/step")
        return "no checkpoint yet" if taken is None else f"step {taken:.0f}, no checkpoint yet"
    voids = f", {trainer.voids} void" if trainer.voids else ""
    dropped = f", {trainer.dropped} groups of the last ones dropped (see the log)" if trainer.dropped else ""
    return f"step {trainer.step} durable, after {_batches(trainer.batches)}{voids}{dropped}, {trainer.age_s:.0f} s ago"


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches"


def _ledger(snapshot: RunState) -> str:
    ledger = snapshot.ledger
    if ledger is None:
        return "empty"
    outcomes = ", ".join(f"{count} {kind}" for kind, count in ledger.outcomes.items()) or "none"
    left = ledger.batches - snapshot.trainer.batches if snapshot.finished and snapshot.trainer else 0
    after = f" ({left} after the last step, not trained)" if left > 0 else ""
    return (
        f"entry {ledger.index}, {_batches(ledger.batches)} formed{after}, every rollout up to {ledger.watermark} has "
        f"its outcome, {ledger.age_s:.0f} s ago; groups: {outcomes}{_lengths(snapshot)}"
    )


def _lengths(snapshot: RunState) -> str:
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
