"""A valid example of every event, with every optional field in use: what the fuzzer starts from."""

import math
import zlib
from collections.abc import Iterator

import msgspec

from lachesis.schemas.alerts import Alert, AlertEvent, EnvironmentStanding, ResumeRequest
from lachesis.schemas.annotations import (
    Commit,
    CurriculumEvent,
    DeadLetter,
    EvalEvent,
    EvalExample,
    GroupReward,
    GroupScore,
    RewardEvent,
    ScoreEvent,
    Stamp,
    TeacherEvent,
    TeacherLogprobs,
    TeacherPointer,
)
from lachesis.schemas.calls import (
    GroupEnd,
    GroupStart,
    SessionCall,
    SessionEnd,
    StoredRecord,
    TakeUpReply,
    TakeUpRequest,
    ToolResults,
)
from lachesis.schemas.codec import Event
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.control import (
    AdmissionStatus,
    CurriculumSnapshot,
    EpochClaim,
    EpochRecord,
    Heartbeat,
    LeaseReply,
    LeaseRequest,
    PackedHistogram,
    PolicyRecord,
    PromptsRecord,
    StageIncident,
    StageVitals,
    StatePart,
    StateSnapshot,
)
from lachesis.schemas.ledger import (
    GENESIS,
    Batch,
    GroupRef,
    LedgerEntry,
    Numerics,
    Outcome,
    ProducerMark,
    TrainReport,
    VoidBatch,
)
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.repeats import RepeatedRows
from lachesis.schemas.replay import (
    EnsembleInfo,
    OfflineTrainerRecord,
    RescoreEvent,
    RevisionRecord,
    Selection,
    UnscoredGroup,
)
from lachesis.schemas.rollout import (
    Attachment,
    Dispatch,
    Message,
    RolloutGroup,
    Sequences,
    ToolCall,
    VersionSpan,
)

__all__ = ["EXAMPLES", "GROUP", "floats", "group"]

GROUP = "0199" + "0" * 28
POLICY = "3-first-abcdef012345"
_COMMIT = Commit(term="1-ab", index=0, cursors={"ROLLOUTS": 1, "EVENTS": 1}, delta=b"\x80", crc32=zlib.crc32(b"\x80"))
_STAMP = Stamp("scorer", 1, 2, 3, 1)


def group(**changes: object) -> RolloutGroup:
    """Return a group of two samples of four tokens."""
    mask = [False, True, True, True] * 2
    sequences = Sequences(
        offsets=as_bytes([0, 4, 8], "int32"),
        tokens=as_bytes(range(8), "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes([-0.5 if learn else 0.0 for learn in mask], "float32"),
        finish_reasons=["stop", "length"],
        version_spans=[VersionSpan(0, 0, 0), VersionSpan(1, 0, 0)],
        rewards={"environment": [0.0, 1.0]},
    )
    fields = {
        "id": GROUP,
        "run": "r",
        "env": "sums",
        "item": "7",
        "producer": "p",
        "epoch": 1,
        "counter": 0,
        "policy_versions": [POLICY],
        "sequences": sequences,
        "tokenizer_hash": "tok",
        "started_ns": 1,
        "messages": [[Message(role="user", content="q"), Message(role="assistant", content="a")]] * 2,
    }
    return RolloutGroup(**fields | changes)


def _group_of_one_prompt() -> RolloutGroup:
    """Return a group of three samples with a prompt of 40 tokens, which travels once."""
    mask = [*[False] * 40, *[True] * 4] * 3
    sequences = Sequences(
        offsets=as_bytes([0, 44, 88, 132], "int32"),
        tokens=as_bytes([at % 44 + (at // 44 if at % 44 >= 40 else 0) for at in range(132)], "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes([-0.5 if learn else 0.0 for learn in mask], "float32"),
        finish_reasons=["stop"] * 3,
        version_spans=[VersionSpan(i, 0, 0) for i in range(3)],
        columns={"experts": Column(dtype="int16", data=bytes(264))},
    )
    return group(sequences=sequences, messages=[])


def _rich_group() -> RolloutGroup:
    columns = {"experts": Column(dtype="int16", data=bytes(32), width=2)}
    sequences = msgspec.structs.replace(
        group().sequences,
        sample_index=[0, 1],
        turn_rewards=[[0.5], [0.1, 0.2]],
        turn_parents=[[-1], [-1, 0]],
        token_advantages=as_bytes([0.5] * 8, "float32"),
        columns=columns,
    )
    call = ToolCall(name="add", arguments='{"a":1}', id="c")
    said = [
        Message(role="user", content="q", attachments=[0]),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="2", name="add", tool_call_id="c"),
        Message(role="assistant", content="two"),
    ]
    return group(
        sequences=sequences,
        lease="t.1.2.400",
        skill="plus",
        difficulty=1.5,
        dispatch=Dispatch(index=3, snapshot_id="1-ab", probability=0.25),
        task={"answer": "2", "metadata": {"n": [1, 2.5, None]}},
        messages=[said, said],
        attachments=[Attachment(mime="image/png", data=b"png")],
        generation={"temperature": 1.0},
        metadata={"took": 0.1},
    )


_SCORE = GroupScore(
    group=GROUP,
    seq=1,
    item="7",
    policy_step=3,
    index=3,
    skill="plus",
    scores=[0.0, None],
    ratings={"length": [0.5, None]},
    lengths=[3, 3],
    statuses={"length": ["ok", "timeout"]},
    disagreement=(0.1, 0.2),
    success=0.5,
    stamps=[_STAMP],
)
_REWARD = GroupReward(
    group=GROUP,
    seq=1,
    item="7",
    policy_step=3,
    verdict="trainable",
    scores=[0.0, 1.0],
    rewards=[-1.0, 1.0],
    advantages=[-1.0, 1.0],
    snapshot="s",
    mean=0.0,
    std=1.0,
    range=2.0,
    n_valid=2,
    success=0.5,
    reason="why",
    stamps=[_STAMP],
)
_POINTER = TeacherPointer(group=GROUP, seq=1, stored=1, missing=[1], reason="late", stamps=[_STAMP])
_REF = GroupRef(
    group=GROUP, seq=1, env="sums", sequences=2, tokens=8, policy_step=3, advantages=[-1.0, 1.0], teacher=1, score=0.5
)
_HISTOGRAM = PackedHistogram(2, 0.5, 0.25, 0.25, 0, 0, [-65, -60], [1, 1])
_NAMES = {"run": "r", "env": "sums", "revision": "live"}

EXAMPLES: list[Event] = [
    group(),
    _rich_group(),
    _group_of_one_prompt(),
    ScoreEvent(**_NAMES, ensemble="e", raters={"length": "1"}, groups=[_SCORE]),
    RewardEvent(**_NAMES, advantage="grpo", commit=_COMMIT, groups=[_REWARD]),
    RescoreEvent(
        **_NAMES, ensemble="e", raters={"length": "1"}, advantage="grpo", commit=_COMMIT, digest="d", scores=[_SCORE],
        rewards=[_REWARD], unscored=[UnscoredGroup(group=GROUP, seq=2, reason="DataError: bad")],
    ),
    RevisionRecord(
        run="r", revision="v2", first=1, last=9, groups={"sums": 3}, created_ns=1, normalization={"window": 64},
        advantage={"estimator": "grpo"},
        selection=Selection(
            envs=["sums"], first_seq=1, last_seq=9, since_ns=1, until_ns=2, min_step=0, max_step=3, groups="1-ab"
        ),
        judges={
            "sums": EnsembleInfo(ensemble="e", raters={"length": "1"}, success_threshold=1.0, success_rater="length")
        },
    ),
    TeacherEvent(**_NAMES, teacher="t", groups=[_POINTER]),
    CurriculumEvent(**_NAMES, strategy="sec", snapshot_id="1-ab", commit=_COMMIT, observed=[GROUP]),
    DeadLetter(
        **_NAMES,
        stage="scorer",
        kind="data",
        stream="ROLLOUTS",
        seq=1,
        group=GROUP,
        reason="SchemaError: bad",
        place="scorer 1-ab",
        time_ns=1,
        trace_id=GROUP,
        leased=True,
    ),
    EvalEvent(
        **_NAMES, policy_version=POLICY, policy_step=3, items=4, k=2, temperature=1.0, avg=0.5, pass_at_k=0.75,
        started_ns=1, ended_ns=2, greedy=0.5, unjudged=1, error=0.25, tasks=[7, 2], task_successes=[2, 0],
        task_judged=[2, 1], examples=[EvalExample(task=7, prompt="2 + 2?", answer="4", score=1.0)],
    ),
    TeacherLogprobs(
        run="r", env="sums", group=GROUP, teacher="t", tokenizer_hash="tok", temperature=1.0,
        logprobs=as_bytes([0.0, -1.0] * 4, "float32"), missing=[1], k=2, topk_ids=as_bytes([1, -1] * 8, "int32"),
        topk_logprobs=as_bytes([-1.0, -math.inf] * 8, "float16"), topk_mass=as_bytes([0.5] * 8, "float16"),
    ),
    TeacherLogprobs(
        run="r", env="sums", group=GROUP, teacher="t", tokenizer_hash="tok", temperature=1.0,
        logprobs=as_bytes([0.0, -1.0] * 4, "float32"),
    ).without_repeats([RepeatedRows(0, 4, 2), RepeatedRows(2, 6, 1)]),
    LeaseRequest(op="acquire", producer="p", env="sums", sequences=2, bytes=4096),
    LeaseRequest(op="renew", producer="p", env="sums", sequences=2, bytes=4096, lease="1-ab.1"),
    LeaseRequest(op="release", producer="p", env="sums", lease="1-ab.1.2.4096"),
    LeaseReply(granted=True, lease="1-ab.1.2.4096", expires_s=30.0, retry_s=0.1, reason="why"),
    PolicyRecord(run="r", version=POLICY, weights="/w/3.safetensors", tokenizer_hash="tok", written_ns=1),
    CurriculumSnapshot(
        **_NAMES, id="1-ab", observed=1, strategy="sec", weights=as_bytes([0.5, 1.0, 2.0, 0.0], "float32")
    ),
    PromptsRecord(tokenizer_hash="0" * 64, item="9", messages="a" * 64),
    EpochRecord(
        order="4-ab", epoch=1, next=2, claims=[EpochClaim(epoch=1, place=1, holder="p", life=1, since_ns=1, failures=1)]
    ),
    StateSnapshot(stage="normalizer", index=0, covers=1, cursors={"ROLLOUTS": 1}, state=b"\x80", sha256=b"0" * 32),
    StateSnapshot(
        stage="curriculum", index=1, covers=2, cursors={}, state=b"", parts=[1, 2], slot=1, sha256=b"0" * 32
    ),
    StatePart(stage="curriculum", index=1, data=b"\x80"),
    GroupStart(
        run="r", env="sums", group=GROUP, life=2, holder="h", producer="p", epoch=1, counter=0, item="7", samples=2,
        tokenizer_hash="tok", started_ns=1, lease="1-ab.1", fruitless=1,
        dispatch=Dispatch(index=3, snapshot_id="1-ab", probability=0.25),
        claim=EpochClaim(epoch=1, place=1, holder="p", life=1, since_ns=1),
    ),
    SessionCall(
        group=GROUP, life=2, session="0.0", index=1, parent=0, digest=b"12345678", prompt=as_bytes([1, 2], "int32"),
        tokens=as_bytes([3, 4], "int32"), logprobs=as_bytes([-0.5, -1.0], "float32"), versions=[(0, POLICY)],
        finish_reason="stop", text="a", fork="0.1", seconds=0.5,
        columns={"routed_experts": Column(dtype="int16", data=bytes(8), width=2)},
    ),
    ToolResults(group=GROUP, life=2, session="0.0", index=1, results=["2"], fork="0.1", seconds=0.5),
    SessionEnd(
        group=GROUP, life=2, session="0.0", sample=0, finish_reason="tool", rewards={"environment": 1.0}, calls=[0, 1],
        further=[[0, 2]], messages=[Message(role="user", content="q")], thought_calls=1, diverged="call 1",
    ),
    GroupEnd(group=GROUP, life=2, outcome="abandoned", reason="why", lost_s=1.5),
    TakeUpRequest(env="sums", holder="p", life=2, group=GROUP, after=3),
    TakeUpReply(group=GROUP, records=[StoredRecord(seq=4, kind="end", data=b"\x80")], more=True),
    Heartbeat(
        host="h", schema_version=1,
        run="r", service="scorer", instance="1-ab", pid=1, time_ns=1, metrics={"flow/blocked": 1.0},
        stage=StageVitals(handled=2, lag=1, wait=_HISTOGRAM, process=_HISTOGRAM, note="n"),
    ),
    AdmissionStatus(run="r", blocked=True, last_rollout=3, last_entry=1),
    StageIncident(run="r", group=GROUP, stamp=_STAMP),
    StageIncident(run="r", group=GROUP, stamp=_STAMP, error_type="DataError", error="no such answer"),
    LedgerEntry(
        run="r", trainer="main", index=1, previous=GENESIS, watermark=1, resolved=b"\x02", events_cursor=1,
        batch=Batch(number=0, groups=[_REF], sequences=2, tokens=8),
        outcomes=[Outcome(3, GROUP, "stale", 2, "old")], producers={"p@1": ProducerMark(1, [0, 1, 3, 4])},
        totals={"batched": 1}, next_batch=1, term="1-ab", written_ns=1, stamps={GROUP: [_STAMP]},
    ),
    AlertEvent(
        run="r", env="sums", revision="live", commit=_COMMIT, window=0, groups=64, source="groups",
        results=[Alert(check="truncated", severity="warn", value=0.3, threshold=0.2, windows=1, examples=[GROUP])],
        standing=EnvironmentStanding(quarantined_from=1, cause="truncated", since=0),
    ),
    ResumeRequest(run="r", env="sums", after=1, asked_ns=1),
    TrainReport(
        run="r", trainer="main", lineage="first", term="1-ab", step=3, ledger_index=1, chain=GENESIS, next_batch=3,
        policy_version=POLICY, checkpoint="/c/step-3", voids=[VoidBatch(1, "why")], written_ns=1,
        numerics=Numerics(torch="2.9", processor="x", instructions="AVX2", threads=1, learner="{}"),
    ),
    OfflineTrainerRecord(
        run="r", trainer="again", revision="v2", digest="ab", model="m", start=4, max_staleness=8, min_step=1,
        max_step=None, batch_size=8, token_budget=None, mix={"sums": 1.0}, std_floor=0.001, entries=3, batches=2,
        groups=4, chain=GENESIS, manifest=GENESIS, created_ns=1,
    ),
]  # fmt: skip


def floats(value: object) -> Iterator[float]:
    """Yield every float of an event that a field declares as one; free-form fields may hold what they like."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in {"task", "generation", "metadata", "config"}:
                yield from floats(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floats(item)
