"""Observes the tokenizer of the policy's server, for groups of environments that use it themselves.

Guarantees that no group is stored under the hash of a tokenizer that was never seen: the server is compared with the
run's before each post is taken, and while it differs, posts wait. A client that uses another server is not noticed
here.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import anyio

from lachesis.pipeline.errors import AccessError, InfrastructureError, WrongServerError
from lachesis.pipeline.extensions.atropos.gateway.policies import PolicyVersions
from lachesis.pipeline.inference.directory import InferenceDirectory, RoleAccess, open_configured_role
from lachesis.pipeline.runtime.service import Service

__all__ = ["ServerIdentity"]

_RETRY_S = 0.5
_TIMEOUT_S = 10.0


class ServerIdentity:
    """Compares the policy's server with the run's newest policy. Use `open`."""

    def __init__(self, service: Service, policies: PolicyVersions, directory: InferenceDirectory) -> None:
        self.policies = policies
        self._directory = directory
        self._guard = directory.guard
        self._guard.report = lambda problem: service.set_problem(
            "policy's server", problem, held_up=["environments of other projects", "trainer"], stops=True
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, service: Service, access: RoleAccess, policies: PolicyVersions) -> AsyncIterator[Self]:
        """Yield it, following which server there is."""
        async with open_configured_role(service.bus, service.run, access, timeout_s=_TIMEOUT_S) as directory:
            yield cls(service, policies, directory)

    async def tokenizer_hash(self) -> str | None:
        """Return the hash of the observed tokenizer; wait while it differs from the run's.

        None: no server is known, or it has never been reached; nothing was observed.
        """
        while True:
            client, record = self._directory.present, self.policies.newest_version
            if client is None or record is None:
                return None
            self._guard.expect(record)
            try:
                await self._guard.check(client)
            except WrongServerError:
                await anyio.sleep(_RETRY_S)
                continue
            except (InfrastructureError, AccessError):  # unavailable, or access is refused: the last observation counts
                if self._guard.problem is not None:
                    await anyio.sleep(_RETRY_S)
                    continue
            return None if self._guard.observed is None else self._guard.tokenizer_hash({})
