"""No answer and no field of a task runs as Python in a scorer of reasoning-gym."""

import builtins
import contextlib
import inspect
import re
import sys
from typing import Any

import pytest

from lachesis.pipeline.extensions.reasoning_gym.datasets import create_dataset, import_reasoning_gym, score_answer
from lachesis.pipeline.extensions.reasoning_gym.guard import evaluate, parse_formula

pytestmark = [pytest.mark.hostile, pytest.mark.slow]

RAN: list[str] = []
CALL = "__import__('test_gym_guard_mark').ran('{}')"
PAYLOADS = (CALL, f"[{CALL}]", f"[[{CALL}]]", f"x + {CALL}", f"({CALL})", f"1 if {CALL} else 2", f"lambda: {CALL}")
RUN_ANSWERS = {
    "string_insertion", "spiral_matrix", "polynomial_multiplication", "n_queens", "binary_matrix", "countdown",
    "puzzle24", "simple_integration", "intermediate_integration",
}  # fmt: skip
"""The datasets of reasoning-gym 0.1.25 whose scorers ran an answer as Python."""


class Mark:
    """A module that notes who ran it."""

    def ran(self, what: str) -> int:
        RAN.append(what)
        return 0


def running_datasets() -> list[str]:
    """Return the datasets whose module names `eval` or a parser of sympy's, which is `eval` as well."""
    known = import_reasoning_gym().factory.DATASETS
    sources = {name: inspect.getsource(sys.modules[kind.__module__]) for name, (kind, _) in known.items()}
    return sorted(name for name, source in sources.items() if re.search(r"\b(eval|parse_expr|sympify)\(", source))


def tasks(name: str) -> list[dict[str, Any]]:
    item = next(iter(create_dataset(name, {"size": 1}, 1)))
    task = {"dataset": name, **{key: item[key] for key in ("question", "answer", "metadata")}}
    texts = [key for key, value in item["metadata"].items() if isinstance(value, str)]
    forged = [{**task, "metadata": {**item["metadata"], key: CALL.format(f"{name}.{key}")}} for key in texts]
    return [task, *forged, {**task, "answer": CALL.format(f"{name}.answer")}]


def test_no_scorer_runs_what_a_model_or_a_message_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_gym_guard_mark", Mark())  # type: ignore[arg-type]
    names = running_datasets()
    assert set(names) >= RUN_ANSWERS
    for name in names:
        for task in tasks(name):
            for payload in PAYLOADS:
                with contextlib.suppress(Exception):  # a forged task is broken, as its rating then says
                    score_answer(payload.format(name), task)
    assert RAN == []


@pytest.mark.slow
def test_each_reference_answer_is_still_right() -> None:
    for name in RUN_ANSWERS | {"number_sorting", "bitwise_arithmetic", "basic_arithmetic"}:
        for seed in range(3):
            item = next(iter(create_dataset(name, {"size": 1}, seed)))
            task = {"dataset": name, **{key: item[key] for key in ("question", "answer", "metadata")}}
            if item["answer"] is not None:
                assert score_answer(str(item["answer"]), task) == 1.0, (name, item["answer"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("[['A', 'B'], (1, 2.5)]", [["A", "B"], (1, 2.5)]), ("-(3 + 4) * 2 ** 3 // 5", -12)),
        *(("{'a': {1}}", {"a": {1}}), ("0x1f ^ ~2 << 3", 0x1F ^ ~2 << 3), (" 1/2 ", 0.5), ("None", None)),
    ],
)  # fmt: skip
def test_values_and_arithmetic(text: str, value: object) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("f()", "a.b", "x", "[x for x in [1]]", "f'{1}'", "[0] * 9", "1 < 2"),
        *("2 ** 9 ** 9", "1 << 99999", "(3 ** 4096 * 3 ** 4096) ** 4096"),
    ],
)
def test_no_other_python_is_a_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"no value|no number|too large"):
        evaluate(text)


def test_formulas() -> None:
    assert str(parse_formula("3*x**2 + exp(2*x)/sqrt(y1) - 1.5e3 + C")) == "C + 3*x**2 - 1500.0 + exp(2*x)/sqrt(y1)"
    for text in ("x.y", "f'x'", "open(x)", "chr(1)", "x[0]", "_", "x__y", "a; b", "x=1", "eval(x)", "exit()", '"x"'):
        with pytest.raises(ValueError, match=r"no formula|no name"):
            parse_formula(text)
    assert builtins.eval is not evaluate
