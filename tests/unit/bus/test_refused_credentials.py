"""What a server does not take is named by what the client gave, without a secret."""

import pytest

from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.refused_credentials import describe_refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nkey_file": "/keys/scorer.nk"}, "does not know the key /keys/scorer.nk: no account"),
        ({"creds_file": "/keys/me.creds"}, "does not take the credentials in /keys/me.creds: it does not know their"),
        ({"user": "me", "password_file": "/keys/pw"}, "does not take the user 'me' with the password in /keys/pw"),
        ({"token_file": "/keys/token"}, "does not take the token in /keys/token"),
        ({"url": "nats://me:s3cret@host:4222"}, "does not take the credentials in nats.url"),
        ({"url": "s3cret@host:4222"}, "does not take the credentials in nats.url"),
        ({}, "wants credentials, and none were given: set nats.nkey_folder"),
    ],
)
def test_what_the_client_gave_is_named(settings: dict[str, str], said: str) -> None:
    text = describe_refused(ConnectionConfig(**settings), "nats://host:4222", has_token=False)  # type: ignore[arg-type]
    assert text.startswith(f"the server at nats://host:4222 {said}")
    assert "s3cret" not in text


def test_a_token_that_was_given_apart_is_named() -> None:
    assert "does not take the token given" in describe_refused(ConnectionConfig(), "host", has_token=True)
