"""Which rank a process is, and the settings that do not go together."""

import pytest

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.trainer.ranks.place import STORE_VARIABLE, RankPlace, check_ranks, rank_device
from lachesis.schemas.errors import ConfigError

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


def test_torchrun_says_which_rank_a_process_is():
    assert RankPlace.of(TrainingConfig(), TORCHRUN) == RankPlace(3, 1, 4, started=True)
    assert RankPlace.of(TrainingConfig(ranks=4), TORCHRUN).rank == 3
    with pytest.raises(ConfigError, match=r"training\.ranks is 2, but torchrun has started 4"):
        RankPlace.of(TrainingConfig(ranks=2), TORCHRUN)


def test_variables_of_a_cluster_alone_make_no_ranks():
    pod = {"RANK": "3", "WORLD_SIZE": "4"}
    assert RankPlace.of(TrainingConfig(), pod) == RankPlace()
    assert RankPlace.of(TrainingConfig(ranks=2), {}) == RankPlace(size=2)
    own = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", STORE_VARIABLE: "/folder/store"}
    expected = RankPlace(1, 1, 2, "file:///folder/store", started=True)
    assert RankPlace.of(TrainingConfig(ranks=2), own) == expected


@pytest.mark.parametrize(
    ("settings", "size", "text"),
    [
        ({"sharding": "full"}, 1, r'training\.sharding is "full", but there is one rank'),
        ({"sharding": "full", "lora": LoraConfig()}, 2, r'training\.lora does not go with training\.sharding = "full"'),
        ({"device": "cuda:1"}, 2, r'training\.device is "cuda:1", one GPU for 2 ranks'),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings, size, text):
    with pytest.raises(ConfigError, match=text):
        check_ranks(TrainingConfig(**settings), size)


def test_each_rank_takes_the_gpu_of_its_number_on_its_machine():
    place = RankPlace(rank=3, local_rank=1, size=4, started=True)
    for setting in ("auto", "cuda"):
        assert rank_device(TrainingConfig(device=setting), place, 2) == "cuda:1"
    assert rank_device(TrainingConfig(), place, 0) == "auto"
    assert rank_device(TrainingConfig(device="cuda"), place, 0) == "cuda:1", "which is said not to be there"
    assert rank_device(TrainingConfig(device="cpu"), place, 2) == "cpu"
    assert rank_device(TrainingConfig(device="cuda:1"), RankPlace(), 2) == "cuda:1"


@pytest.mark.parametrize(
    ("place", "gpus", "shared"),
    [
        (RankPlace(size=2), 1, "2 ranks of the trainer on this machine would share 1 GPU,"),
        (RankPlace(rank=0, size=8, started=True, on_machine=4), 2, "4 ranks .* would share 2 GPUs,"),
        (RankPlace(rank=7, local_rank=3, size=8, started=True), 3, "4 ranks .* would share 3 GPUs,"),
    ],
)
def test_ranks_that_would_share_a_gpu_are_refused_before_nccl_refuses_them(place, gpus, shared):
    with pytest.raises(ConfigError, match=shared + ' and NCCL .*training\\.collectives = "gloo"'):
        rank_device(TrainingConfig(device="cuda"), place, gpus)


def test_ranks_may_share_a_gpu_over_gloo():
    places = [RankPlace(rank=rank, local_rank=rank, size=3, started=True) for rank in range(3)]
    over_gloo = TrainingConfig(collectives="gloo")
    assert [rank_device(over_gloo, place, 2) for place in places] == ["cuda:0", "cuda:1", "cuda:0"]
    assert rank_device(over_gloo, places[1], 0) == "auto"
    with pytest.raises(ConfigError, match=r'training\.sharding is "full".*gloo'):
        check_ranks(TrainingConfig(collectives="gloo", sharding="full"), 3)
