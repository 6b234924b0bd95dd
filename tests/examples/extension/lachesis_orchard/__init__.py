"""An extension: a kind of environment, a rater, a service with settings of its own, and a command."""

from lachesis.pipeline.extension import EnvironmentKind, Extension, ServiceSpec, Setting
from lachesis_orchard.config import OrchardConfig

EXTENSION = Extension(
    name="orchard",
    about="counting apples",
    settings={"orchard": Setting(OrchardConfig, OrchardConfig(), "Where the apples go.")},
    check="lachesis_orchard.config:check",
    environments={"orchard": EnvironmentKind(place="lachesis_orchard.environment:Orchard")},
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
