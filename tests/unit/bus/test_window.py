"""The window of what is in flight: its bounds, its order, and that cancelled waiters leave nothing behind."""

import anyio
import anyio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.bus.window import InFlightWindow


async def test_bounds_and_order() -> None:
    window = InFlightWindow(max_bytes=100, max_messages=3)
    order: list[int] = []

    async def enter(name: int, size: int) -> None:
        await window.enter(size)
        order.append(name)

    async with anyio.create_task_group() as tasks:
        for name, size in enumerate((50, 40, 20, 5, 5)):
            tasks.start_soon(enter, name, size)
        await anyio.wait_all_tasks_blocked()
        assert order == [0, 1]  # the third does not fit, and no later one overtakes it
        window.release(50)
        await anyio.wait_all_tasks_blocked()
        assert order == [0, 1, 2, 3]  # three messages are the limit
        window.release(40)
        await anyio.wait_all_tasks_blocked()
        assert order == [0, 1, 2, 3, 4]
        window.release(20)
    assert (window.bytes, window.messages) == (10, 2)


async def test_larger_than_the_window_goes_alone() -> None:
    window = InFlightWindow(max_bytes=100, max_messages=3)
    await window.enter(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(window.enter, 1000)
        await anyio.wait_all_tasks_blocked()
        assert window.messages == 1
        window.release(1)
    assert (window.bytes, window.messages) == (1000, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.booleans()), min_size=1, max_size=30))
async def test_cancelled_waiters_leave_no_trace(plan: list[tuple[int, bool]]) -> None:
    window = InFlightWindow(max_bytes=100, max_messages=4)
    worst = 0

    async def use(size: int, cancelled: bool) -> None:
        nonlocal worst
        with anyio.CancelScope() as scope:
            if cancelled:
                scope.cancel()
            await window.enter(size)
            try:
                if window.messages > 1:
                    worst = max(worst, window.bytes)
                await anyio.lowlevel.checkpoint()
            finally:
                window.release(size)

    async with anyio.create_task_group() as tasks:
        for size, cancelled in plan:
            tasks.start_soon(use, size, cancelled)
    assert (window.bytes, window.messages) == (0, 0)
    assert worst <= 100
