"""An extension: a kind of environment, a rater, an engine, a service with settings of its own, and a command."""

from lachesis.pipeline.extension import EngineSpec, EnvironmentKind, Extension, ServiceSpec, Setting
from lachesis_orchard.config import OrchardConfig

EXTENSION = Extension(
    name="orchard",
    about="counting apples",
    settings={"orchard": Setting(OrchardConfig, OrchardConfig(), "Where the apples go.")},
    check="lachesis_orchard.config:check",
    environments={"orchard": EnvironmentKind(place="lachesis_orchard.environment:Orchard")},
    engines={"parrot": EngineSpec(serve="lachesis_orchard.engine:serve", says="orchard")},
    raters={"ripeness": "lachesis_orchard.rater:ripeness"},
    services={
        "basket": ServiceSpec(
            name="basket",
            stage="lachesis_orchard.basket:run_basket",
            phase=1,
            about="counts the groups that have been stored",
            is_single=True,
        )
    },
    plan="lachesis_orchard.basket:processes",
    access="lachesis_orchard.basket:access",
    folder_entries=("basket.json",),
)
