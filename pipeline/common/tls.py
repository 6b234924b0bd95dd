"""Makes the TLS settings that the HTTP clients of one process share.

Loading the known authorities takes each client 20 ms of a core otherwise.
"""

import functools
import ssl

import httpx

__all__ = ["tls_context"]


@functools.cache
def tls_context(*, trust_env: bool) -> ssl.SSLContext:
    """Return httpx's own TLS settings: certificates and host names are checked.

    `trust_env`: SSL_CERT_FILE and SSL_CERT_DIR say where the authorities are, as they were at the first call.
    """
    return httpx.create_ssl_context(trust_env=trust_env)
