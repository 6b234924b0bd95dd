"""Permissions: what each service and each operator may do, one row each.

It uses the names of `subjects` and no others.

Reading is granted by stream, writing by subject or key: a service that reads EVENTS may read all of it, but each kind
of event has one service that may write it. All rows are of one run: its streams, named by kind, and its bucket.
`pipeline.bus.accounts` turns the rows into what the server enforces.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import (
    BUCKET,
    CALLS,
    ENVIRONMENT,
    EVENTS,
    LEDGER,
    REPLAY,
    ROLLOUTS,
    STREAMS,
    TEACHER,
    WEIGHTS,
    value_subject,
)

__all__ = [
    "OBSERVER",
    "OPERATOR",
    "SINGLE_WRITERS",
    "Access",
    "Scope",
    "access_table",
    "identity_of",
    "roles",
    "service_access",
]

OPERATOR: Final = "operator"
"""The identity of `lachesis init`, `up`, `dead requeue`, `resume`, `replay`, `shadow`, `train`, `export`, `import`,
`gc` and `runs recover`: reads everything, makes the streams, puts messages back, lets environments go on, writes
revisions of history and trains on them, stores earlier rollouts, deletes unused history, fills up what was lost."""
OBSERVER: Final = "observer"
"""The identity of `lachesis status`, `top`, `trace`, `tail`, `health`, `compare`, `reproduce`, `dead` and `doctor`:
reads everything, writes nothing."""

_DURABLE_STAGES = ("scorer", "teacher")
SINGLE_WRITERS: Final = ("governor", "batcher", "normalizer", "curriculum", "health", "trainer")
"""Services of which a run has one: a service that starts first checks whether another one runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the subjects of one run are made of. `environments` are those trained on, `foreign` those of them whose
    groups a service of an extension publishes. `trains_over_http`: it hands batches to trainers, too, and reports for
    them."""

    run: str
    revision: str
    trainer: str
    environments: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    trains_over_http: bool = False
    teachers: tuple[str, ...] = ()
    """Roles of inference servers that are further teachers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What one identity may do, beyond asking JetStream whether it is there and receiving its own answers."""

    writes: tuple[str, ...] = ()
    """Subjects it publishes to that a stream stores."""
    spares: tuple[str, ...] = ()
    """Subjects of those that it does not publish to after all."""
    tells: tuple[str, ...] = ()
    """Broadcasts it publishes."""
    hears: tuple[str, ...] = ()
    """Services whose broadcasts it subscribes to."""
    serves: tuple[str, ...] = ()
    """Subjects on which it answers requests."""
    asks: tuple[tuple[str, str], ...] = ()
    """(identity, subject) of the requests it sends, and of the identity that answers them; it may be its own."""
    reads: tuple[str, ...] = ()
    """Streams that it reads from a cursor."""
    watches: tuple[str, ...] = ()
    """Keys whose changes it is notified of; `*` stands for one part of a key, `>` for the rest."""
    gets: tuple[str, ...] = ()
    """Streams, or the bucket, of which it fetches messages by sequence, or a subject's last; all that it reads, and the
    bucket where it watches, are among them, unless it reads single keys."""
    rereads: tuple[tuple[str, str], ...] = ()
    """(stream, subject) of which it reads the last message, and of the stream nothing else: what it writes in several
    parts, and an environment's keys."""
    consumes: tuple[tuple[str, str], ...] = ()
    """(stream, durable name) of the competing consumers it belongs to."""
    inspects: tuple[tuple[str, str], ...] = ()
    """(stream, durable name) of the competing consumers whose progress it asks for; its own are among them."""
    sets: tuple[str, ...] = ()
    """Keys that it writes and deletes; `*` stands for one part of a key."""
    measures: tuple[str, ...] = ()
    """Streams whose size it asks for; all that it gets are among them."""
    trims: tuple[str, ...] = ()
    """Streams that it deletes history from."""
    lists: tuple[str, ...] = ()
    """Streams, or the bucket, whose consumers it lists; who lists any may also ask which streams there are."""
    forgets: tuple[str, ...] = ()
    """Streams, or the bucket, of which it deletes unused consumers, or sets consumers back."""
    makes: tuple[str, ...] = ()
    """Streams, or the bucket, that it creates and changes, and deletes when the run is deleted."""


def identity_of(service: str, part: str) -> str:
    """Return the identity of a process of `service` that plays `part`.

    Each environment has a key of its own.
    """
    return f"{ENVIRONMENT}-{part}" if service == ENVIRONMENT else service


def roles(identity: str, teachers: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names under which processes of `identity` speak.

    Its own, and one for each role it can play; `teachers`: see `Scope`.
    """
    parts = (*keys.INFERENCE_ROLES, *teachers) if identity == "inference" else ()
    return (identity, *(f"{identity}-{part}" for part in parts))


def access_table(scope: Scope, further: Mapping[str, Access] | None = None) -> dict[str, Access]:
    """Return what each service, the operator and the observer may do in the run of `scope`.

    `further`: the rows of services that extensions add.
    """
    services = {**_services(scope, (further or {}).keys()), **(further or {})}
    people = _people(scope, services)
    return {**services, **people}


def _durables(scope: Scope) -> dict[str, tuple[str, str]]:
    return {stage: (ROLLOUTS, subjects.durable(stage, scope.run, scope.revision)) for stage in _DURABLE_STAGES}


def service_access(
    scope: Scope,
    identity: str,
    *,
    writes: tuple[str, ...] = (),
    hears: tuple[str, ...] = (),
    tells: tuple[str, ...] = (),
    serves: tuple[str, ...] = (),
    asks: tuple[tuple[str, str], ...] = (),
    reads: tuple[str, ...] = (),
    watches: tuple[str, ...] = (),
    gets: tuple[str, ...] = (),
    rereads: tuple[tuple[str, str], ...] = (),
    sets: tuple[str, ...] = (),
    trims: tuple[str, ...] = (),
    inspects: tuple[tuple[str, str], ...] = (),
    by_key: bool = False,
    is_single: bool = False,
) -> Access:
    """Return a service's row: what is its own, and what every one does.

    That is heartbeats, answers to the micro protocol, and, for a single writer (`is_single`, and those of
    `SINGLE_WRITERS`), the question whether another one runs. `by_key`: of the bucket it reads those keys alone that it
    watches or sets.
    """
    run, names = scope.run, roles(identity, scope.teachers)
    own = tuple(durable for stage, durable in _durables(scope).items() if stage == identity)
    attempts = tuple(keys.attempts(durable) for _, durable in own)
    all_gets = _merged(
        reads,
        (BUCKET,) if (watches or own) and not by_key else (),
        gets,
        tuple(stream for stream, _ in own),
    )
    alone = (identity,) if is_single or identity in SINGLE_WRITERS else ()
    return Access(
        writes=writes,
        tells=(*(subjects.heartbeat(run, name) for name in names), *((subjects.incident(run),) if own else ()), *tells),
        hears=hears,
        serves=_merged(serves, *(subjects.micro(run, name) for name in names)),
        asks=(*asks, *((name, subjects.health(run, name)) for name in alone)),
        reads=reads,
        watches=watches,
        gets=all_gets,
        rereads=(*rereads, *((BUCKET, value_subject(run, key)) for key in (*watches, *sets) if by_key)),
        consumes=own,
        inspects=(*own, *inspects),
        sets=(*sets, *attempts),
        # the bucket: the server's clock. What it gets: whether a message that is not found was ever there
        measures=_merged((BUCKET,), all_gets),
        trims=trims,
    )


def _services(scope: Scope, further: Collection[str]) -> dict[str, Access]:
    run, revision = scope.run, scope.revision
    dead = subjects.event("dead", run, revision)
    policy = keys.POLICY
    policy_server, teacher_server, eval_server = map(keys.inference, keys.INFERENCE_ROLES)
    teacher_servers = (teacher_server, *map(keys.inference, scope.teachers))
    inference = (policy_server, *teacher_servers, eval_server)
    promotions = subjects.promotion(run, revision)
    incidents = (subjects.incident(run),)
    everybody = (subjects.heartbeat(run),)  # who reads events asks their writers which versions they write

    def chunks(env: str) -> str:
        return subjects.blob("rollout", run, env)

    def state(stage: str, partition: str = "*") -> str:
        return subjects.state(run, stage, revision, partition)

    def lease(env: str) -> tuple[str, str]:
        return ("governor", subjects.lease(run, env))

    def take_up(env: str) -> tuple[str, str]:
        return ("governor", subjects.take_up(run, env))

    report = subjects.state(run, "trainer", subjects.LIVE, scope.trainer)
    row = partial(service_access, scope)
    return {
        "governor": row(
            "governor",
            # a chunk of its own ends an unfinished large message before it is deleted
            writes=(
                state("governor", "0"),
                subjects.marks(run),
                subjects.blob("rollout", run),
                subjects.blob("logprobs", run),
            ),
            tells=(subjects.admission(run),),
            serves=(subjects.lease(run), subjects.take_up(run)),
            hears=everybody,
            reads=(ROLLOUTS, EVENTS, REPLAY, TEACHER, LEDGER, CALLS),
            watches=(policy,),
            gets=(BUCKET, WEIGHTS),
            sets=(keys.RETENTION, keys.MARKS),
            trims=(ROLLOUTS, EVENTS, REPLAY, TEACHER, LEDGER, CALLS),
            inspects=tuple(_durables(scope).values()),
        ),
        "batcher": row(
            "batcher",
            writes=(subjects.ledger(run, scope.trainer), dead, promotions),
            hears=(*everybody, subjects.admission(run), *incidents),
            reads=(ROLLOUTS, EVENTS, LEDGER),
            gets=(BUCKET,),
        ),
        "normalizer": row(
            "normalizer",
            writes=(subjects.event("reward", run, revision), state("normalizer"), dead),
            hears=everybody,
            reads=(ROLLOUTS, EVENTS, LEDGER),
            gets=(BUCKET,),  # how far history was trimmed
        ),
        "curriculum": row(
            "curriculum",
            writes=(subjects.event("curriculum", run, revision), state("curriculum"), dead),
            hears=everybody,
            reads=(EVENTS, LEDGER),
            gets=(BUCKET,),  # how far history was trimmed
            sets=(keys.curriculum(revision),),
        ),
        "health": row(
            "health",
            writes=(subjects.event("alert", run, revision), state("health")),
            hears=everybody,
            reads=(EVENTS, LEDGER),
            watches=(keys.resume(),),
            sets=(keys.webhook(revision),),
        ),
        # the list of promotions is among the rollouts
        "scorer": row(
            "scorer",
            writes=(subjects.event("score", run, revision), dead),
            hears=(subjects.heartbeat(run, "batcher"),),
            reads=(ROLLOUTS,),
            gets=(BUCKET,),  # which token ids the trainer knows
            sets=(keys.fixed_samples(revision),),
        ),
        "teacher": row(
            "teacher",
            writes=(
                subjects.event("teacher", run, revision),
                subjects.logprobs(run, revision),
                subjects.blob("logprobs", run),
                dead,
            ),
            watches=(policy_server, *teacher_servers),
            rereads=((TEACHER, subjects.blob("logprobs", run)),),
        ),
        "inference": row(
            "inference",
            hears=tuple(subjects.heartbeat(run, name) for name in sorted({"trainer", *further})),  # they may set policy
            watches=(policy, *inference),
            gets=(WEIGHTS,),
            sets=inference,
        ),
        "trainer": row(
            "trainer",
            writes=(report, *subjects.weights_subjects(run)),
            hears=(*everybody, *incidents),
            reads=(EVENTS, LEDGER),  # of EVENTS: evaluations, for the best checkpoint
            watches=(policy,),
            gets=(ROLLOUTS, TEACHER, WEIGHTS),
            sets=(policy,),
            trims=(WEIGHTS,),
        ),
        "evaluator": row(
            "evaluator",
            writes=(subjects.event("eval", run, revision),),
            watches=(policy, eval_server),
            gets=(EVENTS, WEIGHTS),
        ),
        **{
            identity_of(ENVIRONMENT, env): row(
                identity_of(ENVIRONMENT, env),
                writes=(subjects.rollout(run, env), chunks(env), subjects.call(run, env)),
                asks=(lease(env), take_up(env)),
                rereads=((ROLLOUTS, chunks(env)),),
                watches=(policy, keys.curriculum(revision, env), policy_server),
                sets=(keys.epoch(env), keys.held_out(env), keys.prompts(env)),
                by_key=True,
            )
            for env in scope.environments
        },
    }


def _people(scope: Scope, services: dict[str, Access]) -> dict[str, Access]:
    run, revision = scope.run, scope.revision
    durables = tuple(_durables(scope).values())
    everything = (*STREAMS, BUCKET)
    micro = tuple(
        (identity, subject)
        for identity in services
        for subject in ("$SRV.>", *(subjects.health(run, name) for name in roles(identity, scope.teachers)))
    )
    supervisor = (OPERATOR, subjects.health(run, "supervisor"))
    looks = Access(
        hears=(subjects.heartbeat(run), subjects.incident(run)),
        asks=(*micro, supervisor),
        reads=tuple(STREAMS),
        watches=(">",),
        gets=everything,
        inspects=durables,
        measures=everything,
        lists=everything,
    )
    put_back = (subjects.rollout(run), subjects.blob("rollout", run))  # by `dead requeue`
    annotations = tuple(subjects.event(kind, run, revision) for kind in ("score", "teacher", "eval"))
    replays = (subjects.replay("rescore", run, "*"), subjects.revision(run), subjects.state(run, "replay", "*", "*"))
    # trainers on past rollouts have names of their own
    trains = (
        subjects.ledger(run, "*"),
        subjects.state(run, "trainer", subjects.LIVE, "*"),
        subjects.offline_trainer(run, "*"),
    )
    recovers = (*subjects.fillers(run).values(), subjects.marks(run))
    live = (subjects.ledger(run, scope.trainer), subjects.state(run, "trainer", subjects.LIVE, scope.trainer))
    operates = Access(
        writes=(*put_back, *annotations, *replays, subjects.promotion(run, revision), *trains, *recovers),
        spares=live,
        tells=(subjects.heartbeat(run),),  # of shadows
        hears=looks.hears,
        serves=(subjects.shadow(run, "*"), supervisor[1]),
        asks=(*looks.asks, ("governor", subjects.lease(run)), (OPERATOR, subjects.shadow(run, "*"))),
        reads=looks.reads,
        watches=looks.watches,
        gets=everything,
        rereads=((ROLLOUTS, subjects.blob("rollout", run)),),
        inspects=durables,
        sets=(keys.resume(), keys.RETENTION, keys.STORE, keys.SUPERVISOR, keys.MARKS),
        measures=everything,
        trims=everything,
        lists=everything,
        forgets=everything,
        makes=everything,
    )
    return {OPERATOR: operates, OBSERVER: looks}


def _merged(*groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
