"""Determines the encoding of a text: UTF-8, UTF-16 or UTF-32, with or without a mark.

Windows' programs put a byte order mark before UTF-8, and write UTF-16. Pure.
"""

import codecs

__all__ = ["UTF8_MARK", "encoding_of", "read_text"]

UTF8_MARK = codecs.BOM_UTF8
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16's does, so it is looked for first
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_of(start: bytes) -> str:
    """Return the encoding by the first bytes: by their mark, or by the zeros between UTF-16's letters."""
    for mark, name in _MARKS:
        if start.startswith(mark):
            return name
    if len(start) > 1 and start[0] != 0 and start[1] == 0:
        return "utf-16-le"
    return "utf-16-be" if len(start) > 1 and start[0] == 0 and start[1] != 0 else "utf-8"


def read_text(data: bytes) -> str:
    """Return the text. Raises `UnicodeDecodeError` where it is in none of these encodings."""
    return data.decode(encoding_of(data[:4]))
