"""`python -m lachesis` is the command line."""

import os
import sys
from contextlib import suppress

if __name__ == "__main__":  # worker processes import the main module again, under another name
    with suppress(OSError):  # the current folder was deleted, which `main` says
        if not sys.flags.safe_path and sys.path and os.path.samefile(sys.path[0] or ".", "."):  # noqa: PTH121
            del sys.path[0]  # `main` has this folder searched last: its files may be called like packages
    from lachesis.services.cli import main

    main()
