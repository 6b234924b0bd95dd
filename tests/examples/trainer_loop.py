"""A trainer of your own: one policy-gradient step a batch, every step published and committed; a crash resumes."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lachesis


async def train(run: str, model_path: str, folder: str, nats: str | None = None, steps: int | None = None) -> None:
    async with lachesis.batches(run, nats=nats) as batches:
        last = batches.committed
        model = AutoModelForCausalLM.from_pretrained(last.checkpoint if last else model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        await batches.publish(model, tokenizer, f"{folder}/weights")
        async for batch in batches:
            loss = policy_gradient(model, batch.packed)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            version = await batch.publish(model, tokenizer, f"{folder}/weights")
            checkpoint = f"{folder}/checkpoint-{version}"
            model.save_pretrained(checkpoint)
            await batch.commit(policy_version=version, checkpoint=checkpoint)
            print(f"batch {batch.number}: loss {loss.item():.4f}, now {version}")
            if steps is not None and batch.number + 1 >= steps:
                return


def policy_gradient(model: torch.nn.Module, batch) -> torch.Tensor:
    """Importance-weighted policy gradient over the tokens the policy sampled."""
    logits = model(input_ids=batch.tokens_BT).logits[:, :-1].float()
    targets = batch.tokens_BT[:, 1:, None]
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets).squeeze(-1)
    mask = batch.mask_BT[:, 1:]
    ratio = (logprobs[mask] - batch.logprobs_BT[:, 1:][mask]).exp()
    return -(ratio * batch.advantages_BT[:, 1:][mask]).mean()
