"""The command line with single writers that do not ask whether another runs, as when two start at the same moment."""

from lachesis.services.cli import main
from lachesis.services.process import service_process as process


async def is_alone(*_: object, **__: object) -> bool:
    return True


process._is_alone = is_alone
if __name__ == "__main__":
    main()
