"""Leaves out variables that Kubernetes and Docker set for services, which are no settings.

Kubernetes gives every pod of a namespace variables for each service in it: for one called `lachesis`,
LACHESIS_SERVICE_HOST, LACHESIS_SERVICE_PORT, LACHESIS_PORT=tcp://10.0.0.1:80, LACHESIS_PORT_80_TCP_ADDR and more; for
`lachesis-gateway` the same after LACHESIS_GATEWAY. Docker's links are like them.
"""

import re
from collections.abc import Collection, Mapping

__all__ = ["without_service_variables"]

_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)
_SUFFIX = r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?|NAME)"


def without_service_variables(environ: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the variables without those of services whose names begin with `prefix`, LACHESIS_ say.

    A service is known by NAME_SERVICE_HOST, or by NAME_PORT with an address as its value: LACHESIS_PORT=8080 stays, so
    that it is named as a setting that is not known.
    """
    named = [name for name in environ if name.startswith(prefix)]
    services = {
        name.removesuffix("_SERVICE_HOST") if name.endswith("_SERVICE_HOST") else name.removesuffix("_PORT")
        for name in named
        if name.endswith("_SERVICE_HOST") or (name.endswith("_PORT") and _ADDRESS.match(environ[name]))
    }
    left_out = {name for name in named if _is_of(name, services)}
    return {name: value for name, value in environ.items() if name not in left_out}


def _is_of(name: str, services: Collection[str]) -> bool:
    return any(re.fullmatch(rf"{re.escape(service)}_{_SUFFIX}", name) for service in services)
