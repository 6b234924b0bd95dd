"""TLS settings that clients share."""

import ssl

import pytest

from lachesis.pipeline.common.tls import tls_context
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://models.example"])
def test_a_further_client_does_not_load_the_authorities_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    InferenceClient(ClientConfig(url=url))

    def load_again(*_: object, **__: object) -> ssl.SSLContext:
        raise AssertionError("they are loaded again")

    monkeypatch.setattr(ssl, "create_default_context", load_again)
    InferenceClient(ClientConfig(url=url))


@pytest.mark.parametrize("trust_env", [True, False])
def test_certificates_and_host_names_are_checked(trust_env: bool) -> None:
    context = tls_context(trust_env=trust_env)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
