"""What the ledger says against what is stored: outcomes, manifests, the chain, the writer's state, the bound. Pure.

Each check returns the violations it found, as sentences; none when everything holds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from chaos.history import History, Rollout
from chaos.witness import Acknowledged

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.whitening import whiten_batch
from lachesis.pipeline.errors import LedgerError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.producer_dedup import ProducerDedup, ResolvedSet
from lachesis.schemas import subjects
from lachesis.schemas.annotations import (
    DeadLetter,
    GroupReward,
    RewardEvent,
    ScoreEvent,
    TeacherEvent,
    TeacherPointer,
)
from lachesis.schemas.ledger import GroupRef, LedgerEntry, Outcome

__all__ = ["bound", "chain", "kept", "manifests", "outcomes", "promotions", "reasons", "stored_once", "writer_state"]


class Annotated:
    """The annotation of each kind that counts for each rollout, which is the first stored; `firsts` are the sequences
    of groups. By group, dead letters by sequence."""

    def __init__(self, history: History) -> None:
        self.firsts: dict[str, int] = {}
        for rollout in history.rollouts:
            if rollout.plan:
                self.firsts.setdefault(rollout.plan.group, rollout.seq)
        self.rewards: dict[str, GroupReward] = {}
        self.teachers: dict[str, TeacherPointer] = {}
        self.letters: dict[int, DeadLetter] = {}
        for _, event in history.annotations:
            match event:
                case RewardEvent():
                    for reward in event.groups:
                        self.rewards.setdefault(reward.group, reward)
                case TeacherEvent():
                    for pointer in event.groups:
                        self.teachers.setdefault(pointer.group, pointer)
                case DeadLetter():
                    if event.ends_rollout:
                        self.letters.setdefault(event.seq, event)
                    elif event.group is not None and event.stage == "teacher":
                        failed = TeacherPointer(group=event.group, seq=event.seq, stored=None, reason=event.reason)
                        self.teachers.setdefault(event.group, failed)


def _recorded(entry: LedgerEntry) -> Iterator[int]:
    yield from (outcome.seq for outcome in entry.outcomes)
    yield from (ref.seq for ref in (entry.batch.groups if entry.batch else ()))


def outcomes(history: History, config: BatchingConfig, settled: int | None = None) -> list[str]:
    """Every rollout has exactly one outcome, or is ready for the next batch, which has too few groups yet.

    Of rollouts beyond sequence `settled` only that they have not two: the run was stopped with them under way.
    """
    counts = Counter(seq for stored in history.entries for seq in _recorded(stored.entry))
    found = [f"rollout {seq} has {count} outcomes" for seq, count in counts.items() if count > 1]
    gone = counts.keys() - {rollout.seq for rollout in history.rollouts}
    below = history.trimmed.get(subjects.ROLLOUTS, 1)
    found += [f"rollout {seq} has an outcome but is not stored" for seq in gone if seq >= below]
    annotated = Annotated(history)
    waiting = 0
    for rollout in history.rollouts:
        if counts[rollout.seq] or (settled is not None and rollout.seq > settled):
            continue
        missing = _missing(rollout, annotated, config)
        if missing:
            found.append(f"rollout {rollout.seq} has no outcome: {missing}")
        elif rollout.plan:
            waiting += rollout.plan.sequences
    if waiting >= config.batch_size * (config.max_staleness + 2):
        found.append(f"{waiting} sequences are ready, and nobody makes batches of {config.batch_size} of them")
    return found


def _missing(rollout: Rollout, annotated: Annotated, config: BatchingConfig) -> str | None:
    """Return what a rollout without an outcome lacks; None if it may still be in a batch."""
    if rollout.plan is None or rollout.seq in annotated.letters:
        return "it is dead, and the ledger does not say so"
    reward = annotated.rewards.get(rollout.plan.group)
    if reward is None:
        return "nobody rewarded it"
    if reward.verdict != "trainable":
        return f"it is {reward.verdict}, and the ledger does not say so"
    if config.teacher != "off" and rollout.plan.group not in annotated.teachers:
        return "its teacher never answered"
    return None


def manifests(history: History) -> list[str]:
    """Batches are numbered without a gap, and each group is in one of them at most."""
    batches = [stored.entry.batch for stored in history.entries if stored.entry.batch is not None]
    numbers = [batch.number for batch in batches]
    found = [] if numbers == list(range(len(numbers))) else [f"batches are numbered {numbers}"]
    counts = Counter(ref.group for batch in batches for ref in batch.groups)
    found += [f"group {group} is in {count} batches" for group, count in counts.items() if count > 1]
    if history.report is not None and history.report.voids:
        found.append(f"batches were void: {history.report.voids[:3]}")
    if history.report is not None and history.report.next_batch > len(batches):
        found.append(f"batch {history.report.next_batch - 1} is trained, of {len(batches)} in the ledger")
    return found


def chain(history: History) -> list[str]:
    """Each entry names the digest of the one before; the trainer's report names one of them."""
    position = LedgerPosition()
    digests = []
    for stored in history.entries:
        try:
            position = position.after(stored.entry)
        except LedgerError as error:
            return [str(error)]
        digests.append(position.digest)
    report = history.report
    if report is not None and report.ledger_index >= 0:
        if report.ledger_index >= len(digests):
            return [f"the trainer reports entry {report.ledger_index} of a ledger of {len(digests)}"]
        if digests[report.ledger_index] != report.chain:
            return [f"the trainer's report names another entry {report.ledger_index} than the ledger has"]
    return []


def promotions(history: History) -> list[str]:
    """Each rollout's scores and rewards are of the revision that the ledger says judges it; it never goes back."""
    said = [stored.entry.promoted for stored in history.entries if stored.entry.promoted]
    firsts = list(dict.fromkeys(promoted.first for promoted in said))
    found = [] if firsts == sorted(firsts) else [f"promotions begin at {firsts}"]
    known: object = msgspec.UNSET
    for stored in history.entries:
        if not stored.entry.promoted and known:
            found.append(f"entry {stored.entry.index} has forgotten {known}")
        known = stored.entry.promoted
    for _, event in history.annotations:
        if isinstance(event, ScoreEvent | RewardEvent):
            for item in event.groups:
                judge = max((first for first in firsts if first <= item.seq), default=None)
                if event.promoted != judge:
                    found.append(f"rollout {item.seq} has a {type(event).__name__} of {event.promoted}, not of {judge}")
    return found


def stored_once(history: History) -> list[str]:
    """No rollout is stored twice within the duplicate window."""
    where: dict[str, int] = {}
    keys: dict[tuple[str, int, int], int] = {}
    found = []
    for rollout in history.rollouts:
        if rollout.plan is None:
            continue
        plan = rollout.plan
        first = where.setdefault(plan.group, rollout.seq)
        twin = keys.setdefault((plan.producer, plan.epoch, plan.counter), rollout.seq)
        if min(first, twin) != rollout.seq:
            found.append(f"rollout {rollout.seq} is stored at {min(first, twin)} as well")
    return found


def kept(history: History, acknowledged: Iterable[Acknowledged]) -> list[str]:
    """Everything acknowledged is still there, or was deleted by the governor when it was not needed any more."""
    ours = (f"rl.rollout.{history.run}.", f"rl.ledger.{history.run}.")
    trained = history.report.next_batch if history.report else 0
    done = {
        seq
        for stored in history.entries
        if stored.entry.batch is None or stored.entry.batch.number < trained
        for seq in _recorded(stored.entry)
    } | {outcome.seq for stored in history.entries for outcome in stored.entry.outcomes}
    found = []
    for ack in acknowledged:
        if not (ack.subject.startswith(ours) or (ack.stream == subjects.EVENTS and f".{history.run}." in ack.subject)):
            continue
        if ack.seq in history.sequences[ack.stream]:
            continue
        what = f"{ack.subject}: {ack.msg_id} was acknowledged at sequence {ack.seq} of {ack.stream}"
        if ack.seq >= history.trimmed.get(ack.stream, 1):
            found.append(f"{what}, and is gone")
        elif ack.stream == subjects.ROLLOUTS and ack.seq not in done:
            found.append(f"{what}, and was deleted before it was trained or settled")
    return found


def reasons(history: History, config: BatchingConfig, std_floor: float) -> list[str]:
    """Each outcome follows from what is stored: advantages, staleness, verdicts, dead letters, duplicates."""
    rollouts = {rollout.seq: rollout for rollout in history.rollouts}
    annotated = Annotated(history)
    found = []
    for stored in history.entries:
        entry = stored.entry
        for outcome in entry.outcomes:
            rollout = rollouts.get(outcome.seq)
            if rollout is not None and not _justified(outcome, rollout, annotated, entry.next_batch, config):
                found.append(f"rollout {outcome.seq} is called {outcome.kind} ({outcome.reason}), which it is not")
        groups = entry.batch.groups if entry.batch else []
        given = _given_advantages(groups, annotated, entry.promoted.std_floor if entry.promoted else std_floor)
        for ref in groups:
            rollout = rollouts.get(ref.seq)
            wrong = _wrong(ref, rollout, annotated, entry.next_batch - 1, config) if rollout else "is not stored"
            if wrong is None and ref.advantages != given[ref.seq]:
                wrong = f"has advantages {ref.advantages}, where the first rewards of its batch give {given[ref.seq]}"
            if wrong:
                found.append(f"batch {entry.next_batch - 1}: rollout {ref.seq} {wrong}")
    return found


def _given_advantages(
    groups: Sequence[GroupRef], annotated: Annotated, std_floor: float
) -> dict[int, list[float | None]]:
    """Return by sequence the advantages that the first rewards give the groups of one batch."""
    rewards = {ref.seq: annotated.rewards[ref.group] for ref in groups if ref.group in annotated.rewards}
    known = [ref for ref in groups if ref.seq in rewards]
    plain = [msgspec.structs.replace(ref, advantages=rewards[ref.seq].advantages) for ref in known]
    to_whiten = {seq: reward.lengths for seq, reward in rewards.items() if reward.lengths}
    return {ref.seq: ref.advantages for ref in whiten_batch(plain, to_whiten, std_floor)}


def _justified(
    outcome: Outcome,
    rollout: Rollout,
    annotated: Annotated,
    next_batch: int,
    config: BatchingConfig,
) -> bool:
    plan = rollout.plan
    if outcome.kind == "dead":
        return plan is None or rollout.seq in annotated.letters
    if plan is None:
        return False
    reward = annotated.rewards.get(plan.group)
    match outcome.kind:
        case "stale":
            return next_batch - config.step_of(plan) > config.max_staleness
        case "duplicate":
            return annotated.firsts[plan.group] < rollout.seq
        case "zero_variance" | "unscorable" | "quarantined":
            return reward is not None and reward.verdict == outcome.kind
    return False


def _wrong(ref: GroupRef, rollout: Rollout, annotated: Annotated, batch: int, config: BatchingConfig) -> str | None:
    plan = rollout.plan
    if plan is None or (ref.group, ref.sequences, ref.tokens, ref.policy_step, ref.env) != (
        plan.group, plan.sequences, plan.tokens, plan.policy_step, rollout.env,
    ):  # fmt: skip
        return f"is {plan}, not {ref}"
    if batch - config.step_of(ref) > config.max_staleness:
        return f"is of step {config.step_of(ref)}, too old"
    reward = annotated.rewards.get(ref.group)
    if reward is None or reward.verdict != "trainable":
        return f"is trained, where its first reward says {reward}"
    pointer = annotated.teachers.get(ref.group)
    if ref.teacher is not None and (pointer is None or pointer.stored != ref.teacher):
        return f"has teacher {ref.teacher}, where the first pointer says {pointer}"
    return None


def writer_state(history: History) -> list[str]:
    """What each entry says of all before it is what one pass over their outcomes gives."""
    plans = {rollout.seq: rollout.plan for rollout in history.rollouts}
    settled: set[int] = set()
    marks = ProducerDedup()
    totals: Counter[str] = Counter()
    watermark = next_batch = 0
    for stored in history.entries:
        entry = stored.entry
        duplicates = {outcome.seq for outcome in entry.outcomes if outcome.kind == "duplicate"}
        for outcome in entry.outcomes:
            totals[outcome.kind] += 1
            totals["sequences"] += outcome.sequences
        if entry.batch is not None:
            totals["batched"] += len(entry.batch.groups)
            totals["sequences"] += entry.batch.sequences
            totals["batched_sequences"] += entry.batch.sequences
            next_batch += 1
        for seq in _recorded(entry):
            settled.add(seq)
            plan = plans.get(seq)
            if plan is not None and seq not in duplicates:
                marks.record(plan)
        place = f"entry {entry.index}"
        if entry.watermark < watermark:
            return [f"{place}: the watermark falls from {watermark} to {entry.watermark}"]
        watermark = entry.watermark
        resolved = ResolvedSet(entry.watermark, entry.resolved)
        # what is resolved and settled in no entry belongs to other runs, or is a chunk
        wrong = [seq for seq in plans if (seq in resolved) != (seq in settled)]
        if wrong:
            return [f"{place}: says otherwise than the outcomes so far of rollouts {wrong[:5]}"]
        if entry.producers != marks.pack():
            return [f"{place}: producers are {entry.producers}, the outcomes so far give {marks.pack()}"]
        if (entry.totals, entry.next_batch) != (dict(totals), next_batch):
            return [f"{place}: totals {entry.totals} and batch {entry.next_batch}, not {totals} and {next_batch}"]
    return []


def bound(
    history: History, acknowledged: Iterable[Acknowledged], config: BatchingConfig, late: int
) -> tuple[int, list[str]]:
    """Return the most sequences stored and not trained at any time, which the leases bound, and the violations.

    Groups that came late, after their lease had run out in an outage, may pass the bound: so many did.
    Times are the servers' and, of policies, the trainer's when it sent them: on one machine the same clock. A trainer
    that starts again steps back to its checkpoint; what it had trained before counts as trained, so this is a lower
    estimate.
    """
    changes: list[tuple[int, int]] = []
    weights = {rollout.seq: rollout.plan.sequences for rollout in history.rollouts if rollout.plan}
    changes += [(rollout.time_ns, weights.get(rollout.seq, 0)) for rollout in history.rollouts]
    sizes: list[int] = []
    for stored in history.entries:
        done = sum(weights.get(outcome.seq, 0) for outcome in stored.entry.outcomes)
        changes.append((stored.time_ns, -done))
        if stored.entry.batch is not None:
            sizes.append(stored.entry.batch.sequences)
    trained = 0
    for ack in acknowledged:
        step = ack.policy_step
        if step is not None and step > trained:
            changes.append((ack.sent_ns, -sum(sizes[trained:step])))
            trained = step
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    capacity = (config.max_staleness + 1) * config.batch_size + late * max(weights.values(), default=0)
    return most, [f"{most} sequences were stored and not trained, {capacity} are allowed"] if most > capacity else []
