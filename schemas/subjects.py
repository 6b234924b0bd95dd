"""Every subject, stream, durable name and bucket, in one place. No other module spells a subject out.

Each run has streams of its own: `lachesis_<run>_ROLLOUTS` and so on. Code names a stream by its kind, since a bus is
opened for one run; `stream_name` gives the name that the server knows. All have limits retention, file storage, discard
new, a bound in bytes and no maximum age:

    ROLLOUTS  rl.rollout.<run>.<env>                               payloads, immutable
              rl.promotion.<run>.<revision>                        the revisions that the run was switched to
    EVENTS    rl.<kind>.<run>.<revision>.<env>                     annotations of live revisions
    REPLAY    rl.replay.rescore.<run>.<revision>.<env>             scores and rewards of re-scored history
              rl.replay.revision.<run>.<revision>.all              what that revision is
    TEACHER   rl.logprobs.<run>.<revision>.<env>                   large arrays
    LEDGER    rl.ledger.<run>.<trainer>, rl.state.<run>.<stage>.<revision>.<partition>
    CALLS     rl.call.<run>.<env>                                  calls of conversations under way

ROLLOUTS and TEACHER take the chunks of large messages as well: rl.blob.<rollout or logprobs>.<run>.<env>.<name>.
"""

import re
from typing import Final, Literal, get_args

from lachesis.schemas.errors import ConfigError

__all__ = [
    "BLOB_KINDS",
    "BUCKET",
    "BUCKET_TEXT",
    "CALLS",
    "ENVIRONMENT",
    "EVENTS",
    "LEDGER",
    "LIVE",
    "REPLAY",
    "ROLLOUTS",
    "STREAMS",
    "STREAM_TEXTS",
    "TEACHER",
    "WEIGHTS",
    "Kind",
    "ReplayKind",
    "admission",
    "blob",
    "bucket_name",
    "call",
    "check_name",
    "durable",
    "event",
    "fillers",
    "health",
    "heartbeat",
    "incident",
    "key_change",
    "kind_of",
    "lease",
    "ledger",
    "logprobs",
    "marks",
    "micro",
    "offline_trainer",
    "promotion",
    "replay",
    "revision",
    "rollout",
    "run_of",
    "run_of_stream",
    "service_name",
    "shadow",
    "state",
    "stream_name",
    "stream_subjects",
    "take_up",
    "value_subject",
    "weights_chunks",
    "weights_heads",
    "weights_subjects",
]

ROLLOUTS: Final = "ROLLOUTS"
EVENTS: Final = "EVENTS"
REPLAY: Final = "REPLAY"
TEACHER: Final = "TEACHER"
LEDGER: Final = "LEDGER"
WEIGHTS: Final = "WEIGHTS"
CALLS: Final = "CALLS"
BUCKET: Final = "KEYS"
"""The run's key-value bucket, where it is meant as one store among the streams."""

LIVE: Final = "live"
"""The revision of a run's first, live annotations; re-scored ones have names of their own."""

Kind = Literal["score", "reward", "curriculum", "teacher", "dead", "eval", "alert"]

ReplayKind = Literal["rescore", "revision"]

BLOB_KINDS: Final = {"rollout": ROLLOUTS, "logprobs": TEACHER}
"""What may be stored in chunks, by kind, and the stream that takes them."""


def blob(kind: str, run: str, env: str = "*", name: str = "*") -> str:
    """Return where the chunks of an environment's large message go; kind is one of `BLOB_KINDS`.

    They are in the stream of `rl.<kind>.<run>.>`, and the environment's own, so that none can see, hold up or spoil the
    large messages of another.
    """
    return f"rl.blob.{kind}.{run}.{env}.{name}"


def weights_heads(run: str) -> str:
    """Return where the trainer says which weights there are; each message lists the chunks of a version."""
    return f"rl.weights.{run}.head"


def weights_chunks(run: str) -> str:
    """Return where the trainer stores weights, in chunks."""
    return f"rl.weights.{run}.chunk"


def weights_subjects(run: str) -> tuple[str, str]:
    """Return all subjects of WEIGHTS."""
    return weights_heads(run), weights_chunks(run)


def call(run: str, env: str = "*") -> str:
    """Return where the calls of an environment's conversations are stored."""
    return f"rl.call.{run}.{env}"


def stream_subjects(run: str) -> dict[str, list[str]]:
    """Return by kind what the streams of `run` store."""
    return {
        ROLLOUTS: [f"rl.rollout.{run}.*", blob("rollout", run), f"rl.promotion.{run}.*"],
        EVENTS: [f"rl.{kind}.{run}.*.*" for kind in get_args(Kind)],
        REPLAY: [f"rl.replay.{kind}.{run}.*.*" for kind in get_args(ReplayKind)],
        TEACHER: [f"rl.logprobs.{run}.*.*", blob("logprobs", run)],
        LEDGER: [f"rl.ledger.{run}.*", f"rl.state.{run}.*.*.*"],
        WEIGHTS: list(weights_subjects(run)),
        CALLS: [call(run)],
    }


STREAMS: Final = stream_subjects("*")
"""The kinds of streams that each run has, and what they store."""

STREAM_TEXTS: Final = {
    ROLLOUTS: "Lachesis: rollout groups as environments published them, never changed; queue and history",
    EVENTS: "Lachesis: annotations of rollouts: scores, rewards, teacher pointers, dead letters, alerts",
    REPLAY: "Lachesis: scores and rewards of history under other revisions",
    TEACHER: "Lachesis: a teacher's logprobs of rollouts",
    LEDGER: "Lachesis: batches, outcomes of rollouts, reports of trainers, state of stages",
    WEIGHTS: "Lachesis: the newest weights, for inference servers without a shared folder; they expire by themselves",
    CALLS: "Lachesis: calls of conversations under way; they are deleted once their group is a rollout",
}
"""What each stream holds, as the server's own tools show it."""

BUCKET_TEXT: Final = "Lachesis: what a run keeps by key: its newest policy, who supervises it, what it still needs..."
"""What the bucket holds, as the server's own tools show it."""

ENVIRONMENT: Final = "environment"
"""The service that generates rollouts; `environment-<name>` is the one of an environment."""

_PREFIX = "lachesis_"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def stream_name(run: str, kind: str) -> str:
    """Return the server's name of a run's stream, or of the stream behind its bucket."""
    return f"KV_{bucket_name(run)}" if kind == BUCKET else f"{_PREFIX}{run}_{kind}"


def bucket_name(run: str) -> str:
    """Return the server's name of a run's key-value bucket."""
    return f"{_PREFIX}{run}"


def kind_of(name: str) -> str:
    """Return the kind of the run's stream that the server knows as `name`; of any other stream its name."""
    if name.startswith(f"KV_{_PREFIX}"):
        return BUCKET
    return name.rpartition("_")[2] if run_of_stream(name) is not None else name


def run_of_stream(name: str) -> str | None:
    """Return the run that the stream called `name` is of; None if it is no run's."""
    if name.startswith(f"KV_{_PREFIX}"):
        return name.removeprefix(f"KV_{_PREFIX}")
    run, _, kind = name.removeprefix(_PREFIX).rpartition("_")
    return run if name.startswith(_PREFIX) and run and kind in STREAMS else None


def run_of(subject: str) -> str:
    """Return the run that a stored subject is of."""
    tokens = subject.split(".")
    return tokens[3] if tokens[1] in ("blob", "replay") else tokens[2]


def check_name(what: str, name: str) -> str:
    """Return `name` if it can be one token of a subject. Raises `ConfigError` naming `what`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} {name[:80]!r}: use 1 to 64 letters, digits, '_' or '-'")
    return name


def rollout(run: str, env: str = "*") -> str:
    return f"rl.rollout.{run}.{env}"


def promotion(run: str, revision: str) -> str:
    """Return where the promotions of the run's `revision` are listed.

    They are among the rollouts: the order there says which revision scores a rollout.
    """
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


def offline_trainer(run: str, trainer: str) -> str:
    """Where it is stored what an offline trainer trains on."""
    return state(run, "past", LIVE, trainer)


def marks(run: str) -> str:
    """Where it is stored how far the run's streams go."""
    return state(run, "marks", LIVE, "0")


def fillers(run: str) -> dict[str, str]:
    """Return by stream the subject of what a recovery stores in place of lost messages.

    WEIGHTS needs none: every reader of weights compares their digest. Nor does CALLS: a call that is missing is made
    again.
    """
    return {
        ROLLOUTS: blob("rollout", run, "lost", "recovery"),
        EVENTS: event("alert", run, "recovery", "lost"),
        REPLAY: replay("rescore", run, "recovery", "lost"),
        TEACHER: blob("logprobs", run, "lost", "recovery"),
        LEDGER: state(run, "recovery", LIVE, "0"),
    }


def lease(run: str, env: str = "*") -> str:
    """Request/reply subject of the governor.

    Each environment has its own, so that none takes another's leases.
    """
    return f"rl.lease.{run}.{env}"


def take_up(run: str, env: str = "*") -> str:
    """Request/reply subject of the governor for groups that were left behind; one for each environment."""
    return f"rl.takeup.{run}.{env}"


def admission(run: str) -> str:
    """Where the governor publishes whether it can admit anything more."""
    return f"rl.admission.{run}"


def heartbeat(run: str, service: str = "*", instance: str = "*") -> str:
    return f"rl.heartbeat.{run}.{service}.{instance}"


def shadow(run: str, revision: str) -> str:
    """Request/reply subject of requests to end a revision that follows the run."""
    return f"rl.shadow.{run}.{revision}"


def health(run: str, service: str) -> str:
    """Request/reply subject on which a service reports its health."""
    return f"rl.health.{run}.{service}"


def value_subject(run: str, key: str) -> str:
    """Where the value of a key of the run's bucket is stored."""
    return f"$KV.{bucket_name(run)}.{key}"


def key_change(run: str, key: str) -> str:
    """Return the subject on which the server announces each stored value of a key of the run's bucket."""
    return f"rl.kv.{run}.{key}"


def incident(run: str) -> str:
    """Where a stage says that it has handled a rollout again, or in vain."""
    return f"rl.incident.{run}"


def service_name(service: str) -> str:
    """Return the name of a service in the NATS micro protocol and in telemetry.

    Environments share one, as runs do: names that grow with what is configured would fill every menu and metric.
    """
    return f"lachesis-{ENVIRONMENT if service.startswith(f'{ENVIRONMENT}-') else service}"


def micro(run: str, service: str) -> tuple[str, ...]:
    """Return the subjects of a service's NATS micro endpoints (`nats micro ls|info|stats|ping`)."""
    # each verb by its name: in nats-server, permission to subscribe to `$SRV.*` includes `$SRV.>`
    verbs = [f"$SRV.{verb}{name}" for verb in ("PING", "INFO", "STATS") for name in _ends(service_name(service))]
    return (*verbs, health(run, service))


def _ends(name: str) -> tuple[str, ...]:
    return ("", f".{name}", f".{name}.*")


def durable(stage: str, run: str, revision: str) -> str:
    """Name of the durable consumer that all replicas of a stateless stage share.

    `=` occurs in none of its parts.
    """
    return f"{stage}={run}={revision}"
