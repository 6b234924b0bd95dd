"""Makes the ids of single writers' commits: one commit has one id, which no other process can guess.

A server drops a message whose id its stream has seen before. If the id of a commit were predictable, any writer of its
stream could store something else under that id, and the commit would never be stored.
"""

import hmac
import secrets

__all__ = ["commit_id"]

_KEY = secrets.token_bytes(32)
"""Only this process knows it; no id reveals it."""


def commit_id(name: str) -> str:
    """Return the id of the commit that `name` stands for in this process."""
    return f"{name}.{hmac.digest(_KEY, name.encode(), 'sha256').hex()[:24]}"
