"""Draws the items of an Atropos environment by the run's curriculum: a mixin for `BaseEnv`.

It needs nothing but Python, so it runs in atroposlib's interpreter: import it from lachesis, or copy this file.

    class Gsm8k(CurriculumMixin, BaseEnv):
        async def setup(self):
            self.curriculum_items = {f"gsm8k-{n}": row for n, row in enumerate(rows)}

`get_next_item` then returns one of these items, drawn by the weights that the gateway serves, and each group that is
sent has its item's name, so that the curriculum learns its result. While there are no new weights, or the gateway is
unavailable, it draws by the weights that it has, at first evenly.
"""

import asyncio
import base64
import json
import logging
import math
import random
import time
from http.client import HTTPException
from itertools import accumulate
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

__all__ = ["CurriculumMixin"]

log = logging.getLogger("lachesis")

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
_PART_BYTES = 1 << 16
_NOT_MODIFIED = 304
_MAX_NAME_BYTES = 128


class CurriculumMixin:
    """Stands before `BaseEnv` among the bases. `setup` gives it `curriculum_items`, a dict from name to item.

    A name is text of at most 128 bytes. Items are distinguished by their identity: each name has an object of its own.
    """

    curriculum_items: dict[str, Any]
    curriculum_poll_s = 5.0
    """Seconds between requests for newer weights."""
    _curriculum_names: dict[int, str] | None = None
    _curriculum_sums: list[float]
    _curriculum_tag = ""
    _curriculum_polled_s = -math.inf

    async def get_next_item(self) -> Any:
        """Return an item, drawn by the newest weights.

        Raises TypeError or ValueError where `curriculum_items` is no dict, is empty, has a bad name or an object twice.
        """
        if self._curriculum_names is None:
            self._curriculum_names = _names_by_identity(self.curriculum_items)
            self._set_curriculum_weights({}, 1.0)
            if getattr(self.config, "ensure_scores_are_not_same", False):  # type: ignore[attr-defined]
                log.warning(
                    "ensure_scores_are_not_same drops groups of equal scores unsent: the curriculum never hears of "
                    "items that are solved or hopeless. Set it to false; the run leaves such groups out of its batches"
                )
        if (
            getattr(self, "env_id", None) is not None
            and time.monotonic() - self._curriculum_polled_s >= self.curriculum_poll_s
        ):
            self._curriculum_polled_s = time.monotonic()
            await self._poll_curriculum()
        return self.curriculum_items[
            random.choices(list(self._curriculum_names.values()), cum_weights=self._curriculum_sums)[0]
        ]

    async def handle_send_to_api(self, scored_data: Any, item: Any = None, *args: Any, **kwargs: Any) -> None:
        """Name the item of each group, and send them."""
        name = (self._curriculum_names or {}).get(id(item))
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            if name is not None and group is not None:
                group["group_overrides"] = {**(group.get("group_overrides") or {}), "curriculum_item": name}
        await super().handle_send_to_api(scored_data, item, *args, **kwargs)  # type: ignore[misc]

    async def _poll_curriculum(self) -> None:
        config: Any = self.config  # type: ignore[attr-defined]
        url = f"{config.rollout_server_url}/curriculum?env_id={self.env_id}"  # type: ignore[attr-defined]
        try:
            answer, self._curriculum_tag = await asyncio.to_thread(_fetch, url, self._curriculum_tag)
            if answer is not None:
                self._set_curriculum_weights(answer["weights"], answer["unknown"])
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the curriculum's weights are not known, so the last ones stay: %s", error)

    def _set_curriculum_weights(self, weights: dict[str, float], unknown: float) -> None:
        """Draw by these weights from now on. If they are invalid, it raises an error and changes nothing."""
        cumulative = list(
            accumulate(float(weights.get(name, unknown)) for name in (self._curriculum_names or {}).values())
        )
        if not (cumulative[-1] > 0 and math.isfinite(cumulative[-1])):
            raise ValueError(f"the weights of all {len(cumulative)} items are {cumulative[-1]} together")
        self._curriculum_sums = cumulative


def _names_by_identity(items: dict[str, Any]) -> dict[int, str]:
    if not isinstance(items, dict) or not items:
        raise TypeError("curriculum_items must be a dict from names to items, with an item at least; set it in setup()")
    names: dict[int, str] = {}
    for name, item in items.items():
        if not _is_name(name):
            raise ValueError(
                f"curriculum_items: {name!r:.200} is no name: 1 to {_MAX_NAME_BYTES} bytes of printable text "
                "that does not begin with 'prompt-'. The gateway would refuse its groups"
            )
        other = names.setdefault(id(item), name)
        if other != name:
            raise ValueError(f"curriculum_items: {other!r} and {name!r} are one object; give each an object of its own")
    return names


def _is_name(name: Any) -> bool:
    """Return whether the gateway accepts this as the name of an item."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name.encode()) <= _MAX_NAME_BYTES
        and not name.startswith("prompt-")
    )


def _fetch(url: str, tag: str) -> tuple[Any, str]:
    """Return the gateway's answer and its tag; None while it is the one of `tag`. Raises OSError or ValueError."""
    parts = urlsplit(url)
    headers = {"If-None-Match": tag} if tag else {}
    if parts.password is not None:  # the gateway's token, which urllib does not send by itself
        user = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    try:
        with build_opener(ProxyHandler({})).open(Request(plain, headers=headers), timeout=_TIMEOUT_S) as response:  # noqa: S310
            return json.loads(_read_whole(response)), response.headers.get("ETag") or ""
    except HTTPError as error:
        if error.code == _NOT_MODIFIED:
            return None, tag
        raise ValueError(f"{plain} answers {error.code}: {error.read(500).decode(errors='replace')}") from error


def _read_whole(response: Any) -> bytes:
    """Return the body of an answer. Raises `OSError` where it takes too long as a whole, or is too large."""
    ends_s, data = time.monotonic() + _TIMEOUT_S, bytearray()
    while part := response.read1(_PART_BYTES):
        data += part
        if len(data) > _MAX_ANSWER_BYTES or time.monotonic() > ends_s:
            raise OSError(f"no whole answer of at most {_MAX_ANSWER_BYTES} bytes within {_TIMEOUT_S:g} s")
    return bytes(data)
