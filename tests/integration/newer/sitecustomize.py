"""Imported by every Python process of a run before anything else: those with a variable are of a newer build.

NEWER_BUILD names a file with service names. A service listed there when it starts writes, in every struct of every
event, a field more than this build knows, as a later version of it would after an upgrade.
"""

import os
import sys
from pathlib import Path
from typing import Any

FIELD = "from_a_newer_build"


def install() -> None:
    """Have this process write events as a newer build does."""
    import msgspec

    from lachesis.schemas import codec

    def newer(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            there = {name: getattr(value, name) for name in value.__struct_fields__}
            fields = {name: newer(found) for name, found in there.items() if found is not msgspec.UNSET}
            if value.__struct_config__.array_like:
                return [*fields.values(), FIELD]
            return {FIELD: [1, {"deep": None}], **fields}
        if isinstance(value, dict):
            return {key: newer(item) for key, item in value.items()}
        return [newer(item) for item in value] if isinstance(value, list | tuple) else value

    class Encoder:
        def encode(self, event: codec.Event) -> bytes:
            return msgspec.msgpack.encode(newer(event))

    codec._encoder = Encoder()  # type: ignore[assignment]


_command = sys.orig_argv[sys.orig_argv.index("lachesis") + 1 :] if "lachesis" in sys.orig_argv else []
if _command[:1] == ["run"] and _command[1] in Path(os.environ["NEWER_BUILD"]).read_text().split():
    install()
