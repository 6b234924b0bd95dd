"""Remembers which posts are stored, for clients that send one again after the duplicate window.

ROLLOUTS has each group of a client under the digest of its bytes. A gateway reads these digests at its start, follows
those that another gateway stores, and writes them to the bucket from time to time, so that trimmed history is
remembered too. The horizon is the newest `MAX_POSTS` of the run, whether or not their rollouts are still there; an
older post counts as new.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence

import anyio

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.routing import MSG_ID_HEADER
from lachesis.pipeline.errors import HistoryLostError, InfrastructureError, NotFoundError
from lachesis.pipeline.extensions.atropos.gateway.logic.posts import DIGEST_BYTES, MAX_POSTS, StoredPosts
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.schemas import subjects
from lachesis.schemas.subjects import ROLLOUTS

__all__ = ["KnownPosts"]

log = logging.getLogger("lachesis")

_SAVE_S = 10.0


class KnownPosts:
    """The posts of `envs`. Call `catch_up` first; run `follow` and `save` beside the gateway."""

    def __init__(self, bus: Bus, run: str, envs: Sequence[str], store: GatewayStore) -> None:
        self._bus = bus
        self._store = store
        self._filters = [subjects.rollout(run, env) for env in envs]
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._seq, self._stored_ns, self._saved_seq = 0, 0, 0

    def __len__(self) -> int:
        return len(self._known)

    def is_known(self, msg_id: str) -> bool:
        """Return whether the group with this message id is stored, or was."""
        return _digest(msg_id) in self._known

    async def catch_up(self) -> None:
        """Read the digests stored now. Those in the bucket are dropped if the stream was rolled back."""
        saved = await self._store.posts()
        if saved.seq and await self._continues(saved):
            digests = saved.digests
            starts = range(0, len(digests) - DIGEST_BYTES + 1, DIGEST_BYTES)
            self._known = OrderedDict.fromkeys(digests[at : at + DIGEST_BYTES] for at in starts)
            self._seq, self._stored_ns = saved.seq, saved.stored_ns
        elif saved.seq:
            log.warning("ROLLOUTS is not what it was when the gateway last noted its posts: reading it again")
        self._saved_seq = self._seq
        try:
            await self._read(follow=False)
        except HistoryLostError:
            self._known.clear()
            self._seq = self._stored_ns = 0
            await self._read(follow=False)

    async def follow(self) -> None:
        """Add the digests of groups stored from now on."""
        await self._read(follow=True)

    async def save(self) -> None:
        """Store the digests now and then. Raises `FencedError` once another gateway has taken over."""
        while True:
            await anyio.sleep(_SAVE_S)
            if self._seq > self._saved_seq:
                seq, posts = self._seq, self._to_store()
                try:
                    await self._store.set_posts(posts)
                except InfrastructureError as error:  # the stream says it as well, as long as it is not trimmed
                    log.warning("which posts are stored could not be noted: %s", error)
                else:
                    self._saved_seq = seq

    def _to_store(self) -> StoredPosts:
        return StoredPosts(seq=self._seq, stored_ns=self._stored_ns, digests=b"".join(self._known))

    async def _continues(self, saved: StoredPosts) -> bool:
        """Return whether the stream goes on from what was saved."""
        try:
            return (await self._bus.get_head(ROLLOUTS, saved.seq)).time_ns == saved.stored_ns
        except NotFoundError:  # trimmed, or the end was lost, which the reader notices
            return True

    async def _read(self, *, follow: bool) -> None:
        async with self._bus.read(
            ROLLOUTS, self._filters, start=self._seq + 1, headers_only=True, follow=follow
        ) as messages:
            async for message in messages:
                self._add(message)

    def _add(self, message: StoredMessage) -> None:
        msg_id = message.headers.get(MSG_ID_HEADER)
        self._seq, self._stored_ns = message.seq, message.time_ns
        if msg_id is not None:
            self._known[_digest(msg_id)] = None
            if len(self._known) > MAX_POSTS:
                self._known.popitem(last=False)


def _digest(msg_id: str) -> bytes:
    return hashlib.sha256(msg_id.encode(errors="surrogatepass")).digest()[:DIGEST_BYTES]
