"""A pool of processes that a user's code starts ends its workers, and not the service."""

import subprocess
import sys

PROGRAM = """
import multiprocessing, signal, sys, anyio, anyio.to_thread
from lachesis.services.process.forked_children import separate_forked_children

def rate():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(len, ["ab"])[0]  # the pool ends its worker by SIGTERM

async def main():
    if sys.argv[1] == "separate":
        separate_forked_children()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        print(await anyio.to_thread.run_sync(rate))
        with anyio.move_on_after(0.3):
            async for number in signals:
                print("told to drain")
                break

anyio.run(main)
"""


def output(how: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_the_end_of_a_pool_does_not_drain_the_service() -> None:
    assert output("separate") == "2\n"
