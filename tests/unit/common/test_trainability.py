"""What a trainer cannot use is known before it gets there: token ids, tokenizer, and what is not text."""

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.common.tokenizer_hash import with_template_parameters
from lachesis.pipeline.common.trainability import TEXT_ALONE, TrainerLimits, why_untrainable
from lachesis.schemas.columns import Column, as_bytes
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.rollout import Attachment

LIMITS = TrainerLimits("tok", 60)


def changed(group, **columns):
    return group.replace(sequences=msgspec.structs.replace(group.sequences, **columns))


def column(group):
    return Column(dtype="float32", data=as_bytes(np.zeros(group.sequences.n_tokens), "float32"))


async def test_a_plain_group_is_fine(lab):
    assert why_untrainable(lab.group(1), LIMITS) is None
    assert why_untrainable(lab.group(1), TrainerLimits()) is None


@pytest.mark.parametrize("vocabulary", [18, 19])
async def test_token_ids_end_at_the_vocabulary(lab, vocabulary):
    group = lab.group(1)  # ids 11 to 18
    reason = why_untrainable(group, LIMITS._replace(vocabulary=vocabulary))
    assert (reason is None) == (vocabulary == 19)
    if reason is not None:
        assert "token id 18 in sequence 1 is none of the 18" in reason


async def test_what_is_not_text_is_named(lab):
    group = lab.group(1, attachments=[Attachment(mime="image/png", data=b"x")])
    group = changed(group, columns={name: column(group) for name in ("b", "a")})
    assert why_untrainable(group, LIMITS).startswith("attachments, a, b: this run's trainer reads text")
    assert why_untrainable(group, LIMITS._replace(reads=None)) is None


async def test_a_long_list_of_columns_stays_short(lab):
    group = lab.group(1)
    group = changed(group, columns={f"{n:03}" + "x" * 200: column(group) for n in range(50)})
    reason = why_untrainable(group, LIMITS)
    assert "and 42 more" in reason
    assert len(reason) < 900


async def test_another_tokenizer_is_told_by_its_hash(lab):
    assert "tokenizer 'other'" in why_untrainable(lab.group(1, tokenizer_hash="other"), LIMITS)


def test_the_policy_record_says_what_is_known():
    record = PolicyRecord(run="r", version="1-a-b", weights="w", tokenizer_hash="t", written_ns=1, vocabulary=9)
    assert TrainerLimits.of(record, TEXT_ALONE) == ("t", 9, TEXT_ALONE, None, True)
    assert TrainerLimits.of(None, None) == (None, None, None, None, True)


async def test_parameters_of_the_chat_template_do_not_make_another_tokenizer(lab):
    group = lab.group(1)
    thinks = group.replace(tokenizer_hash=with_template_parameters(group.tokenizer_hash, {"enable_thinking": True}))
    assert thinks.tokenizer_hash != group.tokenizer_hash
    assert why_untrainable(thinks, LIMITS) is None
    other = group.replace(tokenizer_hash=with_template_parameters("other", {"enable_thinking": True}))
    assert "is not the trainer's" in why_untrainable(other, LIMITS)
