"""Which device a trainer takes, and what is set so that the same steps give the same bits there."""

import pytest
import torch

from lachesis.pipeline.model.device import prepare_device, take_repeatably
from lachesis.schemas.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads, filled = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.fixture
def two_gpus(monkeypatch):
    """torch as on a machine with two GPUs, of which nothing is used but their number: a stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def is_strict():
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("two_gpus")
def test_on_a_gpu_attention_is_of_a_kind_that_gives_the_same_bits():
    assert prepare_device("auto", 1) == torch.device("cuda")
    assert is_strict()  # where torch only warns, the fused kinds of attention take their form that varies
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.usefixtures("two_gpus")
def test_a_trainer_may_do_without():
    prepare_device("cuda:1", 1)
    prepare_device("cuda:1", 1, deterministic="never")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_cpu_is_always_deterministic():
    assert prepare_device("cpu", 1, deterministic="never") == torch.device("cpu")
    assert is_strict()


@pytest.mark.parametrize("threads", [3, 1])
def test_torch_computes_on_as_many_threads_as_are_set(threads):
    prepare_device("cpu", threads)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r'training\.device is "cuda:2", but torch .* sees 2 GPUs'):
        prepare_device("cuda:2", 1)


def scatter_by_position():
    """torch has no deterministic form of it, on no device."""
    return torch.zeros(2).put_(torch.tensor([0]), torch.ones(1)).tolist()


def test_an_operation_without_a_deterministic_form_is_named_and_done_without():
    prepare_device("cpu", 1)
    notes = []
    assert take_repeatably(scatter_by_position, "auto", notes.append) == [1.0, 0.0]
    (note,) = notes
    assert note.startswith("put_, an operation of this model, has no deterministic form on this device: steps taken")
    assert take_repeatably(scatter_by_position, "auto", notes.append) == [1.0, 0.0]
    assert len(notes) == 1


def test_where_steps_must_be_repeatable_it_is_an_error_with_the_setting():
    prepare_device("cpu", 1)
    with pytest.raises(ConfigError, match=r'^put_, .*training\.deterministic = "never"'):
        take_repeatably(scatter_by_position, "always", pytest.fail)


def test_other_errors_of_a_step_stay_what_they_are():
    def step():
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        take_repeatably(step, "auto", pytest.fail)
