"""An environment's key reads the bucket's keys that it needs, by the real server's permissions, and no others."""

import base64

import anyio
import pytest
from integration.security.secured import Secured
from nats.aio.msg import Msg

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.errors import AccessError, FencedError
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.schemas import keys
from lachesis.schemas.subjects import BUCKET, stream_name, value_subject

ENV = "environment-words"
STORE = stream_name("one", BUCKET)
WAITING = value_subject("one", stored_key("buffer-far"))
SECRET = b"a prompt that waits in the gateway"


def tells(answer: Msg) -> bool:
    """Return whether an answer holds the secret, in either form that the server has for stored messages."""
    said = answer.data + str(answer.headers).encode()
    return SECRET in said or base64.b64encode(SECRET) in said


@pytest.mark.parametrize(
    ("subject", "body"),
    [
        (f"$JS.API.STREAM.MSG.GET.{STORE}", b'{"last_by_subj": "%s"}' % WAITING.encode()),
        (f"$JS.API.STREAM.MSG.GET.{STORE}", b'{"seq": 1, "next_by_subj": ">"}'),
        (f"$JS.API.DIRECT.GET.{STORE}", b'{"last_by_subj": "%s"}' % WAITING.encode()),
        (f"$JS.API.DIRECT.GET.{STORE}", b'{"multi_last": [">"]}'),
        (f"$JS.API.DIRECT.GET.{STORE}.{WAITING}", b""),
        (f"$JS.API.DIRECT.GET.{STORE}.$KV.lachesis_one.>", b""),
        (f"$JS.API.DIRECT.GET.{STORE}.$KV.lachesis_one.policy", b'{"last_by_subj": "%s"}' % WAITING.encode()),
        (f"$JS.API.DIRECT.GET.{STORE}.$KV.lachesis_one.policy", b'{"multi_last": [">"]}'),
    ],
)
async def test_what_waits_in_the_gateway_is_told_to_no_environment(secured: Secured, subject: str, body: bytes) -> None:
    async with await secured.bus("gateway") as gateway:
        await gateway.put(stored_key("buffer-far"), SECRET)
    async with await secured.bus(OPERATOR) as operator:
        await operator.put(keys.SUPERVISOR, b"who runs it")
        control = f"$JS.API.STREAM.MSG.GET.{STORE}", b'{"last_by_subj": "%s"}' % WAITING.encode()
        async with operator._link.series(*control) as answers:
            answer = await answers.next(10.0)
            assert answer is not None
            assert tells(answer), "it is there to be told, and would be recognized"
    async with await secured.bus(ENV) as bus:
        try:
            async with bus._link.series(subject, body) as answers:
                while (answer := await answers.next(1.0)) is not None:
                    assert not tells(answer)
        except AccessError:
            return


async def test_an_environment_follows_its_keys_and_changes_its_own(secured: Secured) -> None:
    async with (
        await secured.bus("trainer") as trainer,
        await secured.bus(ENV) as first,
        await secured.bus(ENV) as other,
    ):
        await trainer.put(keys.POLICY, b"1")
        async with first.watch(keys.POLICY) as values:
            with anyio.fail_after(30):
                assert (await anext(aiter(values))).value == b"1"
                await trainer.put(keys.POLICY, b'{"error": {"code": 503, "description": "not for long"}}')
                assert b"not for long" in (await anext(aiter(values))).value  # a value, whatever it looks like
        key = keys.epoch("words")
        assert await first.value(keys.curriculum("live", "words")) is None
        entry = await first.value(key)
        revision = await first.put(key, b"claim 1", revision=0 if entry is None else entry.revision)
        with pytest.raises(FencedError):
            await other.put(key, b"claim 2", revision=revision - 1)
        found = await other.value(key)
        assert found is not None
        assert (found.value, found.revision) == (b"claim 1", revision)
        await other.put(key, b"claim 2", revision=revision)
