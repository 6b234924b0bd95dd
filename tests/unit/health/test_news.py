"""Which alerts are news: warnings always, what informs once."""

from lachesis.pipeline.health.logic.alert_novelty import AlertNovelty
from lachesis.schemas.alerts import Alert, Severity


def alert(severity: Severity, reason: str = "", check: str = "rater_at_odds") -> Alert:
    return Alert(check=check, severity=severity, reason=reason)


def test_what_informs_is_news_once_until_it_changes() -> None:
    news = AlertNovelty()
    odds = alert("inform", "the others agree better without judge-2, as from the start")
    assert news.pick([odds]) == [odds]
    assert news.pick([odds]) == []
    assert news.pick([alert("idle")]) == news.pick([odds]) == []
    other = alert("inform", "the others agree better without judge-3, as from the start")
    assert news.pick([other]) == [other]
    assert news.pick([alert("ok")]) == []
    assert news.pick([other]) == [other]


def test_figures_that_differ_from_window_to_window_are_no_change() -> None:
    news = AlertNovelty()
    first = alert("inform", "mean scores moved from 0.112 to 0.214", "reward_drift")
    assert news.pick([first]) == [first]
    assert news.pick([alert("inform", "mean scores moved from -1.3e-4 to 12%", "reward_drift")]) == []


def test_a_warning_is_news_in_every_window_and_so_is_what_it_falls_back_to() -> None:
    news = AlertNovelty()
    warned, informed = alert("warn", "more than at first"), alert("inform", "as from the start")
    assert [news.pick([one]) for one in (warned, warned, informed, informed, warned)] == [
        [warned], [warned], [informed], [], [warned],
    ]  # fmt: skip


def test_checks_do_not_hide_each_other() -> None:
    news = AlertNovelty()
    both = [alert("inform", "x"), alert("inform", "x", "change_point")]
    assert news.pick(both) == both
    assert news.pick([alert("ok"), both[1]]) == []
