"""`lachesis run`: one service in this process."""

import sys

from lachesis.services.cli.options import Options
from lachesis.services.output import print_table
from lachesis.services.process.replica import replica_name
from lachesis.services.process.service_process import Role, run_process
from lachesis.services.registry import SERVICES, find

__all__ = ["list_services", "run_service"]


def list_services() -> None:
    """Print the services with what they do and the extra they need."""
    rows = [(spec.name, spec.about, f"lachesis-rl[{spec.extra}]" if spec.extra else "") for spec in SERVICES.values()]
    print_table(("service", "what it does", "needs"), rows)


def run_service(options: Options, service: str, part: str, *, replica: int | None, supervised: bool) -> None:
    """Run until drained; exits with the code of `run_process`."""
    role = Role(find(service), part, replica_name(replica), supervised)
    sys.exit(run_process(role, options.config()))
