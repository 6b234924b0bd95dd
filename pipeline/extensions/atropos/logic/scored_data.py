"""Reads ScoredData: a scored group of an Atropos environment, with the fields of atroposlib 0.4.

Guarantees finite numbers, token ids of 32 bits and no integer beyond 64. As in Atropos, unknown keys are dropped and
"1" is read as 1.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import Count, Finite, check_decoded_integers, check_integers

__all__ = ["ScoredData", "read_json", "read_scored_data", "split_list"]

Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Label = Annotated[int, Meta(ge=-100, le=(1 << 31) - 1)]
T = TypeVar("T")


class ScoredData(Struct, frozen=True, kw_only=True):
    """A scored group of n sequences. `masks` repeat the tokens and have -100 at those of the prompt;
    `inference_logprobs` are 1.0 there. The teacher's arrays are [sequence][position][k], ragged.
    """

    tokens: list[list[Token]]
    masks: list[list[Label]]
    scores: list[Finite]
    advantages: list[list[Finite]] | None = None
    ref_logprobs: list[list[Finite]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[Finite]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Count | None = None
    distill_token_ids: list[list[list[Token]]] | None = None
    distill_logprobs: list[list[list[Finite]]] | None = None
    turn_rewards: list[list[Finite]] | msgspec.UnsetType | None = msgspec.UNSET
    """No field of Atropos, whose clients do not get it back: the reward of each run of tokens under the mask."""


_FREE_FORM = ("messages", "generation_params", "overrides", "group_overrides", "images")
"""The fields whose types do not bound the integers in them."""


def read_scored_data(data: bytes | memoryview) -> ScoredData:
    """Return the group that the JSON `data` holds.

    Raises `SchemaError`, also for an integer beyond 64 bits.
    """
    found = _decode(ScoredData, data)
    for name in _FREE_FORM:
        if (value := getattr(found, name)) is not None:
            check_decoded_integers(name, value)
    return found


def split_list(data: bytes) -> list[memoryview]:
    """Return the JSON of each entry of the list that the JSON `data` holds. Raises `SchemaError`."""
    return [memoryview(part) for part in _decode(list[msgspec.Raw], data)]


def read_json(kind: type[T], data: bytes | memoryview) -> T:
    """Return the `kind` that the JSON `data` holds. Raises `SchemaError`, as `check_integers`, too."""
    check_integers("the body", data)
    return _decode(kind, data)


def _decode(kind: type[T], data: bytes | memoryview) -> T:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except UNREADABLE as error:
        hint = "; NaN and Infinity are no JSON, and no score or logprob" if "malformed" in str(error) else ""
        raise SchemaError(f"{str(error)[:MAX_ERROR_CHARS]}{hint}") from error
