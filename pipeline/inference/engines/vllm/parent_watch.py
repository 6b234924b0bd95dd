"""Ends vLLM once the service that started it is gone, even if vLLM's own shutdown never ends.

Runs inside vLLM's process, on the standard library. The kernel sends vLLM SIGTERM when the service dies, and its engine
ends; but its server was once seen to wait for ever then, deaf to further signals.
"""

import logging
import os
import select
import signal
import threading
import time

__all__ = ["OWNER", "end_with_owner"]

OWNER = "LACHESIS_VLLM_OWNER"
"""Environment variable with the pid of the service that starts vLLM in a session of its own."""
GRACE_S = 30.0
"""Seconds that vLLM has to end by itself."""

log = logging.getLogger("vllm.lachesis")


def end_with_owner(grace_s: float = GRACE_S) -> None:
    """Kill this process group `grace_s` after the death of the parent that `OWNER` names.

    Does nothing in a process that has another parent, as vLLM's workers have.
    """
    owner = int(os.environ.pop(OWNER, "0"))
    if not owner or owner != os.getppid():
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        return  # it died just now: the SIGTERM comes before anything is served

    def wait_and_kill() -> None:
        select.select([watched], [], [])
        time.sleep(grace_s)
        log.warning("the service that started this server has been gone for %.0f s; ending it", grace_s)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait_and_kill, name="owner", daemon=True).start()
