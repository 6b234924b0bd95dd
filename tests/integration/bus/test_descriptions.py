"""What a person sees who lists streams, buckets and consumers with the server's own tools."""

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects

RUN = "demo"


async def test_streams_buckets_and_consumers_say_what_they_are_and_whose(nats_bus: NatsBus) -> None:
    js = nats_bus.client.jetstream()
    for kind, text in subjects.STREAM_TEXTS.items():
        assert (await js.stream_info(f"lachesis_demo_{kind}")).config.description == f"{text}, of run demo"
    bucket = await js.key_value("lachesis_demo")
    assert (await bucket.status()).stream_info.config.description == f"{subjects.BUCKET_TEXT}, of run demo"

    url = f"nats://{nats_bus.server[0]}:{nats_bus.server[1]}" if nats_bus.server else ""
    durable = subjects.durable("scorer", "demo", "live")
    filters = [subjects.event(kind, "demo", "live") for kind in ("reward", "dead")]
    async with (
        await connect(url, run="demo", name="demo.batcher", token=nats_bus.client.options.get("token")) as batcher,
        batcher.read(subjects.EVENTS, filters) as messages,
        batcher.consume(subjects.ROLLOUTS, durable, [subjects.rollout("demo")]),
    ):
        await nats_bus.publish(subjects.event("reward", "demo", "live", "words"), b"x", msg_id="1")
        await anext(messages)
        (shared,) = [info for info in await js.consumers_info("lachesis_demo_ROLLOUTS") if info.config.durable_name]
        assert (shared.name, shared.config.description) == (
            durable, "Lachesis: work of all replicas of scorer (run demo, revision live)",
        )  # fmt: skip
        (reader,) = await js.consumers_info("lachesis_demo_EVENTS")
        assert reader.name.startswith("batcher=demo=EVENTS=reward-dead=")
        about = f"Lachesis: demo.batcher reads {', '.join(filters)} from 1 on "
        assert reader.config.description.startswith(about)
