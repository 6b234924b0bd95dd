"""Makes text safe to print: control characters are spelled out.

Data can then neither move the cursor nor hide the text that follows.

Secrets that this process knows (`hide`) are left out too.

`SafeOutput` stands in for standard output and error of every process, so nothing that is printed or logged goes past
it. What rich draws itself, colours and bars, goes by; its consoles make the text in it safe (`services.output`).
"""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

__all__ = [
    "MASK",
    "SafeOutput",
    "encodable",
    "hide",
    "printable",
    "printable_lines",
    "protect_output",
    "without_hidden",
]

MASK = "***"
"""Stands where a secret was."""
_MIN_HIDDEN_CHARS = 8
"""A shorter secret is not looked for: it would be found in the middle of words."""
_HIDDEN: list[str] = []
"""Secrets, the longest first: a part of another is replaced after it."""


def hide(secret: str) -> None:
    """Leave `secret` out of everything that this process prints from now on."""
    if len(secret) >= _MIN_HIDDEN_CHARS and secret not in _HIDDEN:
        _HIDDEN.append(secret)
        _HIDDEN.sort(key=len, reverse=True)


def without_hidden(text: str) -> str:
    """Return the text without the secrets that were hidden."""
    for secret in _HIDDEN:
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def printable(text: str) -> str:
    """Return the text in one line: control, format and direction characters and line ends are spelled out."""
    return text if text.isprintable() else "".join(_spelled(char) for char in text)


def printable_lines(text: str) -> str:
    """Return the text as `printable` does, but with its line ends."""
    return "\n".join(map(printable, text.split("\n")))


def encodable(text: str) -> str:
    """Return the text with what UTF-8 cannot encode spelled out: halves of characters, bytes of names."""
    return text.encode(errors="backslashreplace").decode()


def _spelled(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


class SafeOutput:
    """A text stream that spells out control characters, of which only line ends and tabs pass."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The stream itself. A rich console writes there, since its output is meant to hold control sequences."""

    def write(self, text: str) -> int:
        shown = without_hidden(text)
        safe = shown if shown.isprintable() else "\t".join(map(printable_lines, shown.split("\t")))
        self.rich_proxied_file.write(safe)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def protect_output() -> None:
    """Let standard output and error of this process spell out control characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeOutput):
            setattr(sys, name, SafeOutput(stream))
