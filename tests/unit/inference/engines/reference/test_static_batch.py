"""Steps at fixed addresses: the logits of the growing cache, whatever joins and leaves, and what a graph may hold."""

import logging
import random
from contextlib import contextmanager

import pytest
import torch
from contract.model_families import family_model

from lachesis.pipeline.inference.engines.reference import decoding_choice, graphed_call
from lachesis.pipeline.inference.engines.reference.decoding import PaddedBatch
from lachesis.pipeline.inference.engines.reference.decoding_choice import choose_decoding
from lachesis.pipeline.inference.engines.reference.decoding_trial import DecodingTrial
from lachesis.pipeline.inference.engines.reference.graphed_call import CaptureError, GraphPool, bucket
from lachesis.pipeline.inference.engines.reference.next_token import draw, row_settings
from lachesis.pipeline.inference.engines.reference.row_cache import UnknownCacheError
from lachesis.pipeline.inference.engines.reference.static_batch import StaticBatch
from lachesis.pipeline.inference.engines.reference.token_sampler import TokenSampler
from lachesis.pipeline.inference.protocol import SamplingParams

CPU = torch.device("cpu")
WAIT = 60


class Recorded:
    """Stands in for a CUDA graph: a replay makes the call again and fills the memory of the first one's output."""

    def __init__(self, call, output):
        self.call, self.output, self.replays = call, output, 0

    def replay(self):
        self.replays += 1
        outputs, again = self.output, self.call()
        for old, new in zip(*((one,) if torch.is_tensor(one) else one for one in (outputs, again)), strict=True):
            old.copy_(new)


class RecordingPool(GraphPool):
    """Stands in for the graphs of a GPU; `refuses` is what it says of each call."""

    def __init__(self, refuses=None, strict=False):
        super().__init__(CPU, strict=strict)
        self.records, self.refuses, self.graphs = True, refuses, []

    def capture(self, call):
        if self.refuses is not None:
            raise CaptureError(self.refuses)
        for _ in range(2):
            call()
        output = call()
        output = output.clone() if torch.is_tensor(output) else type(output)(*(one.clone() for one in output))
        self.graphs.append(Recorded(call, output))
        return self.graphs[-1], output


def test_sizes_are_few_and_hold_what_they_are_for():
    sizes = sorted({bucket(count) for count in range(1, 4097)})
    assert all(count <= bucket(count) <= max(1.25 * count, count + 1) for count in range(1, 4097))
    assert len(sizes) < 50
    assert {bucket(size) for size in sizes} == set(sizes)
    assert bucket(3, 64) == 64


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pool", [lambda: GraphPool(CPU), RecordingPool], ids=["plain", "recorded"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gpt2"])
def test_logits_are_those_of_a_growing_cache_whatever_joins_and_leaves(name, pool):
    model, order = family_model(name), random.Random(3)
    pool = pool()
    one, other = PaddedBatch(model), StaticBatch(model, pool)
    with torch.inference_mode():
        for turn in range(90):
            rows = len(one.logits)
            if rows < 2 or (order.random() < 0.15 and rows < 12):
                prompts = [[order.randrange(3, 50) for _ in range(order.choice([1, 4, 19, 40]))] for _ in range(2)]
                for batch in (one, other):
                    batch.prefill(prompts, [2, 1])
            elif order.random() < 0.2:
                kept = order.sample(range(rows), order.randint(1, rows))
                kept = sorted(kept) if turn % 2 else kept
                for batch in (one, other):
                    batch.select_rows(kept)
            else:
                tokens = [order.randrange(3, 50) for _ in range(rows)]
                for batch in (one, other):
                    batch.append_tokens(tokens)
            assert torch.allclose(one.logits, other.logits, atol=1e-5)
        for batch in (one, other):
            batch.select_rows([])
            batch.prefill([[5, 6, 7]], [1])
            batch.append_tokens([8])
        assert torch.allclose(one.logits, other.logits, atol=1e-5)
    if isinstance(pool, RecordingPool):
        assert sum(graph.replays for graph in pool.graphs) > 4 * len(pool.graphs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_it_passes_the_trial_that_every_way_of_decoding_has_to_pass(name):
    model = family_model(name)
    with torch.inference_mode():
        assert DecodingTrial(model, 90).problem(StaticBatch(model, RecordingPool())) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3_5", "mamba"])
def test_windows_and_states_are_refused(name):
    with pytest.raises(UnknownCacheError, match="have no fixed addresses"):
        StaticBatch(family_model(name), GraphPool(CPU))


def answers(start_engine, params, **patches):
    with start_engine(max_running_sequences=7) as engine:
        for name, value in patches.items():
            setattr(engine, name, value)
        futures = [engine.submit([1, *range(5, 5 + length)], one) for length, one in params]
        return [[(s.token_ids, s.logprobs, s.allowed) for s in future.result(WAIT).samples] for future in futures]


def test_an_engine_samples_the_same_tokens_with_recorded_steps_and_draws(start_engine, policy):
    params = [
        (length, SamplingParams(n=n, temperature=heat, top_p=p, max_tokens=30, seed=length, sampling_mask=p < 1))
        for length, n, heat, p in [(1, 3, 1.0, 1.0), (9, 1, 0.0, 1.0), (4, 2, 0.7, 0.8), (30, 4, 1.0, 0.5)]
    ]
    steps, draws = RecordingPool(), RecordingPool()
    right = answers(start_engine, params)
    found = answers(start_engine, params, _batch=StaticBatch(policy.model, steps), _sampler=TokenSampler(draws))
    for one, other in zip(found, right, strict=True):
        for (tokens, logprobs, allowed), expected in zip(one, other, strict=True):
            assert tokens == expected[0]
            assert allowed == expected[2]
            assert logprobs == pytest.approx(expected[1], abs=1e-5)
    assert steps.graphs
    assert draws.graphs


def test_a_recorded_draw_has_the_bits_of_a_plain_one():
    generator, pool = torch.Generator().manual_seed(0), RecordingPool()
    sampler = TokenSampler(pool)
    for rows in (1, 12, 5, 9, 5, 11):
        for top_p in (1.0, 0.7):
            logits = 4 * torch.randn(rows, 101, generator=generator)
            uniform = torch.rand(rows, generator=generator).tolist()
            settings = row_settings([0.0, 1.0, 0.3] * 4, [top_p] * 12, [*uniform, *[0.0] * (12 - rows)])
            settings = settings._replace(values=settings.values[:rows])
            right, found = draw(logits, settings.values, has_nucleus=settings.has_nucleus), sampler(logits, settings)
            assert torch.equal(found.logprobs, right.logprobs)
            assert torch.equal(found.drawn, right.drawn)
    assert len(pool.graphs) == 2 * len({bucket(rows) for rows in (1, 12, 5, 9, 11)})


def test_all_sizes_share_one_memory_of_logits(policy):
    batch, sampler = StaticBatch(policy.model, GraphPool(CPU)), TokenSampler(RecordingPool())
    with torch.inference_mode():
        for rows in (9, 1, 2, 3):
            batch.clear()
            batch.prefill([[1, 5, 6]], [rows])
            batch.append_tokens([7] * rows)
            sampler(batch.logits, row_settings([1.0] * rows, [1.0] * rows, [0.5] * rows))
        outputs = {batch._steps[size].call().data_ptr() for size in batch._steps}
    assert len(batch._steps) == len(sampler._sized) == 4
    assert outputs == {batch._logits_memory.data_ptr()}
    assert len(batch._logits_memory) == len(sampler._logprobs) == bucket(9)


class FakeCuda:
    """Stands in for torch.cuda: a recording that `fails` ends as torch's does, without going back to its stream."""

    def __init__(self, monkeypatch):
        self.fails, self.ended, self.recorded, self.handles = False, [], [], 0
        cuda = self

        class Stream:
            def __init__(self, device):
                self.device = device

            def wait_stream(self, _):
                pass

        class Recording:
            def __init__(self, graph, handle, stream, mode):
                cuda.recorded.append((handle, stream.device, mode))
                self.stream = stream

            def __enter__(self):
                self.before, cuda.current = cuda.current, self.stream

            def __exit__(self, *_):
                if cuda.fails:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.current = self.before

        @contextmanager
        def stream(one):
            before, cuda.current = cuda.current, one
            try:
                yield
            finally:
                cuda.current = before

        self.current = self.first = Stream(torch.device("cuda", 0))
        names = {"Stream": Stream, "stream": stream, "graph": Recording, "CUDAGraph": type("Graph", (), {})}
        for name, fake in names.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.new_handle)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: self.ended.append(pool), raising=False)

    def new_handle(self):
        self.handles += 1
        return 0, self.handles


def test_a_recording_that_fails_leaves_the_stream_and_the_memory_as_they_were(monkeypatch):
    cuda, pool = FakeCuda(monkeypatch), GraphPool(torch.device("cuda", 1))
    cuda.fails = True
    assert graphed_call.GraphedCall(pool, lambda: 7)() == 7
    assert cuda.current is cuda.first
    assert cuda.ended == [(1, (0, 1))]
    assert not pool.records


def test_it_is_recorded_on_the_device_of_the_pool_in_memory_that_graphs_hold(monkeypatch):
    cuda, pool = FakeCuda(monkeypatch), GraphPool(torch.device("cuda", 1))
    kept = [pool.capture(lambda: 7) for _ in range(2)]
    kept.clear()
    pool.capture(lambda: 7)
    assert cuda.recorded == [((0, handle), torch.device("cuda", 1), "thread_local") for handle in (1, 1, 2)]
    assert cuda.current is cuda.first


@pytest.mark.slow
def test_a_step_that_cannot_be_recorded_is_plain_code_and_said_once(policy, caplog):
    pool = RecordingPool(refuses="a CUDA graph cannot hold its step: it waits for the GPU")
    batch, right = StaticBatch(policy.model, pool), PaddedBatch(policy.model)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "lachesis"):
        for one in (batch, right):
            one.prefill([[1, 5], [1, 6, 7]], [1, 1])
        for token in range(3, 90):
            for one in (batch, right):
                one.append_tokens([token, token])
            assert torch.allclose(batch.logits, right.logits, atol=1e-5)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "it waits for the GPU; steps run without a graph from now on" in said


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [None, "a CUDA graph cannot hold its step: it waits for the GPU"])
def test_a_gpu_tries_it_first_and_says_why_not(policy, monkeypatch, caplog, refuses):
    pool = RecordingPool(refuses, strict=True)
    monkeypatch.setattr(decoding_choice, "graph_pool", lambda _: pool)
    with caplog.at_level(logging.INFO, "lachesis"):
        batch = choose_decoding(policy.model, 90)
    if refuses is None:
        assert type(batch) is StaticBatch
        assert batch.about.startswith("all rows together, a step as one CUDA graph")
        assert pool.strict is False
    else:
        assert type(batch) is PaddedBatch
        assert refuses in caplog.text


@pytest.mark.slow
def test_a_cpu_does_without(policy):
    assert type(choose_decoding(policy.model, 90)) is PaddedBatch
    assert not GraphPool(CPU).records


def test_no_more_sizes_are_kept_than_some(policy, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.inference.engines.reference.static_batch._MAX_STEPS", 2)
    batch, right = StaticBatch(policy.model, RecordingPool()), PaddedBatch(policy.model)
    with torch.inference_mode():
        for one in (batch, right):
            for rows in (9, 1, 2, 3, 1):
                one.clear()
                one.prefill([[1, 5, 6]], [rows])
                one.append_tokens([7] * rows)
        assert torch.allclose(batch.logits, right.logits, atol=1e-5)
    assert len(batch._steps) == 2


@pytest.mark.gpu
def test_a_call_is_recorded_on_a_gpu():
    device = torch.device("cuda")
    given, pool = torch.ones(3, device=device), GraphPool(device, strict=True)
    call = graphed_call.GraphedCall(pool, lambda: given * 2)
    assert call().tolist() == [2, 2, 2]
    given.fill_(4)
    assert call().tolist() == [8, 8, 8]
    with pytest.raises(CaptureError, match="cannot hold its step"):
        graphed_call.GraphedCall(pool, lambda: given.sum().item())()
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    assert call().tolist() == [8, 8, 8]
    assert graphed_call.GraphedCall(pool, lambda: given * 3)().tolist() == [12, 12, 12]
