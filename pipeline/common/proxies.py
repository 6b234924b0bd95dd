"""Finds the proxy that requests to a server take, by HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

A proxy that does not reach a server makes the server look as if it were away, so errors have to name it.
"""

from urllib.request import getproxies, proxy_bypass

import httpx

from lachesis.pipeline.common.loopback import is_loopback

__all__ = ["describe_proxy", "is_on_this_machine"]


def is_on_this_machine(url: str) -> bool:
    """Return whether a URL leads to loopback, where no proxy may stand in between."""
    return is_loopback(httpx.URL(url).host)


def describe_proxy(url: str) -> str:
    """Return what to add to the name of a server where requests take a proxy; "" where they take none."""
    parts = httpx.URL(url)
    variables = getproxies()
    scheme = next((one for one in (parts.scheme, "all") if variables.get(one)), None)
    if scheme is None or is_on_this_machine(url) or proxy_bypass(parts.host):
        return ""
    proxy = httpx.URL(variables[scheme])
    shown = proxy.host if proxy.port is None else f"{proxy.host}:{proxy.port}"
    return f" (by the proxy {shown} that {scheme.upper()}_PROXY names; NO_PROXY={parts.host} leaves it out)"
