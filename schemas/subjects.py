"""Every subject, stream, durable name and bucket, in one place. Nothing else in the tree spells a subject out.

Streams (all: limits retention, file storage, discard new, bounded in bytes, no maximum age):

    ROLLOUTS  rl.rollout.<run>.<env>                               payloads, immutable
              rl.promotion.<run>.<revision>                        the revisions that the run was switched to
    EVENTS    rl.<kind>.<run>.<revision>.<env>                     annotations of live revisions
    REPLAY    rl.replay.rescore.<run>.<revision>.<env>             scores and rewards of re-scored history
              rl.replay.revision.<run>.<revision>.all              what that revision is
    TEACHER   rl.logprobs.<run>.<revision>.<env>                   large arrays
    LEDGER    rl.ledger.<run>.<trainer>, rl.state.<run>.<stage>.<revision>.<partition>

ROLLOUTS and TEACHER take the chunks of large messages as well: rl.blob.<rollout or logprobs>.<run>.<name>.
"""

import re
from typing import Final, Literal, get_args

from lachesis.schemas.errors import ConfigError

__all__ = [
    "BLOB_KINDS",
    "BUCKETS",
    "BUCKET_TEXTS",
    "ENVIRONMENT",
    "EVENTS",
    "LEDGER",
    "LIVE",
    "REPLAY",
    "RESERVATIONS",
    "ROLLOUTS",
    "STREAMS",
    "STREAM_TEXTS",
    "TEACHER",
    "Kind",
    "ReplayKind",
    "admission",
    "blob",
    "bucket_change",
    "check_name",
    "durable",
    "event",
    "health",
    "heartbeat",
    "incident",
    "lease",
    "ledger",
    "logprobs",
    "micro",
    "past",
    "promotion",
    "replay",
    "revision",
    "rollout",
    "service_name",
    "shadow",
    "state",
    "supervisor_lease",
]

ROLLOUTS: Final = "ROLLOUTS"
EVENTS: Final = "EVENTS"
REPLAY: Final = "REPLAY"
TEACHER: Final = "TEACHER"
LEDGER: Final = "LEDGER"

LIVE: Final = "live"
"""The revision of a run's first, live annotations; re-scored ones have names of their own."""

Kind = Literal["score", "reward", "curriculum", "teacher", "dead", "eval", "alert"]

ReplayKind = Literal["rescore", "revision"]

BLOB_KINDS: Final = {"rollout": ROLLOUTS, "logprobs": TEACHER}
"""What may be stored in chunks, by kind, and the stream that takes them."""

STREAMS: Final[dict[str, list[str]]] = {
    ROLLOUTS: ["rl.rollout.*.*", "rl.blob.rollout.*.*", "rl.promotion.*.*"],
    EVENTS: [f"rl.{kind}.*.*.*" for kind in get_args(Kind)],
    REPLAY: [f"rl.replay.{kind}.*.*.*" for kind in get_args(ReplayKind)],
    TEACHER: ["rl.logprobs.*.*.*", "rl.blob.logprobs.*.*"],
    LEDGER: ["rl.ledger.*.*", "rl.state.*.*.*.*"],
}

BUCKETS: Final = {
    "runs": "lachesis_runs",
    "policy": "lachesis_policy",
    "curriculum": "lachesis_curriculum",
    "attempts": "lachesis_attempts",
    "inference": "lachesis_inference",
    "retention": "lachesis_retention",
    "resume": "lachesis_resume",
    "gateway": "lachesis_gateway",
}
"""Key-value buckets by what they hold."""

STREAM_TEXTS: Final = {
    ROLLOUTS: "Lachesis: rollout groups as environments published them, never changed; queue and history",
    EVENTS: "Lachesis: annotations of rollouts: scores, rewards, teacher pointers, dead letters, alerts",
    REPLAY: "Lachesis: scores and rewards of history under other revisions",
    TEACHER: "Lachesis: a teacher's logprobs of rollouts",
    LEDGER: "Lachesis: batches, outcomes of rollouts, reports of trainers, state of stages",
}
"""What each stream holds, as the server's own tools show it."""

BUCKET_TEXTS: Final = {
    "runs": "Lachesis: the runs of this server",
    "policy": "Lachesis: each run's newest policy and where its weights are",
    "curriculum": "Lachesis: the newest weights of each environment's tasks",
    "attempts": "Lachesis: rollouts whose handling has ended a process, and how often",
    "inference": "Lachesis: where each role's inference server listens",
    "retention": "Lachesis: what each run still needs of the streams",
    "resume": "Lachesis: requests that an environment go on after a health check stopped it",
    "gateway": "Lachesis: environments of other projects that registered at the gateway",
}
"""What each bucket holds, as the server's own tools show it."""

RESERVATIONS: Final = "reservations="
"""Key of the bucket "retention" under which all runs of a server agree on its streams; no run can have that name."""

ENVIRONMENT: Final = "environment"
"""The service that generates rollouts; `environment-<name>` is the one of an environment."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(what: str, name: str) -> str:
    """Return `name` if it can be one token of a subject. Raises `ConfigError` naming `what`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name[:80]!r}: use 1 to 64 letters, digits, '_' or '-'")
    return name


def rollout(run: str, env: str = "*") -> str:
    return f"rl.rollout.{run}.{env}"


def blob(kind: str, run: str, name: str = "*") -> str:
    """Chunks of a large message, stored in the stream of `rl.<kind>.<run>.>`; kind is one of `BLOB_KINDS`."""
    return f"rl.blob.{kind}.{run}.{name}"


def promotion(run: str, revision: str) -> str:
    """Where the promotions of the run's `revision` are listed: among the rollouts, whose order says who judges."""
    return f"rl.promotion.{run}.{revision}"


def event(kind: Kind, run: str, revision: str, env: str = "*") -> str:
    return f"rl.{kind}.{run}.{revision}.{env}"


def replay(kind: ReplayKind, run: str, revision: str, env: str = "*") -> str:
    return f"rl.replay.{kind}.{run}.{revision}.{env}"


def revision(run: str, name: str = "*") -> str:
    """Where the definition of a revision of the run's history is stored."""
    return replay("revision", run, name, "all")


def logprobs(run: str, revision: str, env: str = "*") -> str:
    return f"rl.logprobs.{run}.{revision}.{env}"


def ledger(run: str, trainer: str) -> str:
    return f"rl.ledger.{run}.{trainer}"


def state(run: str, stage: str, revision: str, partition: str) -> str:
    return f"rl.state.{run}.{stage}.{revision}.{partition}"


def past(run: str, trainer: str) -> str:
    """Where it is stored what a trainer on past rollouts trains on."""
    return state(run, "past", LIVE, trainer)


def lease(run: str, env: str = "*") -> str:
    """Request/reply subject of the governor; each environment has its own, so that none takes another's leases."""
    return f"rl.lease.{run}.{env}"


def admission(run: str) -> str:
    """Where the governor publishes whether it can admit anything more."""
    return f"rl.admission.{run}"


def heartbeat(run: str, service: str = "*", instance: str = "*") -> str:
    return f"rl.heartbeat.{run}.{service}.{instance}"


def shadow(run: str, revision: str) -> str:
    """Request/reply subject on which a revision that follows the run is asked to end."""
    return f"rl.shadow.{run}.{revision}"


def health(run: str, service: str) -> str:
    """Request/reply subject on which a service tells how it is."""
    return f"rl.health.{run}.{service}"


def supervisor_lease(run: str) -> str:
    """Key of the bucket "runs" under which it is stored who runs a run's services."""
    return f"{run}.supervisor"


def bucket_change(bucket: str, key: str) -> str:
    """Where the server says, of each value that it has stored under a key, that it has."""
    return f"rl.kv.{bucket}.{key}"


def incident(run: str) -> str:
    """Where a stage says that it has handled a rollout again, or in vain."""
    return f"rl.incident.{run}"


def service_name(service: str) -> str:
    """Return the name of a service in the NATS micro protocol and in telemetry.

    Environments share one, as runs do: names that grow with what is configured would fill every menu and metric.
    """
    return f"lachesis-{ENVIRONMENT if service.startswith(f'{ENVIRONMENT}-') else service}"


def micro(run: str, service: str) -> tuple[str, ...]:
    """Return the subjects on which a service is asked by the NATS micro protocol (`nats micro ls|info|stats|ping`)."""
    # each verb by its name: nats-server lets whoever may subscribe to `$SRV.*` subscribe to `$SRV.>` as well
    asked = [f"$SRV.{verb}{name}" for verb in ("PING", "INFO", "STATS") for name in _ends(service_name(service))]
    return (*asked, health(run, service))


def _ends(name: str) -> tuple[str, ...]:
    return ("", f".{name}", f".{name}.*")


def durable(stage: str, run: str, revision: str) -> str:
    """Name of the durable consumer that all replicas of a stateless stage share: `=` occurs in none of its parts."""
    return f"{stage}={run}={revision}"
