"""Names what Atropos adds: two kinds of environments, the gateway, its settings and commands."""

from lachesis.pipeline.extension import EnvironmentKind, Extension, ForeignClasses, HeldSocket, ServiceSpec, Setting
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig
from lachesis.pipeline.extensions.atropos.gateway.listener import LISTENER_FD
from lachesis.pipeline.extensions.atropos.gateway.token import GATEWAY_TOKEN, GATEWAY_URL

__all__ = ["EXTENSION"]

_HERE = "lachesis.pipeline.extensions.atropos"

EXTENSION = Extension(
    name="atropos",
    about="environments and trainers that speak the trajectory API of Atropos",
    settings={
        "gateway": Setting(
            GatewayConfig, GatewayConfig(), "The HTTP gateway, which runs if an environment's kind is gateway."
        ),
    },
    environments={
        "atropos": EnvironmentKind(
            place=f"{_HERE}.native.source:AtroposSource",
            param_paths={"place": "code", "python": "program"},
            renders_prompts=True,
            classes=ForeignClasses(
                base="BaseEnv",
                package="atroposlib",
                settings_class="env_config_cls",
                params=("python", "items", "fresh_items", "timeout_s", "hang_s", "success_threshold"),
                model_setting="tokenizer_name",
            ),
        ),
        "gateway": EnvironmentKind(place=None, renders_prompts=True),
    },
    services={
        "gateway": ServiceSpec(
            name="gateway",
            stage=f"{_HERE}.gateway.stage:run_gateway",
            settings=f"{_HERE}.gateway.settings:gateway_settings",
            phase=3,
            about="publishes what environments elsewhere send over HTTP",
            extra="gateway",
            is_single=True,
            held_up=("environments of other projects",),
            socket=HeldSocket(open=f"{_HERE}.gateway.listener:open_listener", variable=LISTENER_FD, table="gateway"),
        ),
    },
    plan=f"{_HERE}.gateway.planned_process:gateway_processes",
    access=f"{_HERE}.gateway.access:gateway_access",
    stored_values=f"{_HERE}.gateway.store:stored_values",
    importers={"atropos": f"{_HERE}.logic.lines:from_line"},
    policies={"rl": f"{_HERE}.policy:RL"},
    folder_entries=(GATEWAY_TOKEN, GATEWAY_URL),
    announce=f"{_HERE}.gateway.planned_process:announce",
)
