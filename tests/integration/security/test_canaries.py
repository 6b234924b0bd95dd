"""A secret planted wherever one can be configured, and looked for everywhere after a run: it is in none of it."""

import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from integration.harness import CONFIG, RUN, SUMS, Run
from integration.security.secured import Secured, auth_init, make_certificates
from integration.security.test_run import exposed, files_with
from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import TextContent
from nats.aio.client import Client as NatsClient
from otlp import Received, receiving

from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.subjects import BUCKET, EVENTS, STREAMS
from lachesis.services.registry import services

STEPS = 3
_AT_ONCE = 4
"""Commands that run at the same time."""
CANARY = "canary-71d0b3"
"""Every planted secret holds it; no two are equal, so that a leak says which one it is."""
PLAIN = CANARY.replace("-", "")
"""The same where a key holds letters and digits alone."""
LIKE_KEYS = (
    f"""{{
    note = "sk-{CANARY}-form", hub = "hf_{PLAIN}form1", git = "ghp_{PLAIN}form2", cloud = "AKIA{PLAIN.upper()}",
    jwt_like = "eyJhbGciOiJIUzI1NiJ9.{PLAIN}form3.sig", block = "-----BEGIN PRIVATE KEY-----\\n{CANARY}-pem\\n-----END \
PRIVATE KEY-----", pat = "{CANARY}-pat", access_key_id = "{CANARY}-id", dsn = "{CANARY}-dsn", sas = "{CANARY}-sas",
    session = "{CANARY}-session", headers = [["Authorization", "{CANARY}-pair"]], cookie = "{CANARY}-cookie",
    deep = [[{{ pem = ["{CANARY}-deep"] }}]], passphrase = "{CANARY}-phrase",
    lines = ["X-Api-Key: {CANARY}-line"], options = ["serve", "--api-key", "{CANARY}-option"],
    variables = [{{ name = "API_KEY", value = "{CANARY}-variable" }}],
    link = "https://me:{CANARY}-info@h/x?api_key={CANARY}-in-query&sig={CANARY}-sig", bearer = "{CANARY}-bearer",
}}""".replace("\n    ", " ")
    .replace("\n}", "}")
    .replace(",}", " }")
)
"""Parameters that hold secrets by their names, by their forms, and by what stands beside them."""
SHAPES = (CANARY, f"{PLAIN}form", PLAIN.upper())
"""Each secret of `LIKE_KEYS` and of what else is planted holds one of these."""
ENVIRON = {
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": f"{CANARY}-wandb" + "0" * 40,
    "HF_TOKEN": f"{CANARY}-hub",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{CANARY}-otlp",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"x-key={CANARY}-otlp-traces",
    "OPENAI_API_KEY": f"{CANARY}-openai",
    "MLFLOW_TRACKING_TOKEN": f"{CANARY}-mlflow-token",
    "MLFLOW_TRACKING_PASSWORD": f"{CANARY}-mlflow-password",
    "HTTPS_PROXY": f"http://me:{CANARY}-proxy@127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "LACHESIS_TRAINING__WANDB__PROJECT": "p",
}
COMMANDS = (
    ["status", "--json"], ["doctor"], ["config", "show"], ["tail", "score"], ["init"], ["run", "scorer"], ["health"],
    ["run", "trainer"], ["export", "x.jsonl"], ["gc"], ["reproduce"], ["dead", "list"], ["trace", "--follow"], ["up"],
)  # fmt: skip

pytestmark = pytest.mark.timeout(900)


class Planted(Secured):
    """A server with keys that asks for certificates too; the run learns its address by the environment."""

    @property
    def arguments(self) -> Sequence[str]:
        files = {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key", "nkey_folder": f"auth/{RUN}"}
        return [f"--set=nats.{name}={self.folder / file}" for name, file in files.items()]

    def config(self, **more: Any) -> ConnectionConfig:
        files = {name: str(self.folder / f"client.{end}") for name, end in (("cert_file", "pem"), ("key_file", "key"))}
        return super().config(**files, **more)

    @property
    def secrets(self) -> list[str]:
        """The seeds of all keys, and a line of each private key."""
        keys = [file.read_text().splitlines()[2] for file in self.folder.glob("*.key")]
        return [*keys, *(file.read_text().strip() for file in self.keys.glob("*.nk"))]


@contextmanager
def judging(answers: list[str]) -> Iterator[str]:
    """Serve what a judge of answers is: at first it refuses its clients' keys, and repeats them as some do."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answers.append(str(self.headers["Authorization"]))
            refused = len(answers) <= 2
            reply = {"error": f"incorrect key: {self.headers['Authorization']}"}
            verdict = {"choices": [{"message": {"content": json.dumps({"score": len(answers) % 10})}}]}
            data = json.dumps(reply if refused else verdict).encode()
            self.send_response(401 if refused else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1?api_key={CANARY}-query"
        http.shutdown()
        thread.join()


class Heard:
    """What services say aloud: heartbeats, incidents, and answers to the micro protocol."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self.subjects: set[str] = set()
        self.leaks: set[str] = set()
        self._secrets = [secret.encode() for secret in secrets]

    async def take(self, message: Any) -> None:
        self.subjects.add(message.subject)
        said = message.data + repr(message.headers).encode()
        self.leaks |= {message.subject for secret in self._secrets if secret in said}

    async def listen(self, client: NatsClient) -> None:
        for subject in (subjects.heartbeat(RUN), subjects.incident(RUN), inbox := client.new_inbox()):
            await client.subscribe(subject, cb=self.take)
        self._inbox = inbox

    async def ask(self, client: NatsClient) -> None:
        for subject in ("$SRV.PING", "$SRV.INFO", "$SRV.STATS", *(subjects.health(RUN, name) for name in services())):
            await client.publish(subject, reply=self._inbox)
        await client.flush(30)


async def leaks_in_streams(bus: NatsBus, secrets: Sequence[str]) -> list[str]:
    """Return the subjects of the stored messages that hold a secret, the bucket's keys included."""
    found, read = [], 0
    for stream in STREAMS:
        async with bus.read(stream, [], follow=False) as messages:
            async for message in messages:
                read += 1
                said = message.data + repr(message.headers).encode()
                found += [message.subject for secret in secrets if secret.encode() in said]
    for subject in await bus.stored_subjects(BUCKET, [subjects.value_subject(RUN, ">")]):
        entry = await bus.value(subject.removeprefix(subjects.value_subject(RUN, "")))
        read += 1
        found += [subject for secret in secrets if entry is not None and secret.encode() in entry.value]
    assert read > 10
    return found


def leaks_in_telemetry(received: Received, secrets: Sequence[str]) -> list[str]:
    told = [*map(str, received.spans), *map(str, received.metrics.items()), *map(str, received.resources.items())]
    assert len(told) > 10
    return [text for text in told if any(secret in text for secret in secrets)]


def configure(run: Run, judge: str) -> None:
    """Put secrets wherever the run's configuration takes them: parameters, addresses, files."""
    environment = run.folder / "keyed.py"
    keyed = SUMS.read_text().replace(
        "largest: int = 99", "api_key: str, service: str, settings: dict, largest: int = 99"
    )
    keyed = keyed.replace("self.numbers = ", "print('keyed with', api_key, service, settings)\n        self.numbers = ")
    environment.write_text(keyed)
    (run.folder / "raters.py").write_text(
        "from lachesis import Sample, rater\n\n\n@rater(bounds=(0.0, 1.0), inline=True)\n"
        "def keyed(sample: Sample, api_key: str, service: str, settings: dict) -> float:\n"
        "    print(f'rated with {settings}')\n"
        "    if sum(map(ord, sample.completion)) % 5 == 0:\n"
        "        raise ValueError(f'{service} refused {api_key!r}: {settings}')\n"
        "    return float(len(sample.completion) % 3) / 2\n"
    )
    (run.folder / "token").write_text(f"{CANARY}-gateway\n")
    (run.folder / "webhook").write_text(f"http://me:{CANARY}-webhook@127.0.0.1:9/{CANARY}-hook?token={CANARY}-hooked\n")
    (run.folder / "webhook").chmod(0o600)  # a run does not start otherwise
    params, rated = (
        f'{{ api_key = "{CANARY}-{of}", service = "https://me:{CANARY}-{of}-service@host/x", settings = {LIKE_KEYS} }}'
        for of in ("param", "rater")
    )
    parts = run.config.read_text().replace(str(SUMS), str(environment)).split(':Sums"\n')
    run.config.write_text(
        f':Sums"\nparams = {params}\n'.join(parts)
        + f'[[scoring.raters]]\nrater = "{run.folder / "raters.py"}:keyed"\nparams = {rated}\n'
        + f'[[scoring.raters]]\nrater = "llm_judge"\nparams = {{ url = "{judge}", model = "m", rubric = "r", '
        + 'key_env = "JUDGE_KEY" }\n'
        + '[environments.far]\nkind = "gateway"\n'
        + f'[gateway]\nport = 0\ntoken_file = "{run.folder / "token"}"\n'
        + '[inference.policy]\nhost = "0.0.0.0"\n'
        + f'[telemetry]\njaeger_url = "http://me:{CANARY}-jaeger@127.0.0.1:1"\n'
        + f'[training.mlflow]\nuri = "http://me:{CANARY}-mlflow@127.0.0.1:9"\n'
    )


SHOWN = (
    ["status", "--json"], ["status"], ["config", "show"], ["config", "show", "--json"], ["doctor", "--json"], ["plan"],
    ["health"], ["dead", "list", "--json"], ["trace", "0" * 32], ["gc"], ["rollouts", "--json"], ["top", "--once"],
    ["runs", "show", RUN], ["runs", "logs", RUN], ["runs", "results", RUN], ["env", "verify", "--env", "sums"],
    ["reproduce"], ["auth", "show"], ["run", "scorer", "--set=scoring.timeout=1"],
)  # fmt: skip
"""Commands whose output is looked through after the run, the last one for what it says of a setting that is none."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_planted_secret_is_found_after_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    make_certificates(folder)
    tls = ("--cert", folder / "server.pem", "--key", folder / "server.key", "--client-ca", folder / "ca.pem")
    authorized = CONFIG.format(sums=SUMS, steps=STEPS) + '[environments.far]\nkind = "gateway"\n'
    auth_init(folder, "--run", RUN, *map(str, tls), config=authorized)
    async with Planted(folder, RUN) as server:
        secrets, asked = [*SHAPES, *server.secrets], []
        with receiving("grpc") as received, judging(asked) as judge:
            environ = {
                **ENVIRON,
                "JUDGE_KEY": f"{CANARY}-judge",
                "LACHESIS_NATS__URL": server.address.replace("://", f"://me:{CANARY}-address@"),
                "LACHESIS_TELEMETRY__RATIO": "1.0",
                "LACHESIS_TRAINING__TENSORBOARD": "true",
                "LACHESIS_HEALTH__WEBHOOK_FILE": str(tmp_path / "run" / "webhook"),
                "LACHESIS_HEALTH__WEBHOOK_FROM": "inform",
                "OTEL_EXPORTER_OTLP_ENDPOINT": received.url,
                "XDG_STATE_HOME": str(tmp_path / "state"),
            }
            (tmp_path / "run").mkdir()
            run = Run(tmp_path / "run", STEPS, server, environ=environ)
            configure(run, judge)
            run.start()
            heard = Heard(secrets)
            async with server.client("observer") as observer, server.client("environment-sums") as environment:
                await heard.listen(observer)
                with run:
                    await run.wait_for_step(1, 300)
                    await environment.publish(subjects.rollout(RUN, "sums"), b"x")  # it becomes a dead letter
                    await heard.ask(observer)
                    shown = [line for pid in run.pids().values() for line in exposed(pid)]
                    assert await run.wait(300) == 0, run.tail()
            assert leaks_in_telemetry(received, secrets) == []
        assert asked[0] == f"Bearer {CANARY}-judge"
        assert {subject.split(".")[0] for subject in heard.subjects} >= {"rl", "_INBOX_observer"}
        assert heard.leaks == set()
        async with await server.bus("observer") as bus:
            assert await leaks_in_streams(bus, secrets) == []
            assert "dead" in {subject.split(".")[1] for subject in await bus.stored_subjects(EVENTS, ["rl.>"])}
        given = {*environ, *_HANDED_ON}
        visible = [line for line in shown if line.partition("=")[0] not in given]
        assert not [line for line in visible if any(secret in line for secret in secrets)]
        export = await lachesis(run, environ, "export", str(tmp_path / "export.jsonl"))
        assert export.returncode == 0, export.stderr
        answers: list[tuple[object, str]] = []

        async def show(command: Sequence[str]) -> None:
            done = await lachesis(run, environ, *command)
            answers.append((command, (done.stdout + done.stderr).decode()))

        async def answer(ask: Callable[[Run, Mapping[str, str]], Awaitable[list[str]]]) -> None:
            answers.extend((ask.__name__, said) for said in await ask(run, environ))

        await at_once(
            [*(partial(show, one) for one in SHOWN), partial(answer, page_answers), partial(answer, tool_answers)]
        )
        assert {str(command) for command, _ in answers} >= {str(one) for one in SHOWN}
        for command, said in answers:
            assert not [secret for secret in secrets if secret in said], (command, said[:2000])
        assert f"{CANARY}-mlflow" in run.config.read_text()
        assert "MLflow does not answer" in "".join(file.read_text() for file in run.folder.glob("logs/trainer*"))
        own = [
            run.folder / "web.token",
            *(run.folder / "inference").glob("*.token"),
            run.folder / "inference" / "policy.key",
            run.folder / "gateway.url",
            run.folder / "token",
        ]
        tokens = [file.read_text().strip() for file in own]
        assert f"{CANARY}-gateway" in tokens[-2], "the URL that the user is to give to the environment"
        assert not [line for line in shown for token in tokens if token in line]
        keys = {file.name for file in (*server.folder.rglob("*.key"), *server.folder.rglob("*.nk"))}
        kept = {
            "run.toml",
            "run.effective.toml",
            "webhook",
            "mcp.token",
            *(file.name for file in own),
            *keys,
        }  # what its user gave it
        found = files_with([*secrets, *tokens], run.folder, tmp_path / "state", tmp_path / "server", tmp_path)
        assert {name for name, _ in found} <= kept, found
        private = kept - {"run.toml", "token", "webhook"} & {path.name for path in run.folder.iterdir()}
        assert all((run.folder / name).stat().st_mode & 0o077 == 0 for name in private)


_HANDED_ON = {"WANDB_API_KEY", "WANDB_SERVICE", "LACHESIS_NATS__URL"}


async def page_answers(run: Run, environ: Mapping[str, str]) -> list[str]:
    """Return what `lachesis web` shows of the run, and what it prints but for its address."""
    command = [sys.executable, "-m", "lachesis", "web", *run.arguments]
    async with await anyio.open_process(command, env={**run.environ, **environ}) as page:
        assert page.stdout is not None
        with anyio.fail_after(120):
            url = ""
            while "\n" not in url:
                url += (await page.stdout.receive()).decode()
        async with httpx.AsyncClient(timeout=120, follow_redirects=True, trust_env=False) as http:
            opened = await http.get(url.strip())
            assert opened.status_code == 200
            answers = [opened.text]
            for name in ("run", "series", "alerts", "groups", "revisions", "comparison"):
                answer = await http.get(str(opened.url.join(f"/api/{name}")))
                answers.append(answer.text)
                assert answer.status_code < 500, answer.text
            assert RUN in answers[1]
            group = json.loads(answers[4])["groups"][0]["group"]
            answers.append((await http.get(str(opened.url.join(f"/api/groups/{group}")))).text)
        page.terminate()
    return answers


async def tool_answers(run: Run, environ: Mapping[str, str]) -> list[str]:
    """Return what an agent's tools say of the run and its configuration."""
    command = ["-m", "lachesis", "mcp", "--policy", "rl", *run.arguments]
    server = StdioServerParameters(command=sys.executable, args=command, env={**run.environ, **environ})
    said = []
    async with Client(stdio_client(server)) as client:
        for tool, arguments in (
            ("rl_list_environments", {}), ("rl_select_environment", {"name": "sums"}), ("rl_get_current_config", {}),
            ("rl_list_runs", {}), ("rl_check_status", {"run_id": RUN}), ("rl_get_results", {"run_id": RUN}),
            ("rl_health", {"run_id": RUN}), ("rl_list_rollouts", {"run_id": RUN}),
            ("rl_edit_config", {"field": "training.mlflow.uri", "value": 7}),
            ("rl_edit_config", {"field": "nats.url", "value": "nats://other"}),
            ("rl_edit_config", {"field": "environments.sums.params.api_key", "value": "x"}),
            ("rl_edit_config", {"field": "scoring.raters", "value": []}),
            *(("rl_get_current_config", {"section": name}) for name in ("environments", "scoring", "nats", "training")),
        ):  # fmt: skip
            result = await client.call_tool(tool, arguments)
            said += [content.text for content in result.content if isinstance(content, TextContent)]
    return said


async def at_once(works: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Await all, some at a time: most of each is one process that starts and imports."""
    limit = anyio.CapacityLimiter(_AT_ONCE)

    async def limited(work: Callable[[], Awaitable[None]]) -> None:
        async with limit:
            await work()

    async with anyio.create_task_group() as tasks:
        for work in works:
            tasks.start_soon(limited, work)


async def lachesis(run: Run, environ: Mapping[str, str], *command: str) -> "anyio.abc.CompletedProcess[bytes]":
    return await anyio.run_process(
        [sys.executable, "-m", "lachesis", *command, *run.arguments], env={**run.environ, **environ}, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("address", ["nats://{}@127.0.0.1:1", "nats://me:{}@127.0.0.1:1", "tls://me:{}@127.0.0.1:1"])
async def test_an_address_that_nobody_serves_is_named_without_its_secret(tmp_path: Path, address: str) -> None:
    done = await anyio.run_process(
        [sys.executable, "-m", "lachesis", "status", "--set=nats.connect_timeout_s=0.1", "--run", "r"],
        env={**ENVIRON, "PATH": "/usr/bin", "LACHESIS_NATS__URL": address.format(CANARY), "HOME": str(tmp_path)},
        cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert b"127.0.0.1:1" in done.stderr
    assert CANARY.encode() not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_no_command_says_a_secret_when_it_fails(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "token").write_text(f"{CANARY}-file")
    (tmp_path / "nkey").write_text(f"SU{CANARY}".upper())
    (tmp_path / "run.toml").write_text(
        f'run = "r"\n[environments.sums]\nkind = "none.py:None"\nparams = {{ api_key = "{CANARY}-param" }}\n'
        f'[nats]\nurl = "nats://me:{CANARY}-password@127.0.0.1:1"\nconnect_timeout_s = 0.1\n'
    )

    async def fail(sets: Sequence[str]) -> None:
        done = await anyio.run_process(
            [sys.executable, "-m", "lachesis", *command, "--config=run.toml", *(f"--set={one}" for one in sets)],
            env={**ENVIRON, "PATH": "/usr/bin", "HOME": str(tmp_path)}, cwd=tmp_path, check=False,
        )  # fmt: skip
        said = (done.stdout + done.stderr).decode()
        assert CANARY.lower() not in said.lower(), (command, sets, said)
        assert "Traceback" not in said, (command, sets, said)
        assert done.returncode != 0 or command[0] == "config", (command, sets, said)

    given = ((), ("nats.token_file=token",), ("nats.nkey_file=nkey",), ("batching.batch_size=x",))
    await at_once(partial(fail, sets) for sets in given)
