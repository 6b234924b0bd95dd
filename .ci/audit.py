# ruff: noqa: INP001 - a script, no package
"""Compare the pinned packages with the advisories of PyPI, by pip-audit. Exit code 1 if one is known to be vulnerable.

Needs the network, and says so where it has none: what could not be looked up is no reason to fail a build, and no
reason to call it audited either.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def main() -> int:
    """Print the findings and return the exit code."""
    beside = Path(sys.executable).with_name("pip-audit")
    program = str(beside) if beside.exists() else shutil.which("pip-audit")
    if program is None:
        print("NOT AUDITED: pip-audit is not installed (`make audit` installs it where there is a network)")
        return 0
    command = [program, "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        print(f"NOT AUDITED: no advisories could be had: {reason[:300]}")
        return 0
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    bad = [(package, flaw) for package in packages for flaw in package.get("vulns", [])]
    for package, flaw in bad:
        fixed = ", ".join(flaw["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {flaw['id']}, fixed in {fixed}")
    audited = len(packages) - len(skipped)
    if skipped:
        print(f"NOT AUDITED: {len(skipped)} of {len(packages)} packages ({', '.join(skipped[:5])}...)")
    print(f"{audited} packages audited, {len(bad)} advisories")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
