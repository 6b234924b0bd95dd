"""Notices at a start that the same tasks are asked in another way than at the last start.

A task keeps its key under another chat template, other template parameters or another system message, and so what the
curriculum learned of it. Guarantees that such a change is reported: what was learned, and evaluations, are then of
prompts that the model no longer sees.
"""

import logging

from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stored_values import decode_value
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.pipeline.tasks.task import prompt_hash
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PromptsRecord

__all__ = ["describe_change", "note_changed_prompts", "record_of"]

log = logging.getLogger("lachesis")


def record_of(env: Environment, item_keys: Keys, tokenizer_hash: str, item: str | None = None) -> PromptsRecord:
    """Return how the prompts are made now, by the task with the key `item`, else the lowest key."""
    known = [] if item is None or not item.isdecimal() else (item_keys == int(item)).nonzero()[0].tolist()
    place = known[0] if known else int(item_keys.argmin())
    try:
        said = prompt_hash("\n".join(f"{one.role}: {one.content}" for one in env.task(place).messages))
    except Exception:  # noqa: BLE001 - a bug of the environment: where the task is worked on, it is named
        said = ""
    return PromptsRecord(tokenizer_hash=tokenizer_hash, item=str(item_keys[place]), messages=said)


def describe_change(before: PromptsRecord, now: PromptsRecord) -> str | None:
    """Return what differs, None if nothing does that concerns the same task."""
    found = []
    if before.item == now.item and before.messages and now.messages and before.messages != now.messages:
        found.append("its template or system message, or the code that writes its prompts")
    one, _, parameters = before.tokenizer_hash.partition("+")
    other, _, others = now.tokenizer_hash.partition("+")
    if one != other:
        found.append("the tokenizer or its chat template")
    if parameters != others:
        found.append("chat_template_kwargs")
    if not found:
        return None
    return (
        f"the same tasks are asked in another way than at the last start: {' and '.join(found)} changed. They keep "
        "what the curriculum learned of them, and earlier evaluations are of the former prompts"
    )


async def note_changed_prompts(
    service: Service, name: str, env: Environment, item_keys: Keys, tokenizer_hash: str
) -> None:
    """Compare with the last start of the run, raise a notice of a change, and store how it is now."""
    key = keys.prompts(name)
    entry: Entry | None = await service.retrying(f"read {key}")(service.bus.value, key)
    before = decode_value(PromptsRecord, entry, key)
    now = record_of(env, item_keys, tokenizer_hash, None if before is None else before.item)
    if now == before:
        return
    text = None if before is None else describe_change(before, now)
    if text is not None:
        log.warning("environment %s: %s", name, text)
        service.set_problem(
            f"{name} prompts",
            f"environment {name}: {text}",
            mend="if that was not meant, set it back; for a fresh start, give the run another name",
        )
    await service.retrying(f"store {key}")(service.bus.put, key, encode(now))
