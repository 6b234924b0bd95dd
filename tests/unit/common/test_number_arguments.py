"""Columns of numbers: those of Python's own floats, which are checked as a whole, are as those read one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.common.number_arguments import number_column
from lachesis.schemas.errors import DataError


def result(column):
    try:
        return number_column("reward", column, largest=1e100)
    except DataError as error:
        return str(error)


@given(st.lists(st.floats()))
def test_plain_floats_are_read_as_other_numbers_are(column):
    assert result(column) == result([np.float64(value) for value in column]) == result(tuple(column))


def test_what_is_returned_is_not_what_was_given():
    given_column = [1.0, 2.0]
    found = number_column("reward", given_column)
    found[0] = None
    assert given_column == [1.0, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.1e100, -1.1e100])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_is_no_number_is_named_wherever_it_stands(value, place):
    column = [1.0, -1.0]
    column.insert(place, value)
    with pytest.raises(DataError, match=f"reward {place} is "):
        number_column("reward", column, largest=1e100)
