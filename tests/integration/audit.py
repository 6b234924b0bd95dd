"""The audit: from the streams alone, was any rollout lost, or given two outcomes, or trained twice?"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.retention.holds import read_record
from lachesis.schemas import subjects
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.planning_header import PLAN_HEADER, Plan


@dataclass(frozen=True)
class Audit:
    """What the audit found. `violations` is empty when everything holds."""

    rollouts: int
    resolved: int
    batches: int
    entries: int
    outcomes: dict[str, int]
    violations: list[str]


async def audit(bus: Bus, run: str, trainer: str = "main") -> Audit:
    """Walk ledger and rollouts. Raises `LedgerError` when the hash chain is broken."""
    outcomes: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    batched: Counter[str] = Counter()
    violations = []
    numbers = []
    entries, watermark = 0, 0
    async for entry in follow_ledger(bus, run, trainer, LedgerPosition(), follow=False):
        entries += 1
        watermark = entry.watermark
        for outcome in entry.outcomes:
            outcomes[outcome.seq] += 1
            kinds[outcome.kind] += 1
        if entry.batch is not None:
            numbers.append(entry.batch.number)
            for ref in entry.batch.groups:
                outcomes[ref.seq] += 1
                kinds["batched"] += 1
                batched[ref.group] += 1
    if numbers != list(range(len(numbers))):
        violations.append(f"batch numbers have gaps or repeats: {numbers}")
    violations += [f"group {group} is in {count} batches" for group, count in batched.items() if count > 1]
    violations += [f"rollout {seq} has {count} outcomes" for seq, count in outcomes.items() if count > 1]
    trimmed = (await read_record(bus, run)).trimmed.get(
        subjects.ROLLOUTS, 0
    )  # below it, what had an outcome may be gone
    stored = 0
    groups: set[str] = set()
    async with bus.read(subjects.ROLLOUTS, [subjects.rollout(run)], headers_only=True, follow=False) as rollouts:
        async for message in rollouts:
            stored += 1
            with suppress(SchemaError):  # an attacker's: it has its outcome as any other
                groups.add(Plan.unpack(message.headers.get(PLAN_HEADER)).group)
            if message.seq <= watermark and outcomes[message.seq] != 1:
                violations.append(
                    f"rollout {message.seq} lies below the watermark and has {outcomes[message.seq]} outcomes"
                )
            outcomes.pop(message.seq, None)
    violations += [f"outcome of {seq}, where no rollout is stored" for seq in outcomes if seq >= trimmed]
    return Audit(stored, sum(kinds.values()), len(numbers), entries, dict(kinds), violations)
