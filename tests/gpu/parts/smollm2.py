"""The demo on a pretrained language model, SmolLM2-135M-Instruct, on the device."""

from importlib.util import find_spec

from gpu.figures import left_out

from lachesis.services.demo.pretrained import MODULES

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Take 12 steps; in small one."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        left_out("the SmolLM2 demo", f"{', '.join(missing)} missing: see tests/gpu/README.md")
        return
    from gpu.demo_run import run_demo
    from gpu.models import DEVICE

    if small:
        one = ["environments.sums.samples=4", "environments.sums.concurrency=2", "batching.batch_size=4"]
        few = [*one, "evaluate.items=1", "evaluate.items_between=1", "evaluate.samples=1"]
        run_demo("smollm2", 1, few)
    else:
        run_demo("smollm2", 12, ["training.threads=8", "inference.policy.threads=8"] if DEVICE == "cuda" else [])
