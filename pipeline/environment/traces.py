"""Exports the trace of a sampled group that an environment could not store.

The inference server has already exported its spans as children of these; without these, the group they belong to would
be unknown.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lachesis.pipeline.common.cut_text import cut_middle
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, generate_span, root_span

__all__ = ["traced_if_abandoned"]


@contextmanager
def traced_if_abandoned(
    service: Service, group: str, env: str, started_ns: int, chats: Sequence[Span]
) -> Iterator[None]:
    """Export the requests for a sampled group, and its root, if an exception leaves the context.

    It is abandoned.
    """
    try:
        yield
    except BaseException as error:
        if service.tracing.sampled(group):
            times = started_ns, service.now_ns()
            end = RolloutEnd(
                group=group,
                run=service.run,
                env=env,
                seq=None,
                sequences=0,
                policy_step=None,
                started_ns=times[0],
                ended_ns=times[1],
                outcome="dropped" if isinstance(error, Exception) else "unfinished",
                kept="ratio",
                cause="abandoned",
                reason=cut_middle(f"abandoned: {error_text(error)}", 500),
            )
            service.tracing.emit([*chats, generate_span(group, env, times), root_span(end)])
        raise
