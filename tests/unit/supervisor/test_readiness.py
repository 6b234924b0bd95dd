from lachesis.pipeline.config.run import RunConfig, ServicesConfig, TrainingConfig
from lachesis.schemas.control import StageVitals
from lachesis.services.supervisor.readiness import LateProcess, describe_late


def test_who_is_not_ready_is_told_with_what_it_did_and_the_setting_that_gives_it_more_time() -> None:
    config = RunConfig(training=TrainingConfig(drain_s=60), services=ServicesConfig(ready_s=120))
    late = [
        LateProcess("trainer", True, StageVitals(state="starting", note="loading model m"), "INFO started"),
        LateProcess("scorer", True, None, ""),
        LateProcess("inference-policy", False, None, "x" * 1000),
    ]
    said = describe_late(config, ["trainer", "scorer", "inference"], late).splitlines()
    assert said[0] == "not ready after 180 s (services.ready_s = 120, 60 for a predecessor to drain):"
    assert said[1] == "  trainer: starting: loading model m; its log ends: INFO started"
    assert said[2] == "  scorer: runs and has not reached the server; its log is empty"
    assert said[3].startswith("  inference-policy: is being started; its log ends: xxx")
    assert len(said[3]) < 400
    assert "raise services.ready_s; else see" in said[4]
