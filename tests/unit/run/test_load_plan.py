"""`lachesis plan --groups-per-s`: what a load takes, what is full first, and what helps."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS, TEACHER
from lachesis.services.cli.commands import app
from lachesis.services.output import human_bytes
from lachesis.services.run.load_costs import CostTable, Observation, ProcessCost, fit_costs, lone_share, read_costs
from lachesis.services.run.load_messages import GroupShape, MessageSize, make_group, measure_messages
from lachesis.services.run.load_plan import FEED, Load, LoadPlan, leader_costs, plan_load, process_costs
from lachesis.services.run.load_settings import parse_retention, parse_shape, plan_configured_load

SHAPE = GroupShape(samples=4, tokens=64, raters=2, batch_groups=4)
PROCESSES = (
    "producer",
    "scorer",
    "governor",
    "normalizer",
    "batcher",
    "curriculum",
    "health",
    "consumer",
    "nats-server",
)


def cost(group=0.1, megabyte=0.0, batch=0.0, lone=0.0, idle=0.0):
    return ProcessCost(group_ms=group, megabyte_ms=megabyte, batch_ms=batch, lone_ms=lone, idle_ms=idle)


def table(**costs):
    processes = {name: costs.get(name.replace("-", "_"), cost()) for name in PROCESSES}
    return CostTable(origin=["a test"], machine="none", together_groups_per_s=200.0, processes=processes)


MESSAGES = [
    MessageSize(kind="rollout", stream=ROLLOUTS, size=1_000_000, header=300, per_group=1),
    MessageSize(kind="score", stream=EVENTS, size=1_000, header=100, per_group=1),
    MessageSize(kind="ledger", stream=LEDGER, size=8_000, header=100, per_group=0.25),
]


def load(rate, **changes):
    budgets = dict.fromkeys((ROLLOUTS, EVENTS, LEDGER, TEACHER), 1 << 30)
    return Load(**{"groups_per_s": rate, "shape": SHAPE, "budgets": budgets, "cores": 64, **changes})


def test_the_single_process_with_the_least_capacity_is_the_bottleneck_and_scorers_never_are():
    costs = table(scorer=cost(group=50.0), batcher=cost(group=2.0))
    plan = plan_load(load(100.0), MESSAGES, costs)
    assert (plan.bottleneck, plan.full_at, plan.fits) == ("batcher", 500.0, True)
    by_name = {one.name: one for one in plan.processes}
    assert by_name["scorer"].count == 8  # 5 cores of work, each 70 % busy
    assert by_name["scorer"].full_at is None
    assert by_name["batcher"].utilisation == pytest.approx(0.2)


def test_a_load_beyond_the_bottleneck_does_not_fit_and_what_helps_would():
    plan = plan_load(load(1_000.0), MESSAGES, table(batcher=cost(group=2.0)))
    assert not plan.fits
    assert plan_load(load(400.0), MESSAGES, table(batcher=cost(group=2.0))).fits  # and yet too busy to be at ease
    assert plan_load(load(400.0), MESSAGES, table(batcher=cost(group=2.0))).cures
    assert "batcher is the bottleneck and one by design, at 500 groups/s; 1,000 are wanted" in plan.text
    assert plan.cures[0].startswith("spread the environments over 3 runs")
    assert plan_load(load(1_000.0 / 3), MESSAGES, table(batcher=cost(group=2.0))).fits


def test_a_lone_message_costs_more_until_the_process_is_busy():
    costs = table(normalizer=cost(group=1.0, lone=4.0))
    busy = {
        rate: next(one for one in plan_load(load(rate), MESSAGES, costs).processes if one.name == "normalizer")
        for rate in (1.0, 1_000.0)
    }
    assert busy[1.0].cpu_ms_per_group == pytest.approx(5.0, rel=1e-3)
    assert busy[1_000.0].cpu_ms_per_group == pytest.approx(1.0)
    assert lone_share(100.0, 100.0) == lone_share(500.0, 100.0) == 0.0


def test_bytes_by_stream_and_reader():
    plan = plan_load(load(10.0, retention_s=100.0, replicas=3), MESSAGES, table())
    by_name = {one.name: one for one in plan.streams}
    assert by_name[ROLLOUTS].kept == 1_000_000 * 10 * 100
    assert by_name[LEDGER].bytes_per_group == 2_000
    assert plan.disk_in_all == 3 * 1_003_000 * 10 * 100
    assert plan.disk_per_node == pytest.approx(plan.disk_in_all / plan.nodes)
    assert plan.network.published == 10 * 1_003_000
    assert plan.network.replicated == 2 * plan.network.published
    assert plan.network.delivered["governor"] == 10 * (300 + 2_000)
    assert plan.network.delivered["scorer"] == 10 * 1_000_000
    assert "streams.replicas = 3" in plan.settings
    assert f"streams.rollouts_bytes = {-(-2_000_000_000 // (1 << 20)) << 20}" in plan.settings


def test_a_state_that_the_next_one_replaces_is_sent_and_not_kept():
    state = MessageSize(kind="state of reward", stream=LEDGER, size=5_000, header=0, per_group=1, lasts=False)
    plan = plan_load(load(10.0, retention_s=100.0), [*MESSAGES, state], table())
    ledger = next(one for one in plan.streams if one.name == LEDGER)
    assert (ledger.bytes_per_group, ledger.kept) == (7_000, 2_000 * 10 * 100)


def test_without_a_retention_it_is_what_trimming_leaves_of_rollouts():
    plan = plan_load(load(10.0, kept_share=0.5), MESSAGES, table())
    assert plan.retention_s == pytest.approx(0.5 * (1 << 30) / 10_000_000)
    assert all(stream.fits for stream in plan.streams)


def test_there_are_scorers_enough_for_lone_messages_too():
    costs = table(scorer=cost(group=1.0, lone=2.0, idle=5.0))
    scorer = next(one for one in plan_load(load(2_000.0), MESSAGES, costs).processes if one.name == "scorer")
    assert scorer.count > 3  # what a saturated one carries, without lone messages
    assert scorer.utilisation <= 0.7


def test_nodes_are_enough_for_the_work_and_for_the_copies():
    costs = table(scorer=cost(group=100.0))
    assert plan_load(load(10.0, cores=1), MESSAGES, costs).nodes == 2
    assert plan_load(load(1.0, replicas=3), MESSAGES, costs).nodes == 3


def test_copies_cost_the_leader_that_sends_them_and_the_servers_that_store_them():
    costs = table(nats_server=cost(group=3.0))
    alone, copied = (plan_load(load(1.0, replicas=replicas), MESSAGES, costs) for replicas in (1, 3))
    assert copied.leaders[0].full_at == pytest.approx(alone.leaders[0].full_at * 3 / 5)
    server = [one.cpu_ms_per_group for plan in (alone, copied) for one in plan.processes if one.name == "nats-server"]
    assert server == pytest.approx([3.0, 7.0])


def test_a_slower_machine_is_full_earlier():
    costs = table(batcher=cost(group=2.0))
    assert plan_load(load(1.0, pace=2.0), MESSAGES, costs).full_at == 250.0


def test_the_leaders_parts_are_the_servers_work():
    costs = table(nats_server=cost(group=1.0, megabyte=3.0, batch=0.5, lone=2.0, idle=10.0))
    one = load(10.0)
    parts, whole = leader_costs(one, MESSAGES, costs), process_costs(one, MESSAGES, costs)["nats-server"]
    assert sum(part.group_ms for part in parts.values()) == pytest.approx(whole.group_ms)
    assert sum(part.lone_ms for part in parts.values()) == pytest.approx(whole.lone_ms)
    assert parts["leader of ROLLOUTS"].group_ms > parts["leader of EVENTS"].group_ms


def test_the_fit_finds_the_costs_that_observations_were_made_of():
    made = cost(group=0.7, megabyte=4.0, batch=1.5, lone=2.0, idle=6.0)
    seen = [
        Observation(
            process="consumer", groups_per_s=rate, megabytes=size, batch_groups=batch,
            cpu_ms=made.per_group_ms(size, batch, lone_share(rate, 200.0)) + made.idle_ms / rate,
        )
        for rate in (12.0, 100.0, 200.0) for size in (0.07, 1.0) for batch in (1, 16)
    ]  # fmt: skip
    fitted = fit_costs(seen, {"consumer": 6.0}, 200.0)["consumer"]
    assert msgspec.structs.astuple(fitted) == pytest.approx(msgspec.structs.astuple(made), abs=2e-3)
    backwards = [msgspec.structs.replace(one, cpu_ms=1 / one.cpu_ms) for one in seen]
    assert min(msgspec.structs.astuple(fit_costs(backwards, {}, 200.0)["consumer"])) >= 0


def test_the_table_of_the_package_has_every_process():
    assert set(read_costs().processes) == set(PROCESSES)


def test_messages_are_those_of_the_codec():
    shape = GroupShape(samples=4, tokens=64, raters=3, teacher_top_k=5, batch_groups=4)
    found = {one.kind: one for one in measure_messages(shape, RunConfig(), 1.0, history=64)}
    group = encode(make_group(shape))
    assert len(group) < found["rollout"].size == len(group) + found["rollout"].header
    assert found["ledger"].per_group == pytest.approx(1 / 4)
    assert found["score"].per_group == found["reward"].per_group == 1
    assert found["logprobs"].size > 4 * 64 * (4 + 5 * 6 + 4)
    fewer = {one.kind: one for one in measure_messages(GroupShape(samples=4, tokens=64), RunConfig(), 1.0, history=64)}
    assert fewer["score"].size < found["score"].size
    assert "logprobs" not in fewer


@pytest.mark.slow
def test_what_the_command_line_leaves_out_is_the_configurations():
    config = msgspec.convert(
        {
            "environments": {"a": {"kind": "gateway", "samples": 2, "longest_tokens": 32}},
            "batching": {"batch_size": 8}, "streams": {"replicas": 3},
            "teacher": {"enabled": True}, "scoring": {"raters": [{"rater": "exact_match"}]},
        },
        run_config_type(),
    )  # fmt: skip
    plan = plan_configured_load(config, 5.0, cores=4, machine_factor=1.0)
    assert plan.tokens_per_s == 5 * 2 * 32
    assert {"streams.replicas = 3"} <= set(plan.settings)
    assert {one.name for one in plan.processes} >= {"teacher", FEED, "health"}
    assert any("2x32 tokens with text, 1 raters, batches of 4 groups" in note for note in plan.notes)


@pytest.mark.parametrize("text", ["8", "8x", "x8", "0x5", "8x1024x2", "8 x 4", "-1x4"])
def test_a_shape_that_is_none(text):
    with pytest.raises(ConfigError, match="such as 8x1024"):
        parse_shape(text)


def test_times():
    assert [parse_retention(text) for text in ("90", "90s", "1.5h", "7d")] == [90, 90, 5400, 7 * 86_400]
    for text in ("0", "h", "1w", "-1"):
        with pytest.raises(ConfigError, match="such as 30m, 24h or 7d"):
            parse_retention(text)


@pytest.mark.slow
def test_the_command_says_what_is_full_first_and_exits_by_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = ["plan", "--tokens", "4x64", "--machine-factor", "1", "--cores", "4"]
    fits = CliRunner().invoke(app, [*given, "--groups-per-s", "5"])
    assert fits.exit_code == 0, fits.output
    assert "is full first, at " in fits.output
    assert "leader of ROLLOUTS" in fits.output
    too_much = CliRunner().invoke(app, [*given, "--groups-per-s", "50000", "--json"])
    assert too_much.exit_code == 1
    found = json.loads(too_much.output)
    assert found["full_at"] < 50_000
    assert found["bottleneck"] in found["text"]
    assert found["cures"]
    assert CliRunner().invoke(app, ["plan", "--tokens", "4x64"]).exit_code == 2
    assert CliRunner().invoke(app, [*given, "--groups-per-s", "5", "--device", "cpu"]).exit_code == 2


@pytest.mark.slow
def test_what_deploy_recommends_is_what_the_command_says():
    page = (Path(__file__).parents[3] / "deploy" / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "`--groups-per-s" in line]
    assert len(rows) == 3
    common = ["plan", "--raters", "3", "--retention", "24h", "--machine-factor", "1", "--json"]
    for load_of, nodes, disk, network, processes, first in rows:
        result = CliRunner().invoke(app, [*common, *load_of.split("`")[1].split()])
        assert result.exit_code == 0, result.output
        plan = msgspec.json.decode(result.output, type=LoadPlan)
        count = {one.name: one.count for one in plan.processes}
        assert nodes.startswith(f"{plan.nodes} of ")
        assert nodes.endswith(f"{plan.cpu_s_per_s:.1f} busy")
        assert disk == human_bytes(int(plan.disk_per_node))
        assert network == f"{human_bytes(int(plan.network.total))}/s"
        assert processes == f"{count['environment']} / {count['scorer']}"
        assert first == f"{plan.bottleneck}, {plan.full_at:.0f}"
