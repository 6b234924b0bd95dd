"""A policy that the reference server serves: fixtures for tests of teachers."""

import pytest
from contract.inference_servers import reference, sharp_policy

__all__ = ["policy", "url"]


@pytest.fixture(scope="module")
def policy():
    return sharp_policy(0)


@pytest.fixture(scope="module")
def url(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with reference(policy, folder, folder) as found:
        yield found
