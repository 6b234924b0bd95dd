"""Why vLLM ended is found in its output, whatever it says last."""

import subprocess
import sys

import pytest

from lachesis.pipeline.common.machine_memory import MemoryKills
from lachesis.pipeline.inference.engines.vllm import end_reason as vllm_reason
from lachesis.pipeline.inference.engines.vllm.end_reason import OutputMark, failure_reason

MEMORY = """
(APIServer pid=1) WARNING 11-27 06:57:25 [system_utils.py:255] This can cause `OSError: [Errno 24] Too many`.
(VllmWorker-0 pid=2) ERROR 11-27 06:58:14 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=2) ERROR 11-27 06:58:14 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=2) ERROR 11-27 06:58:14 [multiproc_executor.py:953] ValueError: Available memory on node 0 is less
(EngineCore pid=3) Exception: WorkerProc initialization failed due to an exception in a background process.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
VALIDATION = """
Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['Nothing'] are not supported for now. [type=value_error]
"""


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (MEMORY, ["ValueError: Available memory on node 0 is less", "VLLM_CPU_KVCACHE_SPACE"]),
        ("api_server.py: error: unrecognized arguments: --no-such\n", ["unrecognized arguments: --no-such"]),
        (VALIDATION, ["ModelConfig Value error, Model architectures ['Nothing'] are not supported"]),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n", ["CUDA out of memory", "--gpu-memory-utilization"]),
        ("/lib/torch/cuda.py:61: FutureWarning: x is old\nValueError: no such model\n", ["ValueError: no such model"]),
        ("/bin/python: No module named vllm\n", ["No module named vllm"]),
        ("OSError: [Errno 98] Address already in use\n", ["OSError: [Errno 98] Address already in use"]),
    ],
)
def test_the_first_error_that_says_something_is_the_reason(output: str, says: list[str]) -> None:
    reason = failure_reason(output)
    assert reason is not None
    assert all(text in reason for text in says), reason


@pytest.mark.parametrize("output", ["", "INFO all is well\n", "RuntimeError: Engine core initialization failed. See\n"])
def test_without_one_there_is_no_reason(output: str) -> None:
    assert failure_reason(output) is None


KILLED = """
(EngineCore pid=625) ERROR 11-27 23:13:09 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly
(EngineCore pid=625) ERROR 11-27 23:13:09 [core.py:1510] RuntimeError: cancelled
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_a_process_that_was_killed_says_nothing_and_is_named_with_what_the_kernel_counts() -> None:
    assert failure_reason(KILLED) == (
        "Worker proc VllmWorker-0 died without a message, as where something else kills it"
    )
    for output, named in ((KILLED, "killed Worker proc VllmWorker-0"), ("", "killed a process")):
        reason = failure_reason(output, starved=True)
        assert reason is not None
        assert reason.startswith(f"the kernel was out of memory and {named} (")
        assert "VLLM_CPU_KVCACHE_SPACE" in reason
    assert failure_reason("KeyError: 7\n", starved=True) == "KeyError: 7"  # another process may have been killed


def test_what_was_written_before_is_another_start_s(tmp_path) -> None:
    log = tmp_path / "a log"
    log.write_text("ValueError: of the start before\n")
    code = (
        "import sys; from lachesis.pipeline.inference.engines.vllm.end_reason import OutputMark; mark = OutputMark();"
        "print('KeyError: 7', file=sys.stderr, flush=True); print(mark.reason())"
    )
    with log.open("ab") as sink:
        done = subprocess.run([sys.executable, "-c", code], stderr=sink, stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout == "KeyError: 7\n"


def test_a_kill_for_lack_of_memory_is_the_reason_only_if_vllm_ended_just_after_it(monkeypatch) -> None:
    now, counts = [0.0], [5]
    monkeypatch.setattr(vllm_reason.time, "monotonic", lambda: now[-1])
    monkeypatch.setattr(vllm_reason, "_log_size", lambda: None)
    mark = OutputMark(MemoryKills(lambda: counts[-1], within_s=15.0))
    counts.append(6)
    now.append(1.0)
    mark.poll()
    now.append(9.0)
    assert "the kernel was out of memory" in (mark.reason() or "")
    now.append(900.0)
    assert mark.reason() is None, "a neighbour was killed, a quarter of an hour ago"
