"""Derives the notices of silent services, and of processes that end or do not become ready. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from lachesis.pipeline.common.process_state import STOPPED_STATES, describe_stop
from lachesis.pipeline.notices.facts import HeardProcess, Moment, ProcessFact, held_up_by
from lachesis.schemas.notices import Notice

__all__ = [
    "ENDED",
    "HELD_CURE",
    "SILENT_S",
    "end_notices",
    "ends_recur",
    "is_silent",
    "never_heard_notices",
    "silence_notices",
]

ENDED = "ended"
"""Key of the notice of a process that ended; its supervisor logs each end."""
SILENT_S = 8.0
"""Seconds without a heartbeat, which is sent once a second, after which a process counts as silent."""
_STOPPED_S = 3.0
"""The same for a process that the kernel says is stopped."""
_HELD_S = 2.0
"""The same for a process with an interpreter that is known to be held."""
HELD_CURE = (
    "one call into C there keeps Python from all else, other threads as well: call it by "
    "`await anyio.to_process.run_sync(...)`, give it less at once, or bound what it is given"
)
_STARTING_S = 60.0
"""The same for a process that starts: while it imports packages or loads a model, it does nothing else."""
_UNREACHED_S = 60.0
"""Seconds after which a process should have sent its first heartbeat: a busy machine imports torch for so long."""
_MAX_NAMED = 3
_SPARE = {"curriculum", "health", "evaluator", "inference-eval"}
"""Services that a run can do without."""
_OFTEN = 3
"""From this many ends of a process within half an hour, they are no accident."""
_JUDGED_ENDS = 8
"""Newest ends that are read to estimate how long a process lives."""
_USUAL_LIVES = 2.0
"""A process works again once it has lived for this many times as long as its recent lives."""
_MIN_LIFE_S = 3.0


def is_silent(one: HeardProcess, now_s: float, state: str = "", held: str = "") -> bool:
    """Return whether a heartbeat of a process is overdue.

    `state`: its state in the kernel, if known; `held`: see `ProcessFact`.
    """
    if held:
        return now_s - one.heard_s > _HELD_S
    if state in STOPPED_STATES:
        return now_s - one.heard_s > _STOPPED_S
    return now_s - one.heard_s > (_STARTING_S if one.beat.stage.state == "starting" else SILENT_S)


def silence_notices(
    silent: Sequence[HeardProcess],
    speaking: Iterable[str],
    states: Mapping[int, str],
    facts: Mapping[int, ProcessFact],
    now: Moment,
) -> Iterator[Notice]:
    """Yield a notice for each process that sent heartbeats and is silent now.

    `speaking`: services with other processes that send heartbeats. `states`: by pid, the kernel's state of processes of
    this machine, "" for those that do not run.
    """
    others = set(speaking)
    for one in silent:
        beat = one.beat
        fact = facts.get(beat.pid)
        name = beat.service if fact is None or len(fact.services) > 1 else fact.name
        state = states.get(beat.pid)
        why, mend = _why_silent(beat.pid, state, fact, beat.host)
        yield Notice(
            key=f"silent/{beat.instance}",
            source=beat.service,
            what=f"{name} is silent" + ("" if beat.service not in others else ", others of it speak"),
            since_ns=now.ago_ns(one.heard_s),
            why=why,
            mend=mend,
            held_up=[] if beat.service in others else held_up_by(beat.service),
            stops=beat.service not in others and beat.service not in _SPARE,
        )


def _why_silent(pid: int, state: str | None, fact: ProcessFact | None, host: str) -> tuple[str, str]:
    log = f"see {fact.log}; " if fact is not None and fact.log else ""
    if fact is not None and fact.held:
        return f"{fact.held} holds Python itself, so nothing else of its process runs", HELD_CURE
    again = f"`kill -9 {pid}` has it started again" if fact is not None else f"end process {pid} and start it again"
    if state is not None and state in STOPPED_STATES:
        return describe_stop(pid, state)
    if state == "D":
        return f"its process {pid} waits for a disk or a device", "look at the disk, or at the machine's log"
    if state == "":
        return f"its process {pid} has ended", "start it again"
    if state is not None:
        return f"its process {pid} runs, and something in it blocks all else", f"{log}{again}"
    place = f"process {pid} on {host}" if host else f"process {pid}"
    return f"{place} sends no heartbeats: it ended, hangs, or is cut off from the server", "look there, or at its log"


def never_heard_notices(missing: Sequence[str], of: int) -> Iterator[Notice]:
    """Yield notices for services that never sent a heartbeat. `of`: how many services the run has."""
    why, mend = "it does not run, hangs, or is cut off from the server", "start it, or see its log"
    if len(missing) > _MAX_NAMED:
        what = f"all {of} services are silent" if len(missing) == of else f"silent: {', '.join(missing)}"
        yield Notice(
            key="silent", source="services", what=what, why=why, mend="start the run, or see the logs", stops=True
        )
        return
    for service in missing:
        yield Notice(
            key="silent",
            source=service,
            what=f"{service} is silent",
            why=why,
            mend=mend,
            held_up=held_up_by(service),
            stops=service not in _SPARE,
        )


def ends_recur(ends_s: Sequence[float], now_s: float) -> bool:
    """Return whether a process that ended at these times, the newest last, will probably end again.

    It will not once it has lived longer than it did recently, however often it ended before. Of its recent lives the
    second longest counts: they may differ much, and before the longest one it may have ended for another cause.
    """
    if len(ends_s) < _OFTEN:
        return False
    lives_s = sorted(after - before for before, after in pairwise(ends_s[-_JUDGED_ENDS:]))
    return now_s - ends_s[-1] <= max(_MIN_LIFE_S, _USUAL_LIVES * lives_s[-2])


def _mend_of_ends(fact: ProcessFact, how: str) -> str:
    again = "it is started again each time" + (f"; see {fact.log}" if fact.log else "")
    if "out of memory" not in how:
        return again
    helps = "`lachesis plan` says what a step takes and which settings make it less; " * ("trainer" in fact.services)
    return f"{helps}more memory, or fewer programs beside it; {again}"


def end_notices(facts: Iterable[ProcessFact], heard_pids: Mapping[int, HeardProcess], now: Moment) -> Iterator[Notice]:
    """Yield notices of processes that end or do not become ready, as their supervisor sees them."""
    for fact in facts:
        if fact.done:
            continue
        since = fact.failing_since_s
        if fact.failing or fact.recurs:
            often = f" ended {fact.ends} times in {fact.ends_within_s / 60:.0f} min; the last time it"
            what, _, why = (fact.failing or fact.last_end).partition(": ")
            yield Notice(
                key=ENDED,
                source=fact.name,
                what=f"{fact.name}{often if fact.ends > 1 else ''} {what}",
                since_ns=None if since is None else now.ago_ns(since),
                why=why,
                mend=_mend_of_ends(fact, what),
                held_up=held_up_by(*fact.services),
                stops=bool(fact.failing) and not _SPARE.issuperset(fact.services),
            )
        elif fact.pid is not None and fact.pid not in heard_pids and _is_overdue(fact, now.s):
            why, mend = _why_silent(fact.pid, fact.state or None, fact, "")
            yield Notice(
                key="unreached",
                source=fact.name,
                what=f"{fact.name} was started and has not reached the server",
                since_ns=now.ago_ns(fact.started_s),
                why=why if fact.state in STOPPED_STATES | {"D"} else "",
                mend=mend,
                held_up=held_up_by(*fact.services),
                stops=not _SPARE.issuperset(fact.services),
            )


def _is_overdue(fact: ProcessFact, now_s: float) -> bool:
    """Return whether a process that was started should have sent a heartbeat by now."""
    return now_s - fact.started_s > (_STOPPED_S if fact.state in STOPPED_STATES else _UNREACHED_S)
