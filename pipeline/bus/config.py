"""Settings of the bus: where the server is, and how much each stream may hold."""

import re
from typing import NamedTuple

import msgspec

from lachesis.pipeline.bus.addresses import check_addresses, split_addresses
from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.paths import Address, FilePath
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import CALLS, EVENTS, LEDGER, REPLAY, ROLLOUTS, TEACHER, WEIGHTS

__all__ = ["Connection", "ConnectionConfig", "ServerConfig", "StreamsConfig"]

_MIB, _GIB = 1 << 20, 1 << 30
_DEFAULT_BUDGETS = {
    ROLLOUTS: 2 * _GIB,
    EVENTS: 512 * _MIB,
    REPLAY: 256 * _MIB,
    TEACHER: 512 * _MIB,
    LEDGER: 1 * _GIB,
    CALLS: 512 * _MIB,
}
_DOMAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INBOX = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*", re.ASCII)


class StreamsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Byte budgets and durability of the run's streams. A full stream refuses messages; none is dropped in silence."""

    rollouts_bytes: int | None = None
    """Budget of ROLLOUTS, bytes on the server's disk, per replica. Default None: 2 GiB; a stream that exists with more
    keeps that, as each of those below does."""
    events_bytes: int | None = None
    """Budget of EVENTS, bytes. Default None: 512 MiB."""
    replay_bytes: int | None = None
    """Budget of REPLAY, bytes. Default None: 256 MiB."""
    teacher_bytes: int | None = None
    """Budget of TEACHER, bytes. Default None: 512 MiB."""
    ledger_bytes: int | None = None
    """Budget of LEDGER, bytes. Head-room of its own: its messages are what frees the other streams. Default None:
    1 GiB."""
    calls_bytes: int | None = None
    """Budget of CALLS, bytes: the conversations under way in environments that record their calls, and those of the
    last seconds. Default None: 512 MiB."""
    weights_bytes: int = 1 << 20
    """Budget of WEIGHTS, bytes, which weights.transport nats alone fills: three times what the weights take is ample, a
    little more than once is the least. Older versions make room for newer ones. Default 1 MiB: nothing is stored."""
    bucket_bytes: int = 256 << 20
    """Budget of the run's key-value bucket, bytes."""
    replicas: int = 1
    """Servers that hold a copy of each message: 1, 3 or 5."""
    duplicate_window_s: float = 600.0
    """How long a message id is remembered, seconds; longer than the longest outage that publishers wait out."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.replicas not in (1, 3, 5):
            raise ConfigError(f"streams.replicas is {self.replicas}: use 1, 3 or 5")
        if self.duplicate_window_s < 1:
            raise ConfigError(f"streams.duplicate_window_s is {self.duplicate_window_s}: use at least 1")
        for name, size in {
            **{name.lower(): size for name, size in self.budgets().items()},
            "bucket": self.bucket_bytes,
        }.items():
            if size < 1 << 20:
                raise ConfigError(f"streams.{name}_bytes is {size}: use at least {1 << 20} (1 MiB)")

    def set_budgets(self) -> dict[str, int]:
        """Return the byte budgets that are set, by the stream's name."""
        named = {
            ROLLOUTS: self.rollouts_bytes,
            EVENTS: self.events_bytes,
            REPLAY: self.replay_bytes,
            TEACHER: self.teacher_bytes,
            LEDGER: self.ledger_bytes,
            CALLS: self.calls_bytes,
            WEIGHTS: self.weights_bytes,
        }
        return {stream: size for stream, size in named.items() if size is not None}

    def budgets(self) -> dict[str, int]:
        """Return the byte budget of each stream by its name, as a new stream has it."""
        return _DEFAULT_BUDGETS | self.set_budgets()

    def total_bytes(self) -> int:
        """Return what the run's streams and its bucket may hold together, bytes."""
        return sum(self.budgets().values()) + self.bucket_bytes


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded nats-server."""

    host: Address = "127.0.0.1"
    """Address it listens on; anything but loopback should have TLS, so use a server of your own for that."""
    port: int | None = None
    """TCP port; None: any free one."""
    max_file_bytes: int | None = None
    """Most that all streams may take on disk, bytes; None: 1.25 times the sum of the default budgets."""
    start_timeout_s: float = 60.0
    """How long it may take until it answers, seconds. Recovering 3 GiB took 0.5 s."""
    stop_timeout_s: float = 10.0
    """How long a clean stop may take before it is killed, seconds."""

    def file_bytes(self) -> int:
        return self.max_file_bytes or StreamsConfig().total_bytes() * 5 // 4


class ConnectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach the server. Secrets are given by files or by the environment, never here."""

    url: Address = "nats://127.0.0.1:4222"
    """One server or several, separated by commas; `tls://`, or a ca_file, allows no connection without TLS. A user,
    password or token in it is percent-encoded, as in every URL."""
    user: str | None = None
    """User to connect as, with password_file."""
    password_file: FilePath | None = None
    """File that holds the password of user."""
    token_file: FilePath | None = None
    """File that holds the token."""
    creds_file: FilePath | None = None
    """NATS credentials file (JWT and nkey), where the server has accounts."""
    nkey_file: FilePath | None = None
    """File that holds an nkey seed."""
    nkey_folder: FilePath | None = None
    """Folder that `lachesis auth init` filled for the run: each process takes the nkey seed of its own service."""
    ca_file: FilePath | None = None
    """Certificate authority of the server, PEM; None: the system's."""
    cert_file: FilePath | None = None
    """This client's certificate, PEM, with its chain, where the server asks for one."""
    key_file: FilePath | None = None
    """Private key of cert_file, PEM; None: it is in cert_file."""
    tls_first: bool = False
    """Begin with TLS, before the server says anything: for servers with `tls { handshake_first: true }`."""
    domain: str | None = None
    """JetStream domain that holds the run's streams, where it is not that of the connected server but that of a leaf
    node or a hub. Default None: the connected server's JetStream."""
    inbox_prefix: str = "_INBOX"
    """Prefix of the subjects that answers come back on. With nkey_folder it is the one that the service is allowed."""
    connect_timeout_s: float = 10.0
    """How long to wait at start for the server, seconds."""
    window_bytes: int = 16 << 20
    """Most bytes published and not yet acknowledged."""
    window_messages: int = 256
    """Most messages published and not yet acknowledged."""
    ack_timeout_s: float = 10.0
    """How long to wait for one answer before asking again, seconds."""
    give_up_s: float = 60.0
    """How long a call other than publish and commit waits for the server before it raises, seconds."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_addresses(self.url)
        named = ("user", "token_file", "creds_file", "nkey_file", "nkey_folder")
        ways = [name for name in named if getattr(self, name)]
        if len(ways) > 1:
            raise ConfigError(f"nats has {' and '.join(ways)}: give one of them")
        if bool(self.user) != bool(self.password_file):
            raise ConfigError("nats.user and nats.password_file: set both, or none")
        if self.domain is not None and not _DOMAIN.fullmatch(self.domain):
            raise ConfigError(f"nats.domain is {self.domain!r}: use letters, digits, '_' and '-'")
        if not _INBOX.fullmatch(self.inbox_prefix):
            raise ConfigError(
                f"nats.inbox_prefix is {self.inbox_prefix!r}: use words joined by dots, without wildcards and blanks"
            )
        if self.tls_first and not self.needs_tls:
            raise ConfigError("nats.tls_first is set without TLS: give a tls:// address in nats.url, or nats.ca_file")
        if self.key_file and not self.cert_file:
            raise ConfigError("nats.key_file is set without nats.cert_file, whose key it is")

    @property
    def needs_tls(self) -> bool:
        """Whether a server that offers no TLS is to be refused."""
        return bool(self.ca_file or self.cert_file) or any(
            url.startswith(("tls://", "wss://")) for url in split_addresses(self.url)
        )


class Connection(NamedTuple):
    """What a connection was made with. `token` is a secret: it goes from process to process through pipes alone."""

    config: ConnectionConfig
    token: str | None
