"""What `run_round` of a plain FedAvg runs of the package can be read in one go, and stays so.

As a script it prints the path: file, lines, functions entered, why.

    python tests/project/test_round_path.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

from fl_lightning.conformance.toy import images, run, sgd
from fl_lightning.methods import FedAvg
from fl_lightning.run import session

PACKAGE = Path(session.__file__).parents[1]
WHY = {
    "loop.py": "the round",
    "federation.py": "the parts of the run, and the size of the cohort",
    "rng.py": "the streams of cohort, order of examples and dropout",
    "sampling/base.py": "who takes part",
    "exchange.py": "what each client is asked and sent, and the way of its upload to the server",
    "hooks.py": "where stressors and meters join; here there are none",
    "wire/payload.py": "messages to bytes and back",
    "support/tensor_bytes.py": "the bytes of a tensor",
    "wire/layout.py": "the network's tensors as one vector",
    "wire/ledger.py": "the bytes of each client",
    "models/tensors.py": "the tensors of a network by name",
    "data/holdings.py": "which examples a client has",
    "data/example_batches.py": "clients and their batches, of validation and test too",
    "data/batches.py": "the order of a client's examples",
    "data/image_base.py": "images as inputs of the network",
    "engines/base.py": "what a client is to do and what came of it",
    "engines/sequential.py": "a client's local steps",
    "methods/base.py": "FedAvg: the client's half",
    "methods/personal.py": "what stays on a client: here nothing",
    "methods/with_terms.py": "terms of the loss: here none",
    "methods/optimizing.py": "the local optimiser of the round",
    "tasks/base.py": "how outputs are evaluated",
    "tasks/classification.py": "the loss and the metrics",
    "aggregation/adapters/plain_weights.py": "all weights travel and are averaged as they are",
    "aggregation/base.py": "what becomes of uploads",
    "aggregation/plain.py": "of the four ways the one in the open",
    "aggregation/receiving.py": "an upload decoded and checked",
    "aggregation/client_weights.py": "n_k, which an upload may claim",
    "aggregation/intake.py": "uploads added up as they come",
    "aggregation/server.py": "FedAvg: the server's half",
    "aggregation/sums.py": "sums by name, and their means",
    "aggregation/average.py": "what of an upload enters the mean: all of it",
    "aggregation/exact_sum.py": "sums of integers",
    "aggregation/compiled_sum.py": "the same in one pass, where a compiler is",
    "support/compiled.py": "the library of that",
    "config/overriding.py": "whether a method or data have a rule of their own",
    "support/hook_values.py": "what hooks of a method return and leave",
    "distributed/collectives.py": "whether there are other processes",
    "evaluation.py": "test set and validation",
    "metrics/mean.py": "means of the losses",
    "metrics/spread.py": "mean and spread over clients",
}
"""The package's files in which at least one function runs, and what for."""
MOST_LINES = 7270
LENGTHS = {"trainer.py": 450, "loop.py": 232, "methods/base.py": 405}


def path_of_a_round(folder: Path | str) -> tuple[dict[str, set[str]], dict[str, set[int]]]:
    """Return the functions that the second round of a run enters, and the lines that it executes,
    by file."""
    functions: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, set[int]] = defaultdict(set)
    one_round, before = session.run_round, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        name = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        if event == "call":
            functions[name].add(code.co_name.strip("<>"))
        elif event == "line":
            lines[name].add(frame.f_lineno)
        return trace

    def traced(fed: Any, engine: Any, round: int) -> Any:
        sys.settrace(before if round == 1 else trace)  # in the first round is what is done once
        try:
            return one_round(fed, engine, round)
        finally:
            sys.settrace(before)

    data = images()
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "run_round", traced)
        method = FedAvg(network=lambda num_classes: deepcopy(network), optimizer=sgd())
        run(method, data, folder, max_rounds=2, engine="sequential", workers=1)
    return functions, lines


def length(name: str) -> int:
    return len((PACKAGE / name).read_text().splitlines())


def test_a_plain_round_runs_these_files_and_no_others(tmp_path):
    functions, _ = path_of_a_round(tmp_path)
    assert functions.keys() == WHY.keys(), "say why it is on the path, or keep it off"
    assert sum(map(length, functions)) <= MOST_LINES


@pytest.mark.parametrize("name", LENGTHS)
def test_the_longest_constructors_stay_short(name):
    assert length(name) <= LENGTHS[name]


@pytest.mark.parametrize(("name", "most"), [("loop.py", 0), ("trainer.py", 6)])
def test_what_protects_uploads_has_a_place_of_its_own(name, most):
    """Lines of code that name it; the trainer's have its two settings."""
    code = re.sub(r'""".*?"""', "", (PACKAGE / name).read_text(), flags=re.DOTALL)
    assert len(re.findall(r"^.*\b(?:secure_sum|privacy)\b.*$", code, re.MULTILINE)) <= most


def table() -> str:
    """Return the path as text."""
    with tempfile.TemporaryDirectory() as folder:
        functions, lines = path_of_a_round(folder)
    rows = [f"{'file':36} lines  run  functions entered, and why"]
    for name in sorted(functions, key=lambda name: [*WHY].index(name) if name in WHY else len(WHY)):
        rows.append(
            f"{name:36} {length(name):5} {len(lines[name]):4}  {', '.join(sorted(functions[name]))}"
        )
        rows.append(f"{'':49}({WHY.get(name, '?')})")
    executed = sum(map(len, lines.values()))
    return "\n".join(
        [*rows, f"{len(functions)} files, {sum(map(length, functions))} lines, {executed} run"]
    )


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
