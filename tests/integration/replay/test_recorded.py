"""Replays what another build recorded: later builds give the same scores, rewards and advantages to the bit.

`recorded.jsonl.xz` holds the first 137 groups that `lachesis export` gave of a run of `CONFIG`: of the model that the
demo begins with, `max_new_tokens = 10` and `longest_tokens = 32` in both environments, `batching.batch_size = 64`, and
8 steps. The digests are those that the replays of the build that recorded it gave. A digest changes only on purpose:
say in the changelog why, and how a history is moved.
"""

import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RECORDED = Path(__file__).with_name("recorded.jsonl.xz")
CONFIG = """
run = "recorded"
folder = "recorded"
seed = 7
[environments.short]
kind = "spell_backward"
samples = 4
params = { min_length = 2, max_length = 3, size = 400 }
[environments.long]
kind = "spell_backward"
samples = 4
params = { min_length = 4, max_length = 5, size = 400 }
[[scoring.raters]]
rater = "exact_match"
[[scoring.raters]]
rater = "similarity"
[normalization]
window = 16
"""


def test_replays_of_a_recorded_run_are_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "recorded.jsonl").write_bytes(lzma.decompress(RECORDED.read_bytes()))

    def lachesis(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "lachesis", *arguments, "--config", "run.toml", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, object] = json.loads(done.stdout)
        return found

    def digest(revision: str, *settings: str) -> object:
        sets = [part for setting in settings for part in ("--set", setting)]
        replayed = lachesis("replay", "--revision", revision, *sets)
        assert replayed["groups"] == 137
        return replayed["digest"]

    assert lachesis("import", "recorded.jsonl", "--unleased")["stored"] == 137
    assert digest("mean") == "03412308721e6566dbbf6b99d964089a"
    assert digest("median", "scoring.aggregation=median") == "cb0487b02062a02bccb85b4042c9e820"
    zscore = ("normalization.mode=zscore", "normalization.window=8")
    assert digest("zscore", *zscore) == "c069cedc1de375475b735d71502a367c"
