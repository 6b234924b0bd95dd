"""Connects to a server, and finds at start the faults that would otherwise show much later.

Raises `StartupError` when there is no server, or it is too old, has no JetStream or takes too small messages, and
`AccessError` when it refuses the credentials or cannot prove its identity; the text says what to do and never holds a
secret. If TLS is required, nothing is sent without it, neither at first nor after a reconnect.
"""

import importlib.util
import itertools
import random
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import ParseResult

import anyio
import msgspec
import nats.errors

from lachesis.pipeline.bus.addresses import host_and_port, is_websocket, parse_address, split_addresses
from lachesis.pipeline.bus.blobs import INLINE_BYTES
from lachesis.pipeline.bus.client import NatsClient, hang_up, is_refusal, requested_cancellations
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.diagnosis import explain
from lachesis.pipeline.bus.failover import Failover
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.permissions import inbox_prefix
from lachesis.pipeline.bus.refused_credentials import describe_refused
from lachesis.pipeline.bus.replies import error_in
from lachesis.pipeline.bus.server_link import ServerLink, is_no_responder, patience_s
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.errors import AccessError, StartupError
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import check_name

__all__ = ["MIN_PAYLOAD_BYTES", "MIN_SERVER_VERSION", "connect", "for_identity"]

MIN_SERVER_VERSION = (2, 11)
"""Oldest nats-server that the bus was made for."""
MIN_PAYLOAD_BYTES = INLINE_BYTES + (1 << 20)
"""Least `max_payload` of a server: a message stored as one, its headers, and room for commits."""

_PENDING_BYTES = 4 << 20
_RETRY_S = 0.2
_CLOSE_S = 0.5
_LISTENS_S = 1.0
_OTHER_PORT = "attempted to connect to"
"""How a nats-server begins what it says to a client at its port for leaf nodes, gateways or routes."""
_HUNG_UP = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)


def for_identity(config: ConnectionConfig, identity: str) -> ConnectionConfig:
    """Return the settings with which `identity` (a service, or `access.OPERATOR`...) connects.

    Raises `ConfigError` when its key is not in `config.nkey_folder`.
    """
    if config.nkey_folder is None:
        return config
    key = Path(config.nkey_folder) / f"{identity}.nk"
    if not key.is_file():
        raise ConfigError(
            f"nats.nkey_folder: there is no {key}, the key of {identity}; make it with `lachesis auth init`, or copy "
            "it from where that was run"
        )
    return msgspec.structs.replace(config, nkey_folder=None, nkey_file=str(key), inbox_prefix=inbox_prefix(identity))


async def connect(
    url: str | None = None,
    *,
    run: str,
    name: str,
    token: str | None = None,
    config: ConnectionConfig | None = None,
    needs_jetstream: bool = True,
) -> NatsBus:
    """Connect and return the bus of `run`; use it as `async with await connect(...) as bus`.

    `url` goes before `config.url`. `name` is shown in the server's own monitoring. `token` goes before
    `config.token_file`. Waits `config.connect_timeout_s` for a server that is not there yet. Without `needs_jetstream`
    it does not wait for JetStream: what is broadcast can be heard also where nothing can be stored.
    """
    check_name("run", run)
    config = config or ConnectionConfig()
    if url is not None:
        config = msgspec.structs.replace(config, url=url)
    options = _credentials(config, token)
    errors: list[Exception] = []
    config = _shuffled(config)
    deadline = anyio.current_time() + config.connect_timeout_s
    while True:
        link = await _attempt(config, run, name, options, errors)
        if link is not None:
            break
        shown = without_secrets(config.url)
        _raise_if_refused(errors[-1], shown, describe_refused(config, shown, has_token=token is not None))
        if anyio.current_time() > deadline:
            if config.needs_tls and isinstance(errors[-1], _HUNG_UP):  # the reason may be lost on the way
                raise StartupError(
                    f"the server at {shown} hangs up whenever it is connected to: if it is because it refuses this "
                    "client's certificate, set nats.cert_file and nats.key_file to one it knows"
                )
            raise StartupError(_no_answer(config, shown, errors[-1], listens=await _listens(config)))
        await anyio.sleep(_RETRY_S)

    async def dial(address: str) -> ServerLink | None:
        return await _attempt(msgspec.structs.replace(config, url=address), run, name, options, [])

    failover = Failover(link, dial, _home(config))
    try:
        async with background() as tasks:
            tasks.start_soon(failover.run)
            await _check(link, without_secrets(config.url), needs_jetstream=needs_jetstream)
    except BaseException:
        await link.close()
        raise
    return NatsBus(link, failover)


async def _listens(config: ConnectionConfig) -> bool:
    """Return whether anything accepts connections at the last address."""
    place = host_and_port(parse_address(split_addresses(config.url)[-1]))
    with anyio.move_on_after(_LISTENS_S):
        try:
            async with await anyio.connect_tcp(*place):
                return True
        except OSError:
            return False
    return False


def _no_answer(config: ConnectionConfig, shown: str, error: Exception, *, listens: bool) -> str:
    """Return why no server answered; `listens`: whether something accepts connections there."""
    reason = without_secrets(str(error))
    if listens and is_websocket(config.url):
        return (
            f"what listens at {shown} is no websocket of a nats-server ({reason:.80}): for its ordinary port write "
            "nats:// or tls://"
        )
    if listens and _OTHER_PORT in reason.lower():
        return (
            f"what listens at {shown} is another port of a nats-server ({reason:.80}): name the one for clients, 4222 "
            "by default"
        )
    if listens and (isinstance(error, TimeoutError) or "INFO message" in reason):
        first = (
            "; nats.tls_first is set, which only servers with `handshake_first` take"
            if config.tls_first
            else ", or begins with TLS (then set nats.tls_first = true)"
        )
        return (
            f"what listens at {shown} does not greet as a nats-server does. Perhaps the server hangs, or this is its "
            f"port for monitoring (8222), websockets (ws://, wss://), leaf nodes or its cluster{first}"
        )
    return (
        f"no nats-server answers at {shown} ({type(error).__name__}: {reason}); start one (`nats-server -js`, with "
        "max_payload: 8MB in its configuration), or use the embedded one by leaving out --nats"
    )


def _shuffled(config: ConnectionConfig) -> ConnectionConfig:
    """Return the settings with the servers in random order, in which the client tries them."""
    urls = split_addresses(config.url)
    random.shuffle(urls)
    return msgspec.structs.replace(config, url=",".join(urls))


def _home(config: ConnectionConfig) -> ParseResult | None:
    """Return the server to come back to, the first in the connection's own order; None where there is only one."""
    first, *others = split_addresses(config.url)
    return parse_address(first) if others else None


def _raise_if_refused(error: Exception, shown: str, refused: str) -> None:
    """Raise `AccessError` where trying again cannot help; `refused` is what to say of credentials."""
    if is_refusal(str(error)):
        raise AccessError(refused)
    if isinstance(error, nats.errors.SecureConnWantedError):
        raise AccessError(
            f"the server at {shown} offers no TLS, which nats.url or nats.ca_file asks for; nothing was sent"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        raise AccessError(
            f"the server at {shown} cannot prove its identity ({error.verify_message}): set nats.ca_file to the "
            "certificate authority of its certificate, and use a name that is in it"
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in str(error):
        raise AccessError(
            f"the server at {shown} refuses this client's certificate ({error.reason}): set nats.cert_file and "
            "nats.key_file to one it knows"
        )


async def _attempt(
    config: ConnectionConfig, run: str, name: str, options: dict[str, Any], errors: list[Exception]
) -> ServerLink | None:
    nc = NatsClient()
    nc.needs_tls = config.needs_tls
    nc.domain = config.domain
    link = ServerLink(nc, config, run)
    try:
        with requested_cancellations():
            await nc.connect(
                split_addresses(config.url),
                name=name,
                dont_randomize=True,  # the order is random already, and the first is the one to come back to
                allow_reconnect=False,  # for this attempt: its failure must come to us
                max_reconnect_attempts=1,
                reconnect_time_wait=_RETRY_S,  # type: ignore[arg-type, unused-ignore]  # seconds; fractions work
                ping_interval=3,
                max_outstanding_pings=2,
                pending_size=_PENDING_BYTES,
                inbox_prefix=config.inbox_prefix,
                error_cb=link.on_error,
                disconnected_cb=link.on_disconnected,
                reconnected_cb=link.on_reconnected,
                closed_cb=link.on_closed,
                **options,
            )
        nc.options.update(allow_reconnect=True, max_reconnect_attempts=-1)
        await link.setup()
    except (OSError, nats.errors.Error, TimeoutError, ValueError) as error:
        errors.append(link.last_error or error)  # the client's own says no more than that no server is left
        await hang_up(nc, within_s=_CLOSE_S)  # it would wait for the goodbye of a peer it does not trust
        return None
    except BaseException:
        await hang_up(nc, within_s=_CLOSE_S)
        raise
    return link


async def _check(link: ServerLink, shown: str, *, needs_jetstream: bool) -> None:
    version = link.nc.connected_server_version
    if (version.major, version.minor) < MIN_SERVER_VERSION:
        raise StartupError(
            f"nats-server at {shown} is {version.major}.{version.minor}.{version.patch}; "
            f"{'.'.join(map(str, MIN_SERVER_VERSION))} or newer is needed"
        )
    if needs_jetstream:
        await _check_jetstream(link, shown)
    if link.nc.max_payload < MIN_PAYLOAD_BYTES:
        raise StartupError(
            f"nats-server at {shown} takes messages of {link.nc.max_payload} bytes, where {MIN_PAYLOAD_BYTES} may be "
            "needed: set max_payload: 8MB in its configuration"
        )


async def _check_jetstream(link: ServerLink, shown: str) -> None:
    """Wait until JetStream answers: a cluster that has just lost its leader, or just started, takes seconds."""
    reason, joined_by_s = "silence", anyio.current_time() + link.config.connect_timeout_s
    with link.waits.waiting("JetStream"), anyio.move_on_after(link.config.give_up_s):
        for attempt in itertools.count():
            await link.wait_up()
            msg = await link.request_once("$JS.API.INFO", b"", timeout_s=patience_s(attempt, link.config.ack_timeout_s))
            link.check()
            error = error_in(msg.data) if msg is not None else None
            if msg is not None and error is None and not is_no_responder(msg):
                return
            joins = link.config.domain is not None and anyio.current_time() < joined_by_s  # as leaf nodes do by and by
            if msg is not None and not joins and (error is None or not error.is_transient):
                raise StartupError(_no_jetstream(link, shown))
            reason = error.description if error else reason
            await anyio.sleep(_RETRY_S)
    raise StartupError(f"JetStream at {shown} is not available ({reason}): {await explain(link, '')}")


def _no_jetstream(link: ServerLink, shown: str) -> str:
    domain = link.nc.jetstream_domain
    if link.config.domain is not None:
        own = f" (its own is {domain!r})" if domain else ""
        return (
            f"nats-server at {shown} reaches no JetStream of the domain {link.config.domain!r}{own}: set nats.domain "
            "to what the server that stores has as `jetstream { domain: ... }`, and connect the leaf node to it"
        )
    if link.nc.has_jetstream:
        return (
            f"nats-server at {shown} has JetStream, and this account reaches none of it: if a reload has added the "
            "account, reload the server once more, which connects it; else it needs `jetstream: enabled` in the "
            "server's configuration (`lachesis auth init` writes it)"
        )
    return (
        f"nats-server at {shown} has no JetStream: start it with `-js`. If JetStream is at the other end of a leaf "
        "node, set nats.domain to the domain of that server"
    )


def _credentials(config: ConnectionConfig, token: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if is_websocket(config.url) and importlib.util.find_spec("aiohttp") is None:
        raise StartupError("connecting by ws:// or wss:// needs the package aiohttp: pip install aiohttp")
    if config.user is not None and config.password_file is not None:
        options |= {"user": config.user, "password": _secret("password_file", config.password_file)}
    if token is None and config.token_file is not None:
        token = _secret("token_file", config.token_file)
    if token is not None:
        options["token"] = token
    if config.creds_file is not None:
        options["user_credentials"] = _existing("creds_file", config.creds_file)
    if (config.creds_file or config.nkey_file) and importlib.util.find_spec("nkeys") is None:
        raise StartupError(f"connecting with an nkey needs the package nkeys: {install_command('auth')}")
    if config.nkey_file is not None:
        options["nkeys_seed_str"] = _seed(config.nkey_file)
    if config.needs_tls:
        options["tls"] = _tls(config)
        options["tls_handshake_first"] = config.tls_first
    return options


def _tls(config: ConnectionConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=_existing("ca_file", config.ca_file) if config.ca_file else None)
    except ssl.SSLError as error:
        raise ConfigError(
            f"nats.ca_file {config.ca_file} holds no certificate ({error.reason}); give the authority's as PEM"
        ) from error
    if config.cert_file is not None:
        key = _existing("key_file", config.key_file) if config.key_file else None
        try:
            context.load_cert_chain(_existing("cert_file", config.cert_file), key)
        except ssl.SSLError as error:
            raise ConfigError(f"nats.cert_file {config.cert_file} and its key do not fit: {error.reason}") from error
    return context


def _existing(setting: str, path: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"nats.{setting}: there is no file {path}")
    return path


def _seed(path: str) -> str:
    import nkeys

    text = _secret("nkey_file", path)
    try:
        nkeys.from_seed(text.encode()).wipe()
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(
            f"nats.nkey_file: {path} holds no nkey seed; copy it again, or make one with `lachesis auth init`"
        ) from error
    return text


def _secret(setting: str, path: str) -> str:
    try:
        text = read_small_text(Path(_existing(setting, path))).strip()
    except OSError as error:
        raise ConfigError(f"nats.{setting}: {path}: {error.strerror}") from error
    if not text:
        raise ConfigError(f"nats.{setting}: file {path} is empty")
    return text
