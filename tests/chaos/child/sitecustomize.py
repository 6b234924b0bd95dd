"""Imported by every Python process of a campaign before anything else: what it acknowledges is noted, and where the
campaign asks for it, it is broken on purpose."""

import os

if "CHAOS_WITNESS" in os.environ:
    from chaos.witness import bear_witness

    bear_witness(os.environ["CHAOS_WITNESS"])
if "CHAOS_MUTATION" in os.environ:
    from chaos.mutations import MUTATIONS

    MUTATIONS[os.environ["CHAOS_MUTATION"]].apply()
