"""Bytes and seconds of a policy's weights on the way to an inference server, whole and as differences.

Takes real optimizer steps (AdamW, clipped gradients, random tokens) on a model, codes each version as it travels and
decodes it again, which must give the same bytes. Without `--model` it is the demo's shape.

    python tests/benchmarks/weights_delta.py [--model FOLDER] [--learning-rate 2e-5] [--steps 4] [--threads 2]
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, rounded
from lachesis.pipeline.weights.payload import decode_payload, encode_payload, forms_of
from lachesis.pipeline.weights.upload import raw_tensors


def code(tensors, base):
    """Return the coded bytes' number, and the seconds of coding and of decoding."""
    started = time.perf_counter()
    payload = b"".join(encode_payload(tensors, base))
    coded = time.perf_counter()
    blocks = [block.tobytes() for block in decode_payload(memoryview(payload), base)]
    decoded = time.perf_counter()
    forms, _ = forms_of(memoryview(payload))
    assert b"".join(blocks) == b"".join(tensors.data[form.name].tobytes() for form in forms)
    return len(payload), coded - started, decoded - coded


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    if arguments.model is None:
        model = build_tiny_policy(0).model
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    before = {}
    print(f"learning rate {arguments.learning_rate:g}, {sum(p.numel() for p in model.parameters()):,} parameters")
    print("step dtype          plain bytes  coded bytes  share  code s  decode s")
    for step in range(arguments.steps + 1):
        for dtype in ("float32", "bfloat16"):
            tensors = raw_tensors(rounded(policy_tensors(model), dtype))
            size, coding_s, decoding_s = code(tensors, before.get(dtype))
            before[dtype] = tensors
            share = size / tensors.nbytes
            print(
                f"{step:4} {dtype:9} {'whole' if step == 0 else 'delta':5} {tensors.nbytes:11,} {size:12,}"
                f"  {share:5.3f} {coding_s:7.2f} {decoding_s:9.2f}",
                flush=True,
            )
        tokens = torch.randint(0, model.config.vocab_size, (4, 24))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
