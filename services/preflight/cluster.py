"""Checks a cluster: every stream has a leader and the configured number of current replicas.

Reads the server's descriptions of the streams. A server that is not part of a cluster describes none.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import nats.errors

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.replies import NO_LEADER
from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.schemas import subjects

__all__ = ["check_copies", "cluster_problems"]

_ANSWER_S = 1.5


def check_copies(streams: Mapping[str, dict[str, Any]]) -> Iterator[DoctorFinding]:
    """Yield findings on `streams`: the server's answers by the stream's name."""
    groups = {name: info["cluster"] for name, info in streams.items() if info.get("cluster")}
    leaderless = [name for name, group in groups.items() if not group.get("leader")]
    leaderless += [name for name, info in streams.items() if info.get("error", {}).get("err_code") == NO_LEADER]
    away: defaultdict[str, list[str]] = defaultdict(list)
    for name, group in groups.items():
        for copy in group.get("replicas", ()):
            if copy.get("offline") or not copy.get("current"):
                away[copy["name"]].append(name)
    moving = [name for name, group in groups.items() if "desired" in group]
    single = [name for name in groups if streams[name]["config"]["num_replicas"] == 1]
    if leaderless:
        yield fail(
            "cluster",
            f"without a leader, so nothing can be stored: {_some(leaderless, streams)}",
            "start the missing servers; acknowledged messages are kept, and publishers wait",
        )
    for server, names in sorted(away.items()):
        yield warn(
            "cluster",
            f"server {server} is away or behind with its copy of {_some(names, streams)}",
            "start it, or wait until it has caught up; losing one more may stop these streams",
        )
    if moving and not away:
        yield warn("cluster", f"copies are still being made of {_some(moving, streams)}", "wait, and look again")
    if single:
        yield warn(
            "cluster",
            f"one copy each of {_some(single, streams)}: the run stops with the server that holds it",
            "set streams.replicas=3 and run lachesis init",
        )
    if groups and not (leaderless or away or moving or single):
        servers = {group["leader"] for group in groups.values()}
        servers |= {copy["name"] for group in groups.values() for copy in group.get("replicas", ())}
        yield ok("cluster", f"every stream has a leader and all its copies, on {', '.join(sorted(servers))}")


def _some(names: list[str], streams: Mapping[str, object]) -> str:
    return "every stream" if len(names) == len(streams) else ", ".join(names)


async def cluster_problems(bus: NatsBus) -> list[str]:
    """Return what is wrong with the servers of a cluster, as `doctor` sees it."""
    infos: dict[str, dict[str, Any]] = {}
    with suppress(nats.errors.Error):
        for kind in (*subjects.STREAMS, subjects.BUCKET):
            name = subjects.stream_name(bus.run, kind)
            answer = await bus.client.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout=_ANSWER_S)
            infos[name] = msgspec.json.decode(answer.data)
    return [f"{finding.text}; {finding.mend}" for finding in check_copies(infos) if finding.mend]
