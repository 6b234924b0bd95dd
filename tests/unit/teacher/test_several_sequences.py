"""A sample of several sequences has one conversation, which is that of its last one."""

from typing import Any

import numpy as np
import pytest

from lachesis.pipeline.teacher.requests import _turns_of
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan


class StandInRetokenizer:
    """Keeps what it is given; a real one needs two tokenizers."""

    def __init__(self) -> None:
        self.conversations: list[list[str]] = []

    def turns(self, tokens: Any, mask: Any, conversation: list[Message], parameters: Any) -> list[Any]:
        self.conversations.append([message.content for message in conversation])
        if not conversation:
            raise DataError("no conversation")
        return []


@pytest.mark.parametrize(
    ("index", "known"),
    [(None, [["a"], ["b"], ["c"]]), ([0, 0, 1], [[], ["a"], ["b"]]), ([0, 1, 0], [[], ["b"], ["a"]])],
)
def test_a_teacher_of_another_tokenizer_reads_a_conversation_for_the_last_sequence_of_its_sample(
    index: list[int] | None, known: list[list[str]]
) -> None:
    group = RolloutGroup(
        id="0" * 32, run="r", env="e", item="i", producer="p", epoch=1, counter=1, policy_versions=["1-lin-abcd"],
        sequences=Sequences(
            offsets=as_bytes([0, 2, 4, 6], "int32"), tokens=as_bytes([1] * 6, "int32"),
            loss_mask=pack_mask([False, True] * 3), logprobs=as_bytes(np.tile([0, -1.0], 3), "float32"),
            finish_reasons=["stop"] * 3, version_spans=[VersionSpan(i, 0, 0) for i in range(3)], sample_index=index,
        ),
        tokenizer_hash="0" * 64, started_ns=1,
        messages=[[Message(role="assistant", content=text)] for text in ("a", "b", "c")[: len(set(index or "abc"))]],
    )  # fmt: skip
    group.check()
    retokenizer = StandInRetokenizer()
    turns, reasons = _turns_of(group, retokenizer)  # type: ignore[arg-type]
    assert retokenizer.conversations == known
    assert [turn is None for turn in turns] == [not one for one in known]
    assert len(reasons) == known.count([])
