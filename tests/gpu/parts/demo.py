"""The demo on the device, from start to end: what it learns, how fast, and where its time goes."""

from gpu.demo_run import run_demo

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Run as many steps as there is time for: the demo's own gate takes 100."""
    if small:
        run_demo("tiny", 3, ["evaluate.items=8", "evaluate.items_between=4"])
    else:
        run_demo("tiny", 50, [])
