"""Sequences that begin alike travel with that once: trees come back as they were, and hostile repeats are refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.schemas import codec
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.errors import SchemaError, VersionError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.packing import pack_mask, split_tokens
from lachesis.schemas.repeats import RepeatedRows, put_back, rows_in_all
from lachesis.schemas.rollout import PackedGroup, RolloutGroup, Sequences, VersionSpan


def group_of(rows, samples=None, *, own_columns=False, seed=0):
    """A group of sequences, each given as parts of (tokens, trained here): a part under the mask has logprobs."""
    draw = np.random.default_rng(seed)
    tokens = [np.concatenate([part for part, _ in parts]) for parts in rows]
    mask = np.concatenate([np.repeat([one for _, one in parts], [len(part) for part, _ in parts]) for parts in rows])
    total, lengths = len(mask), [len(row) for row in tokens]
    column = draw.integers(0, 99, (total, 2)) if own_columns else np.concatenate(tokens)[:, None] % [7, 5]
    sequences = Sequences(
        offsets=as_bytes(np.cumsum([0, *lengths]), "int32"),
        tokens=as_bytes(np.concatenate(tokens), "int32"),
        loss_mask=pack_mask(mask),
        logprobs=as_bytes(np.where(mask, -draw.exponential(1, total), 0), "float32"),
        finish_reasons=["stop"] * len(rows),
        version_spans=[VersionSpan(i, 0, 0) for i in range(len(rows))],
        sample_index=samples,
        token_advantages=as_bytes(np.where(mask, 0.5, 0), "float32") if own_columns else None,
        columns={"experts": Column(dtype="int16", data=as_bytes(column, "int16"), width=2)},
    )
    return RolloutGroup(
        id=new_group_id(), run="r", env="e", item="i", producer="p", epoch=1, counter=1,
        policy_versions=["0-0000000a-0000000000000000"], sequences=sequences, tokenizer_hash="t", started_ns=1,
    )  # fmt: skip


def session(turns, fork, branches, seed=0, turn=(100, 150)):
    """The rows of one sample whose conversation forks after `fork` of its `turns` (prompt, answer), the last trains."""
    draw = np.random.default_rng(seed)

    def some(n):
        return [(draw.integers(0, 150_000, size), bool(own)) for _ in range(n) for own, size in enumerate(turn)]

    trunk, last = some(fork), branches - 1
    rows = [[*trunk, *some(turns - fork)] for _ in range(branches)]
    return [
        [(part, own and (i == last or at >= len(trunk))) for at, (part, own) in enumerate(row)]
        for i, row in enumerate(rows)
    ]


def stored_rows(group):
    raw = msgspec.msgpack.decode(encode(group))
    return len(raw["sequences"]["tokens"]) // 2, raw


@pytest.mark.parametrize("own_columns", [False, True])
def test_a_conversation_with_a_fork_travels_with_its_distinct_tokens(own_columns):
    group = group_of(session(40, 20, 4), [0, 0, 0, 0], own_columns=own_columns)
    distinct = (20 + 4 * 20) * 250
    rows, raw = stored_rows(group)
    assert rows == distinct
    assert [one[2] for one in raw["sequences"]["repeats"]] == [20 * 250] * 3
    assert len(raw["sequences"]["logprobs"]) == 4 * distinct
    column = raw["sequences"]["columns"]["experts"]["data"]
    assert len(column) == 4 * (group.sequences.n_tokens if own_columns else distinct)
    for kind in (RolloutGroup, PackedGroup):
        back = decode(kind, encode(group))
        assert (back.sequences, back.v) == (group.sequences, 1)
        assert encode(back) == encode(group)
    whole = len(msgspec.msgpack.encode(group.replace(sequences=whole_on_the_wire(group))))
    per_token = len(encode(group)) / distinct / (whole / group.sequences.n_tokens)
    assert own_columns or per_token == pytest.approx(1, abs=0.02)


def whole_on_the_wire(group):
    """The columns as they travel without repeats: a group's sequences one by one have none."""
    low, bits = split_tokens(group.sequences.tokens)
    return msgspec.structs.replace(group.sequences, tokens=low, token_bits=bits)


def test_samples_of_one_prompt_travel_with_it_once_and_short_or_trained_starts_whole():
    prompt, answer = np.arange(500), np.arange(100)
    rows = [[(prompt, False), (answer + 1000 * i, True)] for i in range(8)]
    assert stored_rows(group_of(rows))[0] == 500 + 8 * 100
    alike = [[(prompt, False), (answer, True)] for _ in range(2)]  # both have logprobs of their own
    assert stored_rows(group_of(alike))[0] == 500 + 2 * 100
    trained = [[(prompt[:1], False), (prompt, True)] for _ in range(2)]
    few = [[(prompt[:20], False), (answer + 1000 * i, True)] for i in range(8)]
    for group in (group_of(trained), group_of(few)):
        rows, raw = stored_rows(group)
        assert (rows, raw["v"]) == (group.sequences.n_tokens, 1)
        assert "repeats" not in raw["sequences"]


def test_what_an_older_build_would_misread_it_refuses(monkeypatch):
    data = encode(group_of(session(4, 2, 2), [0, 0]))
    monkeypatch.setattr(codec, "SCHEMA_VERSION", 3)
    with pytest.raises(VersionError, match="version 4 is newer than 3"):
        decode(RolloutGroup, data)


@st.composite
def trees(draw):
    """Rows as paths of random trees of nodes, whose tokens are few kinds so that starts are alike by chance too."""
    nodes = draw(st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=6))
    kinds = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 99))
    tokens = [np.random.default_rng([seed, i]).integers(0, kinds, size) for i, (size, _) in enumerate(nodes)]
    paths = draw(st.lists(st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=4), min_size=1, max_size=7))
    rows = [[(np.array([0]), False), *((tokens[node], draw(st.booleans())) for node in path)] for path in paths]
    return group_of(rows, own_columns=draw(st.booleans()), seed=seed)


@settings(deadline=None, max_examples=200)
@given(trees())
def test_any_tree_comes_back_with_its_masks_logprobs_columns_and_teacher(group):
    data = encode(group)
    back = decode(RolloutGroup, data)
    assert back == group
    for one, other in zip(back.sequences, group.sequences, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs

    total, starts = group.sequences.n_tokens, group.sequences.starts_alike(trained=True)
    values = as_bytes(-np.frombuffer(group.sequences.tokens, "<i4").astype(float), "float32")
    arrays = TeacherLogprobs(
        run="r", env="e", group=group.id, teacher="t", tokenizer_hash="t", temperature=1.0, logprobs=values, k=2,
        topk_ids=as_bytes(np.tile([3, 4], total), "int32"), topk_logprobs=as_bytes(np.full(2 * total, -1), "float16"),
        topk_mass=as_bytes(np.random.default_rng(0).random(total) if total % 2 else np.ones(total), "float16"),
        topk_tail=as_bytes(np.full(total, -9), "float16"),
    )  # fmt: skip
    sent = arrays.without_repeats(starts)
    assert sent.repeats == starts or total % 2, "what is equal everywhere is left out"
    assert decode(TeacherLogprobs, encode(sent)) == arrays


GROUP = group_of(session(4, 2, 2), [0, 0])


@pytest.mark.parametrize(
    ("repeats", "says"),
    [
        ([[0, 1000, 0]], "cannot be those"),
        ([[0, 1000, -5]], "cannot be those"),
        ([[-1, 1000, 5]], "cannot be those"),
        ([[0, 4, 5]], "cannot be those"),
        ([[1000, 0, 5]], "cannot be those"),
        ([[0, 1600, 500]], "cannot be those"),
        ([[0, 1000, 250], [249, 1000, 250]], "cannot be those"),
        ([[0, 1 << 40, 1 << 40]], "cannot be those"),
        ([[1500 * k, 1500 * (k + 1), 1500] for k in range(32)], "more than 32 times"),
        ([[0, 1000, 5]], "offsets|logprobs|tokens|loss_mask"),
        ([[0, 1000]], "Expected `array` of"),
        ([[0, 1000, "5"]], "Expected `int`"),
    ],
)
def test_repeats_that_cannot_be_right_are_refused(repeats, says):
    raw = msgspec.msgpack.decode(encode(GROUP))
    raw["sequences"]["repeats"] = repeats
    with pytest.raises(SchemaError, match=says):
        decode(RolloutGroup, msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "logprobs"])
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_columns_that_do_not_fit_their_repeats_are_refused(name, cut):
    raw = msgspec.msgpack.decode(encode(GROUP))
    raw["sequences"][name] = raw["sequences"][name][:cut]
    with pytest.raises(SchemaError):
        decode(RolloutGroup, msgspec.msgpack.encode(raw))


def test_a_column_of_another_length_is_left_to_the_check_of_lengths():
    repeats = [RepeatedRows(0, 2, 2)]
    assert rows_in_all(3, repeats) == 5
    assert put_back(b"abc", repeats, 3, 1) == b"ababc"
    for data, width in ((b"abcd", 1), (b"abc", 0), (b"abc", -1), (b"", 1)):
        assert put_back(data, repeats, 3, width) == data
