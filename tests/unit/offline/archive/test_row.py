"""Groups to rows and back, through either format, to the bit."""

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fuzz.examples import EXAMPLES, group
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lachesis.pipeline.offline.archive import jsonl, parquet
from lachesis.pipeline.offline.archive.logic.row import (
    SCHEMA,
    DerivedColumns,
    RolloutRow,
    content_digest,
    group_of,
    rows_of,
)
from lachesis.schemas.annotations import GroupReward, GroupScore, Stamp
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Attachment, Message, RolloutGroup, Sequences, ToolCall, VersionSpan

NOTHING = DerivedColumns(revision="live")
LINE = msgspec.json.encode(
    rows_of(
        group(
            sequences=Sequences(
                offsets=as_bytes([0, 3], "int32"), tokens=as_bytes([1, 2, 3], "int32"), loss_mask=b"\x06",
                logprobs=as_bytes([0, -1, -2], "float32"), finish_reasons=["stop"],
                version_spans=[VersionSpan(0, 0, 0)],
            ),
            messages=[[Message(role="user", content="q")]], task={"a": [1, 2.5]}, metadata={},
        ),
        7, 8, NOTHING,
    )[0],
    enc_hook=lambda array: array.tolist(),
)  # fmt: skip
FULL = next(one for one in EXAMPLES if isinstance(one, RolloutGroup))


def through(kind: str, rows: list[RolloutRow], folder: Path) -> list[RolloutRow]:
    path = folder / f"rows.{kind}"
    with path.open("wb") as file:
        if kind == "parquet":
            pytest.importorskip("pyarrow")
            writer = parquet.ParquetWriter(file, {"run": "r"})
        else:
            writer = jsonl.JsonLinesWriter(file)
        writer.write(rows)
        writer.close()
    if kind == "parquet":
        return [row for _, row in parquet.read_rows(path)]
    return [jsonl.read_row(line.data) for line in jsonl.read_lines(path)]


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    """Any shape: samples of several sequences, columns, branches, texts, rewards that are missing."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    n, total = len(lengths), sum(lengths)
    cuts = np.cumsum([0, *lengths])
    mask = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    mask[cuts[:-1]] = False
    real = st.floats(-1e6, 0, width=32)
    logprobs = np.where(mask, draw(st.lists(real, min_size=total, max_size=total)), 0)
    branches = draw(st.booleans())
    samples = draw(st.integers(1, n)) if branches else n
    index = [min(i, samples - 1) for i in range(n)] if branches else None
    missing = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))
    per_sample = {"min_size": samples, "max_size": samples}
    word, either = st.text(max_size=3), st.integers(0, 1)
    router = Column(dtype="int16", data=as_bytes(range(2 * total), "int16"), width=2)
    texts = st.lists(
        st.builds(
            Message, role=st.text(max_size=4), content=st.text(max_size=8), name=st.none() | st.text(max_size=3),
            tool_calls=st.lists(st.builds(ToolCall, name=word, arguments=word, id=st.none() | word), max_size=2),
            attachments=st.sampled_from([[], [0]]),
        ),
        max_size=2,
    )  # fmt: skip
    whole = st.integers(-(1 << 63), (1 << 63) - 1)
    real = st.floats(allow_nan=False, allow_infinity=False)
    plain = st.dictionaries(word, st.none() | whole | real | word, max_size=2)
    turn_rewards = draw(st.none() | st.lists(st.lists(st.floats(-9, 9), max_size=2), **per_sample))
    branched = turn_rewards is not None and draw(st.booleans())
    made = group(
        sequences=Sequences(
            offsets=as_bytes(cuts, "int32"),
            tokens=as_bytes(draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=total, max_size=total)), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=draw(st.none() | st.just(as_bytes(logprobs, "float32"))),
            finish_reasons=draw(st.lists(st.sampled_from(["stop", "length", "tool"]), min_size=n, max_size=n)),
            version_spans=[VersionSpan(i, j, draw(either)) for i in range(n)[::-1] for j in range(lengths[i])],
            sample_index=index,
            rewards=draw(st.dictionaries(st.text(min_size=1, max_size=4), st.lists(missing, **per_sample), max_size=2)),
            turn_rewards=turn_rewards,
            turn_parents=[[-1] * len(turns) for turns in turn_rewards or []] if branched else None,
            token_advantages=draw(st.none() | st.just(as_bytes(np.arange(total), "float32"))),
            columns=draw(st.sampled_from([{}, {"router": router}])),
            excluded_samples=sorted(draw(st.sets(st.integers(0, samples - 1)))),
        ),
        policy_versions=["3-a-b", "4-a-c"],
        messages=draw(st.just([]) | st.lists(texts, **per_sample)),
        attachments=[Attachment(mime="image/png", data=b"\x00\xff")],
        task=draw(plain), metadata=draw(plain), generation=draw(plain),
        lease=draw(st.none() | st.just("l")), difficulty=draw(st.none() | st.floats(-9, 9)),
    )  # fmt: skip
    made.check()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@given(made=groups())
def test_any_group_comes_back_to_the_bit(
    kind: str, made: RolloutGroup, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = through(kind, rows_of(made, 7, 8, NOTHING), tmp_path_factory.mktemp("rows"))
    again = group_of(rows, run="elsewhere")
    assert content_digest(again) == content_digest(made) == rows[0].digest
    assert (again.run, again.lease) == ("elsewhere", None)
    ours = rows_of(made.replace(run="r", lease=None), 1, 1, NOTHING)
    assert msgspec.msgpack.encode(group_of(ours, run="r")) == msgspec.msgpack.encode(again.replace(run="r"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_was_derived_is_on_the_row_of_its_sample(kind: str, tmp_path: Path) -> None:
    score = GroupScore(
        group=FULL.id, seq=7, item="7", policy_step=3, scores=[0.5, None], lengths=[3, 2],
        ratings={"math": [1.0, None], "format": [0.0, 0.25]}, statuses={"math": ["ok", "timeout"]},
        disagreement=(0.5, 0.75), success=0.5, stamps=[Stamp("scorer", 1, 2, 3)],
    )  # fmt: skip
    reward = GroupReward(
        group=FULL.id, seq=7, item="7", policy_step=3, verdict="trainable", scores=[0.5, None], rewards=[0.1, None],
        advantages=[1.5, None], shaping=[0.25, None], shaping_scale=0.5, snapshot="s", mean=0.5,
        std=None, range=0.0, n_valid=1,
    )  # fmt: skip
    judged = DerivedColumns(
        revision="again", score=score, ensemble="e", raters={"math": "1"}, reward=reward, estimator="rloo",
        outcome="batched", batch=4, batch_advantages=[1.25, None],
    )  # fmt: skip
    one, other = through(kind, rows_of(group(), 7, 8, judged), tmp_path)
    assert (one.schema, one.seq, one.stored_ns, one.revision, one.outcome, one.batch) == (
        SCHEMA,
        7,
        8,
        "again",
        "batched",
        4,
    )
    assert (one.score, one.reward, one.advantage, one.batch_advantage, one.length) == (0.5, 0.1, 1.5, 1.25, 3)
    assert (other.score, other.reward, other.advantage, other.batch_advantage, other.length) == (None,) * 4 + (2,)
    assert [(r.rater, r.rating, r.status) for r in other.ratings] == [("math", None, "timeout"), ("format", 0.25, None)]
    assert (one.verdict, one.reward_std, one.n_valid, one.success, one.disagreement_max) == (
        "trainable",
        None,
        1,
        0.5,
        0.75,
    )
    assert (one.shaping, other.shaping, one.shaping_scale) == (0.25, None, 0.5)
    assert one.stamps[0].stage == "scorer"
    assert one.raters[0].version == "1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:1], "sequence: the rows of group"),
        (lambda rows: rows[::-1], "sequence: the rows of group"),
        (lambda rows: [replace(row, schema="lachesis.rollout/2") for row in rows], "this build reads"),
        (lambda rows: [replace(row, tokens=row.tokens + 1) for row in rows], "digest: group"),
        (lambda rows: [replace(row, tokens=row.tokens[:2]) for row in rows], "loss_mask: 4 values for the 2"),
        (lambda rows: [replace(row, task="[]") for row in rows], "task: Expected `object`"),
        (lambda rows: [rows[0], replace(rows[1], messages=None)], "messages: null for some"),
        (lambda rows: [rows[0], replace(rows[1], sample=4)], "sample: 0, 4"),
        (lambda rows: [rows[0], replace(rows[1], environment_rewards=None)], "environment_rewards: the"),
        (lambda rows: [replace(row, digest=None, policy_versions=["x"]) for row in rows], "policy version"),
    ],
)  # fmt: skip
def test_rows_that_are_no_group_are_refused(change, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        group_of(change(rows_of(group(), 7, 8, NOTHING)), run="r")


def test_altered_content_is_taken_once_its_digest_is_gone() -> None:
    rows = [replace(row, tokens=row.tokens + 1, digest=None) for row in rows_of(group(), 7, 8, NOTHING)]
    assert np.frombuffer(group_of(rows, run="r").sequences.tokens, "<i4").tolist() == list(range(1, 9))


@pytest.mark.parametrize("value", ["[1.5]", "[true]", '["1"]', "[[1]]", "[2147483648]", "7", "[null]"])
def test_tokens_of_another_type_are_refused(value: str) -> None:
    line = io.BytesIO()
    jsonl.JsonLinesWriter(line).write(rows_of(group(), 7, 8, NOTHING)[:1])
    text = line.getvalue().replace(b'"tokens":[0,1,2,3]', f'"tokens":{value}'.encode())
    assert value.encode() in text
    with pytest.raises(SchemaError):
        jsonl.read_row(text)


def test_free_form_data_that_json_has_not_is_refused() -> None:
    with pytest.raises(SchemaError, match="metadata: holds bytes"):
        rows_of(group(metadata={"a": b"b"}), 7, 8, NOTHING)


@given(data=st.data())
def test_whatever_a_line_holds_it_is_a_group_or_refused(data: st.DataObject) -> None:
    line = bytearray(LINE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(line) - 1))
        what = st.sampled_from([b"", b"0", b"-", b"9" * 20, b"null", b"[", b"{", b"1e999", b'"', b"\xff", b"\\ud800"])
        line[at : at + data.draw(st.integers(0, 3))] = data.draw(what)
    try:
        encode(group_of([jsonl.read_row(bytes(line))], run="r"))
    except SchemaError:
        return


@pytest.mark.parametrize("field", ["sequences", "sequence", "sample", "epoch", "counter", "started_ns"])
@pytest.mark.parametrize("value", [-1, 10**12, 1 << 70])
def test_numbers_out_of_range_are_refused(field: str, value: int) -> None:
    plain = msgspec.json.decode(LINE)
    changed = msgspec.json.encode({**plain, "digest": None, field: 10**30 if value > 1 << 64 else value})
    if field in {"epoch", "counter", "started_ns"} and value == 10**12:
        return
    with pytest.raises(SchemaError):
        group_of([jsonl.read_row(changed)], run="r")
