"""`lachesis basket`: says how many groups the basket holds."""

from lachesis.services.cli.options import Options, with_options
from lachesis_orchard.basket import FILE


@with_options
def basket(options: Options) -> None:
    """Say how many groups the basket holds."""
    print((options.config().path / FILE).read_text(encoding="utf-8"))
