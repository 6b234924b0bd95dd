"""The pipeline flat out: from publishers to a trainer's packed tensors, with one and three publishers and scorers.

Groups are of 8 x 1024 tokens with text, some 60 KB each. Everything between is the run's own: leases, scoring,
normalization, batches, the ledger. The trainer takes each batch's tensors and commits it, and computes nothing.
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from gpu.figures import check, figure
from gpu.processes import started

__all__ = ["ENV", "RUN", "SAMPLES", "group_bytes", "measure"]

RUN = "flat"
ENV = "words"
SAMPLES = 8
_PATIENCE_S = 45.0
_START_S = 60.0
_MAX_STALENESS = 1000
"""Steps: groups are published as fast as they can be, far ahead of the trainer."""
_CONFIG = """
run = "flat"
mode = "observe"
inference.policy.url = "http://127.0.0.1:9"

[environments.words]
kind = "gateway"
samples = 8
longest_tokens = {tokens}

[gateway]
port = {port}
needs_token = false

[[scoring.raters]]
rater = "repetition"

[services]
scorers = {scorers}

[health]
act = "warn"

[batching]
batch_size = 128
max_staleness = {staleness}

[streams]
rollouts_bytes = 4294967296
"""


def group_bytes(tokens: int) -> int:
    """Return the most bytes that a group takes."""
    return SAMPLES * tokens * 40 + 65_536


def measure(*, small: bool) -> None:
    """Measure one and three publishers and scorers, all of them processes."""
    # Whole batches of 16: what is left over once publishers stop waits for more, and the trainer would wait with it.
    tokens, groups = (128, 96) if small else (1024, 4096)
    for publishers in (1, 3):
        rate, text = _flat_out(publishers, groups, tokens)
        name = f"{publishers} publisher{'s' * (publishers > 1)} and scorer{'s' * (publishers > 1)}"
        check(f"{name} finish within {_PATIENCE_S:g} s", rate is not None, text)
        figure(f"{name}, groups of 8 x {tokens}", rate, "groups/s")


def _flat_out(publishers: int, groups: int, tokens: int) -> tuple[float | None, str]:
    """Return groups a second; None where the trainer did not get all in time, and then what the run said of it."""
    with tempfile.TemporaryDirectory(prefix="lachesis flat ") as place, _up(Path(place), publishers, tokens) as folder:
        shares = [groups // publishers + (number < groups % publishers) for number in range(publishers)]
        command = [sys.executable, "-m", "gpu.parts.pipeline_publisher", str(folder)]
        with started([[*command, str(i), str(share), str(tokens)] for i, share in enumerate(shares)]):
            seen, rate = anyio.run(_train, folder, groups)
        if rate is not None:
            return rate, ""
        status = subprocess.run(
            [sys.executable, "-m", "lachesis", "status", "--run", RUN, *_settings(folder)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        ).stdout  # fmt: skip
        print(status, file=sys.stderr)
        ledger = next((line for line in status.splitlines() if line.startswith("ledger")), "no status")
        return None, f"{seen} of {groups} groups; {ledger}"


def _settings(folder: Path) -> list[str]:
    return ["--config", str(folder.parent / "run.toml"), "--set", f"folder={folder}"]


@contextmanager
def _up(folder: Path, scorers: int, tokens: int) -> Iterator[Path]:
    """Run the services, and yield the run's folder once they are all ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "run.toml"
    config.write_text(_CONFIG.format(tokens=tokens, port=port, scorers=scorers, staleness=_MAX_STALENESS))
    run = folder / "run"
    up = [sys.executable, "-m", "lachesis", "up", *_settings(run)]
    with started([up]) as (process,):
        end = time.monotonic() + _START_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"`lachesis up` is not ready after {_START_S:g} s, or has ended: {process.poll()}")
            time.sleep(0.05)
        yield run


def _is_ready(port: int) -> bool:
    """Whether the gateway listens: it starts once all services before it are ready."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


async def _train(folder: Path, groups: int) -> tuple[int, float | None]:
    """Return the groups seen, and how many came a second after the first batch; None: not all came in time."""
    import lachesis

    seen, before = 0, 0
    began = 0.0
    with anyio.move_on_after(_PATIENCE_S):
        async with lachesis.batches(RUN, folder=folder) as batches:
            async for batch in batches:
                assert batch.packed.sequences
                seen += len(batch.fed.batch.groups)
                await batch.commit(policy_version=f"{batch.number + 1}-a-b", checkpoint="none")
                if not before:
                    before, began = seen, time.perf_counter()
                if seen >= groups:
                    return seen, (seen - before) / (time.perf_counter() - began)
    return seen, None
