"""Replays what an older build recorded: later builds give the same scores, rewards and advantages to the bit.

`recorded.jsonl.xz` is `lachesis export` of a run of two environments (spell_backward, 137 groups of 4), made before
runs had streams of their own and windows counted an environment's own groups. The first digests are what that build's
own replays of it gave; the last is of the rule that came after it. A digest changes only on purpose: say in the
changelog why, and how a history is moved.
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
OLD_WINDOWS = "normalization.windows=stream"


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
    assert digest("mean", OLD_WINDOWS) == "5737e3823a36f0fd7bdac4793572fb3f"
    assert digest("median", OLD_WINDOWS, "scoring.aggregation=median") == "cc508610a7c29aaafc99a09f9fff02ac"
    assert digest("groups") == "402f83dcd5b25970fea7d970dcf89317"
