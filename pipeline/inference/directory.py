"""Finds the inference servers of a run.

Each server registers its URL under its role in the run's bucket, and clients look it up.

Guarantees that a client made by `open_role` follows a server that moved: after a call that fails for infrastructure
reasons the client looks the URL up again, so callers only retry. If several servers have one role, clients use the one
that registered last; once it is gone, one of the others registers again, so a role is never left to a server that
ended.
"""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

import anyio
import httpx

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.call_times import LOOK_S, CallTimes
from lachesis.pipeline.common.private_file import given_token, shared_token
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import DamagedError
from lachesis.pipeline.inference.answered_requests import AnsweredRequests
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.identity import IdentityGuard
from lachesis.pipeline.inference.serving.text_tokenizer import TextTokenizer
from lachesis.pipeline.telemetry.performance import CallRecord
from lachesis.schemas import keys
from lachesis.schemas.errors import ConfigError

__all__ = [
    "SLOW_SERVER_CURE",
    "InferenceDirectory",
    "RoleAccess",
    "check_url",
    "control_token",
    "open_configured_role",
    "open_role",
    "register",
    "registered_servers",
    "stay_registered",
    "url_file",
]

log = logging.getLogger("lachesis")

SLOW_SERVER_CURE: Final = (
    "look at that server, and at what stands before it; a request is given up after its time-out, and sent again"
)
_POLL_S = 0.5
_SILENT_S = 2.0
"""Without an answer for so long another server counts as gone."""
_MAX_CLIENTS = 8
"""Clients that are kept open: requests may be under way on those of servers that others have replaced."""


def control_token(folder: Path, role: str) -> str:
    """Return the token that is needed to change the state of the servers of `role`.

    The run's own processes, by its folder.

    Raises `StartupError` when it can be neither read nor written.
    """
    return shared_token(folder / "inference" / f"{role}.token")


class RoleAccess(NamedTuple):
    """How clients reach the servers of a role. `url` None: they register on the bus. `key_file` None: they need no key.

    `key_is_given`: the file is the user's own, and is not made.
    """

    role: str
    url: str | None = None
    key_file: Path | None = None
    key_is_given: bool = False

    def key(self) -> str | None:
        """Return the key for sampling, None if the servers need none.

        It is made if there is none yet. Raises `StartupError` when its file cannot be read or written, or holds no key.
        """
        if self.key_file is None:
            return None
        if self.key_is_given:
            return given_token(self.key_file, f"inference.{self.role}.key_file")
        return shared_token(self.key_file)


async def register(bus: Bus, run: str, role: str, url: str) -> None:
    """Say that the server of `role` answers at `url`."""
    await bus.put(keys.inference(role), url.encode())


async def registered_servers(bus: Bus, further_roles: Iterable[str] = ()) -> dict[str, str]:
    """Return the URL of the server that registered last for each role that has one."""
    roles = dict.fromkeys((*keys.INFERENCE_ROLES, *further_roles))
    found = {role: await bus.value(keys.inference(role)) for role in roles}
    return {role: entry.value.decode(errors="replace") for role, entry in found.items() if entry is not None}


def url_file(folder: Path, role: str) -> Path:
    """Return the file of the run's folder that holds the URL of its server of `role`, for other programs."""
    return folder / "inference" / f"{role}.url"


async def stay_registered(bus: Bus, run: str, role: str, url: str) -> None:
    """Register `url` again whenever the server that registered after it is gone. Runs until cancelled."""
    async with bus.watch(keys.inference(role)) as entries:
        async for entry in entries:
            if entry.value != url.encode():
                await _until_gone(entry.value)
                try:
                    newest = await bus.value(keys.inference(role))
                except DamagedError:
                    newest = None
                if newest is None or newest.value == entry.value:
                    await register(bus, run, role, url)


async def _until_gone(registered: bytes) -> None:
    try:
        url = registered.decode()
        check_url(url)
    except (ConfigError, UnicodeDecodeError):
        return  # no client could find a server by that
    async with InferenceClient(ClientConfig(url=url, timeout=_SILENT_S)) as client:
        while await client.ready():  # noqa: ASYNC110 - the other process offers nothing to wait on
            await anyio.sleep(_POLL_S)


class InferenceDirectory:
    """Hands out a client for the server's present URL; `current` waits for a server to register.

    A context that closes the clients it handed out.
    """

    def __init__(self, timeout_s: float, *, requested: Callable[[CallRecord], None] | None = None) -> None:
        """`requested`: see `InferenceClient`."""
        self.guard = IdentityGuard()
        """Compares the servers of its clients with the run's identity, once that is known."""
        self.times = CallTimes()
        self.answered = AnsweredRequests()
        self._texts: TextTokenizer | None = None
        self._timeout_s = timeout_s
        self._requested = requested
        self._clients: deque[AsyncExitStack] = deque()
        """Each closes one client; the newest is last."""
        self._client: InferenceClient | None = None
        self._changed = anyio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as closing:
                for one in self._clients:
                    closing.push_async_callback(one.aclose)

    @property
    def present(self) -> InferenceClient | None:
        """The client of the server that registered last; None: none has yet."""
        return self._client

    async def current(self) -> InferenceClient:
        """Return the client of the server that registered last, waiting until one has."""
        while self._client is None:
            await self._changed.wait()
        return self._client

    def hold(self, texts: TextTokenizer) -> None:
        """Let the clients tokenize in this process from now on, by the tokenizer of the servers; see
        `load_local_tokenizer`.
        """
        self._texts = texts
        if self._client is not None:
            self._client.texts = texts

    async def follow(self, bus: Bus, run: str, role: str, token: str | None = None) -> None:
        """Keep `current` true to the register; its clients bear `token`. Runs until cancelled."""
        async with bus.watch(keys.inference(role)) as entries:
            async for entry in entries:
                try:
                    await self.use(entry.value.decode(), token)
                except (
                    ConfigError,
                    UnicodeDecodeError,
                ) as error:  # whichever process wrote it: the next server registers again
                    log.warning("the register of inference servers holds no URL: %s", str(error)[:200])

    async def use(self, url: str, token: str | None = None) -> None:
        """Hand out clients for `url` from now on, with its `token`. Raises `ConfigError` when it is no URL."""
        check_url(url)
        if self._client is not None and self._client.config.url == url:
            return
        config = ClientConfig(url=url, timeout=self._timeout_s)
        client = InferenceClient(config, token=token, requested=self._requested)
        client.guard, client.times, client.answered = self.guard, self.times, self.answered
        client.texts = self._texts
        closing = AsyncExitStack()
        self._client = await closing.enter_async_context(client)
        self._clients.append(closing)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        if len(self._clients) > _MAX_CLIENTS:
            await self._clients.popleft().aclose()


def check_url(url: str) -> None:
    """Raise `ConfigError` where `url` is no address of an inference server."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"inference server {without_secrets(url)[:200]!r} is no URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.host or not 0 < (parts.port or 80) < 1 << 16:
        raise ConfigError(f"inference server {without_secrets(url)[:200]!r}: use http://HOST:PORT")


@asynccontextmanager
async def open_role(
    bus: Bus,
    run: str,
    role: str,
    *,
    url: str | None = None,
    key: str | None = None,
    token: str | None = None,
    timeout_s: float = 120.0,
    requested: Callable[[CallRecord], None] | None = None,
    report_slow: Callable[[str | None, bool], None] | None = None,
) -> AsyncIterator[InferenceDirectory]:
    """Yield the directory of one role: of the server at `url`, or of those that register on the bus.

    `key`: needed to sample (`RoleAccess.key`). `token`: needed to change the state of the run's own servers
    (`control_token`); it opens every path that the key opens, and is never sent to a server at `url`. `requested`: see
    `InferenceClient`. `report_slow` is called repeatedly with the server that is far slower than usual (None: none is)
    and whether all requests under way are that slow.
    """
    async with InferenceDirectory(timeout_s, requested=requested) as directory, background() as tasks:
        if url is not None:
            await directory.use(url, key)
        else:
            tasks.start_soon(directory.follow, bus, run, role, token or key)
        if report_slow is not None:
            tasks.start_soon(_report_slow, directory.times, report_slow)
        yield directory


@asynccontextmanager
async def open_configured_role(
    bus: Bus,
    run: str,
    access: RoleAccess,
    *,
    token: str | None = None,
    timeout_s: float = 120.0,
    requested: Callable[[CallRecord], None] | None = None,
    report_slow: Callable[[str | None, bool], None] | None = None,
) -> AsyncIterator[InferenceDirectory]:
    """Yield the directory of a role by the address and the key that the run is configured with.

    All else is as in `open_role`. Raises as `RoleAccess.key`.
    """
    async with open_role(
        bus,
        run,
        access.role,
        url=access.url,
        key=access.key(),
        token=token,
        timeout_s=timeout_s,
        requested=requested,
        report_slow=report_slow,
    ) as directory:
        yield directory


async def _report_slow(times: CallTimes, report: Callable[[str | None, bool], None]) -> None:
    while True:
        now_s = time.monotonic()
        times.check_clock(now_s)
        late = times.late(now_s)
        if late is None:
            report(None, False)
        else:
            report(f"{late.what} does not answer: {late.describe('requests')}", late.are_all)
        await sleep_until_tick(LOOK_S)
