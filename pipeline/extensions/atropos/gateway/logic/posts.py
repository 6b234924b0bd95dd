"""Defines the form in which the bucket records which posts are stored. Pure."""

from typing import Annotated, Final

from msgspec import Meta, Struct

__all__ = ["DIGEST_BYTES", "MAX_POSTS", "StoredPosts"]

MAX_POSTS: Final = 1 << 16
"""Posts that are remembered; 640 KiB in the bucket."""
DIGEST_BYTES: Final = 10


class StoredPosts(Struct, frozen=True, kw_only=True):
    """Digests of the posts up to sequence `seq` of ROLLOUTS, oldest first, each of as many bytes.

    `stored_ns`: the server's time of the message there, which distinguishes this stream from one that regrew.
    """

    seq: int = 0
    stored_ns: int = 0
    digests: Annotated[bytes, Meta(max_length=MAX_POSTS * DIGEST_BYTES)] = b""
