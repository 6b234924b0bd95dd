"""Puts notices into words, the same wherever they are shown. Pure."""

from collections.abc import Sequence
from datetime import datetime

from lachesis.schemas.notices import Notice

__all__ = ["notice_line", "notice_lines"]

_MINUTE_S = 60
_HOUR_S = 3600


def notice_line(notice: Notice, now_ns: int | None = None) -> str:
    """Return a notice as one line; given the time, it also says since when the notice holds."""
    processes = f" ({notice.processes} processes)" if notice.processes > 1 else ""
    text = f"{notice.what}{processes}"
    if now_ns is not None and notice.since_ns is not None:
        since = datetime.fromtimestamp(notice.since_ns / 1e9).astimezone()
        text += f", for {_duration(max(0.0, (now_ns - notice.since_ns) / 1e9))} (since {since:%H:%M:%S})"
    if notice.why:
        text += f": {notice.why}"
    if notice.held_up:
        text += f"; held up: {', '.join(notice.held_up)}"
    return f"{text}; to do: {notice.mend}" if notice.mend else text


def notice_lines(notices: Sequence[Notice], now_ns: int | None) -> list[str]:
    """Return a line for each notice, see `notice_line`; it begins with the source unless the text does."""
    lines = []
    for one in notices:
        line = notice_line(one, now_ns)
        lines.append(line if one.what.startswith(one.source) else f"{one.source}: {line}")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < 2 * _HOUR_S else f"{seconds / _HOUR_S:.1f} h"
