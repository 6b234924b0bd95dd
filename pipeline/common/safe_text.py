"""Makes text safe to print: control characters are spelled out.

Data can then neither move the cursor nor hide the text that follows.

Secrets that this process knows (`hide`) are left out too.

`SafeOutput` stands in for standard output and error of every process, so nothing that is printed or logged goes past
it. What rich draws itself, colours and bars, passes unchanged; its consoles make the text in it safe
(`services.output`).
"""

import io
import os
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
    """Let standard output and error of this process spell out control characters.

    Also characters that their encoding lacks (PYTHONIOENCODING=ascii), which would end the process. Streams that the
    process began without (`>&-`) are /dev/null from now on: else the next file that it opens would get what is printed.
    """
    _open_missing()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, SafeOutput):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, SafeOutput(stream))


def _open_missing() -> None:
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)
        mode = "r" if name == "stdin" else "w"
        stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - another may replace it
        setattr(sys, name, stream)
