"""Does the audit notice when the pipeline is broken? Prints, for each mutation, which checks found what.

    python tests/chaos/caught.py [NAME ...]

Each is played twice: broken, where one of the checks it is meant for must fail, and whole under the same strikes, where
none may. Exits with 1 if one goes unnoticed or a whole pipeline is blamed.
"""

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.judge import Verdict
from chaos.mutations import MUTATIONS, Mutation
from chaos.rounds import Round, play

__all__ = ["played"]


async def played(mutation: Mutation, folder: Path, *, broken: bool) -> Verdict:
    """Play the mutation's strikes in `folder`, with its patch or without, and return the audit's verdict."""
    patches = [*mutation.conditions, *([mutation.patch] if broken else [])]
    this = Round(
        seed=0,
        kills=0,
        servers=mutation.servers,
        patches=patches,
        sets=mutation.sets,
        strikes=mutation.strikes,
        progress_s=40.0,
    )
    await play(this, folder)
    return this.verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MUTATIONS))
    parser.add_argument("--broken-only", action="store_true", help="leave the controls out")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # what the audit reads warns in its own words; the checks say what is wrong
    wrong = 0
    for name in arguments.names or MUTATIONS:
        mutation = MUTATIONS[name]
        for broken in [True] if arguments.broken_only else [True, False]:
            folder = Path(tempfile.mkdtemp(prefix="lachesis mutation "))
            verdict = anyio.run(lambda m=mutation, f=folder, b=broken: played(m, f, broken=b))
            found = {check: texts[0][:160] for check, texts in verdict.violations.items()}
            good = bool(mutation.caught_by & found.keys()) if broken else not found
            wrong += not good
            print(f"{name}, {'broken' if broken else 'whole'}: {'as it should be' if good else 'WRONG'}", flush=True)
            for check, text in found.items():
                print(f"    {check}: {len(verdict.violations[check])} violations, the first: {text}", flush=True)
            if good:
                shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
