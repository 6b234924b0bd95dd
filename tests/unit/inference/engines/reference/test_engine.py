"""The engine: exact logprobs whatever is batched, limits, pauses, weight exchange, cancellation, failure."""

import itertools
import threading
import time

import pytest
import torch

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams, WeightVersionSpan
from lachesis.pipeline.inference.serving.engine import EngineFullError
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.schemas.errors import DataError

WAIT = 20
PROMPTS = [[1, 5, 6], [1, 7, 8, 9, 10, 11, 12, 13], [1, 20], [1, *range(30, 60)]]


def alone(model, prompt, tokens, temperature=1.0):
    """Logprobs of `tokens` after `prompt` by one plain forward pass."""
    with torch.no_grad():
        values, _ = token_logprobs(model, torch.tensor([prompt + tokens]), temperature)
    return values[0, len(prompt) :].tolist()


def until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_mixed_lengths_in_one_batch_equal_an_unbatched_pass(start_engine, policy, temperature):
    with start_engine(max_running_sequences=7, max_prefill_tokens=40) as engine:
        futures = [
            (prompt, engine.submit(prompt, SamplingParams(n=n, temperature=temperature, max_tokens=8 + n, seed=n)))
            for prompt in PROMPTS
            for n in (1, 3)
        ]
        results = [(prompt, future.result(WAIT)) for prompt, future in futures]
    lengths = set()
    for prompt, result in results:
        for one in result.samples:
            lengths.add(len(one.token_ids))
            assert one.logprobs == pytest.approx(alone(policy.model, prompt, one.token_ids, temperature), abs=1e-5)
    assert len(lengths) > 1


def test_seeded_requests_repeat_whatever_else_runs_and_samples_differ(start_engine):
    params = SamplingParams(n=4, max_tokens=10, seed=5, ignore_eos=True)
    with start_engine() as engine:
        first = engine.submit(PROMPTS[0], params).result(WAIT)
        others = [engine.submit(prompt, SamplingParams(max_tokens=20)) for prompt in PROMPTS]
        again = engine.submit(PROMPTS[0], params).result(WAIT)
        for other in others:
            other.result(WAIT)
    assert [s.token_ids for s in first.samples] == [s.token_ids for s in again.samples]
    assert len({tuple(s.token_ids) for s in first.samples}) == 4


def test_commands_behind_one_that_breaks_the_engine_fail_with_it(start_engine, policy):
    begun, go = threading.Event(), threading.Event()

    def hold(_):
        begun.set()
        assert go.wait(WAIT)

    with start_engine() as engine:
        request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True), hold)
        assert begun.wait(WAIT)
        broken = engine.load_weights(dict.fromkeys(policy_tensors(policy.model)), "1-a-b")
        behind = engine.resume()
        go.set()
        for future in (broken, behind, request):
            with pytest.raises(InfrastructureError, match="the engine failed"):
                future.result(WAIT)


def test_an_engine_that_is_closed_waits_for_no_sample_though_a_pause_does(start_engine):
    tokens, begun, queued, paused = itertools.count(), threading.Event(), threading.Event(), threading.Event()

    def hold(_):
        match next(tokens):
            case 0:
                begun.set()
                assert queued.wait(WAIT)
            case 1:
                paused.set()
                until(lambda: engine._closed)

    with start_engine() as engine:
        request = engine.submit(PROMPTS[0], SamplingParams(ignore_eos=True), hold)
        assert begun.wait(WAIT)
        engine.pause("wait")
        queued.set()
        assert paused.wait(WAIT)
    with pytest.raises(InfrastructureError, match="the engine was closed"):
        request.result(WAIT)


def test_greedy_takes_the_likeliest_token(start_engine, policy):
    with start_engine() as engine:
        sample = engine.submit(PROMPTS[1], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)).result(WAIT)
    tokens = list(PROMPTS[1])
    for token in sample.samples[0].token_ids:
        with torch.no_grad():
            assert token == policy.model(torch.tensor([tokens])).logits[0, -1].argmax().item()
        tokens.append(token)


def test_finish_reasons_and_limits(start_engine, policy):
    with start_engine() as engine:
        free = engine.submit(PROMPTS[0], SamplingParams(max_tokens=30, seed=1, ignore_eos=True)).result(WAIT).samples[0]
        assert (free.finish_reason, len(free.token_ids)) == ("length", 30)
        stop = free.token_ids[4]
        where = free.token_ids.index(stop)
        params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True, stop_token_ids=[stop])
        stopped = engine.submit(PROMPTS[0], params).result(WAIT).samples[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.token_ids == free.token_ids[: where + 1]
        whole = engine.submit(PROMPTS[0], SamplingParams(ignore_eos=True)).result(WAIT).samples[0]
        assert len(whole.token_ids) == 96 - len(PROMPTS[0])


def test_end_token_stops_and_stays_in_the_output(policy):
    greedy = SamplingParams(temperature=0, max_tokens=9)
    with torch.no_grad():
        likeliest = policy.model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax().item()
    with Engine(policy.model, eos_token_id=likeliest, weight_version="v") as engine:
        sample = engine.submit(PROMPTS[0], greedy).result(WAIT).samples[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([likeliest], "stop", None)


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], SamplingParams(), "empty"),
        ([1, 10_000], SamplingParams(), "vocabulary"),
        ([1, -1], SamplingParams(), "vocabulary"),
        ([1] * 90, SamplingParams(max_tokens=7), "context"),
        ([1] * 96, SamplingParams(), "context"),
        ([1], SamplingParams(n=300), "at most 256"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(start_engine, prompt, params, text):
    with start_engine() as engine, pytest.raises(DataError, match=text):
        engine.submit(prompt, params)


def test_prompt_logprobs_and_ranks(start_engine, policy):
    prompt = PROMPTS[1]
    with start_engine() as engine:
        futures = [
            engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.3, prompt_logprobs=k)) for k in (0, 3)
        ]
        plain, top = (future.result(WAIT).prompt_logprobs for future in futures)
        single = engine.submit([1], SamplingParams(max_tokens=1, prompt_logprobs=0)).result(WAIT).prompt_logprobs
    assert plain[0] is None
    assert single == [None]
    values = [entry[str(token)].logprob for token, entry in zip(prompt[1:], plain[1:], strict=True)]
    assert values == pytest.approx(alone(policy.model, prompt[:1], prompt[1:]), abs=1e-5)
    with torch.no_grad():
        logprobs = policy.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position, (token, entry) in enumerate(zip(prompt[1:], top[1:], strict=True)):
        ordered = logprobs[position].argsort(descending=True).tolist()
        assert set(entry) == {str(t) for t in [*ordered[:3], token]}
        assert entry[str(token)].rank == ordered.index(token) + 1
        assert entry[str(token)].rank == plain[position + 1][str(token)].rank


@pytest.mark.slow
@pytest.mark.parametrize("elements", [1, 2**26])
def test_prompts_scored_together_equal_prompts_scored_alone(start_engine, policy, monkeypatch, elements):
    monkeypatch.setattr("lachesis.pipeline.inference.engines.reference.prompt_scoring.SCORING_ELEMENTS", elements)
    with start_engine() as engine:
        engine.pause("keep").result(WAIT)
        futures = [engine.submit(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)) for prompt in PROMPTS]
        engine.resume().result(WAIT)
        results = [future.result(WAIT).prompt_logprobs for future in futures]
    for prompt, scores in zip(PROMPTS, results, strict=True):
        values = [entry[str(token)].logprob for token, entry in zip(prompt[1:], scores[1:], strict=True)]
        assert values == pytest.approx(alone(policy.model, prompt[:1], prompt[1:]), abs=1e-5)


@pytest.mark.slow
def test_new_weights_between_two_tokens_give_exact_spans_and_logprobs(start_engine, policy):
    other = build_tiny_policy(9, width=32, layers=2, max_length=96)
    old = {name: tensor.clone() for name, tensor in policy_tensors(policy.model).items()}
    new = {name: tensor * 2 for name, tensor in policy_tensors(other.model).items()}
    params = SamplingParams(n=2, max_tokens=90, ignore_eos=True, seed=3)
    with start_engine() as engine:
        future = engine.submit([1, 5], params)
        engine.pause("keep").result(WAIT)
        assert engine.is_paused
        until(lambda: engine.running == 2 or engine.waiting == 1)
        engine.resume().result(WAIT)
        until(lambda: engine.running == 2)
        engine.load_weights(new, "1-second-1").result(WAIT)
        result = future.result(WAIT)
        assert engine.weight_version == "1-second-1"
        later = engine.submit([1, 5], SamplingParams(max_tokens=3, ignore_eos=True)).result(WAIT)
    assert later.samples[0].weight_versions == [WeightVersionSpan(version="1-second-1", start=0, end=3)]
    for sample in result.samples:
        spans = sample.weight_versions
        assert spans[0].start == 0
        assert spans[-1].end == len(sample.token_ids) == 90
        assert [s.end for s in spans[:-1]] == [s.start for s in spans[1:]]
        for span in spans:
            weights = new if span.version == "1-second-1" else old
            policy.model.load_state_dict(weights, strict=False)
            expected = alone(policy.model, [1, 5], sample.token_ids)
            assert sample.logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=1e-5)
    assert len(result.samples[0].weight_versions) == 2


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(start_engine, policy):
    incomplete = dict(policy_tensors(policy.model))
    incomplete.popitem()
    with start_engine() as engine:
        version = engine.weight_version
        with pytest.raises(DataError, match="missing"):
            engine.load_weights(incomplete, "other").result(WAIT)
        assert engine.weight_version == version
        assert engine.submit([1], SamplingParams(max_tokens=2)).result(WAIT).samples


def test_pause_keep_freezes_wait_finishes_abort_ends(start_engine):
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    with start_engine(max_running_sequences=1) as engine:
        running = engine.submit([1, 2], params)
        until(lambda: engine.running == 1)
        waiting = engine.submit([1, 3], params)
        engine.pause("keep").result(WAIT)
        frozen = not running.done()
        engine.pause("wait").result(WAIT)
        assert running.done()
        assert len(running.result().samples[0].token_ids) == 90
        assert not waiting.done()
        engine.resume().result(WAIT)
        until(lambda: engine.running == 1)
        queued = engine.submit([1, 4], params)
        engine.pause("abort").result(WAIT)
        aborted, nothing = waiting.result(WAIT).samples[0], queued.result(WAIT).samples[0]
        assert (nothing.finish_reason, nothing.token_ids, nothing.weight_versions) == ("abort", [], [])
        if aborted.finish_reason == "abort":
            assert len(aborted.token_ids) == len(aborted.logprobs) < 90
        held = engine.submit([1, 4], params)
        assert not held.done()
        engine.resume().result(WAIT)
        assert held.result(WAIT).samples[0].finish_reason == "length"
        assert frozen


def test_full_queue_refuses_and_recovers(start_engine):
    with start_engine(max_waiting_requests=2) as engine:
        engine.pause("keep").result(WAIT)
        futures = [engine.submit([1], SamplingParams(max_tokens=2)) for _ in range(2)]
        with pytest.raises(EngineFullError, match="2 requests"):
            engine.submit([1], SamplingParams(max_tokens=2))
        engine.resume().result(WAIT)
        assert all(future.result(WAIT).samples for future in futures)


def test_cancelled_requests_leave_the_queue_while_paused(start_engine):
    with start_engine(max_waiting_requests=1) as engine:
        engine.pause("keep").result(WAIT)
        for _ in range(5):
            assert engine.submit([1], SamplingParams(max_tokens=2)).cancel()
            assert engine.waiting == 0


def test_cancelled_work_is_dropped_while_it_runs_and_while_it_waits(start_engine):
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    with start_engine(max_running_sequences=1) as engine:
        running, waiting, last = (engine.submit([1], params) for _ in range(3))
        until(lambda: engine.running == 1)
        assert waiting.cancel()
        assert running.cancel()
        assert len(last.result(WAIT).samples[0].token_ids) == 90
        until(lambda: engine.running == 0)


def test_closing_fails_what_is_unfinished(start_engine):
    engine = start_engine()
    with engine:
        engine.pause("keep").result(WAIT)
        future = engine.submit([1], SamplingParams(max_tokens=2))
    with pytest.raises(InfrastructureError, match="closed"):
        future.result(WAIT)
    with pytest.raises(InfrastructureError, match="not running"):
        engine.submit([1], SamplingParams())


def test_prompts_that_cannot_be_scored_fail_their_request(start_engine, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("lachesis.pipeline.inference.engines.reference.engine.PromptScorer.score", fails)
    with start_engine() as engine, pytest.raises(InfrastructureError, match="out of memory"):
        engine.submit([1], SamplingParams(prompt_logprobs=0)).result(WAIT)


def test_a_failing_model_fails_every_request_and_the_engine(start_engine, policy):
    with start_engine() as engine:
        engine.pause("keep").result(WAIT)
        future = engine.submit([1], SamplingParams(max_tokens=2))
        with torch.no_grad():
            policy.model.model.embed_tokens.weight.fill_(torch.nan)
        engine.resume().result(WAIT)
        with pytest.raises(InfrastructureError, match="NaN"):
            future.result(WAIT)
        with pytest.raises(InfrastructureError, match="NaN"):
            engine.submit([1], SamplingParams())
        with pytest.raises(InfrastructureError, match="NaN"):
            engine.check_alive()
