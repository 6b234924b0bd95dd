"""Turns lists of numbers into the arrays of a row without changing any. Pure.

Guarantees that a number that does not fit into a column's type is refused: a cast would turn 2^40 into another token's
id.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import SchemaError

__all__ = ["exact_array"]


def exact_array(values: Any, dtype: Any) -> NDArray[Any]:
    """Return a list or array as `dtype`. Raises `SchemaError` if a number would become another one.

    Floats are rounded to those of `dtype`; what becomes infinite is refused with the group.
    """
    try:
        found = np.asarray(values)
    except ValueError as error:  # lists of different lengths in it
        raise SchemaError(f"a list of {np.dtype(dtype).name} holds something else") from error
    wanted = np.integer if np.issubdtype(dtype, np.integer) else np.number
    if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, wanted)):
        raise SchemaError(f"a list of {np.dtype(dtype).name} holds something else")
    if (
        wanted is np.integer
        and len(found)
        and not (np.iinfo(dtype).min <= found.min() <= found.max() <= np.iinfo(dtype).max)
    ):
        raise SchemaError(f"a number does not fit into {np.dtype(dtype).name}")
    with np.errstate(over="ignore"):
        return found.astype(dtype)
