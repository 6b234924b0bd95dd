"""The page of a run of the script: its figures beside those recorded on a CPU and last on this card. Pure."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["page", "recorded", "slug"]

Line = Mapping[str, Any]


def slug(device: str) -> str:
    """Return the name of a device as a file's name has it."""
    return "-".join("".join(sign if sign.isalnum() else " " for sign in device.lower()).split())


def recorded(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a run that was recorded; none where there is no such file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def page(lines: Iterable[Line], cpu: Iterable[Line], last: Iterable[Line]) -> str:
    """Return a page in Markdown. `cpu`, `last`: lines recorded on a CPU, and last on this card."""
    lines, cpu, last = list(lines), list(cpu), list(last)
    machine = _machine(lines)
    text = [f"# {machine.get('device', 'A run')}", "", _described(machine), ""]
    checks = [line for line in lines if "check" in line]
    failed = [line for line in checks if not line["ok"]]
    ends = [line for line in lines if "ended" in line]
    text += [f"{len(checks) - len(failed)} of {len(checks)} checks hold.", ""]
    text += [f"- **{line['part']}: {line['check']}**: {line['text']}" for line in failed]
    text += [f"- **{line['part']} {line['ended']}**, after {line['seconds']:g} s" for line in ends if not line["ok"]]
    text += [f"- {line['part']}: {line['left_out']} left out: {line['why']}" for line in lines if "left_out" in line]
    text += ["", "## Figures", ""]
    text += [
        f"{name}: {found}." for name, of in (("CPU", cpu), ("Last here", last)) if (found := _machine(of).get("how"))
    ]
    text += ["", _heading(cpu, last), "|---|---|---|---|---|---|"]
    before, elsewhere = _figures(last), _figures(cpu)
    ours = _figures(lines)
    ran = {line["part"] for line in lines if "part" in line}
    for key in dict.fromkeys([*ours, *before]):
        part, name = key
        if part not in ran:
            continue
        one = ours.get(key)
        unit = (one or before[key]).get("unit", "")
        text.append(
            f"| {part} | {name} | {_shown(one)} | {_shown(elsewhere.get(key))} | {_shown(before.get(key))} | {unit} |"
        )
    text += ["", "\\* taken in another way than the script does: the recorded line says how", "", "## Checks", ""]
    text += [f"- {'ok' if line['ok'] else 'FAILS'} {line['part']}: {line['check']}" for line in checks]
    text += ["", "## Parts", ""]
    text += [f"- {line['part']}: {line['ended']}, {line['seconds']:g} s" for line in ends]
    return "\n".join(text) + "\n"


def _machine(lines: Iterable[Line]) -> Line:
    return next((line for line in lines if "device" in line), {})


def _described(machine: Line) -> str:
    return ", ".join(
        f"{name} {machine[name]}" for name in ("when", "commit", "python", "torch", "cores") if name in machine
    )


def _heading(cpu: list[Line], last: list[Line]) -> str:
    of_cpu = f"CPU ({_machine(cpu).get('cores', '?')} cores)" if cpu else "CPU"
    of_last = f"last here ({_machine(last).get('when', '?')})" if last else "last here"
    return f"| part | figure | this run | {of_cpu} | {of_last} | unit |"


def _figures(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    return {(line["part"], line["figure"]): line for line in lines if "figure" in line}


def _shown(line: Line | None) -> str:
    if line is None:
        return ""
    shown = f"{line['value']:,.4g}" if line["value"] is not None else str(line.get("why", "none"))
    return f"{shown} \\*" if "how" in line else shown
