"""One rule for `numeric` and `math`: a number is written out, an operation is not its value."""

import pytest

from lachesis.pipeline.scorer.answers.compare_math import equal, reference_answer
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.raters.numeric import numeric

WRITTEN_OUT = [
    ("0.75", r"\frac{3}{4}"), ("3/4", "6/8"), ("3/4", r"\frac{6}{8}"), ("3.5", "7/2"), ("3.5", r"3\frac12"),
    ("3 1/2", "7/2"), ("50%", "1/2"), ("0.333333", r"\frac13"), ("-0.75", r"-\frac{3}{4}"), ("-0.75", r"\frac{-3}{4}"),
    ("5000", r"5\times10^3"), ("1000", "10^3"), ("0.001", "10^{-3}"), ("2000000", r"2\cdot10^6"), ("18", "1.8e1"),
    ("18", "12 + 6 = 18"), ("18", r"6 \times 3 = 18"), ("18", r"\frac{36}{2} = 18"), ("18", "x = 18"),
    ("18", r"\{18\}"), ("18", "[18]"),
]  # fmt: skip
"""A fraction that does not come out whole is a number, and so is a power of ten."""
OPERATIONS = [
    ("1024", "2^{10}"), ("1024", "2^10"), ("9", "3²"), ("4", "2^2"), ("1", "5^0"), ("0.5", "2^{-1}"), ("6.25", "2.5^2"),
    ("7", "14/2"), ("7", r"\frac{14}{2}"), ("7", r"14 \div 2"), ("18", "18/1"), ("18", r"\frac{36}{2}"), ("0", "0/5"),
    ("18", "9+9"), ("7", "3+4"), ("18", "20-2"), ("18", r"9\cdot 2"), ("18", r"9 \times 2"), ("18", "9*2"),
    ("18", "18+0"), ("18", r"18\cdot 1"), ("18", r"\sqrt{324}"), ("2", r"\sqrt[3]{8}"), ("6", "3!"), ("3", r"\log_2 8"),
    ("6", r"\binom{4}{2}"), ("18", r"\lfloor 18.5 \rfloor"), ("18", "-(-18)"), ("18", "|{-18}|"), ("0.25", "(1/2)^2"),
    ("0.25", r"\frac{1}{2^2}"),
]  # fmt: skip
"""What is left to be calculated is no answer to the task of calculating it."""
ASKED_FOR = [
    ("2^{10}", "1024"), ("2^{10}", "2^{10}"), ("2^{10}", "4^5"), ("14/2", "7"), ("14/2", "14/2"), ("14/2", "28/4"),
]  # fmt: skip
"""A reference that is an operation itself says that its form is not what the task is about."""
SEVERAL = [
    r"12 \text{ or } 18", "12, 18", "(12, 18)", "[12, 18]", r"\{12, 18\}", r"12 \le x \le 18", r"x \ge 18", "x > 18",
    r"\text{at least }18", r"12 \text{ and } 18", r"12 \text{ to } 18", "12-18", r"18 \pm 2", r"\pm 18",
    r"x=12,\ x=18", r"x = 12 \text{ or } x = 18", r"\text{not }18", r"\neq 18", "<18", r"\text{18% sure}", "12..18",
    r"\text{about } 18 \text{ or } 20", r"18 \text{ or } 12", r"\text{18 or none}", r"\text{either 12 or 18}",
    r"18 \lor 12", "18+", r"\text{I am 18% sure it is twelve}", r"\text{less than } 18", r"\text{18 is impossible}",
]  # fmt: skip
"""No single number, for a reference of 18."""


def verdicts(gold: str, given: str) -> tuple[bool, bool]:
    rated = numeric(Sample(prompt="", completion=f"\\boxed{{{given}}}", task={"answer": gold}))
    return rated == 1.0, equal(reference_answer(gold), given) is True


@pytest.mark.parametrize(("gold", "given"), WRITTEN_OUT + ASKED_FOR)
def test_both_raters_read_a_number_that_is_written_out(gold: str, given: str) -> None:
    assert verdicts(gold, given) == (True, True)


@pytest.mark.parametrize(("gold", "given"), OPERATIONS)
def test_neither_rater_takes_an_operation_for_its_value(gold: str, given: str) -> None:
    assert verdicts(gold, given) == (False, False)


@pytest.mark.parametrize("given", SEVERAL)
def test_neither_rater_pays_for_several_numbers(given: str) -> None:
    assert verdicts("18", given) == (False, False)
