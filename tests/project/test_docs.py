"""The documentation names nothing that does not exist, its commands are understood, its code runs,
and its numbers are computed."""

from __future__ import annotations

import ast
import csv
import gc
import importlib.util
import json
import math
import re
import shlex
import shutil
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from outcomes import rows_of
from places import ROOT

import fl_lightning
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning import methods
from fl_lightning.__main__ import main
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.parser import _parser_of_function
from fl_lightning.compatibility import Run, check_run
from fl_lightning.conformance import method_under_test, run_checks
from fl_lightning.conformance.checks_state import kept_state_is_used
from fl_lightning.conformance.formulas import (
    fp32_bytes,
    layer_sizes,
    num_values,
    packed_bytes,
    payload_bytes,
)
from fl_lightning.conformance.toy import images, on_images, run
from fl_lightning.data import FederatedImages, Partition
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import Method
from fl_lightning.models import SmallCNN
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.study.plan.study import Study
from fl_lightning.topology import Gossip

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
REFERENCES = ("LocalOnly", "Oracle", "Centralised")
WRITTEN = [
    *(path for name, path in PAGES.items() if not name.startswith("results/")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
ALL = [*PAGES.values(), *WRITTEN[-3:]]
MKDOCS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

OF_A_RUN = {
    "config.yaml", "metadata.json", "metrics.csv", "ledger.csv", "clients.csv", "run.log", "partition.json", "registration.json", "test.json", "transfer.csv",
    "noisy_sums.csv", "noise_taken_back.csv", "devices.csv", "cells.json", "until.json", "report.md", "report.json", "runs.csv", "study.yaml", "differences.csv", "timings.csv",
    "timing_differences.csv", "confusion_matrix.csv",
}  # fmt: skip
OF_AN_EXPORT = {"load.py", "export.json", "config.json", "adapter_config.json"}
OF_A_USER = {
    "my_methods.py",
    "my_stressors.py",
    "my_meters.py",
    "my_parts.py",
    "own_dataset.py",
    "own_tasks.py",
    "own_module.py",
    "own_token_module.py",
    "own_tokens.py",
}
FILE = re.compile(r"(?!self\.)[\w./-]*\w\.(?:py|md|ya?ml|toml|cff|csv|json|log|svg)")
IN_REPOSITORY = tuple(
    f"{path.name}/"
    for path in ROOT.iterdir()
    if path.is_dir() and path.name not in (".git", "runs", "data")
)


def of(pages: list[Path]) -> dict[str, object]:
    return {"argvalues": pages, "ids": [str(page.relative_to(ROOT)) for page in pages]}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", **of(ALL))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((<[^>]*>|[^)\s]*)\)", page.read_text()):
        target, _, anchor = link.strip("<>").partition("#")
        if target.startswith("https://"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {link}"
        if anchor and "fl_lightning." not in anchor:  # those of docstrings are checked by the build
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
            }, link


@pytest.mark.parametrize("page", **of(WRITTEN))
def test_files_that_are_named_exist(page):
    names = {path.name for path in ROOT.rglob("*.*") if ".git" not in path.parts}
    for token in re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        if token.startswith(IN_REPOSITORY) and re.fullmatch(r"[\w./-]+", token):
            assert (ROOT / token).exists(), f"{page.name}: {token}"
        elif FILE.fullmatch(token) and token not in OF_A_RUN | OF_AN_EXPORT | OF_A_USER:
            within = (ROOT / token, ROOT / "fl_lightning" / token)
            found = any(path.exists() for path in within) or ("/" not in token and token in names)
            assert found, f"{page.name}: {token}"


@pytest.mark.parametrize("page", **of(WRITTEN))
def test_files_that_are_included_exist(page):
    for name in re.findall(r'^--8<-- "(.*)"$', page.read_text(), re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_the_navigation_has_every_page_once():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            page
            for part in (entry.values() if isinstance(entry, dict) else entry)
            for page in pages(part)
        ]

    listed = pages(MKDOCS["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(PAGES)
    assert {page for page in PAGES if not page.startswith("results/")} <= set(listed)


def test_every_method_has_a_page():
    types = {
        name
        for name, cls in vars(methods).items()
        if isinstance(cls, type) and issubclass(cls, Method) and cls is not Method
    }
    pages = {path.stem: path.read_text() for path in (DOCS / "methods").glob("*.md")}
    types -= {*REFERENCES}  # which have one page for all of them
    assert set(pages) - {"index", "controls", "references"} == {name.lower() for name in types}
    assert all(
        f"::: {getattr(methods, name).__module__}" in pages["references"] for name in REFERENCES
    )
    for name in types:
        text = pages[name.lower()]
        for part in ("What travels", "Settings", "Traps", "Neutral", "Source"):
            assert f"**{part}" in text, f"{name} without {part}"
        assert "**Weak" in text or "**When it helps" in text, f"{name} without what it is good for"
        assert f"::: fl_lightning.methods.{name.lower()}" in text
        (command,) = blocks(DOCS / "methods" / f"{name.lower()}.md", "bash")
        config = yaml.safe_load((ROOT / shlex.split(command)[-1]).read_text())
        assert config["model"]["class_path"] == name


def commands(page: Path) -> list[str]:
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [
        line.split("  #")[0].strip() for line in lines if line.startswith("python -m fl_lightning")
    ]


IN_README = set(commands(ROOT / "README.md"))
"""These are run by test_readme.py."""
IN_PAGES = sorted({command for page in WRITTEN for command in commands(page)} - IN_README)


@pytest.mark.parametrize("command", IN_PAGES)
def test_commands_are_understood(command, tmp_path, monkeypatch, capsys):
    """All settings that they name exist and have values that are allowed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    assert shlex.split(command)[3] == "fit", (
        "others belong into the README, too, where they are run"
    )
    assert main([*shlex.split(command)[3:], "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for flag, value in zip(shlex.split(command)[4::2], shlex.split(command)[5::2], strict=True):
        parts = flag.removeprefix("--").split(".")
        if parts[0] == "trainer" and len(parts) == 2 and not flag.endswith("+="):
            assert str(printed["trainer"][parts[1]]) in (value, value.capitalize())


def commands_in_comments(file: Path) -> list[list[str]]:
    """What follows the program's name; a note is two spaces behind a command."""
    text = re.sub(r" *\\\n# *", " ", file.read_text())
    found = re.findall(r"^#.*python -m fl_lightning (\S.*?)(?:  .*)?$", text, re.MULTILINE)
    return [shlex.split(command) for command in found]


IN_CONFIGS = {
    " ".join(words): words
    for file in sorted((ROOT / "configs").rglob("*.yaml"))
    for words in commands_in_comments(file)
    if COMMANDS[words[0]].function  # others are in tests that run each configuration
}


@pytest.mark.parametrize("words", IN_CONFIGS.values(), ids=IN_CONFIGS)
def test_commands_in_comments_of_configurations_are_understood(words):
    parser, _, _ = _parser_of_function(words[0], resolve_name(COMMANDS[words[0]].function))
    assert parser.parse_args(words[1:])


def test_the_tour_of_a_round():
    """At most twelve files; every function and class that a row names is in its file."""
    page = (DOCS / "how-a-round-works.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert 6 <= len(rows) <= 12
    for _, file, text in rows:
        tree = ast.parse((ROOT / "fl_lightning" / file).read_text())
        defined = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        named = set(re.findall(r"`(\w+)`", text))
        assert named <= defined, f"{file} has no {named - defined}"


@pytest.mark.parametrize(
    "diagram", sorted((DOCS / "assets").glob("*.svg")), ids=lambda path: path.name
)
def test_diagrams_name_what_exists_and_fetch_nothing(diagram):
    root = ElementTree.parse(diagram).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        assert not any(name.endswith("href") for name in element.attrib)
        if element.tag.endswith("}text"):
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height
            for name in re.findall(r"[\w/]+\.py\b|\b[a-z_]+/(?=,|$)", element.text or ""):
                places = (ROOT, ROOT / "fl_lightning", ROOT / "callbacks")
                assert any((place / name).exists() for place in places), name


def test_bytes_on_the_pages_of_methods():
    """By hand formula, for ``kd_default.yaml``'s network and each method's configuration."""
    network = SmallCNN(10)
    n, rest = layer_sizes(network), num_values(network) - sum(layer_sizes(network))
    everything, examples = fp32_bytes(sum(n) + rest), {"examples": (0, 4)}
    down = payload_bytes({"weights": (1, everything)})
    codes = {f"w{layer}": (1, packed_bytes(size, 5)) for layer, size in enumerate(n)}
    layers = {
        "bits": (1, packed_bytes(len(n), 4)),
        "scales": (1, fp32_bytes(len(n))),
        **codes,
        "rest": (1, fp32_bytes(rest)),
    }
    grids = {"grid": (1, fp32_bytes(len(n))), "pull": (1, fp32_bytes(len(n)))}
    books: dict[str, tuple[int, int]] = {}
    for layer, size in enumerate(n):
        centroids = min(256, math.ceil(size / 2) // 4)
        books[f"i{layer}"] = (1, packed_bytes(math.ceil(size / 2), math.ceil(math.log2(centroids))))
        books[f"c{layer}"] = (2, fp32_bytes(2 * centroids))
    norms = {"norms": (1, fp32_bytes(len(n))), "rest": (1, fp32_bytes(rest))}
    labels, adapters = (
        {"soft_labels": (2, fp32_bytes(400 * 10))},
        {"adapters": (3, fp32_bytes(4 * 8 * 9))},
    )
    expected = {
        "fedavg": (payload_bytes(examples | {"weights": (1, everything)}), down),
        "qfedavg": (
            payload_bytes(examples | {"codes": (1, packed_bytes(sum(n), 4))} | norms),
            down,
        ),
        "aqfl": (payload_bytes(examples | layers), down),
        "fedpq": (payload_bytes(examples | books | {"rest": (1, fp32_bytes(rest))}), down),
        "fedmpq": (
            payload_bytes(examples | layers | {"tops": (1, packed_bytes(len(n), 4))}),
            payload_bytes(
                {"bits": (1, packed_bytes(len(n), 4)), "weights": (1, everything), **grids}
            ),
        ),
        "fedkd": (payload_bytes(examples | labels), payload_bytes(labels)),
        "fedmosaic": (
            payload_bytes(adapters | {"sketch": (1, fp32_bytes(1020))}),
            payload_bytes(adapters),
        ),
    }
    for page, sizes in expected.items():
        text = " ".join((DOCS / "methods" / f"{page}.md").read_text().split())
        (found,) = re.findall(r"that is (\d+ \d{3})[\s\w]*bytes up.*?and (\d+ \d{3}) down", text)
        assert tuple(int(size.replace(" ", "")) for size in found) == sizes, page


@pytest.fixture
def forgotten():
    """Classes that a page defines are gone afterwards: the commands would offer them to the tests
    that follow."""
    yield
    gc.collect()
    kinds = [Method, Stressor, Meter, Partition, FigureMeter]
    assert [
        cls for kind in kinds for cls in kind.__subclasses__() if cls.__module__ == "page"
    ] == []


def code(page: str) -> dict:
    """What the Python blocks of a page define; those that are included from files are another kind
    of block."""
    names: dict = {"__name__": "page"}
    for block in blocks(DOCS / page, "python"):
        exec(block, names)
    return names


def test_streams_of_the_page_on_reproducibility():
    code("reproducibility.md")  # it holds an assertion itself


def test_the_page_on_energy(capsys):
    """What its comments say is printed: int8 removed at one token, and one choice of high, one of
    int8."""
    code("howto/energy.md")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "['layers.0.mlp.down_proj: int8 from 1 tokens']"
    assert "inf" in printed[1]
    assert printed[2:] == ["tensor([2])", "tensor([1])", "6.0 1 False"]


@pytest.mark.slow
@pytest.mark.essential
def test_the_page_on_text(tmp_path, monkeypatch, capsys):
    """Its code runs, and its configurations are understood."""
    code("howto/text_data.md")
    assert "\\n=' ->" in capsys.readouterr().out
    monkeypatch.syspath_prepend(ROOT)
    for block in blocks(DOCS / "howto" / "text_data.md", "yaml"):
        (tmp_path / "text.yaml").write_text(f"base: fedavg\n{block}")
        assert main(["fit", "--config", str(tmp_path / "text.yaml"), "--print_config"]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
        for name, value in yaml.safe_load(block)["data"]["init_args"].items():
            assert name in ("partition", "tokenizer") or printed[name] == value
        assert printed["partition"]["class_path"].endswith(".Natural")


def test_the_loss_term_of_the_page_is_fedprox(tmp_path, forgotten):
    ours, theirs = (
        on_images(cls(mu=0.5)) for cls in (methods.FedProx, code("howto/method.md")["Proximal"])
    )
    for method in (ours, theirs):
        run(method, images(), tmp_path, max_rounds=2)
    torch.testing.assert_close(theirs.server["weights"], ours.server["weights"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.essential
def test_the_method_of_the_page_that_remembers():
    """It passes the kit as it is; without ``measured`` the kit says that nothing reads what clients
    keep."""
    remembers = code("howto/method.md")["Remembers"]
    assert [
        o.detail for o in run_checks(method_under_test(remembers)) if o.verdict == "failed"
    ] == []
    silent = type("Silent", (remembers,), {"measured": frozenset()})
    (kept,) = run_checks(method_under_test(silent), [kept_state_is_used])
    assert "keeps 'history', but other values of it change nothing" in kept.detail


def test_the_stressor_of_the_page(tmp_path, forgotten):
    """Who is rejected follows from the stream that it names; nothing is refused at probability
    0."""
    stressor = code("howto/stressor.md")["DamagedUploads"]
    with pytest.raises(ValueError, match="lies in"):
        stressor(2)
    for probability in (0.0, 0.5):
        method = on_images(methods.FedAvg())
        trainer = run(
            method, images(), tmp_path, max_rounds=3, callbacks=[stressor(probability)], seed=5
        )
        with (trainer.run_dir / "ledger.csv").open() as file:
            fate = {
                (int(row["round"]), int(row["client"])): row["status"] == "rejected"
                for row in csv.DictReader(file)
            }
        assert fate == {
            at: fl_lightning.stream(5, "damage", *at).random() < probability for at in fate
        }
        assert any(fate.values()) == (probability > 0)


def test_the_stressor_of_the_page_that_replaces_assignments(tmp_path, forgotten):
    """Of all clients, those with fewer than the largest one's examples drop."""
    data = images()
    run(on_images(methods.FedAvg()), data, tmp_path, max_rounds=1)
    stressor = code("howto/stressor.md")["LargeClientsOnly"](int(max(data.sizes)))
    settings = {"max_rounds": 1, "participation": 1.0, "callbacks": [stressor]}
    trainer = run(on_images(methods.FedAvg()), data, tmp_path, **settings)
    (row,) = trainer.progress.history
    assert 0 < row["clients/trained"] == sum(data.sizes == max(data.sizes)) < len(data.sizes)


def test_the_figure_of_the_page(tmp_path, forgotten):
    meter = code("howto/figure.md")["UploadFigure"]()
    trainer = run(on_images(methods.FedAvg()), images(), tmp_path, max_rounds=3, callbacks=[meter])
    assert {path.suffix for path in (trainer.run_dir / "figures").glob("uploads.*")} == {
        ".png",
        ".pdf",
    }
    rows = rows_of(trainer.run_dir / "metrics.csv")
    sent = [float(row["comm/upload_bytes"]) / 1e6 for row in rows]
    assert [float(row["comm/upload_megabytes"]) for row in rows] == pytest.approx(sent)
    assert meter.state_dict() == {"megabytes": pytest.approx(sent)}
    again = type(meter)()
    again.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert again.state_dict() == meter.state_dict()


def test_the_parts_of_the_page(tmp_path, forgotten):
    """Everybody trains once before anybody trains twice; the average withstands one vector of many;
    the graph is symmetric."""
    parts = code("howto/parts.md")
    settings = {"participation": 0.5, "sampler": parts["LeastHeard"]()}
    whole = run(on_images(methods.FedAvg()), images(), tmp_path / "a", max_rounds=2, **settings)
    with (whole.run_dir / "ledger.csv").open() as file:
        trained = [int(row["client"]) for row in csv.DictReader(file)]
    assert sorted(trained) == sorted({*trained})
    noise = PrivateAggregation(ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0))
    others = {"deployed": True, "topology": Gossip("ring"), "masks": SecureSum(), "privacy": noise}
    method = methods.FedAvg(weigh_by="clients")
    for name, other in others.items():
        with pytest.raises(InputError, match="LeastHeard") as caught:
            check_run(Run(method, sampler=parts["LeastHeard"](), **{name: other}))
        assert "loss" not in str(caught.value), "it asks for none"
    average, start = parts["MeanOfMedians"](), torch.zeros(2)
    vectors = [torch.ones(2) * value for value in (1, 1, 1, 1, 1e6, 1)]
    assert average(vectors, [1 / 6] * 6, start).tolist() == [1.0, 1.0]
    assert Gossip(parts["Hub"]()).graph.checked(5, 0, 1)[3] == {
        0: Fraction(1, 5),
        3: Fraction(4, 5),
    }


def test_the_partition_of_the_page(forgotten):
    data = FederatedImages(
        num_clients=7, partition=code("howto/data.md")["Blocks"](), val_fraction=0.0
    )
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    held = np.concatenate([data.client(id).train for id in range(7)])
    assert held.tolist() == list(range(len(data.train_target)))


def test_the_study_of_the_page(tmp_path):
    """Its two blocks make one file, which the sweep would take."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    file = tmp_path / "configs" / "page.yaml"
    file.write_text("".join(blocks(DOCS / "studies.md", "yaml")))
    study = Study.read(file)
    # seeds; methods and levels of noise, and one without them
    assert len(study.cells()) == 3 * (3 * 2 + 1)
    assert len(study.criteria) == 5
    assert len(study.premises) == 2


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == fl_lightning.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest
    assert latest[1] == fl_lightning.__version__


def extension_of_griffe() -> ModuleType:
    pytest.importorskip("griffe", reason="pip install -e '.[docs]'")
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_constraints_are_left_out_of_signatures():
    """Whether they stand in the signature or under a name."""
    module = extension_of_griffe()
    import griffe

    loader = griffe.GriffeLoader(
        search_paths=[str(ROOT)], extensions=griffe.load_extensions(module.Docstrings())
    )
    package = loader.load("fl_lightning")
    for constructor, name in (
        ("methods.fedprox.FedProx", "mu"),
        ("data.image_base.ImageData", "val_fraction"),
    ):
        assert str(package[f"{constructor}.__init__"].parameters[name].annotation) == "float"


def test_docstrings_become_markdown():
    module = extension_of_griffe()
    assert module.as_markdown("See :func:`~a.b.c` and :class:`D`. Layout::\n\n    x") == (
        "See `c` and `D`. Layout:\n\n    x"
    )
    assert module.as_markdown("Add.\n\n>>> 1 + 1\n2\n\nEnd.") == (
        "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nEnd."
    )
