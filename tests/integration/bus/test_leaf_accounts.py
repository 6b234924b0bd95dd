"""Services that connect to a leaf node with the accounts of `lachesis auth init`; the run's streams are at a hub."""

import socket
from pathlib import Path

import pytest
from integration.bus.test_connection import SMALL, CustomServer
from integration.security.secured import auth_init

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import connect, for_identity
from lachesis.pipeline.errors import AccessError, NotFoundError
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import LEDGER, ROLLOUTS

RUN = "far"
CONFIG = f'run = "{RUN}"\n[nats]\ndomain = "hub"\n[environments.sums]\nkind = "x"\n'


@pytest.mark.slow
@pytest.mark.parametrize("own", ["", 'jetstream {{ store_dir: "{folder}/leaf", domain: leaf }}'])
async def test_each_service_may_in_the_domain_what_it_may_without_one(tmp_path: Path, own: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "l").mkdir()
    assert f'account: "lachesis-{RUN}"' in auth_init(tmp_path / "l", config=CONFIG)
    hub_text = f"""
server_name: hub
max_payload: 8MB
jetstream {{ store_dir: "{tmp_path}/hub", domain: hub }}
accounts {{ FAR {{ jetstream: enabled, users: [ {{ user: far, password: secret }} ] }} }}
leafnodes {{ listen: "127.0.0.1:{port}" }}"""
    leaf_text = f"""
server_name: leaf
max_payload: 8MB
{own.format(folder=tmp_path)}
include "../auth.conf"
leafnodes {{ remotes: [ {{ url: "nats-leaf://far:secret@127.0.0.1:{port}", account: "lachesis-{RUN}" }} ] }}"""
    async with CustomServer(tmp_path / "h", hub_text), CustomServer(tmp_path / "l" / "store", leaf_text) as leaf:
        settings = ConnectionConfig(
            url=leaf.url, domain="hub", nkey_folder=str(tmp_path / "l" / "auth" / RUN), connect_timeout_s=20.0,
            ack_timeout_s=2.0, give_up_s=10.0,
        )  # fmt: skip

        async def as_(identity: str):
            return await connect(run=RUN, name=identity, config=for_identity(settings, identity))

        subject = subjects.rollout(RUN, "sums")
        async with await as_(OPERATOR) as operator:
            await operator.ensure_streams(SMALL)
        async with (
            await as_("environment-sums") as producer,
            await as_("scorer") as scorer,
            await as_("trainer") as trainer,
        ):
            stored = await producer.publish(subject, b"a group", msg_id="1")
            durable = subjects.durable("scorer", RUN, "live")
            async with scorer.consume(ROLLOUTS, durable, [subject]) as deliveries:
                async for delivery in deliveries:
                    assert delivery.message.data == b"a group"
                    await delivery.ack()
                    break
            async with producer.watch(keys.POLICY) as changes:
                await trainer.put(keys.POLICY, b"policy", revision=0)
                assert (await anext(aiter(changes))).value == b"policy"
            assert (await scorer.lag(ROLLOUTS, durable)).pending == 0
            with pytest.raises(AccessError):
                await scorer.publish(subject, b"forged", msg_id="2")
            with pytest.raises(AccessError):
                await scorer.put(keys.POLICY, b"forged", revision=0)
        async with await as_(OBSERVER) as observer:
            assert (await observer.usage(ROLLOUTS)).last == stored.seq
            assert (await observer.get(ROLLOUTS, stored.seq)).data == b"a group"
            with pytest.raises(NotFoundError):
                await observer.get(LEDGER, 1)
