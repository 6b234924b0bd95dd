import pytest

from lachesis.pipeline.bus.reply_subjects import MAX_REPLY_CHARS, RefusedReplies, is_inbox, refused_publication


@pytest.mark.parametrize(
    "subject",
    [
        "_INBOX.abc",
        "_INBOX.AbC.17",
        "_INBOX_environment.abc.1",
        "_INBOX_gym-2.x",
        "_inbox_observer.abc.1",
        "_R_.V3BlB0.HyHkVy",
    ],
)
def test_an_inbox_may_be_answered(subject: str) -> None:
    assert is_inbox(subject)


@pytest.mark.parametrize(
    "subject",
    ["", "_INBOX", "_INBOX.", "_INBOX.*", "_INBOX.a.>", "_INBOX..a", "_INBOXES.a", "_INBOX_.a", "x._INBOX.a",
     "_INBOX.a b", "_INBOX.a\x0b", "_INBOX.\u00e9", "_INBOX.\u202e", "_INBOX.\x1b[2J", "rl.lease.r",
     "_INBOX." + "a" * MAX_REPLY_CHARS, "$JS.ACK.ROLLOUTS.d.1.1.1.1.0", "$JS.API.INFO", ">", "*", "mine.a",
     "_R_", "_R_.>", "_R_x.a"],
)  # fmt: skip
def test_no_other_subject_may_be_answered(subject: str) -> None:
    assert not is_inbox(subject)


def test_an_inbox_under_the_configured_prefix_may_be_answered() -> None:
    assert is_inbox("team.inbox.a", "team.inbox")
    assert is_inbox("_INBOX_environment.a", "team.inbox")
    assert not is_inbox("team.inbox", "team.inbox")
    assert not is_inbox("team.inboxes.a", "team.inbox")


def test_the_subject_of_a_refused_publication_is_found() -> None:
    assert refused_publication('nats: permissions violation for publish to "_inbox_a.b"') == "_inbox_a.b"
    assert refused_publication('nats: permissions violation for subscription to "_inbox_a.b"') is None
    assert refused_publication("nats: authorization violation") is None


def test_unanswered_requests_are_told_of_once_a_minute_and_noted_for_a_minute() -> None:
    unanswered = RefusedReplies()
    assert unanswered.summary(0.0) is None
    assert unanswered.record("\x1b[2J" + "a" * 1000, 10.0)
    assert not unanswered.record("rl.any.thing", 20.0)
    note = unanswered.summary(79.0)
    assert note is not None
    assert "requests were not answered" in note
    assert unanswered.count == 2
    assert "'rl.any.thing'" in unanswered.describe()
    assert unanswered.summary(81.0) is None
    assert unanswered.record("\x1b[2J" + "a" * 1000, 100.0)
    long = unanswered.describe()
    assert long.isprintable()
    assert len(long) < 300
