"""Aligns two tokenizations of the same bytes: spans that both end at the same byte. Pure.

Given the bytes of each token for both tokenizers, it returns pairs of slices, in order, that cover both. Guarantees
that each span is as short as possible: no byte inside of it is a boundary of both. By the chain rule the logprobs of a
span's tokens add up to the logprob of its bytes given those before, whatever the vocabulary (up to other tokenizations
of the same bytes, which neither model scores).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

__all__ = ["ByteSpan", "byte_table", "common_spans", "valid_text"]


class ByteSpan(NamedTuple):
    """Tokens `student` of one tokenization and `teacher` of the other that stand for the same bytes."""

    student: slice
    teacher: slice

    def moved(self, student: int, teacher: int) -> "ByteSpan":
        """Return it with both slices that much further on."""
        return ByteSpan(
            slice(self.student.start + student, self.student.stop + student),
            slice(self.teacher.start + teacher, self.teacher.stop + teacher),
        )


def common_spans(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[ByteSpan]:
    """Return the shortest spans that both tokenizations have in common.

    Bytes beyond the shorter one have none.
    """
    ends = [np.array([*accumulate(map(len, tokens))], np.int64) for tokens in (student, teacher)]
    common = np.intersect1d(ends[0], ends[1])
    common = common[common > 0]
    cuts = [np.concatenate([[0], np.searchsorted(end, common, side="right")]).tolist() for end in ends]
    return [
        ByteSpan(slice(*one), slice(*other))
        for one, other in zip(
            zip(cuts[0][:-1], cuts[0][1:], strict=True), zip(cuts[1][:-1], cuts[1][1:], strict=True), strict=True
        )
    ]


def valid_text(data: bytes) -> str:
    """Return the longest beginning of `data` that is UTF-8: a sample may end inside of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def byte_table() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on, in their order.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
