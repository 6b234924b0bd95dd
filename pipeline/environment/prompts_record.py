"""Notices at a start that tasks, answers or prompts are not those of the last start.

A task keeps its key under another chat template, other template parameters, another system message, another answer and
at another place in the pool, and so what the curriculum learned of it. Guarantees that such a change is reported: what
was learned, and evaluations, are then of prompts that the model no longer sees, or of answers that no longer count.
"""

import hashlib
import logging

import anyio.to_thread
import msgspec
import numpy as np

from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stored_values import decode_value
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.pipeline.tasks.task import prompt_hash, prompt_text
from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.control import PromptsRecord

__all__ = ["describe_answers", "describe_change", "describe_tasks", "note_changed_prompts", "record_of"]

log = logging.getLogger("lachesis")

MAX_COMPARED_TASKS = 20_000
"""Of how many tasks, those with the lowest keys, the answers are compared with the last start's."""


def record_of(env: Environment, item_keys: Keys, tokenizer_hash: str, item: str | None = None) -> PromptsRecord:
    """Return how the prompts are made now, by the task with the key `item`, else the lowest key."""
    known = [] if item is None or not item.isdecimal() else (item_keys == int(item)).nonzero()[0].tolist()
    place = known[0] if known else int(item_keys.argmin())
    try:
        said = prompt_hash(prompt_text(env.task(place).messages))
    except Exception:  # noqa: BLE001 - a bug of the environment: where the task is worked on, it is named
        said = ""
    return PromptsRecord(
        tokenizer_hash=tokenizer_hash,
        item=str(item_keys[place]),
        messages=said,
        count=len(item_keys),
        order=_digest(item_keys),
        tasks=_digest(np.sort(item_keys)),
        contents=_contents(env, item_keys),
    )


def _digest(keys: Keys) -> str:
    return hashlib.blake2b(keys.astype("<u8").tobytes(), digest_size=16).hexdigest()


def _contents(env: Environment, item_keys: Keys) -> str:
    """Return a digest of what raters are given with the tasks, the same for every order of the pool; "": it fails."""
    found = []
    try:
        for place in np.argsort(item_keys, kind="stable")[:MAX_COMPARED_TASKS].tolist():
            given = msgspec.msgpack.encode(env.task(place).task, order="deterministic")
            found.append(int(item_keys[place]).to_bytes(8, "little") + hashlib.blake2b(given, digest_size=16).digest())
    except Exception:  # noqa: BLE001 - a bug of the environment: where the task is worked on, it is named
        return ""
    return hashlib.blake2b(b"".join(sorted(found)), digest_size=16).hexdigest()


def describe_tasks(before: PromptsRecord, now: PromptsRecord) -> str | None:
    """Return how the pool differs, None if it does not, or if the last start recorded nothing of it."""
    if before.tasks and before.tasks != now.tasks:
        return (
            f"its tasks are not those of the last start ({before.count} then, {now.count} now): those that ask the "
            "same keep what was learned of them, wherever they are now"
        )
    if before.order and before.order != now.order:
        return "its tasks are in another order than at the last start; each keeps what was learned of it"
    return None


def describe_answers(before: PromptsRecord, now: PromptsRecord) -> str | None:
    """Return how what raters are given with the same tasks differs; None: it does not, or is not known."""
    if before.tasks != now.tasks or not (before.contents and now.contents) or before.contents == now.contents:
        return None
    return (
        "the tasks ask the same as at the last start, and what raters are given with them is another: an answer, tests "
        "or further data changed. They keep what the curriculum learned of them, and earlier rewards and evaluations "
        "are by the former answers"
    )


def describe_change(before: PromptsRecord, now: PromptsRecord) -> str | None:
    """Return what differs in the prompts of the same tasks, None if nothing does."""
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
        f"the same tasks have other prompts than at the last start: {' and '.join(found)} changed. They keep "
        "what the curriculum learned of them, and earlier evaluations are of the former prompts"
    )


async def note_changed_prompts(
    service: Service, name: str, env: Environment, item_keys: Keys, tokenizer_hash: str
) -> None:
    """Compare with the last start of the run, raise notices of changes, and store how it is now."""
    key = keys.prompts(name)
    entry: Entry | None = await service.retrying(f"read {key}")(service.bus.value, key)
    before = decode_value(PromptsRecord, entry, key)
    last_item = None if before is None else before.item
    now = await anyio.to_thread.run_sync(record_of, env, item_keys, tokenizer_hash, last_item)
    if now == before:
        return
    if before is not None:
        pool = describe_tasks(before, now)
        if pool is not None:
            log.warning("environment %s: %s", name, pool)
            service.set_note(f"{name} pool", f"environment {name}: {pool}")
        for topic, text in (("prompts", describe_change(before, now)), ("answers", describe_answers(before, now))):
            if text is not None:
                log.warning("environment %s: %s", name, text)
                service.set_problem(
                    f"{name} {topic}",
                    f"environment {name}: {text}",
                    mend="if that was not meant, set it back; for a fresh start, give the run another name",
                )
    await service.retrying(f"store {key}")(service.bus.put, key, encode(now))
