"""One group in four carries how its answers begin and end."""

import pytest

from lachesis.pipeline.scorer.logic.excerpts import excerpts_of
from lachesis.schemas.annotations import EXCERPT_CHARS, MAX_EXCERPT_SAMPLES
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.rollout import Message
from lachesis.services.run.load_messages import make_group
from lachesis.services.run.load_plan import GroupShape

HAS_EXCERPTS, HAS_NONE = f"{2:032x}", f"{1:032x}"


@pytest.fixture(scope="module")
def group():
    made = make_group(GroupShape(samples=6, tokens=16))
    return made.replace(id=HAS_EXCERPTS)


def said(group, *messages, samples=6):
    conversation = [Message(role=role, content=content) for role, content in messages]
    return excerpts_of(group.replace(messages=[conversation] * samples))


def test_one_group_in_four_has_them_by_its_id_alone(group):
    chosen = [excerpts_of(group.replace(id=new_group_id())) is not None for _ in range(2000)]
    assert 400 < sum(chosen) < 600
    assert excerpts_of(group) == excerpts_of(group)
    assert excerpts_of(group.replace(id=HAS_NONE)) is None


def test_a_short_text_is_whole_and_a_long_one_has_both_ends(group):
    long = "a" * EXCERPT_CHARS + "middle" + "b" * EXCERPT_CHARS
    found = said(group, ("system", "Be brief."), ("user", "Why?"), ("assistant", long))
    assert found.prompt == ["Why?"]
    assert found.answers == [["a" * EXCERPT_CHARS, "b" * EXCERPT_CHARS]] * MAX_EXCERPT_SAMPLES
    assert said(group, ("user", long), ("assistant", "4")).answers == [["4"]] * MAX_EXCERPT_SAMPLES


def test_of_a_conversation_the_first_answer_begins_and_the_last_one_ends(group):
    found = said(
        group,
        ("user", "Find it."), ("assistant", "I search."), ("tool", "nothing"), ("user", "And now?"),
        ("assistant", ""), ("assistant", "It is not there."), samples=2,
    )  # fmt: skip
    assert found.prompt == ["And now?"]
    assert found.answers == [["I search.", "It is not there."]] * 2


def test_a_group_without_texts_has_none(group):
    assert excerpts_of(group.replace(messages=[])) is None
    assert said(group, ("user", "Why?"), ("assistant", "")) is None
    assert said(group, ("user", "Why?")) is None
    assert said(group, ("assistant", "Because.")).prompt == []
