"""Reads conversations that a data set holds as one text. Pure.

Guarantees that only the form of HH-RLHF, with which no text begins by chance, is read as turns. Texts with the marks of
a chat template are found, but not read as turns, because such marks may also be what a question is about.
"""

import re

__all__ = ["read_transcript", "template_mark"]

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_HINTS = ("<|", "<start_of", "<end_of", "[INST]", "<<SYS>>", "<\uff5c", "<extra_id", "### ")
"""Beginnings of the marks: a text with none of them, as nearly all are, is passed over faster."""
_MARKS = re.compile(
    r"<\|im_start\|>|<\|im_end\|>|<\|start_header_id\|>|<\|eot_id\|>|<start_of_turn>|<end_of_turn>|\[INST\]|<<SYS>>"
    r"|<\|user\|>|<\|assistant\|>|<\|system\|>|<\|end\|>|<\uff5cUser\uff5c>|<\uff5cAssistant\uff5c>|<extra_id_1>"
    r"|### (?:Human|Assistant|Response):",
)


def read_transcript(text: str) -> list[dict[str, str]] | None:
    """Return the turns of a text of the form "\\n\\nHuman: ...\\n\\nAssistant: ...", None for any other text.

    A turn of the assistant without words, with which a prompt ends, is left out.
    """
    if not text.startswith("\n\nHuman:"):
        return None
    _, *parts = _TURN.split(text)
    turns = [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns


def template_mark(text: str) -> str | None:
    """Return the first mark of a chat template in a text, None if there is none."""
    found = _MARKS.search(text) if any(hint in text for hint in _HINTS) else None
    return None if found is None else found[0].strip()[:40]
