"""Clients without the gateway's token are named while they try, and no longer."""

from lachesis.pipeline.extensions.atropos.gateway.logic.refused_clients import RefusedClients


def test_refused_clients_are_said_while_they_try() -> None:
    refused = RefusedClients()
    assert refused.describe(0.0) is None
    refused.record("/scored_data", 10.0)
    refused.record("/register-env", 11.0)
    said = refused.describe(18.0)
    assert said is not None
    assert said.startswith("2 requests came without the gateway's token")
    assert said.endswith("the newest was for '/register-env'")
    assert refused.describe(20.0) is None
    refused.record("/" + "x" * 5000, 30.0)
    assert len(refused.describe(30.0) or "") < 200
