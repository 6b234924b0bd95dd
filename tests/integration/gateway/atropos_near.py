"""The example environment for atroposlib, with a reward that an untrained model gets some of: how near the text is."""

import difflib

from atropos_spelling import Spelling


class Near(Spelling):
    def score(self, text, word):
        return difflib.SequenceMatcher(None, text, word[::-1]).ratio()


if __name__ == "__main__":
    Near.cli()
