"""`lachesis gc --consumers` and `--attempts`: shows and deletes what an identity can heap up.

A reader whose consumer is deleted makes another one and goes on where it was, so this is safe beside a run. The
consumers that the replicas of a stage share stay: they know what was handled. Without the records of failed deliveries
(attempts), a rollout whose handling ends its process may do so some times more before it becomes a dead letter.
"""

import sys
from collections import Counter

import anyio

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import BUCKET, STREAMS
from lachesis.services.cli.options import Options
from lachesis.services.output import print_json, print_table
from lachesis.services.run.connect import open_run

__all__ = ["collect_attempts", "collect_consumers"]

_STAGES = ("scorer", "teacher")


def collect_consumers(options: Options, *, yes: bool, as_json: bool) -> None:
    """Show how many readers each stream and the bucket have, and delete them if `yes`."""
    config = options.config()
    found = anyio.run(_collect, config, yes)
    if as_json:
        print_json({"run": config.run, "deleted": yes, "readers": found})
        return
    print_table(("stream", "readers", "of"), [(name, len(each), _owners(each)) for name, each in found.items()])
    print("\nall of them were deleted" if yes else "\nnothing was deleted: give --yes for that", file=sys.stderr)


def collect_attempts(options: Options, *, yes: bool, as_json: bool) -> None:
    """Show how many records of failed deliveries each stage has, and delete them if `yes`."""
    config = options.config()
    found = anyio.run(_collect_attempts, config, yes)
    if as_json:
        print_json({"run": config.run, "deleted": yes, "attempts": found})
        return
    print_table(("of", "records of failed deliveries"), list(found.items()))
    print("\nall of them were deleted" if yes else "\nnothing was deleted: give --yes for that", file=sys.stderr)


async def _collect_attempts(config: RunConfig, yes: bool) -> dict[str, int]:
    pattern = subjects.value_subject(config.run, keys.attempts("*"))
    async with open_run(config, f"{config.run}.gc", OPERATOR) as history:
        stored = await history.bus.stored_subjects(BUCKET, [pattern])
        if yes:
            await history.bus.delete_all(BUCKET, [pattern])
    durables = Counter(subject.split(".")[-2] for subject in stored)
    return dict(sorted(durables.items()))


async def _collect(config: RunConfig, yes: bool) -> dict[str, list[str]]:
    kept = {subjects.durable(stage, config.run, config.revision) for stage in _STAGES}
    found: dict[str, list[str]] = {}
    async with open_run(config, f"{config.run}.gc", OPERATOR) as history:
        for stream in (*STREAMS, BUCKET):
            try:
                names = await history.bus.consumer_names(stream)
            except NotFoundError:
                continue
            # a durable of another revision has two `=`, as those of this one
            found[stream] = [name for name in names if name not in kept and not _is_shared(name)]
            for name in found[stream] if yes else []:
                await history.bus.forget(stream, name)
    return found


def _is_shared(name: str) -> bool:
    stage, *rest = name.split("=")
    return stage in _STAGES and len(rest) == 2


def _owners(names: list[str]) -> str:
    counted: dict[str, int] = {}
    for name in names:
        owner = name.partition("=")[0]
        counted[owner] = counted.get(owner, 0) + 1
    return ", ".join(f"{owner[:40]} {n}" for owner, n in sorted(counted.items(), key=lambda pair: -pair[1])[:5])
