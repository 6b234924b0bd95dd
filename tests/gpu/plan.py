"""The parts of the script, which run at once, the cheapest first, and how long each may take. Pure.

`CALLS` divides what a machine that is lent for minutes is to show into two calls of the script on it.
"""

from dataclasses import dataclass, replace

__all__ = ["CALLS", "MOST_S", "PARTS", "Call", "Part", "chosen", "of_call"]

MOST_S = 420.0
"""Seconds that all parts may take together on a GPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module of `gpu.parts`. `limit_s`: on a GPU; `small_limit_s`: in small, on a busy CPU.

    `times`: what it finds are times, so that nothing may run beside it; on a GPU the others run at once, before.
    """

    name: str
    limit_s: float
    small_limit_s: float
    about: str
    times: bool = True


PARTS = (
    Part("numerics", 60, 300, "Arithmetic beside the CPU's, the same bits twice, large steps, adapters", times=False),
    Part("ranks", 90, 300, "Two ranks on one GPU", times=False),
    Part("resume", 110, 300, "A trainer killed, gone on with, and reproduced", times=False),
    Part("vllm", 150, 600, "Real vLLM as policy", times=False),
    Part("convert", 70, 300, "SmolLM2 made ready for its demo, as the demo does once", times=False),
    Part("suite", 130, 300, "The tests of training, model and inference", times=False),
    Part("weights", 60, 300, "Weights out and in, beside plain copies"),
    Part("inference", 60, 300, "The reference server's engine beside transformers' generate"),
    Part("learner", 130, 300, "The learner's speed and memory beside a bare loop's"),
    Part("smollm2", 80, 300, "The demo on SmolLM2-135M-Instruct"),
    Part("demo", 80, 300, "The demo"),
    Part("pipeline", 100, 300, "From publishers to the trainer's tensors, flat out"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """Parts that run one by one, alone on the machine: the seconds that each may take, and all together."""

    limits_s: dict[str, float]
    most_s: float


CALLS = {
    1: Call({"suite": 290, "convert": 60}, 345),
    2: Call({"inference": 70, "weights": 60, "smollm2": 65, "demo": 50, "learner": 120, "pipeline": 60}, 420),
}
"""Thirteen minutes less what lies between two calls. Parts that an earlier run has shown are in neither."""


def of_call(number: int) -> list[Part]:
    """Return the parts of a call, in its order, with its limits."""
    known = {part.name: part for part in PARTS}
    return [replace(known[name], limit_s=limit, times=True) for name, limit in CALLS[number].limits_s.items()]


def chosen(names: list[str]) -> list[Part]:
    """Return the parts of these names, in the plan's order; all without names. Raises `ValueError` for another name."""
    known = {part.name for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or part.name in names]
