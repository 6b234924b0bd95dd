"""The final answer of a piece of mathematics: what the last `\\boxed{...}` holds."""

__all__ = ["boxed"]

_MAX_ANSWER_CHARS = 512
_MAX_DEPTH = 64


def boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{}` or `\fbox{}` after the last `</think>` holds.

    None where there is none, where its braces do not balance, and beyond 512 characters or 64 levels of braces.
    """
    text = text.rpartition("</think>")[2]
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    brace = text.find("{", start)
    if brace < 0 or text[start:brace].strip() not in {r"\boxed", r"\fbox"}:
        return None
    depth, i = 0, brace
    while i < min(len(text), brace + _MAX_ANSWER_CHARS + 2):
        match text[i]:
            case "\\":
                i += 1  # an escaped brace is text
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if depth > _MAX_DEPTH:
            return None
        i += 1
        if not depth:
            return text[brace + 1 : i - 1].strip()
    return None
