"""Says which of a client's credentials a server does not take, and how to mend that. Pure.

A server gives no reason: an unknown user, an unknown account and a wrong password are one answer. What the client gave
is known here, so the text is about that, and it never holds a secret.
"""

from lachesis.pipeline.bus.addresses import parse_address, split_addresses
from lachesis.pipeline.bus.config import ConnectionConfig

__all__ = ["describe_refused"]


def describe_refused(config: ConnectionConfig, shown: str, *, has_token: bool) -> str:
    """Return one sentence about the server at `shown`.

    `has_token`: a token was given apart from the settings.
    """
    if config.nkey_file:
        return (
            f"the server at {shown} does not know the key {config.nkey_file}: no account of the configuration that it "
            "has read has its user; a key that `lachesis auth init` made is known once the server has read the "
            "auth.conf it wrote (nats-server --signal reload)"
        )
    if config.creds_file:
        return (
            f"the server at {shown} does not take the credentials in {config.creds_file}: it does not know their "
            "account or user, or they are revoked or have expired; push the account to it, or get new credentials"
        )
    if config.user:
        return (
            f"the server at {shown} does not take the user {config.user!r} with the password in "
            f"{config.password_file}: give what its configuration has"
        )
    if has_token or config.token_file:
        which = f"in {config.token_file}" if config.token_file else "given"
        return f"the server at {shown} does not take the token {which}: give the one in its configuration"
    if any(parse_address(url).username for url in split_addresses(config.url)):
        return f"the server at {shown} does not take the credentials in nats.url: give what its configuration has"
    return (
        f"the server at {shown} wants credentials, and none were given: set nats.nkey_folder to what `lachesis auth "
        "init` made for the run, or nats.token_file, nats.user with nats.password_file, or nats.creds_file"
    )
