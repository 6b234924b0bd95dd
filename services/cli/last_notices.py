"""Shows the supervisor's notices where a command fails because the run's server does not answer."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import AccessError, InfrastructureError, StartupError, leaves
from lachesis.pipeline.notices.text import notice_lines
from lachesis.services.output import printable
from lachesis.services.run.notices_file import read_notices

__all__ = ["showing_last_notices"]

_OUT_OF_REACH = (StartupError, InfrastructureError, AccessError)


@contextmanager
def showing_last_notices(config: RunConfig, *, on_stderr: bool = False) -> Iterator[None]:
    """Print what the supervisor says in the run's folder if the context fails for want of a server."""
    try:
        yield
    except Exception as error:
        if any(isinstance(leaf, _OUT_OF_REACH) for leaf in leaves(error)):
            for line in notice_lines(read_notices(config.path) or [], time.time_ns()):
                print(printable(f"notice: {line}"), file=sys.stderr if on_stderr else sys.stdout)
        raise
