"""An upgrade seen from the wire: newer versions are refused by name, fields of newer builds passed over and kept."""

from typing import Any

import msgspec
import pytest

from lachesis.pipeline.ledger.chain import Chain, JoinState, LedgerPosition
from lachesis.schemas import codec
from lachesis.schemas.annotations import ScoreEvent, Stamp
from lachesis.schemas.catalog import CHANNELS, KEY_EVENTS
from lachesis.schemas.codec import SCHEMA_VERSION, Event, decode, encode
from lachesis.schemas.errors import SchemaError, VersionError
from lachesis.schemas.ledger import GENESIS, Batch, GroupRef, LedgerEntry
from lachesis.schemas.promotion import PromotionOutcome
from lachesis.schemas.rollout import RolloutGroup

EVENTS = sorted(
    {event for channel in CHANNELS for event in (*channel.events, channel.reply) if event}
    | {event for events in KEY_EVENTS.values() for event in events},
    key=lambda event: event.__name__,
)


def entry(index: int = 0, previous: str = GENESIS) -> LedgerEntry:
    ref = GroupRef(group="0" * 32, seq=1, env="words", sequences=2, tokens=9, policy_step=0, advantages=[1.0, None])
    return LedgerEntry(
        run="r", trainer="main", index=index, previous=previous, watermark=1, resolved=b"", events_cursor=1, term="a",
        batch=Batch(number=index, groups=[ref], sequences=2, tokens=9), next_batch=index + 1, written_ns=5,
        stamps={"0" * 32: [Stamp("batcher", 1, 2, 3)]},
    )  # fmt: skip


def of_a_newer_build(event: Event, **fields: Any) -> bytes:
    """The event as a build writes it that knows more fields, at the top and further down."""
    raw = msgspec.msgpack.decode(encode(event))
    raw["batch"]["groups"][0]["new"] = {"deep": [1]}
    return msgspec.msgpack.encode({"first": b"1", **raw, **fields, "last": None})


@pytest.mark.parametrize("kind", EVENTS)
def test_a_newer_version_is_refused_by_its_number_whatever_else_changed(kind: type[Event]) -> None:
    for fields in ({}, {"run": 1}, {"run": {"what": "was text"}, "id": [1]}):
        with pytest.raises(VersionError, match=f"version {SCHEMA_VERSION + 1} is newer than .* upgrade this service"):
            decode(kind, msgspec.msgpack.encode({**fields, "v": SCHEMA_VERSION + 1}))


@pytest.mark.parametrize("version", [0, 1, -5, "2", 2.5, None, [2], 2**70])
def test_what_only_looks_like_a_version_is_bad_data(version: object) -> None:
    try:
        data = msgspec.msgpack.encode({"v": version})
    except OverflowError:
        data = b"\x81\xa1v\xcf" + b"\xff" * 8
    with pytest.raises(SchemaError) as refusal:
        decode(ScoreEvent, data)
    assert isinstance(refusal.value, VersionError) == (version == 2**70)


def test_a_cut_message_of_a_newer_version_is_bad_data() -> None:
    data = msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1, "run": "r"})
    with pytest.raises(SchemaError) as refusal:
        decode(ScoreEvent, data[:-1])
    assert not isinstance(refusal.value, VersionError)


def test_an_entry_read_has_the_digest_of_what_is_stored() -> None:
    plain = entry()
    assert decode(LedgerEntry, encode(plain)).digest() == plain.digest()
    newer = decode(LedgerEntry, of_a_newer_build(plain))
    assert newer == plain  # for readers that do not know the fields
    assert newer.digest() != plain.digest()
    assert newer.digest() == decode(LedgerEntry, of_a_newer_build(plain, term="b", written_ns=9, stamps={})).digest()
    assert newer.digest() != decode(LedgerEntry, of_a_newer_build(plain, watermark=2)).digest()
    assert newer.replace(watermark=2).replace(watermark=1).digest() == plain.digest()  # not read, but made here


def test_the_digest_of_before_is_the_digest_of_today() -> None:
    """Chains outlive builds."""
    assert entry().digest() == DIGEST
    assert decode(LedgerEntry, encode(entry())).digest() == DIGEST


DIGEST = "a9814849185c6ddf4258e5df7d8414a89b27587bf08f867c39c17f3e2e3013d7"


def test_reader_and_writer_of_an_older_build_follow_a_newer_one() -> None:
    stored = decode(LedgerEntry, of_a_newer_build(entry()))
    position = LedgerPosition().after(stored)
    chain = Chain("r", "main", "older", stored)
    assert chain.position == position
    state = JoinState(1, b"", 1, {})
    following = chain.extend(state, batch=None, outcomes=[], stamps={}, written_ns=1)
    assert following.previous == stored.digest()
    assert position.after(decode(LedgerEntry, encode(following))).entries == 2


def test_an_unknown_field_whose_name_is_no_text_is_bad_data() -> None:
    raw = encode(entry())
    assert raw[0] == 0xDE  # a map of 16 bit length, so a field more is one more in its third byte
    with pytest.raises(SchemaError):
        decode(LedgerEntry, raw[:2] + bytes([raw[2] + 1]) + raw[3:] + b"\xa1\xff\xc0")


def test_what_a_promoted_revision_judges_is_refused_by_builds_that_do_not_know_of_promotions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score = ScoreEvent(run="r", env="e", revision="live", ensemble="x", raters={}, groups=[])
    told = PromotionOutcome(revision="new", digest="d", first=5, by="me", asked_ns=1, std_floor=1e-3)
    own = [encode(score), encode(entry())]
    promoted = [encode(score.replace(promoted=5)), encode(entry().replace(promoted=told))]
    kinds = ScoreEvent, LedgerEntry
    for kind, data in zip(kinds, promoted, strict=True):
        assert decode(kind, data).v == 2
        assert encode(decode(kind, data)) == data
    monkeypatch.setattr(codec, "SCHEMA_VERSION", 1)
    for kind, data in zip(kinds, own, strict=True):
        assert decode(kind, data).v == 1
    for kind, data in zip(kinds, promoted, strict=True):
        with pytest.raises(VersionError, match="version 2 is newer than 1"):
            decode(kind, data)


@pytest.mark.parametrize("excluded", [[2], [-1], [1, 0], [0, 0]])
async def test_samples_that_are_excluded_must_be_there(lab: Any, excluded: list[int]) -> None:
    group = lab.group(1)
    with pytest.raises(SchemaError, match="excluded_samples"):
        group.replace(sequences=msgspec.structs.replace(group.sequences, excluded_samples=excluded)).check()


async def test_a_group_with_excluded_samples_is_refused_by_builds_that_would_train_on_them(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lab.group(1)
    data = encode(plain.replace(sequences=msgspec.structs.replace(plain.sequences, excluded_samples=[1])))
    assert decode(RolloutGroup, data).sequences.excluded_samples == [1]
    monkeypatch.setattr(codec, "SCHEMA_VERSION", 2)
    assert decode(RolloutGroup, encode(plain)).v == 1
    with pytest.raises(VersionError, match="version 3 is newer than 2"):
        decode(RolloutGroup, data)
