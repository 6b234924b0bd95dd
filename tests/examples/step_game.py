"""A step-based game in the shape of gem and Gymnasium: count down to zero, one number a turn."""

import random
from typing import Any


class CountDown:
    def __init__(self, largest: int = 5) -> None:
        self.largest = largest

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.at = random.Random(seed).randint(1, self.largest)
        return f"Count down from {self.at}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action != str(self.at):
            return "wrong", 0.0, True, False, {}
        self.at -= 1
        return "go on", float(self.at < 0), self.at < 0, False, {}
