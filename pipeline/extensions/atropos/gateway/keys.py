"""Spells the keys of the run's bucket that hold the gateway's state."""

__all__ = ["stored_key"]


def stored_key(name: str = "*") -> str:
    """Return the key of what the gateway stores by that name, for example groups that wait."""
    return f"gateway.{name}"
