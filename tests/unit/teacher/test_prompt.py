"""The teacher's template is filled as it says, and one that cannot be filled is refused."""

import pytest

from lachesis.pipeline.teacher.prompt import PromptTemplate
from lachesis.schemas.errors import ConfigError, DataError

TEMPLATE = PromptTemplate("{question} It is {answer}.")


def test_values_are_put_in_as_they_are():
    assert TEMPLATE.fill("2+{question}?", {"answer": "{answer}"}) == "2+{question}? It is {answer}."
    assert PromptTemplate("{{{question}}} {n}").fill("q", {"n": 4}) == "{q} 4"


@pytest.mark.parametrize(("task", "text"), [({}, "has no 'answer'; it has: none"), ({"answer": ["4"]}, "is a list")])
def test_a_task_without_the_field_is_refused_by_name(task, text):
    with pytest.raises(DataError, match=text):
        TEMPLATE.fill("q", task)


@pytest.mark.parametrize("text", ["{answer}", "{question} {0}", "{question} {answer.__class__}", "{question} {", "{}"])
def test_a_template_that_cannot_be_filled_is_refused(text):
    with pytest.raises(ConfigError, match=r"teacher\.prompt"):
        PromptTemplate(text)
