"""Shortens long texts in their middle, since errors say at their end what happened. Pure."""

__all__ = ["cut_middle"]

_CUT = " ... "


def cut_middle(text: str, max_chars: int) -> str:
    """Return the text in at most `max_chars` characters.

    Of a longer one they are a third from its beginning and two thirds from its end.
    """
    if len(text) <= max_chars:
        return text
    room = max(0, max_chars - len(_CUT))
    first = room // 3
    return f"{text[:first]}{_CUT}{text[len(text) - room + first :]}"[:max_chars]
