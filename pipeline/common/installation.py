"""Returns the command that installs an extra of this package, in the form that fits the installation."""

import shlex
from pathlib import Path

__all__ = ["DISTRIBUTION", "install_command"]

DISTRIBUTION = "lachesis-rl"


def install_command(*extras: str) -> str:
    """Return the pip command that installs `extras` (none: the package's own requirements).

    A checkout is installed from its folder: pip does not find it by its name.
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    checkout = _checkout()
    if checkout is None:
        return f"pip install {shlex.quote(DISTRIBUTION + wanted)}"
    folder = "." if checkout == Path.cwd() else str(checkout)
    return f"pip install -e {shlex.quote(folder + wanted)}"


def _checkout() -> Path | None:
    """Return the root of the source tree that this module runs from; None: it was installed as a wheel."""
    root = Path(__file__).resolve().parents[2]
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    return root if f'name = "{DISTRIBUTION}"' in text else None
