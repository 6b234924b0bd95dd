"""A tracker that keeps what it gets, and fails as a test wants."""

import threading


class Recorder:
    """`failures` are raised by the next calls, one each (None: none is).

    While `free` is clear, every call waits.
    """

    name = "recorder"

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = []
        self.free = threading.Event()
        self.free.set()

    def _call(self, *call) -> None:
        assert self.free.wait(60)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        self.calls.append(call)

    def open(self, step):
        self._call("open", step)

    def log_figures(self, figures, step):
        self._call("figures", step, figures)

    def log_samples(self, rows, step):
        self._call("samples", step, list(rows))

    def log_alert(self, alert, step):
        self._call("alert", step, alert)

    def close(self):
        self._call("close")
