"""Settings of the HTTP gateway."""

from typing import Annotated

from msgspec import Meta, Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.loopback import LOOPBACK
from lachesis.pipeline.common.paths import Address, FilePath, OpenSwitch
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError

__all__ = ["GatewayConfig", "settings_of"]


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP gateway for environments that speak the Atropos trajectory API. It runs if the run has such an
    environment: [environments.NAME] with kind = "gateway"; NAME is the name that the environment gives itself.
    """

    host: Address = "127.0.0.1"
    """Address it listens on. It speaks plain HTTP. Default 127.0.0.1."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port; 0: any free one, which its log and its heartbeat name. Default 8000, as Atropos."""
    token_file: FilePath | None = None
    """File that holds the token clients must send, as a bearer token or as the password of Basic authentication: an
    environment that can do neither names it in its URL, http://any:TOKEN@host:port. Default None: gateway.token in the
    run's folder, made at the first start; gateway.url beside it holds the whole URL."""
    needs_token: OpenSwitch = True
    """Whether clients must send the token. If not, every process and user of this machine may publish rollouts, so
    `host` must be a loopback address. Default true."""
    hold_s: Annotated[float, Meta(gt=0)] = 240.0
    """Seconds for which a group is held while the governor grants no lease, before 503 is answered. The usual client
    waits 300 and loses the group after three answers of 503. Default 240."""
    body_bytes: Annotated[int, Meta(ge=1024)] = 64 << 20
    """Maximum bytes of a request, unpacked. Default 64 MiB."""
    head_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds in which a request's headers must have arrived; after them the client is answered 408. Default 10."""
    body_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds in which a request's body must have arrived; after them the client is answered 408. Default 60."""
    receiving_bytes: Annotated[int, Meta(ge=1024)] = 256 << 20
    """Maximum bytes of bodies that are arriving or wait for conversion. If they are used up, the body that has been
    arriving for the longest, and for at least 5 s, is answered 408. Default 256 MiB."""
    held_bytes: Annotated[int, Meta(ge=1024)] = 256 << 20
    """Maximum bytes of encoded groups that wait for leases or the broker; environments have equal parts of it. Further
    groups are answered 503 at once. Default 256 MiB."""
    buffer_bytes: Annotated[int, Meta(ge=0, le=2 << 20)] = 512 << 10
    """Maximum bytes of groups smaller than their environment's group size that wait, in a bucket of the broker, for
    others to make up that size. A group that does not fit is published as it is. Default 512 KiB."""
    generation_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that foreign groups take to be generated. Their clients do not say which weights made them: a group
    counts as made by the policy that was the newest this long before it arrived. Default 0."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.host not in LOOPBACK and not self.needs_token:
            raise ConfigError(
                f"gateway.host is {self.host}: every client that reaches it could publish rollouts; leave "
                "gateway.needs_token "
                "true, or listen on 127.0.0.1"
            )


_DEFAULTS = GatewayConfig()


def settings_of(config: RunConfig) -> GatewayConfig:
    """Return [gateway]."""
    return config.at("gateway", _DEFAULTS)
