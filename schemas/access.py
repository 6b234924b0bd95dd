"""Who may do what: one row for each service and for the people who run it. The same names as `subjects`, nothing else.

Reading is granted by stream, writing by subject: whoever reads EVENTS may read all of it, but each kind of event has
one service that may write it. `pipeline.bus.permissions` turns a row into what the server enforces.
"""

from dataclasses import dataclass
from typing import Final

from lachesis.schemas import subjects
from lachesis.schemas.subjects import BUCKETS, EVENTS, LEDGER, REPLAY, ROLLOUTS, STREAMS, TEACHER

__all__ = ["OBSERVER", "OPERATOR", "SINGLE_WRITERS", "Access", "Scope", "access_table", "roles"]

OPERATOR: Final = "operator"
"""The identity of `lachesis init`, `up`, `dead requeue`, `resume`, `replay`, `shadow`, `train`, `export`, `import` and
`gc`: reads everything, makes the streams, puts messages back, lets environments go on, writes revisions of history and
trains on them, stores rollouts of the past, deletes what nobody needs."""
OBSERVER: Final = "observer"
"""The identity of `lachesis status`, `top`, `trace`, `tail`, `health`, `compare`, `reproduce`, `dead` and `doctor`:
reads everything, writes nothing."""

_PEOPLE = (OPERATOR, OBSERVER)
_DURABLE_STAGES = ("scorer", "teacher")
SINGLE_WRITERS: Final = ("governor", "batcher", "normalizer", "curriculum", "health", "trainer", "gateway")
"""Services of which a run has one: whoever is started asks first whether another one runs."""
_INFERENCE_ROLES = ("policy", "teacher", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the subjects of one run are made of. `environments` are those trained on and those held out."""

    run: str
    revision: str
    trainer: str
    environments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What one identity may do, beyond asking JetStream whether it is there and receiving its own answers."""

    writes: tuple[str, ...] = ()
    """Subjects it publishes to: events, requests, broadcasts."""
    spares: tuple[str, ...] = ()
    """Subjects of those that it does not publish to after all."""
    hears: tuple[str, ...] = ()
    """Subjects it subscribes to: broadcasts, and requests that it answers."""
    answers: tuple[str, ...] = ()
    """Identities whose requests it answers."""
    reads: tuple[str, ...] = ()
    """Streams and buckets that it reads from a cursor, or watches."""
    gets: tuple[str, ...] = ()
    """Streams and buckets of which it fetches messages by sequence, or a subject's last; all that it reads are among
    them."""
    consumes: tuple[tuple[str, str], ...] = ()
    """(stream, durable name) of the competing consumers it belongs to."""
    inspects: tuple[tuple[str, str], ...] = ()
    """(stream, durable name) of the competing consumers whose progress it asks for; its own are among them."""
    others: tuple[tuple[str, str], ...] = ()
    """(stream, durable name) of every competing consumer of the run that it does not belong to."""
    sets: tuple[tuple[str, str], ...] = ()
    """(bucket, key) that it writes; `*` stands for one part of a key."""
    measures: tuple[str, ...] = ()
    """Streams whose size it asks for; all that it gets are among them."""
    trims: tuple[str, ...] = ()
    """Streams that it deletes history from."""
    forgets: tuple[tuple[str, str], ...] = ()
    """(stream, durable name) of the competing consumers that it deletes, with a run that is over."""
    makes: tuple[str, ...] = ()
    """Streams and buckets that it creates and changes; never deletes."""


def roles(service: str, environments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names under which processes of `service` speak: its own, and one for each part it can play."""
    parts = {"environment": environments, "inference": _INFERENCE_ROLES}.get(service, ())
    return (service, *(f"{service}-{part}" for part in parts))


def access_table(scope: Scope) -> dict[str, Access]:
    """Return what each service, the operator and the observer may do in the run of `scope`."""
    run, revision = scope.run, scope.revision
    durables = {stage: (ROLLOUTS, subjects.durable(stage, run, revision)) for stage in _DURABLE_STAGES}
    dead = subjects.event("dead", run, revision)
    policy = (BUCKETS["policy"], run)
    promotions = subjects.promotion(run, revision)
    incidents = (subjects.incident(run),)

    def row(
        service: str,
        *,
        writes: tuple[str, ...] = (),
        hears: tuple[str, ...] = (),
        answers: tuple[str, ...] = (),
        reads: tuple[str, ...] = (),
        gets: tuple[str, ...] = (),
        sets: tuple[tuple[str, str], ...] = (),
        measures: tuple[str, ...] = (),
        trims: tuple[str, ...] = (),
        inspects: tuple[tuple[str, str], ...] = (),
    ) -> Access:
        """A service: what is its own, and what every one does: heartbeats, answers to the micro protocol,
        and, for a single writer, the question whether another one runs."""
        own = (durables[service],) if service in durables else ()
        names = roles(service, scope.environments)
        attempts = tuple((BUCKETS["attempts"], f"{durable}.*") for _, durable in own)
        all_gets = _merged(reads, gets, tuple(stream for stream, _ in own), (BUCKETS["attempts"],) if own else ())
        alone = (service,) if service in SINGLE_WRITERS else ()
        return Access(
            writes=(
                *writes,
                *(subjects.heartbeat(run, name) for name in names),
                *(subjects.health(run, name) for name in alone),
                *(incidents if own else ()),
            ),
            hears=_merged(hears, *(subjects.micro(run, name) for name in names)),
            answers=(*answers, *alone, *_PEOPLE),
            reads=reads,
            gets=all_gets,
            consumes=own,
            inspects=(*own, *inspects),
            others=tuple(durable for durable in durables.values() if durable not in own),
            sets=(*sets, *attempts),
            # ROLLOUTS: the server's clock. What it gets: whether a message that is not found was ever there
            measures=_merged((ROLLOUTS,), all_gets, measures),
            trims=_merged(trims, (BUCKETS["attempts"],) if own else ()),
        )

    def state(stage: str, partition: str = "*") -> str:
        return subjects.state(run, stage, revision, partition)

    services = {
        "governor": row(
            "governor",
            # a chunk of its own ends a large message that nobody finished, before it is deleted
            writes=(state("governor", "0"), subjects.blob("rollout", run), subjects.blob("logprobs", run)),
            hears=(subjects.lease(run),),
            answers=("environment", "gateway"),
            reads=(ROLLOUTS, EVENTS, REPLAY, TEACHER, LEDGER, BUCKETS["policy"]),
            gets=(BUCKETS["retention"],),
            sets=((BUCKETS["retention"], run), (BUCKETS["retention"], subjects.RESERVATIONS)),
            trims=(ROLLOUTS, EVENTS, REPLAY, TEACHER, LEDGER),
            inspects=tuple(durables.values()),
        ),
        "batcher": row(
            "batcher",
            writes=(subjects.ledger(run, scope.trainer), dead, promotions),
            hears=(subjects.heartbeat(run, "governor"), *incidents),
            reads=(ROLLOUTS, EVENTS, LEDGER),
            gets=(BUCKETS["policy"],),
        ),
        "normalizer": row(
            "normalizer",
            writes=(subjects.event("reward", run, revision), state("normalizer"), dead),
            reads=(ROLLOUTS, EVENTS, LEDGER),
        ),
        "curriculum": row(
            "curriculum",
            writes=(subjects.event("curriculum", run, revision), state("curriculum"), dead),
            reads=(EVENTS, LEDGER),
            sets=((BUCKETS["curriculum"], f"{run}.{revision}.*"),),
        ),
        "health": row(
            "health",
            writes=(subjects.event("alert", run, revision), state("health")),
            reads=(EVENTS, LEDGER, BUCKETS["resume"]),
            gets=(BUCKETS["retention"],),
        ),
        # the list of promotions is among the rollouts
        "scorer": row(
            "scorer",
            writes=(subjects.event("score", run, revision), dead),
            reads=(ROLLOUTS,),
            gets=(BUCKETS["policy"],),  # which token ids the trainer knows
        ),
        "teacher": row(
            "teacher",
            writes=(
                subjects.event("teacher", run, revision),
                subjects.logprobs(run, revision),
                subjects.blob("logprobs", run),
                dead,
            ),
            reads=(BUCKETS["inference"],),
        ),
        "inference": row(
            "inference",
            reads=(BUCKETS["policy"], BUCKETS["inference"]),
            sets=tuple((BUCKETS["inference"], f"{run}.{role}") for role in _INFERENCE_ROLES),
        ),
        "trainer": row(
            "trainer",
            writes=(subjects.state(run, "trainer", subjects.LIVE, scope.trainer),),
            hears=(subjects.heartbeat(run), *incidents),
            reads=(EVENTS, LEDGER, BUCKETS["policy"]),  # of EVENTS: evaluations, for the best checkpoint
            gets=(ROLLOUTS, TEACHER),
            sets=(policy,),
        ),
        "evaluator": row(
            "evaluator",
            writes=(subjects.event("eval", run, revision),),
            reads=(BUCKETS["policy"], BUCKETS["inference"]),
            gets=(EVENTS,),
        ),
        "gateway": row(
            "gateway",
            writes=(subjects.rollout(run), subjects.blob("rollout", run), subjects.lease(run)),
            hears=(subjects.heartbeat(run, "governor"),),
            reads=(BUCKETS["policy"],),
            gets=(BUCKETS["gateway"],),
            sets=((BUCKETS["gateway"], f"{run}.*"),),
        ),
        "environment": row(
            "environment",
            writes=(subjects.rollout(run), subjects.blob("rollout", run), subjects.lease(run)),
            reads=(BUCKETS["policy"], BUCKETS["curriculum"], BUCKETS["inference"]),
        ),
    }  # fmt: skip
    everything = (*STREAMS, *BUCKETS.values())
    looks = Access(
        writes=subjects.micro_requests(run),
        hears=("rl.>",),
        reads=everything,
        gets=everything,
        inspects=tuple(durables.values()),
        others=tuple(durables.values()),
        measures=everything,
    )
    put_back = (subjects.rollout(run), subjects.blob("rollout", run), subjects.lease(run))  # by `dead requeue`
    annotations = tuple(subjects.event(kind, run, revision) for kind in ("score", "teacher", "eval"))
    replays = (subjects.replay("rescore", run, "*"), subjects.revision(run), subjects.state(run, "replay", "*", "*"))
    shadows = (subjects.heartbeat(run), subjects.shadow(run, "*"), promotions)
    # trainers on past rollouts have names of their own
    trains = (subjects.ledger(run, "*"), subjects.state(run, "trainer", subjects.LIVE, "*"), subjects.past(run, "*"))
    live = (subjects.ledger(run, scope.trainer), subjects.state(run, "trainer", subjects.LIVE, scope.trainer))
    operates = Access(
        writes=(*looks.writes, *put_back, *annotations, *replays, *shadows, *trains),
        spares=live,
        hears=looks.hears,
        answers=(OPERATOR,),
        reads=everything,
        gets=everything,
        inspects=looks.inspects,
        others=looks.others,
        sets=(
            (BUCKETS["resume"], f"{run}.*"),
            (BUCKETS["retention"], run),
            (BUCKETS["runs"], subjects.supervisor_lease(run)),
        ),
        measures=everything,
        trims=everything,
        forgets=tuple(durables.values()),
        makes=everything,
    )
    return {**services, OPERATOR: operates, OBSERVER: looks}


def _merged(*groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
