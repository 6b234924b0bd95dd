"""Holds history back from trimming, by a record on which holders and the governor agree.

Each run has one key for this, changed by compare-and-set: history that may be gone by this record is promised to no
holder, and held history is not deleted. If its owner stops renewing a hold, the hold lapses; the record shows that, and
the owner learns of it at the next renewal. Times are the server's, because the clocks of holders and of the governor
may differ.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import FencedError, InfrastructureError, NotFoundError
from lachesis.pipeline.runtime.retention_record import decode_record, read_record
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.retention import Hold, Retention
from lachesis.schemas.subjects import check_name

__all__ = ["OpenHold", "holding", "read_record", "update_record"]

_MAX_NAME_CHARS = 50


async def update_record(bus: Bus, run: str, update: Callable[[Retention], Retention]) -> Retention:
    """Apply `update` to the record; retry until no other writer interferes."""
    while True:
        entry = await bus.value(keys.RETENTION)
        old = decode_record(entry, run)
        new = update(old)
        if new == old:
            return old
        try:
            await bus.put(keys.RETENTION, encode(new), revision=entry.revision if entry else 0)
        except FencedError:
            continue
        return new


@dataclass(slots=True)
class OpenHold:
    """An open hold, `name` in the record.

    A holder that has read on raises what it `needs`; the record follows with the next renewal.
    """

    name: str
    needs: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def holding(
    bus: Bus, run: str, name: str, needs: Mapping[str, int], *, about: str, lease_s: float = 60.0, yields: bool = False
) -> AsyncIterator[OpenHold]:
    """Keep the run's history from `needs` (sequence by stream) on while the context is open.

    Each hold has a key of its own, which begins with `name`: so two holds for the same work do not end each other. A
    hold that `yields` gives way if the run would have to wait for room.

    Raises `NotFoundError` if some of the history may be gone already; and, while it is open, if it lapsed because it
    could not be renewed within `lease_s`, or if it has given way.
    """
    name = f"{check_name('hold', name)[:_MAX_NAME_CHARS]}-{secrets.token_hex(6)}"
    held = OpenHold(name, dict(needs))

    async def write(check: Callable[[Retention], None]) -> None:
        expires_ns = await bus.server_time_ns() + int(lease_s * 1e9)

        def update(old: Retention) -> Retention:
            check(old)
            return old.replace(
                holds={
                    **old.holds,
                    name: Hold(needs=dict(held.needs), expires_ns=expires_ns, about=about, yields=yields),
                }
            )

        await update_record(bus, run, update)

    def is_there(old: Retention) -> None:
        for stream, seq in held.needs.items():
            if seq < old.trimmed.get(stream, 0):
                raise NotFoundError(
                    f"history of run {run} in {stream} is kept from sequence {old.trimmed[stream]} on, not from {seq}"
                )

    def has_not_lapsed(old: Retention) -> None:
        if name not in old.holds:
            gave_way = " or gave way to the run, which needed the room," if yields else ""
            raise NotFoundError(
                f"hold {name} of run {run} was not renewed within {lease_s} s{gave_way} and has lapsed: what it held "
                "may be gone"
            )

    def let_go(old: Retention) -> Retention:
        return old.replace(holds={other: hold for other, hold in old.holds.items() if other != name})

    async def renew() -> None:
        while True:
            await anyio.sleep(lease_s / 4)
            with suppress(InfrastructureError):  # retried before it lapses
                await write(has_not_lapsed)

    await write(is_there)
    try:
        async with background() as tasks:
            tasks.start_soon(renew)
            yield held
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2.0), suppress(InfrastructureError):
            await update_record(bus, run, let_go)
