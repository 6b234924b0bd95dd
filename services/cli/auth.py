"""`lachesis auth`: makes keys and least-privilege permissions for your own server.

They follow from the table in `pipeline.access`.

`init` fills a folder that a nats-server's configuration includes:

    auth.conf           what to include: the accounts of each run found here, and TLS if requested
    auth/RUN.conf       the run's accounts: one holds the streams, and each service and environment has one with an nkey
                        user and its permissions; public keys alone
    auth/RUN/NAME.nk    the seed of one of them (mode 0600), what `nats.nkey_folder` names; all its replicas share it
    tls.conf            the server's certificate, if one was named

Safe to repeat: seeds that exist stay (unless `force`), missing ones are made, permissions are rewritten.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lachesis.pipeline.access import Access
from lachesis.pipeline.bus.accounts import accounts_config, accounts_of, streams_account
from lachesis.pipeline.bus.permissions import Permissions, permissions
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extension import access_of
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.output import print_json, print_table
from lachesis.services.run.permission_scope import scope_of

__all__ = ["ServerTls", "auth_app", "auth_init", "auth_show", "run_auth_init", "server_tls", "show_auth"]

_SEED_BYTES = 32

auth_app = typer.Typer(help="Keys and permissions for your own server.", no_args_is_help=True)


@auth_app.command("init")
@with_options
def auth_init(
    options: Options,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the server's configuration.")] = Path(
        "deploy/nats"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace existing keys by new ones.")] = False,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Require client certificates of this authority, PEM.")
    ] = None,
) -> None:
    """Write an nkey and least-privilege permissions for each service. Safe to repeat."""
    run_auth_init(options, out, force=force, tls=server_tls(cert, key, client_ca))


@auth_app.command("show")
@with_options
def auth_show(options: Options, as_json: Json = False) -> None:
    """Show the permissions of each identity; with --json, its allowed and denied subjects."""
    show_auth(options, as_json=as_json)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's certificate and key, and the authority that its clients' certificates must come from (None: none is
    required). PEM files; the server reads them, so the paths are its own.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """Return what the options of `lachesis auth init` say. Raises `ConfigError` when only a part is given."""
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs both --cert and --key")
    return ServerTls(cert.absolute(), key.absolute(), client_ca.absolute() if client_ca else None)


def run_auth_init(options: Options, folder: Path, *, force: bool, tls: ServerTls | None) -> None:
    """Write keys and permissions of one run and print what was done."""
    config = options.config()
    seeds = folder / "auth" / config.run
    table, keys, made = access_of(scope_of(config)), {}, []
    domain = None if config.nats is None else config.nats.domain
    for identity in table:
        file = seeds / f"{identity}.nk"
        if force or not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, _new_seed(), private=True)
            made.append(identity)
        file.chmod(0o600)
        keys[identity] = _public_key(file)
    accounts = accounts_config(accounts_of(config.run, table, keys), domain)
    # none of these files holds a secret, and the server may be reading each while it is replaced
    replace_file(folder / "auth" / f"{config.run}.conf", accounts.encode())
    if tls is not None:
        replace_file(folder / "tls.conf", _tls_config(tls).encode())
    replace_file(folder / "auth.conf", _include(folder).encode())
    kept = len(keys) - len(made)
    print(f"{seeds}: made {len(made)} keys ({', '.join(made) or 'none'}), kept {kept}")
    for file in sorted(seeds.glob("*.nk")):
        if file.stem not in keys:
            print(f"{file} opens nothing any more: delete it")
    print(
        f"{folder / 'auth.conf'}: include it in the server's configuration, and reload the server when it changes; "
        "twice where a run is new in it, since a server connects a new account to its streams when it reloads again"
    )
    if domain is not None:
        print(_leaf_node(config.run, domain))
    print(f"in the run's configuration: [nats] nkey_folder = {msgspec.json.encode(str(seeds)).decode()}")


def _leaf_node(run: str, domain: str) -> str:
    """Return what joins the run's account to the server of the domain that holds its streams."""
    account = msgspec.json.encode(streams_account(run)).decode()
    return (
        f"in the server's configuration, besides: leafnodes {{ remotes: [ {{ url: ..., account: {account} }} ] }}, "
        "with address and credentials of an account that has JetStream on the server of the domain "
        f"{domain!r}; leave that account to the run alone, since every user in it may write to all of its streams"
    )


def show_auth(options: Options, *, as_json: bool) -> None:
    """Print who may do what; as JSON, the subjects that the server allows and denies."""
    config = options.config()
    if as_json:
        print_json(_permissions(config))
        return
    rows = ((identity, *_cells(access)) for identity, access in access_of(scope_of(config)).items())
    print_table(("who", "writes", "hears", "reads", "consumes", "sets", "makes or trims"), rows)


def _permissions(config: RunConfig) -> dict[str, Permissions]:
    table, domain = access_of(scope_of(config)), None if config.nats is None else config.nats.domain
    return {identity: permissions(config.run, identity, access).in_domain(domain) for identity, access in table.items()}


def _cells(access: Access) -> list[str | None]:
    """Return a row's cells; what every service may do (heartbeats, the micro protocol) is left out."""
    shared = ("rl.heartbeat.", "rl.health.", "$SRV.")
    asked = [subject for _, subject in access.asks]
    writes = [subject for subject in (*access.writes, *asked) if not subject.startswith(shared)]
    hears = [subject for subject in (*access.hears, *access.serves) if not subject.startswith(shared[1:])]
    durables = [durable for _, durable in access.consumes]
    changes = list(dict.fromkeys((*access.makes, *access.trims)))
    return [", ".join(names) or None for names in (writes, hears, access.gets, durables, access.sets, changes)]


def _new_seed() -> bytes:
    nkeys = _nkeys()
    seed: bytes = nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    return seed + b"\n"


def _public_key(file: Path) -> str:
    nkeys = _nkeys()
    try:
        seed = read_small_file(file).strip()
        prefix, raw = nkeys.decode_seed(seed)
        whole = prefix == nkeys.PREFIX_BYTE_USER and nkeys.encode_seed(raw, prefix) == seed  # checksum and all
    except (OSError, nkeys.NkeysError, ValueError):
        whole = False
    if not whole:
        raise ConfigError(f"{file} holds no nkey seed of a user; delete it, and run this again")
    pair = nkeys.from_seed(bytearray(seed))
    key: str = pair.public_key.decode()
    pair.wipe()
    return key


def _nkeys() -> Any:
    try:
        import nkeys
    except ModuleNotFoundError as error:
        raise StartupError(f"making keys needs the package nkeys: {install_command('auth')}") from error
    return nkeys


def _include(folder: Path) -> str:
    runs = sorted((folder / "auth").glob("*.conf"))
    lines = ["# Written by `lachesis auth init`: who may connect, and what each may do; a run has accounts of its own."]
    lines += ["accounts {", *(f'  include "auth/{file.name}"' for file in runs), "}"]
    if (folder / "tls.conf").exists():
        lines.append('include "tls.conf"')
    return "\n".join([*lines, ""])


def _tls_config(tls: ServerTls) -> str:
    files: Mapping[str, Path | None] = {"cert_file": tls.cert, "key_file": tls.key, "ca_file": tls.client_ca}
    lines = [f"  {name}: {msgspec.json.encode(str(path)).decode()}" for name, path in files.items() if path]
    verify = ["  verify: true  # clients have certificates, too"] if tls.client_ca else []
    return "\n".join(["tls {", *lines, *verify, "}", ""])
