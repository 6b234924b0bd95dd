"""What a run leaves in its folder goes with the run, and nothing else does."""

from pathlib import Path

import pytest

from lachesis.pipeline.common.fsync import partial_of
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.held_out import keep_record
from lachesis.schemas.control import HeldOutRecord
from lachesis.services.preflight.first_model import note_model
from lachesis.services.run.deletion import measure_folder
from lachesis.services.run.supervisor_state import SUPERVISOR_LOG
from lachesis.services.supervisor.log_limit import cut_log


@pytest.mark.parametrize("partial", [False, True])
def test_what_a_run_writes_in_its_folder_is_its_own(tmp_path: Path, partial: bool) -> None:
    note_model(RunConfig(run="r", model="org/model", folder=str(tmp_path)))
    keep_record(tmp_path, "math.1", HeldOutRecord(seed=1, limit=0))
    (tmp_path / SUPERVISOR_LOG).write_bytes(b"line\n" * 100)
    assert cut_log(tmp_path / SUPERVISOR_LOG, 100)
    (tmp_path / "summary.json").touch()
    found = sorted(tmp_path.iterdir())
    assert len(found) == 5
    if partial:  # as a kill may leave them
        for path in found:
            path.rename(partial_of(path) if path.suffix in {".json", ".msgpack"} else path)
    (tmp_path / "held_out.txt").touch()
    assert measure_folder(tmp_path).kept == ["held_out.txt"]
