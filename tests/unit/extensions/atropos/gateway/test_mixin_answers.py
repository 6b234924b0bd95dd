"""An answer that trickles or never ends is given up by the mixin of environments."""

from unittest.mock import patch

import pytest
from endless_server import server

from lachesis.pipeline.extensions.atropos.gateway import curriculum_mixin

pytestmark = pytest.mark.outside


@pytest.mark.parametrize("kind", ["trickle", "flood"])
def test_the_mixin_of_environments_gives_up_an_answer_without_end(kind):
    with (
        server(kind) as url,
        patch.object(curriculum_mixin, "_TIMEOUT_S", 0.5),
        patch.object(curriculum_mixin, "_MAX_ANSWER_BYTES", 1 << 20),
        pytest.raises(OSError, match="no whole answer"),
    ):
        curriculum_mixin._fetch(url, "")
