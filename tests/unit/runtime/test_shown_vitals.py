"""What a service says of itself and of others' errors holds no secret, also when it is repeated."""

import pytest

from lachesis.pipeline.common import safe_text
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member
from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.scorer.runner import EnsembleRunner
from lachesis.schemas import codec
from lachesis.schemas.errors import DataError

SECRET = "planted-51c9-secret"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_text, "_HIDDEN", [SECRET])


async def test_a_heartbeat_holds_none(lab) -> None:
    service = Service(lab.bus, "scorer", lab.run)
    service.mark_waiting("waiting", f"refused with {SECRET}")
    service.set_note("failure", f"note {SECRET}")
    service.set_problem("unrated", f"what {SECRET}", why=f"why {SECRET}", mend="https://me:pass1@h")
    await service.heartbeat()
    assert service.last_beat is not None
    said = codec.encode(service.last_beat)
    assert SECRET.encode() not in said
    assert b"pass1" not in said
    assert b"refused with ***" in said
    assert b"why ***" in said


async def test_a_rating_that_failed_holds_none(tmp_path) -> None:
    (tmp_path / "leaky.py").write_text(
        "from lachesis import Sample, rater\n\n\n@rater(bounds=(0.0, 1.0), inline=True)\n"
        f"def leaky(sample: Sample) -> float:\n    raise ValueError('{'x' * 150} {SECRET} Bearer abcdefgh1')\n"
    )
    runner = EnsembleRunner([load_member(RaterConfig(rater=f"{tmp_path / 'leaky.py'}:leaky"))])
    ((rating,),) = (await runner.rate_group([Sample(prompt="", completion="a", task={})])).values()
    assert SECRET not in rating.detail
    assert "abcdefgh1" not in rating.detail
    assert error_text(DataError(f"a {SECRET}")) == "DataError: a ***"
