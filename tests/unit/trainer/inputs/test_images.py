"""Images reach the model through its own processor; what it cannot use costs its group alone."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.policy import ModelSetup, build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tokenizer import save_tokenizer
from lachesis.pipeline.trainer.adapters import with_adapters
from lachesis.pipeline.trainer.config import LearnerConfig, ModelInputConfig
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Attachment

from .groups import group, selected

INPUT = ModelInputConfig(input="images")
IMAGE_TOKEN = 5


def llava():
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=16, patch_size=8, projection_dim=16)  # fmt: skip
    text = LlamaConfig(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=4)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return LlavaForConditionalGeneration(config), processor, lambda width, height: 4


def qwen2_vl():
    text = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}  # fmt: skip
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, vision_start_token_id=6,
                           vision_end_token_id=7, video_token_id=8)  # fmt: skip
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)
    return Qwen2VLForConditionalGeneration(config), processor, lambda width, height: (width // 28) * (height // 28)


def llava_next():
    """An image is one patch for the whole and others for its parts, so images of other sizes have other shapes."""
    llava_model, _, _ = llava()
    config = LlavaNextConfig(**llava_model.config.to_dict() | {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]})
    processor = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16},
                                           image_grid_pinpoints=config.image_grid_pinpoints)  # fmt: skip
    return LlavaNextForConditionalGeneration(config), processor, lambda width, height: 24 if width == height else 14


@pytest.fixture(params=[llava, llava_next, qwen2_vl], ids=["llava", "llava_next", "qwen2_vl"])
def seeing(request, tmp_path):
    """A model folder as people have them, loaded as the trainer does; and the tokens of an image of a size."""
    torch.manual_seed(0)
    model, processor, tokens_of = request.param()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    save_tokenizer(build_tiny_policy(0, width=32, layers=1).tokenizer, tmp_path)
    return load_model(tmp_path, ModelSetup(images=True)), tokens_of


def picture(color, width=56, height=56):
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return Attachment(mime="image/png", data=file.getvalue())


def about(tokens_of, *pictures, extra=0, length=6):
    """A group of two samples with the same pictures."""
    start = []
    for one in pictures:
        size = Image.open(io.BytesIO(one.data)).size
        start += [6, *[IMAGE_TOKEN] * (tokens_of(*size) + extra), 7]
    tokens = [np.array([1, *start, *range(20 + i, 20 + i + length)], np.int32) for i in range(2)]
    named = [list(range(len(pictures)))] * 2
    prompt = 1 + len(start)
    return group(
        tokens, [np.full(len(one), -3.0) for one in tokens], attachments=pictures, messages=named, prompt=prompt
    )


def learner_of(policy, **settings):
    learner = Learner(policy.model, LearnerConfig(**{"learning_rate": 1e-2, "warmup_steps": 0} | settings))
    learner.inputs = load_inputs([INPUT], policy, policy.model)
    return learner


def packed(groups, learner):
    from lachesis.pipeline.trainer.packed_batch import pack

    found = selected(groups, learner.inputs, attachments=True)
    assert not found.dropped
    return pack(found.sequences)


def logprobs(learner, batch):
    with torch.no_grad():
        return learner._logprobs(batch)


def test_what_is_seen_changes_what_is_said_and_micro_batches_do_not(seeing):
    policy, tokens_of = seeing
    learner = learner_of(policy)
    red, blue = (about(tokens_of, picture(color)) for color in ("red", "blue"))
    two = about(tokens_of, picture("red"), picture("blue", 84, 56), length=9)
    text = group([np.arange(20, 29, dtype=np.int32)] * 2, [np.full(9, -3.0)] * 2)
    one, other = packed([red], learner), packed([blue], learner)
    assert (logprobs(learner, one) - logprobs(learner, other))[one.mask_BT].abs().max() > 1e-4
    batch = packed([red, two, blue, text], learner)
    whole = logprobs(learner, batch)
    for rows_b, micro in batch.microbatches(40):
        assert torch.allclose(logprobs(learner, micro), whole[rows_b, : micro.tokens_BT.shape[1]], atol=1e-4)


def test_the_part_of_the_model_that_sees_is_trained(seeing):
    policy, tokens_of = seeing
    learner = learner_of(policy, recompute_layers=True)
    before = {name: tensor.clone() for name, tensor in policy.model.named_parameters() if "vis" in name}
    metrics = learner.step(packed([about(tokens_of, picture("red"))], learner))
    assert metrics.grad_norm > 0
    assert metrics.step_kl > 0
    assert before
    moved = [
        name
        for name, tensor in policy.model.named_parameters()
        if name in before and not torch.equal(tensor, before[name])
    ]
    assert len(moved) > len(before) / 2


def test_adapters_of_a_model_that_sees_are_trained(seeing):
    pytest.importorskip("peft")
    policy, tokens_of = seeing
    adapted = policy._replace(model=with_adapters(policy.model, LoraConfig(rank=2), 0))
    learner = learner_of(adapted)
    batch = packed([about(tokens_of, picture("red"))], learner)
    before = logprobs(learner, batch)
    assert learner.step(batch).step_kl > 0
    assert (logprobs(learner, batch) - before)[batch.mask_BT].abs().max() > 0


def test_a_batch_of_text_alone_trains_too(seeing):
    policy, _ = seeing
    learner = learner_of(policy)
    text = group([np.arange(20, 29, dtype=np.int32)] * 2, [np.full(9, -3.0)] * 2)
    assert learner.step(packed([text], learner)).grad_norm > 0


def test_what_the_model_cannot_use_costs_its_group_alone(seeing):
    policy, tokens_of = seeing
    learner = learner_of(policy)
    good = about(tokens_of, picture("red"))
    many = about(tokens_of, picture("red"), extra=1)
    garbage = good.replace(attachments=[Attachment(mime="image/png", data=b"\x89PNG no image")])
    absent = good.replace(attachments=[], messages=[])
    found = selected([many, garbage, good, absent], learner.inputs, attachments=True)
    assert [ref.seq for ref in found.refs] == [3]
    due = tokens_of(56, 56)
    assert found.dropped[1] == f"images: sequence 0: 1 images make {due} image tokens, but there are {due + 1}"
    assert found.dropped[2].startswith("images: sequence 0: attachment 0 (image/png) is no image that can be read")
    assert found.dropped[4] == f"images: sequence 0: {due} image tokens and no image"


def placed(tokens, *pictures):
    """A group of two samples with these tokens, of which the last two are trained."""
    ids = [np.array(tokens, np.int32)] * 2
    named = [list(range(len(pictures)))] * 2
    logprobs = [np.full(len(tokens), -3.0)] * 2
    return group(ids, logprobs, attachments=pictures, messages=named, prompt=len(tokens) - 2)


@pytest.mark.parametrize("seeing", [qwen2_vl], ids=["qwen2_vl"], indirect=True)
@pytest.mark.parametrize("adapted", [False, True])
def test_image_tokens_that_the_model_cannot_number_cost_their_group_alone(seeing, adapted):
    policy, tokens_of = seeing
    if adapted:
        pytest.importorskip("peft")
        policy = policy._replace(model=with_adapters(policy.model, LoraConfig(rank=2), 0))
    learner = learner_of(policy)
    split = placed([20, 6, 5, 5, 9, 5, 5, 7, 21, 22], picture("red"))
    joined = placed([20, 6, *[5] * 8, 7, 21, 22], picture("red"), picture("blue"))
    found = selected([split, joined, about(tokens_of, picture("red"))], learner.inputs, attachments=True)
    assert [ref.seq for ref in found.refs] == [3]
    assert "not one unbroken run for each image" in found.dropped[1]
    assert "not one unbroken run for each image" in found.dropped[2]


def test_files_that_only_other_programs_read_are_no_images(seeing):
    policy, tokens_of = seeing
    learner = learner_of(policy)
    file = io.BytesIO()
    Image.new("RGB", (56, 56)).save(file, "EPS")
    eps = about(tokens_of, picture("red")).replace(attachments=[Attachment(mime="image/png", data=file.getvalue())])
    assert "it is none of PNG, JPEG" in selected([eps], learner.inputs, attachments=True).dropped[1]


def test_few_bytes_do_not_become_many_pixels(seeing, monkeypatch):
    from lachesis.pipeline.trainer.inputs import images

    policy, tokens_of = seeing
    learner = learner_of(policy)

    def reason(rollout):
        return selected([rollout], learner.inputs, attachments=True).dropped[1]

    one = about(tokens_of, picture("red"))
    due = tokens_of(56, 56)
    crowd = one.replace(messages=[], attachments=[picture("red")] * (due + 1))
    assert f"{due + 1} images, but there are {due} image tokens" in reason(crowd)
    thin = one.replace(attachments=[picture("red", 1, 201)])
    assert "attachment 0 is an image of 1 x 201 pixels: one side is more than 200 times the other" in reason(thin)
    monkeypatch.setattr(images, "MAX_PIXELS_TOGETHER", 2 * 56 * 56 - 1)
    assert "attachment 1 is an image of 56 x 56 pixels, with those before it more" in reason(
        about(tokens_of, picture("red"), picture("blue"))
    )


def test_a_huge_image_is_refused_before_it_is_decoded(seeing, monkeypatch):
    from lachesis.pipeline.trainer.inputs import images

    policy, tokens_of = seeing
    learner = learner_of(policy)
    monkeypatch.setattr(images, "MAX_PIXELS", 56 * 56 - 1)
    found = selected([about(tokens_of, picture("red"))], learner.inputs, attachments=True)
    assert "attachment 0 is an image of 56 x 56 pixels: too many" in found.dropped[1]


def test_a_saved_policy_keeps_its_image_processor(seeing, tmp_path):
    policy, tokens_of = seeing
    folder = tmp_path / "saved"
    folder.mkdir()
    save_policy(policy, folder)
    again = load_model(folder, ModelSetup(images=True))
    batch = packed([about(tokens_of, picture("red"))], learner := learner_of(policy))
    assert torch.equal(logprobs(learner, batch), logprobs(learner_of(again), batch))


def test_a_tokenizer_of_more_tokens_than_the_model_knows_is_refused_by_both_numbers(tmp_path):
    model, processor, _ = llava()
    model.resize_token_embeddings(64)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    apart = tmp_path / "tokenizer"
    save_tokenizer(build_tiny_policy(0, width=32, layers=1).tokenizer, apart)
    with pytest.raises(ConfigError, match="knows 64: choose the tokenizer"):
        load_model(tmp_path, ModelSetup(images=True, tokenizer=str(apart)))


def test_a_model_of_text_is_refused_at_the_start(small_policy):
    policy = small_policy()
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes none"):
        load_inputs([INPUT], policy, policy.model)
