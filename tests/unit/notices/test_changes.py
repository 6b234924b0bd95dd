"""What begins and what ends is reported once, and in words that name the cause and the cure."""

from lachesis.pipeline.notices.changes import NoticeChanges, NoticeHistory
from lachesis.pipeline.notices.text import notice_line, notice_lines
from lachesis.schemas.notices import Notice

FROZEN = Notice(
    key="silent/1", source="batcher", what="batcher is silent", since_ns=10**9, why="stopped", mend="go on",
    held_up=["trainer"], stops=True,
)  # fmt: skip
S = 10**9


def test_a_notice_begins_once_and_ends_once_however_its_text_changes() -> None:
    changes = NoticeChanges()
    told = []
    for at_s in range(30):
        there = [Notice(key="k", source="s", what=f"{at_s} groups")] if 3 <= at_s < 20 else []
        begun, ended = changes.update(there, float(at_s))
        told += [(at_s, "begun", one.what) for one in begun] + [(at_s, "ended", one.what) for one in ended]
    assert told == [(3, "begun", "3 groups"), (24, "ended", "19 groups")]


def test_a_notice_that_is_gone_for_a_moment_never_ended() -> None:
    changes = NoticeChanges()
    told = []
    for at_s in range(20):
        begun, ended = changes.update([FROZEN] if at_s % 4 else [], float(at_s))
        told += [*begun, *ended]
    assert told == [FROZEN]


def test_the_history_keeps_what_was_and_what_holds() -> None:
    history = NoticeHistory()
    history.record([FROZEN], [], 5 * S)
    other = Notice(key="o", source="s", what="other")
    history.record([other], [FROZEN], 9 * S)
    assert [(one.notice, one.until_ns) for one in history.all()] == [(FROZEN, 9 * S), (other, None)]
    for number in range(1000):
        history.record([], [other], number)
    assert len(history.all()) == 200


def test_a_line_says_what_since_when_why_who_and_what_to_do() -> None:
    line = notice_line(FROZEN, 13 * S)
    assert line.startswith("batcher is silent, for 12 s (since ")
    assert line.endswith("): stopped; held up: trainer; to do: go on")
    assert notice_line(FROZEN) == "batcher is silent: stopped; held up: trainer; to do: go on"


def test_lines_name_their_source_once() -> None:
    other = Notice(key="o", source="scorer", what="a rater raises", processes=2)
    assert notice_lines([FROZEN, other], 13 * S)[1] == "scorer: a rater raises (2 processes)"
