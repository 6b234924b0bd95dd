"""A notice: what stands in the way of a run, or harms it, so that a person has to know."""

import msgspec

from lachesis.schemas.values import Count

__all__ = ["MAX_NOTICES", "MAX_NOTICE_CHARS", "REFUSED_POLICY", "Notice"]

MAX_NOTICES = 32
"""Notices of one service at most: however much one has to say, it does not hide the others."""
MAX_NOTICE_CHARS = 1000
"""Characters of each text of a notice."""
REFUSED_POLICY = "policy"
"""Key of an inference server's notice that it has refused a policy, the notice's `version`."""


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`key` names it for as long as it holds, among those of `source`: a service, a process, or a part of the server.

    `what` is so, `why`, and how to `mend` it; empty: nothing is known of that. `since_ns`: since when, Unix ns; None:
    not known. `held_up`: who waits because of it. `stops`: what it concerns does not go on by itself. `processes`: how
    many of the source say it. `version`: the policy that it is about; empty: it is about none.
    """

    key: str
    source: str
    what: str
    since_ns: Count | None = None
    why: str = ""
    mend: str = ""
    held_up: list[str] = []
    stops: bool = False
    processes: Count = 1
    version: str = ""
