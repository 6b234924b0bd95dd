"""`lachesis doctor`: every check, its finding, and how to fix it."""

import sys
from collections.abc import Sequence

import anyio
from rich.text import Text

from lachesis.pipeline.common.doctor_finding import DoctorFinding, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json, print_table
from lachesis.services.preflight.machine import check_machine
from lachesis.services.preflight.ports import SERVER
from lachesis.services.preflight.server import check_server
from lachesis.services.preflight.start import check_start

__all__ = ["doctor"]

_LOAD_S = 60.0
"""Seconds for which environments, raters and models are loaded."""
_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


@with_options
def doctor(options: Options, as_json: Json = False) -> None:
    """Check this machine and the server, and say how to fix each problem. Exits with 1 if there is one."""
    config = options.config()
    heard = HeartbeatLog()
    server = anyio.run(check_server, config, heard)
    running = {beat.service for beat in heard.newest()}
    if any(finding.check == "jetstream" for finding in server):  # it answers, so its port is taken rightly
        running.add(SERVER)
    findings = [*check_machine(config, running=running), *anyio.run(_check_start, options, config), *server]
    if as_json:
        print_json(findings)
    else:
        _print(findings)
    if any(finding.level == "FAIL" for finding in findings):
        sys.exit(1)


async def _check_start(options: Options, config: RunConfig) -> list[DoctorFinding]:
    if not options.has_file and not config.environments:
        return [
            warn(
                "configuration", "none is given, so what a run would load is not checked", "--config FILE or --run NAME"
            )
        ]
    found = check_start(config, options.arguments(), load_s=_LOAD_S, load_always=True, models=True, prompts=True)
    return [finding async for finding in found]


def _print(findings: Sequence[DoctorFinding]) -> None:
    rows = ((Text(row.level, style=_STYLES[row.level]), row.check, row.text, row.mend or "") for row in findings)
    print_table(("", "check", "finding", "mend"), rows)
    counts = {level: sum(row.level == level for row in findings) for level in _STYLES}
    print(", ".join(f"{count} {level}" for level, count in counts.items()))
