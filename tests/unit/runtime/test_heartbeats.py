import pytest

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.runtime.heartbeats import read_heartbeat
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

BEAT = Heartbeat(
    host="h",
    schema_version=1,
    run="r",
    service="health",
    instance="1-a",
    pid=1,
    time_ns=1,
    stage=ServiceMetrics().report(),
)


def test_a_heartbeat_counts_on_the_subject_of_its_service_alone() -> None:
    own = StoredMessage("", subjects.heartbeat("r", "health", "1-a"), 0, encode(BEAT), 1)
    assert read_heartbeat(own) == BEAT
    for subject in ("rl.heartbeat.r.environment.1-a", "rl.heartbeat.other.health.1-a", "rl.heartbeat.r.health", "x"):
        with pytest.raises(SchemaError):
            read_heartbeat(StoredMessage("", subject, 0, encode(BEAT), 1))
