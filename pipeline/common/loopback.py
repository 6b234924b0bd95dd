"""Says which addresses lead to this machine alone. Pure."""

from ipaddress import ip_address

__all__ = ["LOOPBACK", "is_loopback"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""The addresses as settings name them."""


def is_loopback(host: str) -> bool:
    """Return whether a host, an address or a name, is this machine's loopback."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
