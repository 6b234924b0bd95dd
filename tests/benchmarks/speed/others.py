"""What the pipeline is measured beside: JetStream alone, Atropos' own server and TransferQueue."""

import json
import subprocess
import tempfile
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import nats
from speed.figures import Figure, Snapshot, cost_of
from speed.native import Load
from speed.processes import TREE, Processes, snapshot
from speed.raw import STREAM, SUBJECT

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint

__all__ = ["measure_raw", "measure_transferqueue"]

_PATIENCE_S = 300.0


async def measure_raw(groups: int, size: int, samples: int) -> list[Figure]:
    """Publish, consume and acknowledge messages of `size` bytes by JetStream alone."""
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as place:
        folder = Path(place)
        async with EmbeddedServer(folder / "nats", ServerConfig(max_file_bytes=8 << 30)) as server:
            (folder / "token").write_text(server.token)
            client = await nats.connect(server.url, token=server.token)
            await client.jetstream().add_stream(name=STREAM, subjects=[SUBJECT], max_bytes=4 << 30)
            await client.close()
            processes = Processes(folder, TREE)
            server_pids = {"nats-server": read_endpoint(folder / "nats").pid}
            with processes.ending():
                before = snapshot(server_pids)
                for end in ("consume", "publish"):
                    processes.start(
                        end, ["-m", "speed.raw", end, server.url, str(folder / "token"), str(groups), str(size)]
                    )
                for end in ("consume", "publish"):
                    await anyio.to_thread.run_sync(processes.finish, end, _PATIENCE_S)
                after = snapshot(server_pids, groups)
            ends = {end: json.loads(processes.log(end).splitlines()[-1]) for end in ("consume", "publish")}
    began_s, ended_s = min(one[0] for one in ends.values()), max(one[1] for one in ends.values())
    cpu_s = {end: one[2] for end, one in ends.items()}
    first = Snapshot(0, began_s, dict.fromkeys(cpu_s, 0.0) | before.cpu_s, {}, before.machine_busy_s)
    last = Snapshot(groups, ended_s, cpu_s | after.cpu_s, {}, after.machine_busy_s)
    return cost_of("JetStream alone", first, last, samples)


def measure_transferqueue(python: str, groups: int, load: Load) -> list[Figure]:
    """Put groups into TransferQueue and get them. Raises `RuntimeError` if it fails."""
    sizes = map(str, (groups, load.samples, load.tokens, load.batch))
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as place:
        ended = subprocess.run(
            [python, "-m", "speed.transferqueue", *sizes], cwd=place, capture_output=True, timeout=_PATIENCE_S,
            env=Processes(Path(place), TREE).environment, check=False,
        )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"TransferQueue ended with {ended.returncode}: {ended.stderr.decode()[-1000:]}")
    first, last = msgspec.json.decode(ended.stdout.splitlines()[-1], type=tuple[Snapshot, Snapshot])
    return cost_of("TransferQueue, in memory", first, last, load.samples)
