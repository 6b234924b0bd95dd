"""The addresses that only this machine reaches."""

__all__ = ["LOOPBACK"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
