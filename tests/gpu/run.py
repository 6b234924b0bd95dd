"""Measures this machine's GPU part by part, each in a process of its own with a limit; see README.md.

    python -m gpu.run [--call 1|2] [--cpu] [--out FOLDER] [--record] [PART...]

Each line is written as it comes, to FOLDER/results.jsonl; FOLDER/README.md is the page, FOLDER/PART.log what a part
printed. `--cpu` runs everything in small without a GPU. `--record` keeps the lines of a whole run in `results/` under
the device's name. Exits with 1 where a check fails, or a part ends badly.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu.figures import FIGURES_FD
from gpu.plan import CALLS, MOST_S, PARTS, Part, chosen, of_call
from gpu.processes import end_group
from gpu.report import page, recorded, slug

__all__ = ["Results", "run_part"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_RESULTS = _HERE / "results"
_CPU = _RESULTS / "cpu.jsonl"


class Results:
    """The lines of this run, written as they come; the page is written again with each part that ends."""

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self._file = folder / "results.jsonl"
        self._file.unlink(missing_ok=True)
        self._adding = threading.Lock()
        self._last = recorded(_RESULTS / f"{slug(machine['device'])}.jsonl")
        self.add(machine)

    def add(self, line: dict[str, Any]) -> None:
        with self._adding:
            self.lines.append(line)
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)

    def write_page(self) -> str:
        cpu = [] if self.lines[0]["device"] == "cpu" else recorded(_CPU)
        text = page(self.lines, cpu, self._last)
        (self.folder / "README.md").write_text(text)
        return text

    @property
    def is_good(self) -> bool:
        return all(line.get("ok", True) for line in self.lines)


def run_part(part: str, command: list[str], limit_s: float, log: Path, add: Callable[[dict[str, Any]], None]) -> None:
    """Run a part and add its lines, then how it ended. It and all that it started end at the limit."""
    read, write = os.pipe()
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[write],
            env={**os.environ, FIGURES_FD: str(write)},
            start_new_session=True,
        )
    os.close(write)
    _running.add(process)
    listener = threading.Thread(target=_listen, args=(read, part, add), daemon=True)
    listener.start()
    try:
        code = process.wait(limit_s)
        ended = "ended" if code == 0 else f"ended with code {code}: {_tail(log)}"
    except subprocess.TimeoutExpired:
        code, ended = 1, f"was stopped at its limit of {limit_s:g} s"
    finally:
        end_group(process)
        _running.discard(process)
    listener.join(5)  # its writers are gone, but for one that left its session
    add({"part": part, "ended": ended, "ok": code == 0, "seconds": round(time.monotonic() - began, 1)})


def _listen(read: int, part: str, add: Callable[[dict[str, Any]], None]) -> None:
    with os.fdopen(read, "rb") as lines:
        for line in lines:
            add({"part": part, **json.loads(line)})


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _machine(*, small: bool) -> dict[str, Any]:
    """Say what this machine is, by a process of its own: the parts shall have the GPU alone."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if found == "cpu" and not small:
        raise SystemExit("torch sees no GPU here: --cpu runs everything in small without one")
    return {
        "device": "cpu" if small else found,
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "cores": len(os.sched_getaffinity(0)),
    }


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _run(parts: list[Part], results: Results, *, small: bool, most_s: float = MOST_S) -> None:
    """Run the parts, those that time nothing at once; in small, on a CPU, one by one."""
    end = time.monotonic() + most_s

    def run(part: Part) -> None:
        left = float("inf") if small else end - time.monotonic()
        if left < 5:
            results.add({"part": part.name, "left_out": "all of it", "why": f"{most_s:g} s are over"})
            return
        limit_s = min(left, part.small_limit_s if small else part.limit_s)
        command = [sys.executable, "-m", "gpu.part", part.name, *(["--cpu"] if small else [])]
        run_part(part.name, command, limit_s, results.folder / f"{part.name}.log", results.add)

    at_once = [] if small else [part for part in parts if not part.times]
    with ThreadPoolExecutor(len(PARTS)) as threads:
        list(threads.map(run, at_once))
    results.write_page()
    for part in parts:
        if part not in at_once:
            run(part)
            results.write_page()


_running: set["subprocess.Popen[bytes]"] = set()
"""Parts that run now."""


def _end(*_: Any) -> None:
    """End with all parts that run and what they have started."""
    for process in list(_running):
        end_group(process)
    os._exit(128 + signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run; all without")
    parser.add_argument("--call", type=int, choices=list(CALLS), help="the parts of one of two calls, in its order")
    parser.add_argument("--cpu", action="store_true", help="everything in small, without a GPU")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu", help="folder of lines, page and logs")
    parser.add_argument("--record", action="store_true", help="keep the lines of a whole run in tests/gpu/results")
    arguments = parser.parse_args()
    if arguments.call and arguments.parts:
        parser.error("--call has parts of its own: name none with it")
    if arguments.record and (arguments.parts or arguments.call):
        parser.error("--record keeps a whole run in the place of the one before: name no parts with it")
    try:
        parts = of_call(arguments.call) if arguments.call else chosen(arguments.parts)
    except ValueError as error:
        parser.error(str(error))
    if arguments.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("OMP_NUM_THREADS", "1" if arguments.cpu else "8")
    out = arguments.out / f"call-{arguments.call}" if arguments.call else arguments.out
    results = Results(out, _machine(small=arguments.cpu))
    _run(parts, results, small=arguments.cpu, most_s=CALLS[arguments.call].most_s if arguments.call else MOST_S)
    print(results.write_page())
    if arguments.record:
        _RESULTS.mkdir(exist_ok=True)
        (_RESULTS / f"{slug(results.lines[0]['device'])}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in results.lines)
        )
    return 0 if results.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
