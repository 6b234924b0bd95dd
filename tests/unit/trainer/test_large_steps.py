"""The first two steps that are too large are reported at once, and no more until eight in a row were not."""

from lachesis.pipeline.trainer.large_steps import LargeSteps


def urgent(steps: str) -> str:
    """Return the steps with those that are reported at once as "!"; "L" is one that is too large."""
    following, found = LargeSteps(), ""
    for step in steps:
        following.record(large=step == "L")
        found += "!" if following.urgent else step
        if following.urgent:
            following.mark_reported()
    return found


def test_the_second_step_that_is_too_large_is_urgent_as_well_and_the_third_is_not() -> None:
    assert urgent("LLLL") == "!!LL"
    assert urgent("L..L.L") == "!..!.L"


def test_after_eight_steps_in_a_row_that_are_not_the_next_is_the_first_again() -> None:
    assert urgent("LL" + 7 * "." + "L") == "!!.......L"
    assert urgent("LL" + 8 * "." + "LLL") == "!!........!!L"
