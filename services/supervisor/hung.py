"""Decides when a silent process counts as hung, and why. Pure.

Heartbeats come from a service's event loop, so silence means that something blocks the loop, or that the process is
stopped. The bound is far above what may block it in a sound run: a slow inline reward, a collection of garbage, a
machine that swaps. A process that starts imports packages and loads a model, and has as long as it may take to become
ready. One that a debugger or a frozen control group holds is left alone.
"""

from dataclasses import dataclass

from lachesis.pipeline.common.process_state import FROZEN

__all__ = ["SilentProcess", "why_hung"]


@dataclass(frozen=True, slots=True)
class SilentProcess:
    """`silent_s`: since its last heartbeat, or since its start; `state`: the kernel's, a letter of proc(5); `starts`:
    whether it has not been ready yet."""

    silent_s: float
    state: str
    starts: bool


def why_hung(one: SilentProcess, silent_s: float, ready_s: float) -> str:
    """Return why a process has to be killed and started again; empty: it has not.

    `silent_s`, `ready_s`: the bounds.
    """
    bound_s, setting = (ready_s, "services.ready_s") if one.starts else (silent_s, "services.silent_s")
    if one.silent_s <= bound_s or one.state in {"t", FROZEN}:
        return ""
    cause = {
        "T": "a signal had stopped its process",
        "D": "it waited for a disk or a device",
    }.get(one.state, "something in it blocked all else; its log has where")
    return f"no heartbeat for {one.silent_s:.0f} s ({setting}): {cause}"
