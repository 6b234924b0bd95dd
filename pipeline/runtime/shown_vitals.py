"""Takes secrets out of what a service says of itself, before it is broadcast, written or exported.

Its notes and notices repeat what users' code and other servers said, and these repeat what they were given.
"""

import msgspec

from lachesis.pipeline.common.secret_texts import without_secrets
from lachesis.schemas.control import StageVitals
from lachesis.schemas.notices import Notice

__all__ = ["shown_notice", "shown_vitals"]


def shown_vitals(stage: StageVitals) -> StageVitals:
    """Return a service's figures with texts that hold no secrets."""
    note = None if stage.note is None else without_secrets(stage.note)
    return msgspec.structs.replace(stage, note=note, notices=[shown_notice(one) for one in stage.notices])


def shown_notice(notice: Notice) -> Notice:
    """Return a notice with texts that hold no secrets."""
    texts = {name: without_secrets(getattr(notice, name)) for name in ("what", "why", "mend")}
    return msgspec.structs.replace(notice, **texts)
