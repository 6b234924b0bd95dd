"""The audit notices each way in which the pipeline is broken on purpose."""

from pathlib import Path

import pytest
from chaos.caught import played
from chaos.mutations import MUTATIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", MUTATIONS)
async def test_a_broken_pipeline_is_noticed(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    verdict = await played(mutation, tmp_path, broken=True)
    assert mutation.caught_by & verdict.violations.keys(), verdict.violations
