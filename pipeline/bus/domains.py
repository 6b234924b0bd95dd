"""Subjects of JetStream's API and of keys for a domain at the other end of a leaf node. Pure."""

__all__ = ["in_domain", "out_of_domain"]

_API, _KEYS = "$JS.API.", "$KV."


def in_domain(subject: str, domain: str | None) -> str:
    """Return the subject of a key, or of a request to JetStream's API, as it is for `domain`; others stay.

    Leaf nodes let neither through as they are, since both ends may have their own.
    """
    if domain is None or not subject.startswith((_API, _KEYS)):
        return subject
    return f"$JS.{domain}.API.{subject.removeprefix(_API)}"


def out_of_domain(text: str, domain: str | None) -> str:
    """Return what a server says of subjects, in lower case, as if there were no `domain`."""
    if domain is None:
        return text
    api, keys = f"$JS.{domain}.API.".lower(), _KEYS.lower()
    return text.replace(f"{api}{keys}", keys).replace(api, _API.lower())
