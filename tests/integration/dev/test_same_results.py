"""The same rollouts, in `lachesis dev` and in services of their own on a nats-server: equal in all that follows.

Scores, rewards, advantages and the batch are compared to the bit, and for a single group the digest of the ledger's
entry, which covers all but times and names of processes.
"""

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import numpy as np
import pytest
from fuzz.examples import group
from rich.console import Console

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.evaluation_sources import held_out_tasks
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import InferenceConfig, RunConfig
from lachesis.pipeline.extension import ServiceSpec
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ledger import Batch, LedgerEntry, Outcome
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message, Sequences, VersionSpan
from lachesis.services.dev import stages
from lachesis.services.dev.one_group import one_group_config, run_dev
from lachesis.services.dev.stages import open_stages
from lachesis.services.registry import Stage, load_stage

pytestmark = [pytest.mark.timeout(200)]

SUMS = Path(__file__).parents[2] / "examples" / "sums.py"
RATERS = """
from lachesis import rater

@rater(bounds=(0.0, 10.0))
def vowels(sample):
    return float(sum(char in "aeiou" for char in sample.completion))

@rater(bounds=(0.0, 1.0))
async def brevity(sample):
    return 1.0 / (1 + len(sample.completion))

@rater(bounds=(0.0, 1.0))
def fails_on_silence(sample):
    return 1.0 / len(sample.completion)
"""
CONFIG = """
run = "{run}"
folder = "run"
model = "model"
[environments.sums]
kind = "{sums}:Sums"
samples = 4
max_new_tokens = 8
longest_tokens = 64
[scoring]
quorum = 3
[[scoring.raters]]
rater = "raters.py:vowels"
[[scoring.raters]]
rater = "raters.py:brevity"
[[scoring.raters]]
rater = "raters.py:fails_on_silence"
[normalization]
mode = "zscore"
window = 2
warmup_samples = 4
warmup_groups = 1
[advantage]
estimator = "reinforce++-baseline"
[batching]
batch_size = {batch_size}
"""
SAID = [
    ["a", "bcd", "aeiou", "xyz"],
    ["same", "same", "same", "same"],  # nothing to learn
    ["a b c", "so so", "io", "none of it"],
    ["", "a", "", ""],  # too few that can be scored
    ["ae", "e", "i", "q"],
    ["oo", "uuuu", "rst", "never"],
    ["one", "two", "three", "eighteen"],
]
TRAINED = 5
"""Groups of them that are in the batch."""


class Facts(NamedTuple):
    """What the stages made of the rollouts, without times and names of processes, in the rollouts' order."""

    scores: list[Any]
    rewards: list[Any]
    batches: list[Batch]
    outcomes: list[Outcome]
    digests: list[str]


async def facts_of(bus: Bus, config: RunConfig) -> Facts:
    scores, rewards = [], []
    async with bus.read(subjects.EVENTS, [], follow=False) as messages:
        async for message in messages:
            kind = {"score": ScoreEvent, "reward": RewardEvent}[message.subject.split(".")[1]]
            event = decode(kind, message.data)
            about = msgspec.structs.asdict(event) | {"groups": None, "commit": None}
            found = scores if kind is ScoreEvent else rewards
            left_out: dict[str, Any] = {"stamps": []} | (
                {"fixed": None} if kind is ScoreEvent else {}
            )  # dev rates none
            found += [
                (one.seq, msgspec.msgpack.encode(msgspec.structs.replace(one, **left_out)), about)
                for one in event.groups
            ]
    entries = await ledger(bus, config)
    return Facts(
        sorted(scores, key=lambda one: one[0]),
        sorted(rewards, key=lambda one: one[0]),
        [entry.batch for entry in entries if entry.batch is not None],
        sorted((outcome for entry in entries for outcome in entry.outcomes), key=lambda outcome: outcome.seq),
        [entry.digest() for entry in entries],
    )


async def ledger(bus: Bus, config: RunConfig) -> list[LedgerEntry]:
    subject = subjects.ledger(config.run, config.training.name)
    async with bus.read(subjects.LEDGER, [subject], follow=False) as messages:
        return [decode(LedgerEntry, message.data) async for message in messages]


async def until_decided(bus: Bus, config: RunConfig, count: int) -> None:
    """Wait until the ledger says what became of so many rollouts."""
    subject = subjects.ledger(config.run, config.training.name)
    with anyio.fail_after(120):
        async with bus.read(subjects.LEDGER, [subject]) as messages:
            async for message in messages:
                if decode(LedgerEntry, message.data).watermark == count:
                    return


class Folder:
    """A folder with a model, raters and configurations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "raters.py").write_text(RATERS)
        save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), path / "model")

    def config(self, run: str, batch_size: int) -> RunConfig:
        file = self.path / f"{run}.toml"
        file.write_text(CONFIG.format(run=run, sums=SUMS, batch_size=batch_size))
        return load(run_config_type(), file=file).config

    @asynccontextmanager
    async def services(self, server: EmbeddedServer, run: str) -> AsyncIterator[None]:
        """Run scorer, normalizer and batcher as processes."""
        token = self.path / "token"
        token.write_text(server.token)
        where = [f"--config={run}.toml", f"--nats={server.url}", f"--set=nats.token_file={token}"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LACHESIS_")}
        async with AsyncExitStack() as stack:
            for name in ("scorer", "normalizer", "batcher"):
                command = [sys.executable, "-m", "lachesis", "run", name, *where]
                process = await anyio.open_process(command, cwd=self.path, env=environ, stdout=None, stderr=None)
                stack.push_async_callback(process.wait)
                stack.callback(process.terminate)
            yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("dev"))


async def copy_rollouts(source: Bus, target: Bus) -> int:
    """Store the same rollouts, and what the scorer reads of the policy, on another bus."""
    policy = await source.value(keys.POLICY)
    if policy is not None:
        await target.put(keys.POLICY, policy.value)
    count = 0
    async with source.read(subjects.ROLLOUTS, [], follow=False) as messages:
        async for message in messages:
            headers = {PLAN_HEADER: message.headers[PLAN_HEADER]}
            await target.publish(message.subject, message.data, msg_id=f"{message.seq}", headers=headers)
            count += 1
    return count


@asynccontextmanager
async def open_run(server: EmbeddedServer, config: RunConfig, streams: Any) -> AsyncIterator[Bus]:
    async with await connect(server.url, run=config.run, name="tests", token=server.token) as bus:
        await bus.ensure_streams(streams)
        yield bus
        for kind in [*subjects.STREAMS, subjects.BUCKET]:
            await bus.delete_stream(kind)


@pytest.mark.slow
async def test_a_group_of_dev_gets_the_same_in_services(
    nats_server: EmbeddedServer, streams_config: Any, folder: Folder
) -> None:
    config = folder.config("one", batch_size=4)
    console = Console(record=True, width=200)
    async with MemoryBus() as memory, open_run(nats_server, config, streams_config) as bus:
        assert await run_dev(config, "sums", 1203, console, memory)
        assert await copy_rollouts(memory, bus) == 1
        async with folder.services(nats_server, "one"):
            await until_decided(bus, config, 1)
        here, there = await facts_of(memory, config), await facts_of(bus, config)
    assert here == there
    (batch,) = here.batches
    assert batch.sequences == 4
    assert [len(here.scores), len(here.rewards), len(here.digests)] == [1, 1, 1]
    text = console.export_text()
    assert "sums: 12+3" in text
    assert all(f"{advantage:.3f}" in text for advantage in batch.groups[0].advantages)
    assert "optimizer step" in text


async def test_what_cannot_have_adapters_is_refused_as_a_trainer_refuses_it(folder: Folder) -> None:
    config = folder.config("lora", batch_size=4)
    tied = LoraConfig(targets=["q_proj", "lm_head"])
    config = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, lora=tied))
    with pytest.raises(ConfigError, match=r"training\.lora\.targets: .*lm_head"):
        await run_dev(config, "sums", 0, Console(record=True))


# several groups, and stages that are not the run's


async def store_groups(bus: Bus, run: str) -> None:
    for number, said in enumerate(SAID, 1):
        n = len(said)
        mask = [False, True] * n
        sequences = Sequences(
            offsets=as_bytes(range(0, 2 * n + 1, 2), "int32"),
            tokens=as_bytes(range(2 * n), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes([-1.0 if learn else 0.0 for learn in mask], "float32"),
            finish_reasons=["stop"] * n,
            version_spans=[VersionSpan(i, 0, 0) for i in range(n)],
        )
        messages = [[Message(role="user", content="q"), Message(role="assistant", content=text)] for text in said]
        made = group(id=f"{number:032x}", run=run, counter=number, item=str(number), messages=messages,
                     sequences=sequences, policy_versions=["0-first-ab"])  # fmt: skip
        headers = {PLAN_HEADER: Plan.of(made).pack()}
        await bus.publish(subjects.rollout(run, "sums"), encode(made), msg_id=made.id, headers=headers)


async def facts_here(config: RunConfig, count: int) -> Facts:
    """What dev's stages make of the groups."""
    async with MemoryBus() as memory:
        await store_groups(memory, config.run)
        async with open_stages(memory, config):
            await until_decided(memory, config, count)
        return await facts_of(memory, config)


@pytest.fixture(scope="module")
async def in_services(
    nats_server: EmbeddedServer, streams_config: Any, folder: Folder, anyio_backend: str
) -> tuple[RunConfig, Facts]:
    """What services make of the groups."""
    config = folder.config("many", batch_size=4 * TRAINED)
    async with open_run(nats_server, config, streams_config) as bus:
        await store_groups(bus, config.run)
        async with folder.services(nats_server, "many"):
            await until_decided(bus, config, len(SAID))
        return config, await facts_of(bus, config)


async def test_groups_of_all_kinds_get_the_same_in_dev(in_services: tuple[RunConfig, Facts]) -> None:
    config, there = in_services
    here = await facts_here(config, len(SAID))
    assert here._replace(digests=[]) == there._replace(digests=[])  # which outcomes share an entry is a matter of time
    assert [len(batch.groups) for batch in here.batches] == [TRAINED]
    assert {outcome.kind for outcome in here.outcomes} == {"zero_variance", "unscorable"}


def change(path: str, value: Any) -> Callable[[RunConfig], RunConfig]:
    part, _, field = path.partition(".")

    def changed(config: RunConfig) -> RunConfig:
        return msgspec.structs.replace(
            config, **{part: msgspec.structs.replace(getattr(config, part), **{field: value})}
        )

    return changed


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("scorer", change("scoring.aggregation", "mean")),
        ("normalizer", change("normalization.mode", "scale")),
        ("normalizer", change("advantage.estimator", "centred")),
        ("batcher", change("batching.batch_size", 4)),
    ],
)
async def test_another_stage_in_devs_place_is_noticed(
    in_services: tuple[RunConfig, Facts],
    name: str,
    changed: Callable[[RunConfig], RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, there = in_services

    def load_other(spec: ServiceSpec) -> Stage:
        stage = load_stage(spec)
        if spec.name != name:
            return stage

        def other(service: Service, given: RunConfig, part: str) -> Awaitable[None]:
            return stage(service, changed(given), part)

        return other

    monkeypatch.setattr(stages, "load_stage", load_other)
    here = await facts_here(config, len(SAID))
    assert here._replace(digests=[]) != there._replace(digests=[])


def test_a_group_of_its_own_is_scored_and_rewarded_as_the_run_says(folder: Folder) -> None:
    config = folder.config("own", batch_size=64)
    own = one_group_config(config, "sums")
    for part in ("normalization", "reward_config", "advantage", "seed", "revision", "run"):
        assert getattr(own, part) == getattr(config, part)
    assert own.scoring.aggregation == config.scoring.aggregation
    assert [rater.rater for rater in own.scoring.raters] == [rater.rater for rater in config.scoring.raters]
    assert own.batching.batch_size == 4
    pool = np.arange(100, dtype=np.uint64)
    assert list(held_out_tasks(own, "sums", pool).tasks) == list(held_out_tasks(config, "sums", pool).tasks) != []
    elsewhere = msgspec.structs.replace(config, inference={"policy": InferenceConfig(url="http://127.0.0.1:1")})
    assert not list(held_out_tasks(elsewhere, "sums", pool).tasks)
    assert not list(held_out_tasks(one_group_config(elsewhere, "sums"), "sums", pool).tasks)
