"""What a real server lets each key do is what the committed table says, and the table keeps what is promised."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from integration.security.probes import IDENTITIES, STORES, allowed, as_table, publications, subscriptions
from integration.security.secured import Secured

from lachesis.pipeline.access import OBSERVER, OPERATOR, Scope
from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.bus.permissions import permissions
from lachesis.pipeline.bus.routing import matches
from lachesis.pipeline.extension import access_of
from lachesis.schemas.subjects import BUCKET

SCOPE = Scope(run="one", revision="live", trainer="main", environments=("words", "far"), foreign=("far",))
ACCESS = access_of(SCOPE)
PROMISES = Path(__file__).with_name("README.md").read_text()
TABLE = Path(__file__).parents[3] / "deploy" / "nats" / "permissions.md"
WORKERS = [name for name in IDENTITIES if name not in (OPERATOR, OBSERVER)]

May = Mapping[str, tuple[set[str], set[str]]]


@pytest.fixture(scope="session")
async def may(make_secured: Callable[[], AbstractAsyncContextManager[Secured]]) -> May:
    """By identity what it may publish and subscribe to, of all tried; the operator deletes the streams."""
    async with make_secured() as server:
        return {identity: await allowed(server, identity) for identity in IDENTITIES}


async def test_the_server_allows_what_the_table_says(may: May) -> None:
    table = as_table(may)
    if os.environ.get("WRITE_PERMISSIONS"):
        TABLE.write_text(table)
    assert table == TABLE.read_text(), "run it with WRITE_PERMISSIONS=1, and read what changes"


@pytest.mark.parametrize("identity", IDENTITIES)
def test_all_that_a_key_is_granted_is_tried(identity: str) -> None:
    granted = permissions("one", identity, ACCESS[identity])
    further = tuple(f".{name}" for name in reader_names(identity)[1:])  # the first stands for all names of readers
    wanted = [(pattern, publications) for pattern in granted.publish if not pattern.endswith(further)]
    wanted += [(pattern, subscriptions) for pattern in granted.subscribe]
    tried = {which: list(which()) for which in (publications, subscriptions)}
    assert not [pattern for pattern, which in wanted if not any(matches(pattern, one) for one in tried[which])]


def test_the_page_on_security_counts_what_is_tried() -> None:
    tried = [len(set(which())) for which in (publications, subscriptions)]
    assert f"each of {len(IDENTITIES)} identities tries {tried[0]:,} subjects to publish on and {tried[1]}" in PROMISES


@pytest.mark.parametrize("identity", [name for name in WORKERS if not name.startswith("environment-")])
def test_the_page_on_security_names_what_each_writes_and_reads(identity: str) -> None:
    row = next(line for line in PROMISES.splitlines() if line.startswith(f"| {identity} |"))
    _, _, written, read, _ = row.split("|")
    kinds = {subject.split(".")[1] for subject in ACCESS[identity].writes}
    said = {"dead": "dead letters", "state": "state", "blob": "chunks"}
    if identity in ("governor", "teacher"):  # its chunks end or make up large messages of others' kinds
        kinds -= {"blob"}
        said["state"] = "term"
    assert not [kind for kind in kinds if said.get(kind, f"`rl.{kind}.RUN") not in written], row
    streams = {*ACCESS[identity].reads, *ACCESS[identity].gets} - {BUCKET}
    assert not [stream for stream in streams if stream not in read and "everything" not in read], row


async def test_nobody_but_the_operator_deletes_a_stream_and_nobody_a_message_or_takes_it_elsewhere(may: May) -> None:
    calls = ("STREAM.DELETE", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE", "STREAM.PEER.REMOVE")
    for identity, (publish, _) in may.items():
        refused = calls if identity != OPERATOR else calls[1:]  # with the run, the operator deletes its streams
        assert not publish & {f"$JS.API.{call}.{store}" for call in refused for store in STORES}


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_consumers_are_made_and_pulled_under_own_names_alone(may: May, identity: str) -> None:
    durables = {f"{identity}=one=live"} if identity in ("scorer", "teacher") else set()
    verbs = ("$JS.API.CONSUMER.CREATE.", "$JS.API.CONSUMER.DURABLE.CREATE.", "$JS.API.CONSUMER.MSG.NEXT.", "$JS.ACK.")
    used = [subject for subject in may[identity][0] if subject.startswith(verbs)]
    names = {token for subject in used for token in subject.split(".") if "=" in token}
    assert names <= {f"{identity}=0", *durables}
    assert not [subject for subject in used if "=" not in subject], "a consumer that the server names"


@pytest.mark.parametrize("identity", ["environment-words", "environment-far", "inference", "evaluator"])
async def test_who_is_least_trusted_makes_no_consumers(may: May, identity: str) -> None:
    assert not [subject for subject in may[identity][0] if "CONSUMER" in subject]


@pytest.mark.parametrize(("identity", "other"), [("environment-words", "far"), ("environment-far", "words")])
async def test_an_environment_has_to_do_with_itself_alone(may: May, identity: str, other: str) -> None:
    publish, subscribe = may[identity]
    assert not [subject for subject in publish | subscribe if other in subject]
    assert "rl.rollout.one.unknown" not in publish
    assert "$JS.API.STREAM.INFO.lachesis_one_ROLLOUTS" not in publish, "it would tell the names of others' chunks"


async def test_what_is_stored_live_has_one_service_that_writes_it(may: May) -> None:
    for subject in {subject for identity in WORKERS for subject in may[identity][0]}:
        if subject.startswith(("rl.", "$KV.")) and not subject.startswith(("rl.dead.", "rl.blob.", "rl.incident.")):
            writers = {identity for identity in WORKERS if subject in may[identity][0]}
            shared = {"gateway"} if ".far" in subject else set()
            assert len(writers - shared) <= 1, (subject, writers)


async def test_the_observer_stores_nothing(may: May) -> None:
    publish = may[OBSERVER][0]
    assert not [subject for subject in publish if subject.startswith(("rl.", "$KV.")) and ".health." not in subject]
    assert not [subject for subject in publish if "PURGE" in subject or "UPDATE" in subject or "DELETE" in subject]


async def test_nobody_hears_another_or_everything(may: May) -> None:
    for identity, (_, subscribe) in may.items():
        assert not subscribe & {">", "*.>", "rl.>", "_INBOX.>", "_R_.>", "$KV.>", "$JS.>", "$JS.API.>", "$SYS.>"}
        assert {subject for subject in subscribe if subject.startswith("_INBOX")} == {f"_INBOX_{identity}.>"}
