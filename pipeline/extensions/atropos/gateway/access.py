"""Permissions of the gateway."""

from lachesis.pipeline.access import Access, Scope, service_access
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import BUCKET, LEDGER, ROLLOUTS, TEACHER

__all__ = ["gateway_access"]


def gateway_access(scope: Scope) -> dict[str, Access]:
    """Return the gateway's row. Where it hands batches to trainers, it reports for them."""
    run, over_http = scope.run, scope.trains_over_http
    policy, policy_server = keys.POLICY, keys.inference(keys.INFERENCE_ROLES[0])
    report = subjects.state(run, "trainer", subjects.LIVE, scope.trainer)
    chunks = {env: subjects.blob("rollout", run, env) for env in scope.foreign}
    return {
        "gateway": service_access(
            scope,
            "gateway",
            is_single=True,
            writes=(
                *(subjects.rollout(run, env) for env in scope.foreign),
                *chunks.values(),
                *((report,) if over_http else ()),
            ),
            asks=tuple(("governor", subjects.lease(run, env)) for env in scope.foreign),
            rereads=tuple((ROLLOUTS, chunk) for chunk in chunks.values()),
            hears=(subjects.heartbeat(run),) if over_http else (subjects.heartbeat(run, "governor"),),
            reads=(ROLLOUTS, *((LEDGER,) if over_http else ())),  # which groups of its clients are stored
            watches=(policy, policy_server, *(keys.curriculum(scope.revision, env) for env in scope.foreign)),
            gets=(BUCKET, *((TEACHER,) if over_http else ())),
            sets=(stored_key(), *((policy,) if over_http else ())),
        ),
    }
