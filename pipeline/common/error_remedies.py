"""Says how to mend what raters and environments raise on every answer, by the exception's own words."""

import re

__all__ = ["cure_of", "with_cure"]

_SIGNALS = (
    "signal.alarm works in a process's main thread alone, and raters that are plain functions run in worker threads: "
    "switch that timeout off (math_verify: parse(..., parsing_timeout=None) and verify(..., timeout_seconds=None)), as "
    "a rater's own timeout_s ends its calls; or use the built-in rater `math`"
)
_SAMPLES = (
    "a rater gets one lachesis.Sample, sample.completion and sample.task['answer'] say, or with group=True a list of "
    "them; a reward function over lists of completions needs a wrapper"
)
_CURES = (
    (
        re.compile(r"signal only works in main thread|signal\.alarm|threaded environment"),
        _SIGNALS,
    ),
    (
        re.compile(r"no current event loop"),
        "a plain function runs in a worker thread, which has no event loop: make it `async def`, and await",
    ),
    (
        re.compile(r"asyncio\.run\(\) cannot be called from a running|event loop is already running"),
        "an event loop runs there already: make the function `async def`, and await",
    ),
    (
        re.compile(r"SQLite objects created in a thread"),
        "a plain function runs in worker threads: open the connection in each call, or with check_same_thread=False",
    ),
    (
        re.compile(r"Cannot re-initialize CUDA in forked subprocess"),
        "set services.forkserver = false, so that no process is forked",
    ),
    (
        re.compile(r"daemonic processes are not allowed to have children"),
        "start no process of its own there, or use concurrent.futures.ThreadPoolExecutor",
    ),
    (
        re.compile(r"'Sample' object"),
        _SAMPLES,
    ),
)


def cure_of(error: BaseException) -> str | None:
    """Return how to mend the cause of an exception, None where its words do not say.

    What it knows has nothing to do with an answer: it comes again with the next one.
    """
    text = str(error)
    return next((cure for pattern, cure in _CURES if pattern.search(text)), None)


def with_cure(text: str, error: BaseException) -> str:
    """Return `text` with how to mend what raised `error`, where that is known."""
    cure = cure_of(error)
    return text if cure is None else f"{text.rstrip('.')}. Mend it: {cure}"
