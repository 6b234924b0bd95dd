"""Finds keys of a run's bucket whose services cannot go on from what they hold.

Guarantees that a key is named only where its service would end at every start: if the service starts over by itself, or
takes the next value, nothing is to be done.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import DamagedError
from lachesis.pipeline.extension import call_each
from lachesis.pipeline.ledger.rollbacks import describe_false_trims, trim_limits
from lachesis.schemas import keys
from lachesis.schemas.alerts import SentAlerts
from lachesis.schemas.codec import Event, decode
from lachesis.schemas.control import EpochRecord, HeldOutRecord, PromptsRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.retention import Retention
from lachesis.services.stage_settings import ledger_settings

__all__ = ["find_unusable_keys"]


async def find_unusable_keys(bus: NatsBus, config: RunConfig) -> tuple[dict[str, bytes], list[str]]:
    """Return the keys with what they hold, and what is wrong with each, in words."""
    found, problems = dict[str, bytes](), list[str]()
    for key, check in _keys(config):
        try:
            entry = await bus.value(key)
        except DamagedError:
            continue  # the server's store is damaged, which is said elsewhere
        try:
            if entry is not None:
                check(entry.value)
        except SchemaError as error:
            found[key] = entry.value if entry is not None else b""
            problems.append(f"the key {key!r} cannot be used: {error}")
    with suppress(DamagedError, SchemaError):  # said above, or elsewhere
        if (entry := await bus.value(keys.RETENTION)) is not None:
            record = decode(Retention, entry.value)
            limits = await trim_limits(bus, ledger_settings(config), record)
            if (false := describe_false_trims(record, limits)) is not None:
                found[keys.RETENTION] = entry.value
                problems.append(false)
    return found, problems


def _keys(config: RunConfig) -> Iterator[tuple[str, Callable[[bytes], object]]]:
    yield keys.RETENTION, _reads(Retention)
    yield keys.webhook(config.revision), _reads(SentAlerts)
    for env in dict.fromkeys((*config.environments, *config.evaluation)):
        yield keys.held_out(env), _reads(HeldOutRecord)
        yield keys.prompts(env), _reads(PromptsRecord)
        yield keys.epoch(env), _reads(EpochRecord)
    for values in call_each("stored_values", config):
        yield from values


def _reads(kind: type[Event]) -> Callable[[bytes], object]:
    return lambda value: decode(kind, value)
