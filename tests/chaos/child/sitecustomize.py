"""Imported by every Python process of a campaign before anything else: each acknowledgement that it gets is noted, and
where the campaign asks for it, it works under harder conditions or is broken on purpose."""

import os

if "CHAOS_WITNESS" in os.environ:
    from chaos.witness import bear_witness

    bear_witness(os.environ["CHAOS_WITNESS"])
if os.environ.get("CHAOS_PATCHES"):
    from chaos.mutations import PATCHES

    for name in os.environ["CHAOS_PATCHES"].split(","):
        PATCHES[name]()
