"""Reads the statements of an interactive session of Python, which follow `>>>` and `...`."""

import re

__all__ = ["statements_of_session"]

_PROMPT = re.compile(r"[ \t]*>>>(?: |$)")
_MORE = re.compile(r"[ \t]*\.\.\.(?: |$)")


def statements_of_session(text: str) -> str | None:
    """Return the statements, without their output; None if the text is not a session."""
    lines = text.strip("\n").split("\n")
    if not _PROMPT.match(lines[0]):
        return None
    statements: list[str] = []
    for line in lines:
        prompt = _PROMPT.match(line) or (_MORE.match(line) if statements else None)
        if prompt is not None:
            statements.append(line[prompt.end() :])
    return "\n".join(statements).strip("\n")
