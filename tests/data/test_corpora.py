"""Text at hand: read and never run, in a fixed order, with a hash that says which text it is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

from fl_lightning.__main__ import main
from fl_lightning.data import CorpusData
from fl_lightning.data.text import corpora
from fl_lightning.data.text.corpora import Corpus, docstrings, packages, standard_library, topics
from fl_lightning.data.text.tokens import IGNORED
from fl_lightning.errors import InputError

FILES = {
    "toy_text/__init__.py": '"""The package."""\nraise SystemExit("it was imported")\n',
    "toy_text/b.py": 'class A:\n    """A class."""\n    def f(self):\n        """  Its\n        method. """\n    async def g(self):\n        "Another."\n',
    "toy_text/a/deep.py": 'def f():\n    """Deep ö\\d."""\n',
    "toy_text/tests/test_a.py": '"""A test."""\n',
    "toy_text/old.py": 'print "Python 2"\n',
    "toy_text/empty.py": "",
    "toy_text/a/notes.txt": '"""no code"""',
}
TEXTS = ["The package.", "Deep ö\\d.", "A class.", "Its\nmethod.", "Another."]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    packages.cache_clear()
    return tmp_path


def test_docstrings_are_read_in_the_order_of_paths_and_lines(site):
    assert list(docstrings(site / "toy_text")) == TEXTS
    assert list(docstrings(site / "toy_text" / "b.py")) == TEXTS[2:]


def test_a_package_is_not_imported(site):
    corpus = packages("toy_text")
    assert corpus.domains == {"toy_text": "\n\n".join(TEXTS).replace("ö", "")}
    assert "toy_text" not in sys.modules
    assert packages("toy_text").sha256 == corpus.sha256


def test_what_is_cut_is_counted(site):
    whole = packages("toy_text").text
    corpus = packages("toy_text", max_characters=20)
    assert corpus.text == whole[:20]
    assert corpus.left_out == {"domains too short": 0, "domains cut": 1}
    with pytest.raises(InputError, match="max_characters=0"):
        packages("toy_text", max_characters=0)


@pytest.mark.parametrize("name", ["no_such_package", "_thread", "a.b", "", "../toy"])
def test_a_package_without_source_is_refused(name):
    with pytest.raises(InputError, match="not installed as source files"):
        packages(name)


def test_packages_without_docstrings_are_refused(site):
    (site / "mute.py").write_text("pass")
    with pytest.raises(InputError, match="no docstring was found"):
        packages("mute")


def test_the_standard_library_by_package(monkeypatch, tmp_path):
    """On a small one: a domain is a top-level module or package, and other folders are none."""
    for name in (
        "json/__init__.py",
        "json/tool.py",
        "abc.py",
        "test/a.py",
        "site-packages/x/__init__.py",
        "lib-dynload/x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""About {name}."""')
    (tmp_path / "mute.py").write_text("")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = standard_library.__wrapped__()
    assert corpus.domains == {
        "abc": "About abc.py.",
        "json": "About json/__init__.py.\n\nAbout json/tool.py.",
    }
    assert corpus.left_out["domains too short"] == 1
    assert list(standard_library.__wrapped__(min_characters=20).domains) == ["json"]


def test_topics_are_prose_without_doubles():
    corpus = topics()
    assert 250_000 < len(corpus.text) < 700_000
    assert corpus.text.isascii()
    assert list(corpus.domains) == ["topics"]
    assert corpus.left_out["topics inside another"] > 0
    paragraphs = [part for part in corpus.text.split("\n\n") if len(part) > 400]
    assert len(paragraphs) > 100
    assert len(set(paragraphs)) > 0.95 * len(paragraphs)
    assert topics.__wrapped__().sha256 == corpus.sha256


def test_the_hash_covers_names_and_texts():
    corpora_that_differ = [
        Corpus("x", {"a": "bc"}),
        Corpus("x", {"ab": "c"}),
        Corpus("x", {"a": "b", "c": ""}),
        Corpus("x", {"a": "bd"}),
    ]
    assert len({corpus.sha256 for corpus in corpora_that_differ}) == 4
    assert Corpus("other", {"a": "bc"}).sha256 == corpora_that_differ[0].sha256
    summary = json.loads(json.dumps(corpora_that_differ[0].summary()))
    assert summary["characters"] == {"a": 2}
    assert summary["python"] == ".".join(map(str, sys.version_info[:3]))


def federation(**settings) -> CorpusData:
    found = CorpusData(**{"context": 16, "tokenizer": None, **settings})
    found.prepare_data()
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


def test_a_package_is_a_client_and_every_token_of_it_is_asked_for_once(site):
    (site / "other_text.py").write_text('"""' + "Another text. " * 20 + '"""')
    found = federation(packages=["toy_text", "other_text"], val_fraction=0.0)
    assert found.groups == ("other_text", "toy_text")
    assert found.num_clients == 2
    for id, name in enumerate(found.groups):
        held = found.train_target[found.client(id).train]
        asked = torch.cat([held, found.test_target[found.test_group == id]])
        text = bytes(asked[asked != IGNORED].tolist()).decode()
        assert text == packages("toy_text", "other_text").domains[name]
    inputs, target = next(found.train_batches(found.client(0), round=1, epochs=1))
    assert torch.equal(target != IGNORED, inputs["attention_mask"])
    assert set(found.test_kinds) == set(found.groups)
    summary = found.partition_summary()["text"]
    assert summary["sha256"] == packages("toy_text", "other_text").sha256
    only = federation(packages=["toy_text", "other_text"], num_clients=1)
    assert only.groups == ("other_text",)  # the one with more text


def test_what_is_wrong_with_a_federation_of_packages_is_one_line(site):
    for settings, said in (
        ({"packages": ["no_such_package"]}, "it is not installed"),
        ({"packages": []}, "name installed packages"),
        ({"packages": ["toy_text"], "num_clients": 2}, "the corpus has 1 domains"),
        ({"packages": ["toy_text"], "context": 500}, "no text for training"),
        ({"packages": ["toy_text"], "primary": "exact_match"}, "where no answers are generated"),
        ({"corpus": "wikipedia"}, "^corpus wikipedia; one of packages"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            federation(**settings)
        assert "\n" not in str(caught.value)


def test_the_command_of_the_page_trains_on_packages(site, monkeypatch):
    (site / "other_text.py").write_text('"""' + "Another text. " * 90 + '"""')
    monkeypatch.chdir(site)
    page = (ROOT / "docs" / "howto" / "text_data.md").read_text()
    (command,) = re.findall(
        r"(--config configs/lora_default.yaml --data CorpusData .*?)\n```", page, re.DOTALL
    )
    own = [
        "--data.packages",
        '["toy_text", "other_text"]',
        "--data.context",
        "16",
        "--trainer.max_rounds",
        "1",
    ]
    quick = [
        "--trainer.max_local_steps",
        "1",
        "--trainer.logger",
        "false",
        "--trainer.callbacks",
        "[]",
    ]
    words = command.replace("\\\n", " ").replace("configs/", f"{ROOT}/configs/").split()
    assert main(["fit", *words, *own, *quick]) == 0
    (run,) = Path("runs").glob("*/*")
    assert json.loads((run / "partition.json").read_text())["groups"] == ["other_text", "toy_text"]
