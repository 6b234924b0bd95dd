"""Says while torch compiles a model's layers, and bounds how long it does.

A layer is compiled in pieces: once for passes with a gradient and once for those without, and again for rows in one,
padded rows and a row alone; lengths and numbers of rows make no further ones. Each takes seconds to minutes, in which
the trainer takes no step.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch._dynamo.callback import callback_handler

__all__ = ["MAX_COMPILE_S", "CompileWatch"]

log = logging.getLogger("lachesis")

MAX_COMPILE_S = 900.0
"""Seconds of compiling in all after which further pieces are computed by plain layers."""
_SAY_EVERY_S = 10.0


class CompileWatch:
    """Counts the compiler's pieces from `begin` on; `end` reports a step's compile time."""

    def __init__(self, max_seconds: float = MAX_COMPILE_S) -> None:
        self.pieces = 0
        self.seconds = 0.0
        self._max_seconds = max_seconds
        self._began = self._said = 0.0
        self._before = (0, 0.0)
        self._is_bounded = False

    def begin(self) -> None:
        """Watch the compiler."""
        self._before, self._said = (self.pieces, self.seconds), 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._finish)

    def end(self) -> None:
        """Watch it no longer."""
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._finish)
        pieces, seconds = self.pieces - self._before[0], self.seconds - self._before[1]
        if pieces:
            log.info("torch has compiled %d pieces of the model's layers in %.0f s", pieces, seconds)
        if self.seconds > self._max_seconds and not self._is_bounded:
            self._is_bounded = True
            torch.compiler.set_stance("eager_on_recompile")
            log.warning(
                "compiling the model's layers has taken %.0f s in all: what is not compiled yet runs as plain layers "
                "from now on, which takes longer but is within rounding of it",
                self.seconds,
            )

    def _start(self, _: Any) -> None:
        self._began = time.monotonic()
        if self._began - self._said >= _SAY_EVERY_S:
            self._said = self._began
            log.info("torch compiles the model's layers, which may take minutes: piece %d", self.pieces + 1)

    def _finish(self, _: Any) -> None:
        self.pieces += 1
        self.seconds += time.monotonic() - self._began
