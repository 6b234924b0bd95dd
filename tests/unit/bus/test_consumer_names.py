"""Names of consumers: whose they are, that the server takes them, and that no two are one."""

import re

import pytest

from lachesis.pipeline.bus.consumer_names import durable_description, reader_description, reader_name, reader_names
from lachesis.schemas import subjects

LEGAL = re.compile(r"[^\s.*>/\\]{1,255}")


def test_a_reader_says_whose_it_is_and_what_it_reads() -> None:
    filters = [subjects.event(kind, "demo", "live") for kind in ("reward", "dead", "alert")]
    name = reader_name("demo.batcher", subjects.EVENTS, filters, "1b537a28830f5098")
    assert name == "batcher=demo=EVENTS=reward-dead-alert=1b537a28830f5098"
    assert (
        reader_description("demo.batcher", filters[:1], 17, "1b")
        == "Lachesis: demo.batcher reads rl.reward.demo.live.* from 17 on 1b"
    )
    watch = reader_name("demo.environment-words", "KV_lachesis_policy", ["$KV.lachesis_policy.demo"], "00")
    assert watch == "environment-words=demo=KV_lachesis_policy=demo=00"


@pytest.mark.parametrize("client", ["", "x", "a b.c/d*e>f\\g", "run." + "s" * 400, "a.b.c"])
@pytest.mark.parametrize("filters", [[], [">"], ["rl.rollout.r.*"] * 40, ["$KV.bucket.>", "*.*"]])
def test_the_server_takes_every_name_and_the_suffix_is_never_cut_off(client: str, filters: list[str]) -> None:
    name = reader_name(client, "S", filters, "1b537a28830f5098")
    assert LEGAL.fullmatch(name)
    assert name.endswith("=1b537a28830f5098")
    assert name.count("=") != subjects.durable("scorer", "r", "live").count("=")
    description = reader_description(client, filters * 100, 1, "1b537a28830f5098")
    assert len(description) <= 1000
    assert description.endswith(" 1b537a28830f5098")


def test_names_that_belong_to_an_identity_are_no_other_consumers() -> None:
    names = reader_names("environment-words")
    assert len(set(names)) == len(names) >= 32
    assert all(LEGAL.fullmatch(name) and name.count("=") == 1 for name in names)
    assert not set(names) & set(reader_names("environment-words2"))


def test_a_durable_consumer_says_which_stage_of_which_run_shares_it() -> None:
    durable = subjects.durable("scorer", "demo", "live")
    assert durable_description(durable) == "Lachesis: work of all replicas of scorer (run demo, revision live)"
    assert durable_description("other") == "Lachesis: work of all replicas of other"
