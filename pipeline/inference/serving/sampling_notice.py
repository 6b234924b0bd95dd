"""Names clients of the text routes that sample from another distribution than the trainer computes.

A client of OpenAI's routes chooses temperature and top_p, and the resulting group does not record them. Guarantees that
such a client's settings are named once it has an answer, and no longer once clients have sent `FORGET_AFTER_REQUESTS`
requests with the settings of the trainer. Greedy requests are evaluations, and are ignored. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from lachesis.pipeline.common.sampling_agreement import sampling_difference
from lachesis.pipeline.inference.protocol import SamplingParams

__all__ = ["REQUESTED_SAMPLING", "SamplingNotice"]

log = logging.getLogger("lachesis")

REQUESTED_SAMPLING: Final = "requested_sampling"
"""Where in a request's state a route leaves its `SamplingParams`."""
FORGET_AFTER_REQUESTS: Final = 200
"""Requests in a row that agree with the trainer, after which those before them are no longer named."""


class SamplingNotice:
    """An ASGI application that checks the requests for `paths`; `notify` gets the notice, None for none.

    `temperature`: the trainer's.
    """

    def __init__(
        self, app: ASGIApp, paths: Container[str], temperature: float, notify: Callable[[str | None], None]
    ) -> None:
        self._app = app
        self._paths = paths
        self._temperature = temperature
        self._notify = notify
        self._differing = 0
        self._agreeing = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {}) if scope["type"] == "http" and scope["path"] in self._paths else None
        try:
            await self._app(scope, receive, send)
        finally:
            params = None if state is None else state.get(REQUESTED_SAMPLING)
            if isinstance(params, SamplingParams) and params.temperature > 0:
                self._compare(params, scope["path"])

    def _compare(self, params: SamplingParams, path: str) -> None:
        given = {"temperature": params.temperature, "top_p": params.top_p, **msgspec.to_builtins(params)}
        difference = sampling_difference(given, self._temperature, masked=False)
        if difference is not None:
            self._differing += 1
            self._agreeing = 0
            text = (
                f"{self._differing} requests for {path} were {difference}. Groups of such samples are trained with "
                "wrong ratios; samples that are not trained on need nothing"
            )
            if self._differing == 1:
                log.warning("%s", text)
            self._notify(text)
        elif self._differing:
            self._agreeing += 1
            if self._agreeing >= FORGET_AFTER_REQUESTS:
                self._differing = 0
                self._notify(None)
