"""Checks that the server can hold what the streams may take.

Compares the account's limits and the server's own `max_file`. An account does not learn `max_file` through NATS, so it
is read from the server's monitoring, if that listens on its usual port.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import msgspec

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.streams import definitions
from lachesis.pipeline.common.bounded_http import get_within
from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.errors import InfrastructureError
from lachesis.services.output import human_bytes

__all__ = ["ServerStorage", "check_account", "check_sharing", "check_storage", "read_monitor", "try_room"]

MONITOR_PORT = 8222
_MONITOR_S = 1.0
_MAX_MONITOR_BYTES = 1 << 20
_LOWER = "or lower streams.*_bytes"


class ServerStorage(NamedTuple):
    """`max_file` of one server, and what of it is reserved by streams, bytes; its name in the cluster it is part of."""

    max_file: int
    reserved: int
    cluster: str | None


def check_account(
    account: Mapping[str, Any], run: str, config: StreamsConfig, present: Mapping[str, Mapping[str, Any]]
) -> Iterator[DoctorFinding]:
    """Yield findings on what this account may store, by the server's answer `account`.

    `present`: the server's descriptions of the run's streams that exist.
    """
    if "error" in account:
        text = account["error"].get("description", "it does not say why")
        mend = "enable jetstream in the account's configuration; in a cluster, see that it has a leader"
        yield fail("jetstream", f"not for this account: {text}", mend)
        return
    tier = (account.get("tiers") or {}).get(f"R{config.replicas}")
    if account.get("tiers") and tier is None:
        tiers = ", ".join(sorted(account["tiers"]))
        text = f"this account may have streams of {tiers}, not of {config.replicas} copies"
        yield fail(
            "jetstream", text, "set streams.replicas to what the account may have, or raise the account's limits"
        )
        return
    level = tier or account
    limits, copies = level["limits"], 1 if tier else config.replicas
    wanted = {one["name"]: one for one in definitions(run, config)}
    of_others = level.get("reserved_storage", 0) - copies * _reserved(present)
    budget = copies * config.total_bytes()
    problems = list(_exceeded(limits, wanted, budget=budget, of_others=max(0, of_others)))
    yield from problems
    if not problems:
        most = limits.get("max_storage", -1)
        room = "no limit" if most < 0 else f"limit {human_bytes(most)}"
        yield ok("jetstream", f"{room}, {human_bytes(level.get('reserved_storage', 0))} reserved by streams")


def _exceeded(
    limits: Mapping[str, int], wanted: Mapping[str, Mapping[str, Any]], *, budget: int, of_others: int
) -> Iterator[DoctorFinding]:
    storage, streams = limits.get("max_storage", -1), limits.get("max_streams", -1)
    largest = limits.get("storage_max_stream_bytes", -1)
    if 0 <= storage < budget + of_others:
        others = f", and other streams have {human_bytes(of_others)}" if of_others else ""
        text = f"this account may store {human_bytes(storage)}, the streams want {human_bytes(budget)}{others}"
        yield fail("jetstream", text, f"raise the account's max_storage, {_LOWER}")
    if 0 <= streams < len(wanted):
        text = f"this account may have {streams} streams, a run has {len(wanted)}"
        yield fail("jetstream", text, "raise the account's max_streams")
    too_large = [name for name, one in wanted.items() if 0 < largest < one["max_bytes"]]
    if too_large:
        text = (
            f"a stream of this account may have {human_bytes(largest)}, which is less than {', '.join(too_large)} want"
        )
        yield fail("jetstream", text, f"raise the account's max_stream_bytes, {_LOWER}")


def check_sharing(reserved: Mapping[str, int]) -> Iterator[DoctorFinding]:
    """Yield the reservations of each run on this account or server, if there are several runs."""
    if len(reserved) > 1:
        largest = sorted(reserved.items(), key=lambda one: -one[1])
        text = ", ".join(f"{owner} {human_bytes(size)}" for owner, size in largest)
        yield ok("shared", f"the account's limit is for all of its runs together; reserved: {text}")


def check_storage(
    storage: ServerStorage | None, config: StreamsConfig, present: Mapping[str, Mapping[str, Any]]
) -> Iterator[DoctorFinding]:
    """Yield findings on a server's `max_file`, where it is known."""
    if storage is None or (storage.cluster and config.replicas == 1):  # then the streams are spread over servers
        return
    of_others, budget = max(0, storage.reserved - _reserved(present)), config.total_bytes()
    text = f"the server's max_file is {human_bytes(storage.max_file)}, the streams want {human_bytes(budget)}"
    text += f", and other streams have {human_bytes(of_others)}" if of_others else ""
    if storage.max_file < budget + of_others:
        yield fail("max_file", text, f"raise max_file in the jetstream block of the server's configuration, {_LOWER}")
    else:
        yield ok("max_file", text)


async def try_room(
    bus: NatsBus, config: StreamsConfig, run: str, present: Mapping[str, Mapping[str, Any]]
) -> DoctorFinding | None:
    """Return whether a server that says nothing of its limits takes the streams that are still to be made.

    It is tried with an empty stream as large as all of them, or, where a cluster spreads them, as the largest.
    """
    wanted = [one["max_bytes"] for one in definitions(run, config) if one["name"] not in present]
    if not wanted:
        return None
    size = max(wanted) if bus.client.is_clustered else sum(wanted)
    try:
        refused = await bus.try_reservation(size, config.replicas)
    except InfrastructureError as error:
        mend = (
            "compare max_file in the server's jetstream block with streams.*_bytes, or open its monitoring (http: 8222)"
        )
        return warn("max_file", f"not known whether the server has room for {human_bytes(size)}: {error}", mend)
    if refused is not None:
        text = f"the server takes no streams of {human_bytes(size)}, which this run wants ({refused})"
        return fail("max_file", text, f"raise max_file in the jetstream block of the server's configuration, {_LOWER}")
    return ok("max_file", f"the server takes streams of {human_bytes(size)} (tried with an empty one)")


def _reserved(present: Mapping[str, Mapping[str, Any]]) -> int:
    """Return what one copy of the streams that exist reserves, bytes."""
    return sum(max(0, info["config"]["max_bytes"]) for info in present.values())


async def read_monitor(host: str, server_id: str, *, port: int = MONITOR_PORT) -> ServerStorage | None:
    """Return what the monitoring of the server called `server_id` says.

    None if it is not there, or another's.
    """
    try:
        async with httpx.AsyncClient(timeout=_MONITOR_S, trust_env=False) as client:
            url = f"http://{url_host(host)}:{port}/jsz"
            answer = await get_within(client, url, within_s=_MONITOR_S, most_bytes=_MAX_MONITOR_BYTES)
        found = msgspec.json.decode(answer, type=_Monitor)
    except (InfrastructureError, httpx.InvalidURL, msgspec.MsgspecError, ValueError):
        return None
    if found.server_id != server_id or found.config.max_storage <= 0:
        return None
    cluster = found.meta_cluster.name if found.meta_cluster else None
    return ServerStorage(found.config.max_storage, found.reserved_storage, cluster)


class _StorageConfig(msgspec.Struct, frozen=True):
    max_storage: int = 0


class _MetaCluster(msgspec.Struct):
    name: str = ""


class _Monitor(msgspec.Struct):
    server_id: str
    config: _StorageConfig = _StorageConfig()
    reserved_storage: int = 0
    meta_cluster: _MetaCluster | None = None
