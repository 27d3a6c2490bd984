r"""Make a shipped base model, ``fl_lightning/models/language/llama_tiny*.safetensors``, or evaluate
one.

    OMP_NUM_THREADS=1 python benchmarks/language_base.py --out llama_tiny.safetensors
    OMP_NUM_THREADS=1 python benchmarks/language_base.py --blocks 8 --drop 0.2 \
        --out llama_tiny_deep.safetensors
    python benchmarks/language_base.py \
        --evaluate fl_lightning/models/language/llama_tiny.safetensors

A byte model learns the next byte of the standard library's reference texts and docstrings, read
where Python is installed, and at the same time to answer records of copy formats, none of which is
a task of the instruction federation. From the formats it gets in-context copying, without which no
adapter of a task that rewrites its input has an exact match. The weights follow from the Python
version, the torch version, the machine's kind, ``--steps``, ``--blocks`` and ``--drop``; on one
thread.

With ``--drop p`` each sequence of a step lacks each branch, the attention or the feed-forward layer
of a block, with the chance p: LayerDrop (Fan et al., ICLR 2020, arXiv 1909.11556) over branches.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import math
import random
import re
import string
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.energy.switched.branches import BranchBoard, BranchPlan, switch_branches
from fl_lightning.models.language.llama import Llama

BOS, EOS, PAD = 256, 257, 258  # after the 256 bytes
VOCABULARY = 259
SEED = 0
IGNORED = -100

TEXT_LENGTH, TEXT_ROWS = 72, 20  # tokens of a sequence of text, sequences of a step
RECORD_LENGTH, RECORD_ROWS = 56, 32  # the same of records
LEARNING_RATE, WARM_UP_STEPS = 3e-3, 60
SKIPPED_PACKAGES = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "pydoc_data",
    "ensurepip",
}
HELD_OUT_TEXT = 0.05  # share at the end
HELD_OUT_WORDS = 10  # every tenth word is in no training record
NONSENSE = 0.2  # share of words that are random letters
COPY = 0.25  # share of records that are plain copies; the others are drawn evenly from all formats

Maker = Callable[[random.Random, list[str]], tuple[str, str]]


def reference_text() -> str:
    """Return the topics of Python's help that are not part of a longer one, each paragraph on one
    line."""
    middles = {name: text.strip()[200:1200] for name, text in topics.items()}
    repeated = {
        name
        for name, middle in middles.items()
        if middle and any(name != other and middle in topics[other] for other in topics)
    }
    text = "\n\n".join(topics[name] for name in sorted(topics) if name not in repeated)
    return re.sub(r"(?<=[a-z,;])\n {0,6}(?=[a-z(])", " ", text.encode("ascii", "ignore").decode())


def docstrings() -> str:
    """Return the docstrings of the standard library's sources, in the order of their paths, without
    importing a module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_PACKAGES & set(path.relative_to(library).parts):
            continue
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = (ast.get_docstring(node) or "").encode("ascii", "ignore").decode()
                if len(text) >= 40:
                    found[text] = None
    return "\n\n".join(found)


def words_of(text: str) -> tuple[list[str], list[str]]:
    """Return the text's words of 2 to 7 letters: those of training records, and those held out."""
    words = sorted(set(re.findall(r"(?<![A-Za-z_])[a-z]{2,7}(?![A-Za-z_])", text)))
    held_out = words[::HELD_OUT_WORDS]
    return sorted({*words} - {*held_out}), held_out


def draw(numbers: random.Random, words: list[str], count: int) -> list[str]:
    """Return ``count`` words, some of them random letters."""
    return [
        nonsense(numbers) if numbers.random() < NONSENSE else numbers.choice(words)
        for _ in range(count)
    ]


def nonsense(numbers: random.Random) -> str:
    return "".join(numbers.choices(string.ascii_lowercase, k=numbers.randint(2, 7)))


def copied(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    text = " ".join(draw(numbers, words, numbers.randint(1, 4)))
    return text, text


def first(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    chosen = draw(numbers, words, 3)
    return " ".join(chosen), chosen[0]


def middle(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    chosen = draw(numbers, words, 3)
    return ", ".join(chosen), chosen[1]


def quoted(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    text = " ".join(draw(numbers, words, 2))
    return text, f'"{text}"'


def dashed(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    chosen = draw(numbers, words, 3)
    return " ".join(chosen), "-".join(chosen)


def twice(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    (word,) = draw(numbers, words, 1)
    return word, f"{word} {word}"


def titled(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    chosen = draw(numbers, words, 2)
    return " ".join(chosen), " ".join(word.capitalize() for word in chosen)


def counted(numbers: random.Random, words: list[str]) -> tuple[str, str]:
    start = numbers.randrange(90)
    return str(start), f"{start} {start + 1} {start + 2}"


FORMATS: dict[str, Maker] = {
    "Copy.": copied,
    "First word.": first,
    "In quotes.": quoted,
    "Dashes.": dashed,
    "Middle word.": middle,
    "Twice.": twice,
    "Count on.": counted,
    "Title case.": titled,
}
"""By definition, what makes a record's inputs and targets. None of them is a task of the
federation."""


def prompt_ids(definition: str, inputs: str) -> list[int]:
    return [BOS, *f"{definition}\n{inputs}\n=".encode("ascii")]


def record_batch(numbers: random.Random, words: list[str]) -> tuple[Tensor, Tensor]:
    """Return ids and targets of records, both ``[RECORD_ROWS, RECORD_LENGTH]``."""
    ids = torch.full((RECORD_ROWS, RECORD_LENGTH), PAD)
    target = torch.full((RECORD_ROWS, RECORD_LENGTH), IGNORED)
    row = 0
    while row < RECORD_ROWS:
        definition = "Copy." if numbers.random() < COPY else numbers.choice([*FORMATS])
        inputs, answer = FORMATS[definition](numbers, words)
        prompt, reply = prompt_ids(definition, inputs), [*answer.encode("ascii"), EOS]
        if len(prompt) + len(reply) > RECORD_LENGTH + 1:
            continue
        whole = torch.tensor([*prompt, *reply])
        ids[row, : len(whole) - 1] = whole[:-1]
        target[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
        row += 1
    return ids, target


def text_batch(text: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """Return ids and targets ``[len(starts), TEXT_LENGTH]`` of pieces of text, each after BOS."""
    target = torch.stack([text[start : start + TEXT_LENGTH] for start in starts])
    return torch.cat((torch.full((len(starts), 1), BOS), target[:, :-1]), dim=1), target


def loss_of(network: Llama, ids: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(network(ids).flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def dropped(
    board: BranchBoard, ids: Tensor, drop: float, numbers: random.Random
) -> contextlib.AbstractContextManager[None]:
    """Return a block of code within which each sequence of ``ids [B, T]`` lacks each branch with a
    chance."""
    masks = torch.tensor([[numbers.random() >= drop for _ in range(board.branches)] for _ in ids])
    return board.using(BranchPlan.of_sequences(masks, ids.shape[1]))


def train(network: Llama, text: Tensor, words: list[str], steps: int, drop: float = 0.0) -> None:
    """Train in place: AdamW, warm-up, then a cosine down to 3 % of the learning rate.

    With a chance ``drop`` above 0 the blocks of the network are switched ones afterwards.
    """
    numbers, of_drops = random.Random(SEED), random.Random(SEED + 2)
    board = switch_branches(network) if drop else None
    matrices = [p for p in network.parameters() if p.ndim > 1]
    norms = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    began = time.process_time()
    for step in range(steps):
        rate = min(1.0, (step + 1) / WARM_UP_STEPS) * (
            0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        starts = [numbers.randrange(len(text) - TEXT_LENGTH) for _ in range(TEXT_ROWS)]
        losses = []
        for ids, target in (text_batch(text, starts), record_batch(numbers, words)):
            with contextlib.nullcontext() if board is None else dropped(board, ids, drop, of_drops):
                losses.append(loss_of(network, ids, target))
        on_text, on_records = losses
        (on_text + on_records).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            spent = time.process_time() - began
            print(
                f"step {step + 1}: {spent:.0f} CPU s, text {on_text:.3f}, records {on_records:.3f} nats",
                flush=True,
            )


@torch.no_grad()
def evaluate(network: Llama, text: Tensor, words: list[str], count: int = 50) -> dict[str, float]:
    """Return nats per byte of ``text`` and the exact match of each format on ``count`` records of
    ``words``."""
    starts = [*range(0, len(text) - TEXT_LENGTH, TEXT_LENGTH)][:256]
    found = {"text, nats per byte": float(loss_of(network, *text_batch(text, starts)))}
    for definition, make in FORMATS.items():
        found[definition] = exact_match(network, definition, make, words, count)
    found["Copy. of random letters"] = exact_match(
        network,
        "Copy.",
        lambda numbers, words: ((text := " ".join(nonsense(numbers) for _ in range(3))), text),
        words,
        count,
    )
    return found


def exact_match(
    network: Llama, definition: str, make: Maker, words: list[str], count: int
) -> float:
    numbers = random.Random(SEED + 1)
    records = [make(numbers, words) for _ in range(count)]
    prompts = [torch.tensor(prompt_ids(definition, inputs)) for inputs, _ in records]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=PAD)
    longest = max(len(answer) for _, answer in records) + 1
    replies = network.generate(ids, ids != PAD, longest, EOS, PAD).tolist()
    texts = [
        bytes(token for token in reply if token < BOS).decode("ascii", "replace")
        for reply in replies
    ]
    return sum(text == answer for text, (_, answer) in zip(texts, records, strict=True)) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200, help="optimiser steps")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the network")
    parser.add_argument(
        "--drop", type=float, default=0.0, help="chance that a sequence lacks a branch"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("llama_tiny.safetensors"), help="file to write"
    )
    parser.add_argument("--evaluate", type=Path, help="file to evaluate; nothing is trained")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    reference = reference_text()
    words, held_out_words = words_of(reference)
    text = torch.tensor(list(f"{reference}\n\n{docstrings()}".encode("ascii")))
    held_out = int(len(text) * (1 - HELD_OUT_TEXT))
    print(f"{len(text)} bytes of text, {len(words)} words, {len(held_out_words)} held out")
    network = Llama(VOCABULARY, depth=options.blocks)
    path = options.evaluate or options.out
    if options.evaluate is None:
        train(network, text[:held_out], words, options.steps, options.drop)
        weights = {name: weight.bfloat16() for name, weight in network.state_dict().items()}
        save_file(weights, path)
    network.load_state_dict({name: weight.float() for name, weight in load_file(path).items()})
    for name, value in evaluate(network, text[held_out:], held_out_words).items():
        print(f"{name:28} {value:.3f}")
    print(
        f"{path}: {path.stat().st_size} bytes, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
    )


if __name__ == "__main__":
    main()
