"""An environment on the real atroposlib that draws its items by the run's curriculum; half of them are solved."""

import json
from itertools import pairwise
from pathlib import Path

from atropos_environment import Words

from lachesis import CurriculumMixin


class Graded(CurriculumMixin, Words):
    curriculum_poll_s = 0.2

    @classmethod
    def config_init(cls):
        config, servers = super().config_init()
        config.ensure_scores_are_not_same = False
        config.total_steps = 16
        return config, servers

    async def setup(self):
        self.curriculum_items = {f"{kind}-{n}": {"kind": kind} for n in range(40) for kind in ("half", "solved")}

    async def collect_trajectories(self, item):
        group, backlog = await super().collect_trajectories(item)
        del group["overrides"]
        if item["kind"] == "solved":
            group["scores"] = [1.0] * len(group["scores"])
        return group, backlog

    async def get_next_item(self):
        item = await super().get_next_item()
        self.report_weights()
        return item

    def report_weights(self):
        """Write what it draws by, once it has weights of some items of each kind."""
        weights = [round(after - before, 6) for before, after in pairwise([0.0, *self._curriculum_sums])]
        unknown = max(set(weights), key=weights.count)
        found = {"half": [], "solved": []}
        for item, weight in zip(self.curriculum_items.values(), weights, strict=True):
            if weight != unknown:
                found[item["kind"]].append(weight)
        if all(found.values()):
            Path("drawn.json").write_text(json.dumps({"tag": self._curriculum_tag, "weights": found}))


if __name__ == "__main__":
    Graded.cli()
