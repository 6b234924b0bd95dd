"""The wire under attack: what is written comes back, and whatever else comes is refused as `SchemaError`, cheaply."""

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.schemas import subjects
from lachesis.schemas.annotations import FixedRating, GroupScore, ScoreEvent, TeacherLogprobs
from lachesis.schemas.calls import GroupEnd, GroupStart, SessionCall, SessionEnd, TakeUpReply, ToolResults
from lachesis.schemas.codec import SCHEMA_VERSION, Event, decode, encode
from lachesis.schemas.columns import Column, as_bytes, view
from lachesis.schemas.control import (
    CurriculumSnapshot,
    FixedSample,
    FixedSamples,
    Heartbeat,
    LeaseReply,
    LeaseRequest,
    PolicyRecord,
    StageVitals,
)
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion, new_group_id
from lachesis.schemas.ledger import GENESIS, LedgerEntry, TrainReport
from lachesis.schemas.packing import pack_mask, unpack_mask
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.replay import RevisionRecord, Selection
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

VERSION = str(PolicyVersion(12, "a1b2c3d4", "0123456789abcdef"))
KINDS: list[type[Event]] = [
    RolloutGroup, ScoreEvent, TeacherLogprobs, CurriculumSnapshot, Heartbeat, LeaseReply, LeaseRequest, PolicyRecord,
    LedgerEntry, TrainReport, FixedSamples, GroupStart, SessionCall, SessionEnd, ToolResults, GroupEnd, TakeUpReply,
]  # fmt: skip


def make_group(n: int = 8, tokens: int = 1024, seed: int = 0, **changes: Any) -> RolloutGroup:
    """A group as an environment makes it: random tokens and logprobs, a prompt of an eighth that is masked."""
    rng = np.random.default_rng(seed)
    total, prompt = n * tokens, max(1, tokens // 8)
    mask = np.tile(np.arange(tokens) >= prompt, n)
    logprobs = np.where(mask, -rng.exponential(1.0, total), 0).astype(np.float32)
    sequences = Sequences(
        offsets=as_bytes(np.arange(n + 1) * tokens, "int32"),
        tokens=as_bytes(rng.integers(0, 150_000, total), "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes(logprobs, "float32"),
        finish_reasons=["stop"] * n,
        version_spans=[VersionSpan(i, 0, 0) for i in range(n)],
        rewards={"accuracy": [1.0, 0.0] * (n // 2) + [None] * (n % 2)},
    )
    fields: dict[str, Any] = {
        "id": new_group_id(), "run": "run-2026", "env": "spell_backward", "item": "train/000123456",
        "producer": "environment-0-4f2a", "epoch": 1_795_262_854, "counter": 123_456, "policy_versions": [VERSION],
        "sequences": sequences, "tokenizer_hash": "9f" * 16, "started_ns": time.time_ns(), "lease": "lease-12345",
        "skill": "length-5", "difficulty": 0.5, "task": {"answer": "drow", "metadata": {"length": 4}},
        "generation": {"temperature": 1.0, "max_tokens": tokens}, "metadata": {"inference_ms": 812.5},
    }  # fmt: skip
    return RolloutGroup(**{**fields, **changes})


def altered(group: RolloutGroup, **columns: Any) -> bytes:
    return encode(group.replace(sequences=msgspec.structs.replace(group.sequences, **columns)))


# -- round trips -----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 9), tokens=st.integers(2, 50), seed=st.integers(0, 2**32 - 1))
def test_groups_come_back_bit_for_bit(n: int, tokens: int, seed: int) -> None:
    group = make_group(n, tokens, seed, messages=[[Message(role="user", content="ü\0\n")]] * n)
    back = decode(RolloutGroup, encode(group))
    assert back == group
    for ours, theirs in zip(group.sequences, back.sequences, strict=True):
        assert ours.tokens.tobytes() == theirs.tokens.tobytes()
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()


def test_a_group_without_logprobs_comes_back_and_older_builds_refuse_it() -> None:
    group = make_group(2, 16)
    bare = group.replace(sequences=msgspec.structs.replace(group.sequences, logprobs=None))
    back = decode(RolloutGroup, encode(bare))
    assert (back, back.v, group.v) == (bare, 2, 1)
    assert [sequence.logprobs for sequence in back.sequences] == [None, None]
    assert back.sequences.generated.logprobs is None
    assert (Plan.of(back).trainable, Plan.of(group).trainable) == (False, True)
    raw = msgspec.msgpack.decode(encode(group))
    del raw["sequences"]["logprobs"]
    with pytest.raises(SchemaError, match="logprobs"):
        decode(RolloutGroup, msgspec.msgpack.encode(raw))


@given(st.lists(st.booleans(), max_size=200))
def test_masks_come_back(mask: list[bool]) -> None:
    assert unpack_mask(pack_mask(mask), len(mask), "mask").tolist() == mask


@given(
    st.sampled_from(["int32", "int64", "float32", "float64", "uint8", "int16", "float16"]),
    st.lists(st.integers(0, 100), max_size=60),
)
def test_columns_come_back_without_a_copy(dtype: Any, values: list[int]) -> None:
    data = as_bytes(values, dtype)
    array = view(data, dtype, len(values), "column")
    assert array.tolist() == values
    assert not array.flags.owndata
    assert not array.flags.writeable


@given(
    st.integers(0, 2**63 - 1), st.integers(1, 2**31 - 1), st.from_regex("[a-f0-9][a-f0-9-]{0,39}", fullmatch=True),
    st.booleans(), st.sampled_from([(False, None), (True, None), (True, 1), (True, 7)]),
)  # fmt: skip
def test_plans_come_back(step: int, count: int, producer: str, leased: bool, made: tuple[bool, int | None]) -> None:
    trainable, later = made
    newest = step + later if later and step + later < 1 << 63 else None
    plan = Plan(
        group=new_group_id(), sequences=count, samples=count, tokens=count, policy_step=step, producer=producer,
        epoch=step, counter=step, started_ns=step, lease="lease-1" if leased else None, trainable=trainable,
        newest_step=newest,
    )  # fmt: skip
    assert Plan.unpack(plan.pack()) == plan
    assert plan.last_step == (step if newest is None else newest)


# -- versions and fields ---------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_at_every_level() -> None:
    raw = msgspec.msgpack.decode(encode(make_group(2, 8)))
    raw["new_field"] = {"deep": [1, 2]}
    raw["sequences"]["new_column"] = b"123"
    decode(RolloutGroup, msgspec.msgpack.encode(raw))


def test_a_newer_version_is_refused_and_an_older_is_read() -> None:
    raw = msgspec.msgpack.decode(encode(make_group(2, 8)))
    with pytest.raises(SchemaError, match="newer than"):
        decode(RolloutGroup, msgspec.msgpack.encode({**raw, "v": SCHEMA_VERSION + 1}))
    del raw["v"]
    decode(RolloutGroup, msgspec.msgpack.encode(raw))


def test_every_required_field_is_required() -> None:
    raw = msgspec.msgpack.decode(encode(make_group(2, 8)))
    for field in msgspec.structs.fields(RolloutGroup):
        if field.required:
            with pytest.raises(SchemaError, match=field.name):
                decode(RolloutGroup, msgspec.msgpack.encode({k: v for k, v in raw.items() if k != field.name}))


# -- hostile bytes ---------------------------------------------------------------------------------------------------


def test_no_truncation_is_taken_for_a_message() -> None:
    data = encode(make_group(2, 8))
    for end in range(len(data)):
        with pytest.raises(SchemaError):
            decode(RolloutGroup, data[:end])


@settings(max_examples=300)
@given(st.binary(max_size=300), st.sampled_from(KINDS))
def test_random_bytes_raise_schema_errors_only(data: bytes, kind: type[Event]) -> None:
    try:
        decode(kind, data)
    except SchemaError:
        return


GROUP_BYTES = encode(make_group(3, 16))


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GROUP_BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_raise_schema_errors_only(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GROUP_BYTES)
    for place, byte in flips:
        data[place] = byte
    try:
        group = decode(RolloutGroup, bytes(data))
    except SchemaError:
        return
    assert sum(len(s.tokens) for s in group.sequences) == group.sequences.n_tokens  # what passes can be used


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.integers(-3, 3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from([f.name for f in msgspec.structs.fields(RolloutGroup)]), JSON_LIKE)
def test_a_wrong_value_in_any_field(field: str, value: object) -> None:
    raw = msgspec.msgpack.decode(GROUP_BYTES)
    try:
        plan = Plan.of(decode(RolloutGroup, msgspec.msgpack.encode({**raw, field: value})))
    except SchemaError:
        return
    assert Plan.unpack(plan.pack()) == plan  # a group that is taken has a header that can be read


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from([f.name for f in msgspec.structs.fields(Sequences)]), JSON_LIKE)
def test_a_wrong_value_in_any_column(field: str, value: object) -> None:
    raw = msgspec.msgpack.decode(GROUP_BYTES)
    raw["sequences"][field] = value
    try:
        list(decode(RolloutGroup, msgspec.msgpack.encode(raw)).sequences)
    except SchemaError:
        return


@pytest.mark.parametrize(
    "prefix",
    [kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")],
    ids=["array", "map", "bytes", "text"],
)  # fmt: skip
def test_oversized_counts_cost_nothing(prefix: bytes) -> None:
    # the field that holds the promise, then the promise itself
    for data in (prefix, b"\x81\xa9sequences" + prefix, b"\x81\xafpolicy_versions" + prefix, b"\x81\xa4task" + prefix):
        start = time.process_time()
        with pytest.raises(SchemaError):
            decode(RolloutGroup, data)
        assert time.process_time() - start < 1  # nothing like 4 GiB was touched


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_deep_nesting(opening: bytes) -> None:
    for depth in (1_000, 100_000):
        data = b"\x81\xa4task\x81\xa1a" + opening * depth + b"\xc0"
        with pytest.raises(SchemaError):
            decode(RolloutGroup, data)


# -- columns that do not fit -----------------------------------------------------------------------------------------

T = 16
SMALL = make_group(3, T)


@pytest.mark.parametrize(
    ("column", "value", "names"),
    [
        ("offsets", as_bytes([0, 16, 32], "int32"), "offsets"),
        ("offsets", as_bytes([0, 16, 32, 47], "int32"), "offsets"),
        ("offsets", as_bytes([1, 16, 32, 48], "int32"), "offsets"),
        ("offsets", as_bytes([0, 32, 16, 48], "int32"), "offsets"),
        ("offsets", as_bytes([0, 16, 16, 48], "int32"), "offsets"),
        ("offsets", as_bytes([0, -(2**31), 2**31 - 1, 48], "int32"), "offsets"),
        ("offsets", b"", "offsets"),
        ("tokens", SMALL.sequences.tokens[:-1], "offsets|tokens"),
        ("tokens", SMALL.sequences.tokens[:-4], "offsets"),
        ("tokens", as_bytes([-1] * 48, "int32"), "tokens"),
        ("loss_mask", SMALL.sequences.loss_mask + b"\0", "loss_mask"),
        ("loss_mask", b"", "loss_mask"),
        ("loss_mask", b"\xff" * 6, "loss_mask|logprobs"),
        ("loss_mask", b"\0" * 6, "logprobs"),
        ("logprobs", SMALL.sequences.logprobs[4:], "logprobs"),
        ("logprobs", as_bytes([np.nan] * 48, "float32"), "logprobs"),
        ("logprobs", as_bytes([-np.inf] * 48, "float32"), "logprobs"),
        ("logprobs", as_bytes([0.5] * 48, "float32"), "logprobs"),
        ("token_advantages", as_bytes([np.nan] * 48, "float32"), "token_advantages"),
        ("token_advantages", b"", "token_advantages"),
        ("finish_reasons", ["stop"], "offsets"),
        ("finish_reasons", [], "sequences"),
        ("finish_reasons", ["bored"] * 3, "finish_reasons"),
        ("sample_index", [0, 1], "sample_index"),
        ("sample_index", [0, 0, 2], "sample_index"),
        ("sample_index", [-1, 0, 1], "sample_index"),
        ("sample_index", [0, 1, 2**62], "sample_index"),
        ("rewards", {"accuracy": [1.0]}, "accuracy"),
        ("rewards", {"accuracy": [1.0, float("nan"), None]}, "accuracy"),
        ("turn_rewards", [[1.0], [float("inf")], []], "turn_rewards"),
        ("turn_rewards", [[1.0]], "turn_rewards"),
        ("turn_parents", [[-1], [-1]], "turn_parents: it has to name a parent for each of the turn_rewards"),
        ("columns", {"experts": Column(dtype="int16", data=b"1", width=2)}, "experts"),
        ("columns", {"experts": Column(dtype="int16", data=b"", width=0)}, "experts"),
        ("columns", {"experts": Column(dtype="int16", data=b"", width=-5)}, "experts"),
        ("columns", {"experts": Column(dtype="int16", data=b"", width=2**62)}, "experts"),
        ("version_spans", [VersionSpan(0, 0, 0)], "version_spans"),
        ("version_spans", [VersionSpan(i, 0, 1) for i in range(3)], "version_spans"),
        ("version_spans", [VersionSpan(i, 16, 0) for i in range(3)], "version_spans"),
        ("version_spans", [VersionSpan(i - 1, 0, 0) for i in range(3)], "version_spans"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit(column: str, value: object, names: str) -> None:
    with pytest.raises(SchemaError, match=names):
        decode(RolloutGroup, altered(SMALL, **{column: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "x"),
        ("id", "0" * 31 + "G"),
        ("epoch", -1),
        ("counter", -1),
        ("counter", 2**64 - 1),
        ("started_ns", -1),
        ("producer", ""),
        ("producer", "two words"),
        ("producer", "x" * 129),
        ("producer", "\u00e4"),
        ("lease", "a\r\nb"),
        ("lease", "-"),
        ("policy_versions", []),
        ("policy_versions", ["12"]),
        ("policy_versions", ["9" * 5000 + "-a-b"]),
        ("policy_versions", ["\u0661-a-b"]),
        ("messages", [[]]),
        ("messages", [[Message(role="user", content="", attachments=[0])]] * 3),
        ("messages", [[Message(role="user", content="", attachments=[-1])]] * 3),
    ],
)
def test_fields_that_do_not_fit(field: str, value: object) -> None:
    with pytest.raises(SchemaError):
        decode(RolloutGroup, encode(SMALL.replace(**{field: value})))


def test_scores_that_are_no_numbers() -> None:
    def event(scores: list[float | None]) -> bytes:
        item = GroupScore(group=SMALL.id, seq=1, item="i", policy_step=0, scores=scores, ratings={}, lengths=[3, 3])
        return encode(ScoreEvent(run="r", env="e", revision="live", ensemble="x", raters={}, groups=[item]))

    decode(ScoreEvent, event([1.0, None]))
    for scores in ([float("nan"), 1.0], [float("inf"), None], [1.0]):
        with pytest.raises(SchemaError):
            decode(ScoreEvent, event(scores))


@pytest.mark.parametrize(
    "change",
    [{"group": "x"}, {"raters": {}}, {"raters": {"other": "a"}}, {"ratings": {"judge": [1.0, float("nan")]}}],
    ids=["no group", "no raters", "another rater", "nan"],
)
def test_ratings_of_fixed_samples_that_are_none(change: dict[str, Any]) -> None:
    def event(fixed: FixedRating) -> bytes:
        item = GroupScore(
            group=SMALL.id, seq=1, item="i", policy_step=0, scores=[1.0], ratings={}, lengths=[3], fixed=fixed
        )
        return encode(ScoreEvent(run="r", env="e", revision="live", ensemble="x", raters={}, groups=[item]))

    fixed = FixedRating(group=SMALL.id, sample=0, ratings={"judge": [1.0]}, raters={"judge": "a"})
    assert decode(ScoreEvent, event(fixed)).groups[0].fixed == fixed
    with pytest.raises(SchemaError):
        decode(ScoreEvent, event(msgspec.structs.replace(fixed, **change)))


def test_fixed_samples_are_of_groups_and_have_an_answer() -> None:
    sample = FixedSample(
        group=SMALL.id, sample=0, item="i", messages=[Message(role="assistant", content="4")], tokens=3, ending="stop"
    )
    assert decode(FixedSamples, encode(FixedSamples(samples=[sample]))).samples == [sample]
    for change in ({"group": "x"}, {"messages": []}, {"messages": [Message(role="user", content="2+2?")]}):
        with pytest.raises(SchemaError):
            decode(FixedSamples, encode(FixedSamples(samples=[msgspec.structs.replace(sample, **change)])))


@pytest.mark.parametrize("field", ["figures", "controls"])
@pytest.mark.parametrize("column", [[1.0], [1.0, float("nan")]])
def test_figures_and_controls_of_raters_that_are_no_columns(column: list[float | None], field: str) -> None:
    def event(columns: dict[str, list[float | None]]) -> bytes:
        item = GroupScore(
            group=SMALL.id,
            seq=1,
            item="i",
            policy_step=0,
            scores=[1.0, 1.0],
            ratings={},
            lengths=[3, 3],
            **{field: columns},
        )
        return encode(ScoreEvent(run="r", env="e", revision="live", ensemble="x", raters={}, groups=[item]))

    found = decode(ScoreEvent, event({"judge": [1.0, None]})).groups[0]
    assert getattr(found, field) == {"judge": [1.0, None]}
    with pytest.raises(SchemaError):
        decode(ScoreEvent, event({"judge": column}))


def test_ledger_entries_that_do_not_add_up() -> None:
    entry = LedgerEntry(
        run="r", trainer="t", index=0, previous=GENESIS, watermark=0, resolved=b"", events_cursor=0
    )  # fmt: skip
    assert decode(LedgerEntry, encode(entry)).digest() == entry.digest()
    for field in ("index", "watermark", "events_cursor"):
        with pytest.raises(SchemaError):
            decode(LedgerEntry, encode(entry.replace(**{field: -1})))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_declared_numbers_are_finite(value: float) -> None:
    for event in (
        LeaseReply(granted=True, expires_s=value),
        Heartbeat(
            host="h",
            schema_version=1,
            run="r",
            service="s",
            instance="i",
            pid=1,
            time_ns=1,
            stage=StageVitals(),
            metrics={"m": value},
        ),
        SMALL.replace(difficulty=value),
    ):
        with pytest.raises(SchemaError, match="float"):
            decode(type(event), encode(event))


@pytest.mark.parametrize("field", ["normalization", "normalizations", "advantage"])
def test_numbers_in_settings_that_a_revision_records_are_finite(field: str) -> None:
    record = RevisionRecord(
        run="r", revision="v2", selection=Selection(envs=["sums"]), first=1, last=9, groups={}, judges={},
        normalization={}, advantage={}, created_ns=1,
    )  # fmt: skip
    assert decode(RevisionRecord, encode(record)) == record
    with pytest.raises(SchemaError, match=field):
        decode(RevisionRecord, encode(record.replace(**{field: {"sums": [{"window": float("inf")}]}})))


@pytest.mark.parametrize("value", [-1, 1 << 63])
def test_counts_are_no_negative_numbers_and_fit_into_64_bits(value: int) -> None:
    for event in (
        LeaseRequest(op="release", producer="p", env="e", lease="l", sequences=value),
        PolicyRecord(run="r", version=VERSION, weights="w", tokenizer_hash="h", written_ns=value),
    ):
        with pytest.raises(SchemaError, match="int"):
            decode(type(event), encode(event))


@pytest.mark.parametrize("field", ["producer", "env", "lease"])
@pytest.mark.parametrize("text", ["", "-", "a b", "x" * 129, "\u00e9", "x\n"])
def test_names_that_the_governor_remembers_are_short_words(field: str, text: str) -> None:
    request = LeaseRequest(op="acquire", producer="p", env="e", sequences=1, bytes=1, lease="l")
    decode(LeaseRequest, encode(request))
    with pytest.raises(SchemaError, match=field):
        decode(LeaseRequest, encode(request.replace(**{field: text})))


def test_free_form_data_is_what_every_reader_can_walk() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    for value in (deep, {1: "a"}, {"a": {None: 1}}, msgspec.msgpack.Ext(5, b"x")):
        with pytest.raises(SchemaError, match="metadata"):
            decode(RolloutGroup, encode(SMALL.replace(metadata={"k": value})))


def test_top_k_columns_come_together() -> None:
    """A lone column was never looked at, until a reader took its length for granted."""
    logprobs = TeacherLogprobs(
        run="r", env="e", group=SMALL.id, teacher="t", tokenizer_hash="h", temperature=1.0,
        logprobs=as_bytes([0.0], "float32"),
    )  # fmt: skip
    decode(TeacherLogprobs, encode(logprobs))
    with pytest.raises(SchemaError, match="top-k"):
        decode(TeacherLogprobs, encode(logprobs.replace(topk_mass=b"odd")))


def test_complaints_do_not_repeat_the_message() -> None:
    event = msgspec.msgpack.encode({"op": "x" * (1 << 20), "producer": "p", "env": "e"})
    with pytest.raises(SchemaError) as caught:
        decode(LeaseRequest, event)
    assert len(str(caught.value)) < 1000


# -- the planning header ---------------------------------------------------------------------------------------------

PLAN = Plan.of(SMALL).pack()


@pytest.mark.parametrize(
    "text",
    [
        None, "", " ", "1", PLAN + " x", PLAN[:-len(" lease-12345")], "3" + PLAN[1:], "4" + PLAN[1:], PLAN + " 99",
        "3" + PLAN[1:] + f" {Plan.unpack(PLAN).policy_step}", "3" + PLAN[1:] + f" {2**63}", PLAN.replace(" 3 ", " -3 "),
        PLAN.replace(" 3 ", " 0 "), PLAN.replace(" 3 ", " 3.0 "), PLAN.replace(" 3 ", " \u0663 "),
        PLAN.replace(" 3 ", " " + "9" * 4000 + " "), PLAN.replace(" 3 ", f" {2**31} "), PLAN[:-1] + "\udce9",
        PLAN.replace(" 12 ", f" {2**63} "),
        "1 " * (1 << 20), "9" * (4 << 20), PLAN + " " * (1 << 20), "\0" * 100,
    ],
)  # fmt: skip
def test_headers_that_are_no_plan(text: str | None) -> None:
    start = time.process_time()
    with pytest.raises(SchemaError):
        Plan.unpack(text)
    assert time.process_time() - start < 0.5


@given(st.text(max_size=200))
def test_any_header_is_a_plan_or_a_schema_error(text: str) -> None:
    try:
        Plan.unpack(text)
    except SchemaError:
        return


def test_a_megabyte_behind_a_plan_is_not_a_plan() -> None:
    with pytest.raises(SchemaError):
        Plan.unpack(PLAN + "x" * (1 << 20))


def test_no_two_consumers_share_a_durable_name() -> None:
    assert subjects.durable("scorer", "exp", "2-live") != subjects.durable("scorer", "exp-2", "live")
