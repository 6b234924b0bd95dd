"""The ledger of an offline trainer on a bus in memory: the same however often killed, refused where wrong."""

import math
from dataclasses import replace

import anyio
import msgspec
import numpy as np
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TeacherConfig
from lachesis.pipeline.errors import FencedError, LedgerError, NotFoundError, StreamFullError
from lachesis.pipeline.ledger.reader import check_rollouts, newest_entry
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import FormatMarker, RewardConfig
from lachesis.pipeline.normalizer.logic import bonus_fade
from lachesis.pipeline.offline.replay.results import read_results
from lachesis.pipeline.offline.replay.revisions import definition
from lachesis.pipeline.offline.replay.stage import ReplayRequest, run_replay
from lachesis.pipeline.offline.trainer.batch_former import entry_content_digest
from lachesis.pipeline.offline.trainer.ledger import (
    OfflineRequest,
    lowest_seq_needed_after,
    open_offline_ledger,
    read_offline_trainer,
    rebuild_entries,
)
from lachesis.pipeline.retention.holds import read_record, update_record
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import ROLLOUT_HEADER
from lachesis.schemas.replay import RescoreEvent, Selection
from lachesis.schemas.rollout import Message

CONFIG = RunConfig(
    run="r",
    environments={name: EnvironmentConfig(kind="sums.py:Sums") for name in ("sums", "words")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    normalization=NormalizationConfig(window=8, warmup_groups=2, warmup_samples=4),
    batching=BatchingConfig(batch_size=16),
)
AGAIN = OfflineRequest(trainer="again", revision="again", model="model")


async def history(lab, count=60, **changes):
    """Store groups of four samples, right or wrong at random, of two environments; group n is made by policy step n."""
    draw = np.random.default_rng(7)
    for n in range(1, count + 1):
        said = [
            [Message(role="user", content="q"), Message(role="assistant", content="yes" if right else "no")]
            for right in draw.random(4) < 0.5
        ]
        env = "sums" if n % 3 else "words"
        await lab.store(
            lab.group(n, env=env, samples=4, messages=said, task={"answer": "yes"},
                      policy_versions=[f"{n}-first-ab"], **changes)
        )  # fmt: skip


async def replay(lab, name="again", envs=("sums", "words"), config=CONFIG, **selected):
    request = ReplayRequest(revision=name, selection=Selection(envs=list(envs), **selected))
    return await run_replay(lab.bus, config, request, draining=anyio.Event(), progress=lambda *_: None)


async def past(lab, request=AGAIN, config=CONFIG, bus=None, during=None):
    async with open_offline_ledger(bus or lab.bus, config, request, progress=lambda *_: None) as (found, held):
        if during:
            await during(held)
        return found


async def entries(lab, trainer="again") -> list[LedgerEntry]:
    async with lab.bus.read(subjects.LEDGER, [subjects.ledger("r", trainer)], follow=False) as messages:
        return [decode(LedgerEntry, message.data) async for message in messages]


async def test_a_revision_becomes_a_ledger_of_its_own(lab):
    await history(lab)
    replayed = await replay(lab)
    live = await lab.bus.usage(subjects.EVENTS)
    found = await past(lab)
    assert found.digest == replayed.digest
    stored = await entries(lab)
    assert [entry.index for entry in stored] == list(range(found.entries))
    assert stored[-1].digest() == found.chain
    assert stored[-1].next_batch == found.batches > 5
    told = [ref.seq for entry in stored if entry.batch for ref in entry.batch.groups]
    assert len(told) == len(set(told)) == found.groups
    dropped = [outcome.seq for entry in stored for outcome in entry.outcomes]
    assert sorted(told + dropped) == list(range(1, 61))
    assert {outcome.kind for entry in stored for outcome in entry.outcomes} == {"zero_variance"}
    assert await entries(lab, "main") == []
    assert await lab.bus.usage(subjects.EVENTS) == live
    assert (await newest_entry(lab.bus, "r", "again"))[0] == stored[-1]
    await check_rollouts(lab.bus, stored[-1])
    results = await read_results(lab.bus, await definition(lab.bus, CONFIG, "again"))
    assert await rebuild_entries(lab.bus, found, results, {}, lambda *_: None) == [
        entry_content_digest(entry) for entry in stored
    ]


async def test_history_is_held_meanwhile_and_let_go_afterwards(lab):
    await history(lab)
    await replay(lab)

    async def look(held):
        holds = (await read_record(lab.bus, "r")).holds
        assert [hold.needs for hold in holds.values()] == [{subjects.ROLLOUTS: 1}]

    await past(lab, during=look)
    assert (await read_record(lab.bus, "r")).holds == {}


def taught_config(teacher):
    batching = msgspec.structs.replace(CONFIG.batching, teacher=teacher)
    return msgspec.structs.replace(CONFIG, batching=batching, teacher=TeacherConfig(enabled=True))


async def teach(lab, seqs, revision=subjects.LIVE, tokens=16):
    """Store what a teacher gives for the rollouts at `seqs`, and return where, by sequence."""
    stored = {}
    for seq in seqs:
        env = "sums" if seq % 3 else "words"
        with_teacher = TeacherLogprobs(run="r", env=env, group=f"{seq:032x}", teacher="t", tokenizer_hash="tok",
                                 temperature=1.0, logprobs=as_bytes([-1.0] * tokens, "float32"))  # fmt: skip
        headers = {ROLLOUT_HEADER: str(seq)}
        subject = subjects.logprobs("r", revision, env)
        ack = await lab.bus.publish_large(
            subject, encode(with_teacher), msg_id=f"{revision}.{seq}.{tokens}", headers=headers
        )
        stored[seq] = ack.seq
    return stored


async def test_batches_refer_to_what_the_live_runs_teacher_gave(lab):
    await history(lab)
    await replay(lab)
    await teach(lab, [1, 2], revision="other")
    stored = await teach(lab, range(60, 10, -1))
    await teach(lab, [60])  # once more
    plain = await past(lab, replace(AGAIN, trainer="plain"))
    found = await past(lab, config=taught_config("optional"))
    refs = {ref.seq: ref.teacher for entry in await entries(lab) if entry.batch for ref in entry.batch.groups}
    assert refs == {seq: stored.get(seq) for seq in refs}
    assert {seq for seq, teacher in refs.items() if teacher is None} == {seq for seq in refs if seq < 11} != set()
    assert (found.groups, found.batches) == (plain.groups, plain.batches)
    assert found.manifest != plain.manifest
    with pytest.raises(ConfigError, match="teacher"):
        await past(lab)


@pytest.mark.parametrize(("teacher", "first"), [("optional", 11), ("required", 1)])
async def test_a_ledger_can_be_formed_anew_once_the_teachers_logprobs_are_trimmed(lab, teacher, first):
    await history(lab)
    await replay(lab)
    await teach(lab, range(first, 61))
    found = await past(lab, config=taught_config(teacher))
    await lab.bus.trim(subjects.TEACHER, [subjects.logprobs("r", subjects.LIVE)], before=30)
    results = await read_results(lab.bus, await definition(lab.bus, CONFIG, "again"))
    ledger = await entries(lab)
    refs = [ref for entry in ledger if entry.batch for ref in entry.batch.groups]
    teachers = {ref.seq: ref.teacher for ref in refs if ref.teacher is not None}
    formed = await rebuild_entries(lab.bus, found, results, teachers, lambda *_: None)
    assert formed == [entry_content_digest(entry) for entry in ledger]
    other = {**teachers, refs[-1].seq: 1 + teachers[refs[-1].seq]}
    assert await rebuild_entries(lab.bus, found, results, other, lambda *_: None) != formed


async def test_what_may_be_trimmed_at_any_moment_counts_as_missing(lab):
    await history(lab)
    await replay(lab)
    stored = await teach(lab, range(1, 61))
    await update_record(lab.bus, "r", lambda old: old.replace(trimmed={subjects.TEACHER: 20}))
    await past(lab, config=taught_config("optional"))
    refs = [ref for entry in await entries(lab) if entry.batch for ref in entry.batch.groups]
    assert {ref.seq: ref.teacher for ref in refs} == {
        ref.seq: stored[ref.seq] if stored[ref.seq] >= 20 else None for ref in refs
    }


async def test_what_batches_yet_to_come_refer_to_is_held(lab):
    await history(lab)
    await replay(lab)
    stored = await teach(lab, range(60, 0, -1))
    held = []

    async def look(_trained):
        held.append((await read_record(lab.bus, "r")).holds.popitem()[1].needs)

    for _ in range(2):  # as it forms the ledger, and with a ledger that is there
        await past(lab, config=taught_config("required"), during=look)
    ledger = await entries(lab)
    behind = lowest_seq_needed_after(ledger, len(ledger) - 1, {subjects.ROLLOUTS: 61, subjects.TEACHER: 100})
    assert list(behind) == [*range(len(ledger) - 1, -2, -1)]
    for index, needs in behind.items():
        refs = [ref for entry in ledger[index + 1 :] if entry.batch for ref in entry.batch.groups]
        assert needs == {
            subjects.ROLLOUTS: min((ref.seq for ref in refs), default=61),
            subjects.TEACHER: min((stored[ref.seq] for ref in refs), default=100),
        }
    assert held == [{subjects.ROLLOUTS: 1, subjects.TEACHER: behind[-1][subjects.TEACHER]}, behind[-1]]


@pytest.mark.parametrize(
    ("seqs", "tokens", "error", "reason"),
    [
        (range(2, 61), 16, NotFoundError, 'no logprobs of the teacher, group 0+1 of sums at sequence 1 .* "optional"'),
        (range(1, 61), 15, DataError, r'the .* logprobs of group 0+1 at .* are of 15 tokens of group 0+1. .* = "off"'),
    ],
)
async def test_a_teacher_that_is_required_and_gave_nothing_useful_is_refused(lab, seqs, tokens, error, reason):
    await history(lab)
    await replay(lab)
    await teach(lab, seqs, tokens=tokens)
    with pytest.raises(error, match=reason):
        await past(lab, config=taught_config("required"))
    assert await entries(lab) == []
    assert await read_offline_trainer(lab.bus, "r", "again") is None


async def test_one_that_is_started_beside_itself_leaves_the_first_ones_hold_when_it_ends(lab):
    await history(lab)
    await replay(lab)

    async def begin_another(_):
        first = (await read_record(lab.bus, "r")).holds
        await past(lab, OfflineRequest(trainer="again", revision="again", model="model", store=False))
        assert (await read_record(lab.bus, "r")).holds == first

    await past(lab, during=begin_another)
    assert (await read_record(lab.bus, "r")).holds == {}


@pytest.mark.parametrize("left", range(1, 8))
async def test_killed_at_any_message_it_goes_on_with_the_same_ledger(lab, left):
    await history(lab)
    await replay(lab)
    whole = await past(lab, replace(AGAIN, trainer="whole"))
    with pytest.raises(lab.Killed):
        await past(lab, bus=_Dying(lab, left))
    assert len(await entries(lab)) in {max(0, left - 2), left - 1}
    found = await past(lab)
    assert (found.manifest, found.batches) == (whole.manifest, whole.batches)
    assert len(await entries(lab)) == found.entries == whole.entries
    usage = await lab.bus.usage(subjects.LEDGER)
    assert await past(lab) == found
    assert await lab.bus.usage(subjects.LEDGER) == usage, "a whole ledger is written once"


class _Dying:
    """A process's view of the bus that is killed with its commit number `left`, which is stored if that is even."""

    def __init__(self, lab, left: int) -> None:
        self._bus, self._left, self._killed, self._stores = lab.bus, left, lab.Killed, left % 2 == 0

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def commit(self, *args, **kwargs):
        self._left -= 1
        if self._left or self._stores:
            stored = await self._bus.commit(*args, **kwargs)
        if not self._left:
            raise self._killed
        return stored


async def test_policy_steps_select(lab):
    await history(lab)
    await replay(lab)
    found = await past(lab, replace(AGAIN, min_step=11, max_step=30))
    seqs = {ref.seq for entry in await entries(lab) if entry.batch for ref in entry.batch.groups}
    assert found.groups == len(seqs)
    assert seqs <= set(range(11, 31))
    with pytest.raises(NotFoundError, match="none is selected; they were made by policy steps 1 to 60"):
        await past(lab, replace(AGAIN, trainer="none", min_step=99))


async def test_what_cannot_be_trained_on_is_refused_before_anything_is_stored(lab):
    await history(lab, 20)
    with pytest.raises(NotFoundError, match="no revision 'again'; there are live"):
        await past(lab)
    await replay(lab)
    before = await lab.bus.usage(subjects.LEDGER)
    for request, error, text in [
        (replace(AGAIN, revision="other"), NotFoundError, "no revision 'other'; there are live, again"),
        (replace(AGAIN, revision="live"), ConfigError, "the live one, which the run itself trains on"),
        (replace(AGAIN, trainer="main"), ConfigError, "trainer 'main' is the live one"),
        (replace(AGAIN, trainer="a.b"), ConfigError, "trainer 'a.b': use"),
        (replace(AGAIN, tokenizer_hash="else"), DataError, "with tokenizer tok, the model has else"),
        (replace(AGAIN, max_staleness=0, start=99), NotFoundError, "none can be batched"),
    ]:
        with pytest.raises(error, match=text):
            await past(lab, request)
    assert await lab.bus.usage(subjects.LEDGER) == before
    assert (await read_record(lab.bus, "r")).holds == {}


@pytest.mark.parametrize("zeros", [False, True])
async def test_missing_logprobs_are_refused(lab, zeros):
    await history(lab, 10)
    bare = lab.group(11, samples=4, messages=[], task={"answer": "yes"})
    said = [[Message(role="assistant", content=text)] for text in ("yes", "no", "no", "yes")]
    logprobs = as_bytes([0.0] * bare.sequences.n_tokens, "float32") if zeros else None
    await lab.store(bare.replace(messages=said, sequences=msgspec.structs.replace(bare.sequences, logprobs=logprobs)))
    await replay(lab)
    with pytest.raises(DataError, match=f"1 of 11 groups have no logprobs, group {11:032x} of sums at sequence 11"):
        await past(lab)
    assert await read_offline_trainer(lab.bus, "r", "again") is None
    assert await entries(lab) == []
    await replay(lab, "sampled", last_seq=10)
    assert (await past(lab, replace(AGAIN, revision="sampled"))).batches > 1


@pytest.mark.parametrize(("tokenizer", "bare", "text"), [
    ("else", False, f"group {41:032x} at sequence 41 of ROLLOUTS was made with tokenizer else, the model has tok"),
    ("tok", True, f"1 of 41 groups have no logprobs, group {41:032x} of sums at sequence 41"),
])  # fmt: skip
async def test_what_is_trained_for_its_shaping_alone_is_checked_too(lab, monkeypatch, tokenizer, bare, text):
    monkeypatch.setattr(bonus_fade, "MIN_GROUPS", 16)
    for n in range(1, 41):  # successes are rare, so that bonuses are in force
        said = [[Message(role="assistant", content=words)] for words in ("no", "no", "no", "no" if n % 4 else "yes")]
        await lab.store(lab.group(n, samples=4, messages=said, task={"answer": "yes"}))
    said = [[Message(role="assistant", content=words)] for words in ("<think>2</think> no", "no", "no", "no")]
    shaped = lab.group(41, samples=4, messages=said, task={"answer": "yes"}, tokenizer_hash=tokenizer)
    if bare:
        zeros = as_bytes([0.0] * shaped.sequences.n_tokens, "float32")
        shaped = shaped.replace(sequences=msgspec.structs.replace(shaped.sequences, logprobs=zeros))
    await lab.store(shaped)
    reward_config = RewardConfig(format_markers=[FormatMarker(marker="<think>", reward=0.1)])
    config = msgspec.structs.replace(CONFIG, reward_config=reward_config)
    await replay(lab, envs=("sums",), config=config)
    *_, last = await read_results(lab.bus, await definition(lab.bus, config, "again"))
    assert (last.reward.verdict, last.reward.trains) == ("zero_variance", True)
    with pytest.raises(DataError, match=text):
        await past(lab, replace(AGAIN, tokenizer_hash="tok"), config=config)
    assert await read_offline_trainer(lab.bus, "r", "again") is None
    assert await entries(lab) == []


async def test_trimmed_rollouts_are_refused(lab):
    await history(lab)
    await replay(lab)
    await lab.bus.trim(subjects.ROLLOUTS, [subjects.rollout("r")], before=5)
    with pytest.raises(NotFoundError, match="at sequence 1 of ROLLOUTS is gone, it was trimmed: select what is left"):
        await past(lab)
    await update_record(lab.bus, "r", lambda old: old.replace(trimmed={subjects.ROLLOUTS: 5}))
    with pytest.raises(NotFoundError, match="is kept from sequence 5 on, not from 1"):
        await past(lab)
    assert await entries(lab) == []
    assert (await past(lab, replace(AGAIN, min_step=5))).batches > 1


async def test_an_unfinished_revision_is_refused(lab):
    await history(lab)
    stop = anyio.Event()
    stop.set()
    request = ReplayRequest(revision="again", selection=Selection(envs=["sums"]))
    await run_replay(lab.bus, CONFIG, request, draining=stop, progress=lambda *_: None)
    with pytest.raises(NotFoundError, match="not finished in sums: repeat the command that began it"):
        await past(lab)


async def test_the_same_name_with_other_settings_is_refused(lab):
    await history(lab)
    await replay(lab)
    await past(lab)
    smaller = msgspec.structs.replace(CONFIG, batching=BatchingConfig(batch_size=8))
    with pytest.raises(ConfigError, match=r"exists and is another: batch_size was 16, is 8"):
        await past(lab, config=smaller)
    with pytest.raises(ConfigError, match=r"start was 0, is 4"):
        await past(lab, replace(AGAIN, start=4))
    await lab.extend_ledger([lab.group(1000)], trainer="mine")
    with pytest.raises(ConfigError, match="has a ledger already that is of no revision"):
        await past(lab, replace(AGAIN, trainer="mine"))


async def test_of_two_at_once_one_is_fenced(lab):
    await history(lab)
    await replay(lab)

    class Racing(_Dying):
        async def commit(self, subject, *args, **kwargs):
            if self._left and subject.startswith("rl.ledger"):
                self._left = 0
                await past(lab, replace(AGAIN))
            return await self._bus.commit(subject, *args, **kwargs)

    with pytest.raises(FencedError):
        await past(lab, bus=Racing(lab, 1))
    assert len(await entries(lab)) == (await past(lab)).entries


async def test_a_ledger_leaves_the_live_run_room(lab, monkeypatch):
    await history(lab)
    await replay(lab)
    usage = lab.bus.usage

    async def small(stream):
        found = await usage(stream)
        return type(found)(found.first, found.last, found.messages, found.bytes, found.bytes + 5000)

    monkeypatch.setattr(lab.bus, "usage", small)
    with pytest.raises(StreamFullError, match=r"raise streams.ledger_bytes"):
        await past(lab)
    assert await entries(lab) == []


async def rewritten(lab, alter) -> None:
    """Replace the last commit of the revision of sums by what `alter` makes of it."""
    log = lab.bus._logs[subjects.REPLAY]
    subject = subjects.replay("rescore", "r", "again", "sums")
    seq = max(seq for seq, message in log._messages.items() if message.subject == subject)
    message = log._messages[seq]
    event = alter(decode(RescoreEvent, message.data))
    log._messages[seq] = type(message)(**{**_fields(message), "data": encode(event)})


def _fields(message):
    return {name: getattr(message, name) for name in message.__dataclass_fields__}


async def test_a_reward_that_was_changed_is_noticed(lab):
    await history(lab)
    await replay(lab)
    revision = await definition(lab.bus, CONFIG, "again")
    honest = await read_results(lab.bus, revision)
    assert [judged.seq for judged in honest] == list(range(1, 61))

    def nudge(event):
        at = next(i for i, reward in enumerate(event.rewards) if reward.advantages[0] is not None)
        first, *rest = event.rewards[at].advantages
        reward = msgspec.structs.replace(event.rewards[at], advantages=[math.nextafter(first, 9), *rest])
        return event.replace(rewards=[*event.rewards[:at], reward, *event.rewards[at + 1 :]])

    await rewritten(lab, nudge)
    with pytest.raises(LedgerError, match="they were changed"):
        await read_results(lab.bus, revision)
    with pytest.raises(LedgerError, match="they were changed"):
        await past(lab)
    assert await entries(lab) == []


async def test_a_rollout_that_is_another_by_now_is_noticed(lab):
    await history(lab)
    await replay(lab)
    log = lab.bus._logs[subjects.ROLLOUTS]
    log._messages[7], log._messages[8] = (
        type(log._messages[7])(**{**_fields(log._messages[8]), "seq": 7}),
        log._messages[8],
    )
    with pytest.raises(LedgerError, match="the broker lost history"):
        await past(lab)
