"""Data sets with the fields of Natural Instructions: categories by keyword, clients by category,
and the overlay on a model and a data set by name."""

from __future__ import annotations

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from budgeted import costs
from laddered import branch_costs
from places import ROOT

from fl_lightning.__main__ import main
from fl_lightning.data import NaturalInstructions
from fl_lightning.data.text.tokens import IGNORED, ByteTokenizer
from fl_lightning.energy import to_json
from fl_lightning.errors import InputError
from fl_lightning.study.plan.study import Study

DEFINITIONS = {
    "translation": "Translate the word from English to Hausa.",
    "reasoning": "Calculate the sum of the two numbers.",
    "code": "Given a PYTHON call, write its value.",
    "rewriting": "Paraphrase the sentence.",
    None: "Name the sentiment of the review.",
}
COUNT = 40
"""Records of each definition."""


def rows(first: int = 0, count: int = COUNT) -> list[dict[str, str]]:
    """Records as the Hub has them, with the id that nothing reads."""
    return [
        {
            "task_name": f"task{task:03}",
            "id": f"task{task:03}-{number}",
            "definition": definition,
            "inputs": f"{number} {task}",
            "targets": f"{task}-{number}",
        }
        for task, definition in enumerate(DEFINITIONS.values())
        for number in range(first, first + count)
    ]


def data(path: object, **settings) -> NaturalInstructions:
    settings = {"context": 72, "generate": False, **settings}
    found = NaturalInstructions(str(path), **settings)
    found.prepare_data()
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, rows())))
    return path


@pytest.fixture
def saved(tmp_path) -> Path:
    """What ``save_to_disk`` writes; ten of the test records of each task are training records
    too."""
    datasets = pytest.importorskip("datasets")
    splits = {"train": rows(), "test": rows(COUNT - 10, 20)}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(some) for name, some in splits.items()}
    ).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def answers(target: torch.Tensor) -> list[str]:
    return [ByteTokenizer().decode(id for id in row if id != IGNORED) for row in target.tolist()]


def test_a_client_holds_records_of_its_category_and_records_of_none_are_left_out(lines):
    found = data(lines, num_clients=6)
    assert found.groups == ("translation", "reasoning", "code", "rewriting")
    sizes = []
    for id in range(6):
        client = found.client(id)
        held = np.concatenate([client.train, client.val])
        assert {answer[0] for answer in answers(found.train_target[held])} == {str(id % 4)}
        sizes.append(len(held))
    of_category = np.bincount(found.train_group.numpy())
    assert abs(sizes[0] - sizes[4]) <= 1
    assert sizes[0] + sizes[4] == of_category[0]
    assert sizes[2] == of_category[2]
    text = found.partition_summary()["text"]
    assert text["records left out"] == {"of no category": COUNT}
    assert text["categories"] == dict(zip(found.groups, of_category.tolist(), strict=True))


def test_every_record_of_a_category_is_in_one_split_and_equal_prompts_are_not_parted(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(map(json.dumps, rows() + rows())))
    found = data(path)
    train, test = answers(found.train_target), answers(found.test_target)
    assert len(train) + len(test) == 2 * 4 * COUNT
    assert not set(train) & set(test)
    validation = {int(i) for id in range(8) for i in found.client(id).val}
    trained = {answer for number, answer in enumerate(train) if number not in validation}
    assert validation
    assert not trained & {train[number] for number in validation}


def test_a_folder_of_the_library_and_a_file_of_lines_are_the_same_federation(saved, lines):
    one, two = (data(path, val_fraction=0.2) for path in (saved, lines))
    assert one.partition_hash == two.partition_hash
    assert torch.equal(one.train_target, two.train_target)
    with_test = data(saved, test="test")
    assert len(with_test.test_target) == 4 * 10
    left_out = with_test.partition_summary()["text"]["records left out"]
    assert left_out["test records among the training records"] == 4 * 10


def test_categories_of_ones_own_and_a_bound_on_each(lines):
    found = data(
        lines, categories={"mood": ["sentiment"], "sums": ["SUM"]}, max_examples=15, num_clients=2
    )
    assert found.groups == ("mood", "sums")
    assert len(found.train_target) + len(found.test_target) == 30
    first = data(lines, categories={"all": ["the", "given"], "sums": ["sum"]}, num_clients=1)
    assert first.groups == ("all",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"categories": {"law": ["court"]}, "num_clients": 1},
            r"category law; no training record has a definition",
        ),
        ({"categories": {"law": []}}, r"each has a keyword or more"),
        ({"max_examples": 0}, r"^max_examples=0"),
        ({"test": "test"}, r"has a single split; leave test out$"),
        ({"test_fraction": 1.5}, r"^test_fraction=1.5"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(lines, settings, said):
    with pytest.raises(InputError, match=said) as caught:
        data(lines, **settings)
    assert "\n" not in str(caught.value)


def test_fields_may_have_columns_of_other_names_and_one_text_for_all(tmp_path, lines):
    """As CNN/DailyMail has: articles and their highlights, and no instruction."""
    some = [
        {"article": f"{number} happened", "highlights": f"on {number}", "id": "x"}
        for number in range(30)
    ]
    path = tmp_path / "news.jsonl"
    path.write_text("\n".join(map(json.dumps, some)))
    named = {
        "columns": {"inputs": "article", "targets": "highlights"},
        "categories": {"news": ["summar"]},
    }
    constants = {"task_name": "news", "definition": "Summarise."}
    found = data(path, constants=constants, num_clients=2, **named)
    assert set(answers(found.train_target)) | set(answers(found.test_target)) == {
        one["highlights"] for one in some
    }
    assert found.groups == ("news",)
    assert [len(found.client(id).train) > 5 for id in range(2)] == [True, True]
    for settings, said in (
        ({"columns": {"answer": "x"}}, r"^columns=\{'answer': 'x'\}"),
        (
            {"columns": {"inputs": "x"}, "constants": {"inputs": "y"}},
            "a field one column or one text",
        ),
        ({"columns": {"inputs": "nowhere"}}, "line 1; the key nowhere is missing"),
    ):
        with pytest.raises(InputError, match=said):
            data(lines, **settings)


def test_a_missing_column_and_a_missing_value_are_named(saved, tmp_path):
    import datasets

    datasets.Dataset.from_dict({"task_name": ["a"], "input": ["b"]}).save_to_disk(
        tmp_path / "other"
    )
    with pytest.raises(InputError, match="there is no column definition"):
        data(tmp_path / "other")
    datasets.Dataset.from_list([row | {"targets": ""} for row in rows(0, 1)]).save_to_disk(
        tmp_path / "empty"
    )
    with pytest.raises(InputError, match=r"empty, train, row 0; targets is empty"):
        data(tmp_path / "empty")


@pytest.fixture
def model(tmp_path) -> Path:
    """A causal language model of transformers with a tokeniser of its own, as ``save_pretrained``
    writes them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *sorted(alphabet)])}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def arguments(model: Path, saved: Path, config: str = "lora_default") -> list[str]:
    configs = [
        ROOT / "configs" / f"{config}.yaml",
        ROOT / "configs" / "overlays" / "natural_instructions.yaml",
    ]
    flags = {
        "model.network.name": model,
        "data.tokenizer.name": model,
        "data.path": saved,
        "data.context": 80,
        "data.batch_tokens": 320,
        "trainer.max_rounds": 1,
        "trainer.max_local_steps": 2,
        "trainer.callbacks": [],
        "trainer.logger": "false",
        "trainer.workers": 1,
    }
    return [
        "fit",
        *(part for config in configs for part in ("--config", str(config))),
        *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
    ]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_the_overlay_trains_a_model_and_a_data_set_by_name(model, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments(model, saved), "--model.network.load_in_4bit", "false"]) == 0
    (run,) = Path("runs").glob("*/*")
    assert (
        run.parent.name,
        json.loads((run / "metadata.json").read_text())["task"]["primary"],
    ) == (
        "natural_instructions",
        "perplexity",
    )
    partition = json.loads((run / "partition.json").read_text())
    assert partition["groups"] == ["translation", "reasoning", "code", "rewriting"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["init_args"]["batch_tokens"] == 320
    header, row = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[:2])
    metrics = dict(zip(header, row, strict=True))
    assert {"test/exact_match", "test/rouge_l", "test/perplexity"} <= set(metrics)
    assert int(metrics["comm/upload_bytes"]) > 0
    assert main(["test", "--ckpt_path", str(run), "--probes", "corruptions"]) == 0
    found = json.loads((run / "test.json").read_text())["metrics"]
    assert {"typos/perplexity", "typos/swap/exact_match", "typos/keyboard/rouge_l"} <= set(found)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_experts_on_the_overlay(model, saved, tmp_path, monkeypatch):
    """The command of Fed-VEMoE's page, with a small model and a small data set."""
    monkeypatch.chdir(tmp_path)
    experts = {"top_m": 2, "k_init": 3, "k_max": 12, "network.load_in_4bit": "false"}
    flags = [part for name, value in experts.items() for part in (f"--model.{name}", str(value))]
    assert main([*arguments(model, saved, "vemoe_default"), *flags]) == 0
    (run,) = Path("runs").glob("*/*")
    header, row = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[:2])
    metrics = dict(zip(header, row, strict=True))
    assert float(metrics["experts/active"]) == 3
    assert float(metrics["test/perplexity"]) > 1
    used = [float(metrics[f"expert/{slot}/mass"]) for slot in range(1, 13)]
    assert sum(used) == pytest.approx(1)


@pytest.mark.skipif(
    torch.cuda.is_available() and find_spec("bitsandbytes") is not None, reason="4 bits work here"
)
def test_four_bits_are_refused_where_they_do_not_work_and_nothing_is_written(
    model, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments(model, saved)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "4-bit weights need bitsandbytes on a CUDA device; write load_in_4bit: false" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "name", ["records.jsonl", "./records", "folder/of/files", "{tmp}/nothing", "{here}/flowers"]
)
def test_a_path_that_is_not_there_is_no_name_of_the_hub(name, tmp_path, monkeypatch):
    """Nothing asks for it, whether or not the library is installed; ``owner/name`` and ``name`` may
    be on the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="there is no such file or folder"):
        data(name.format(tmp=tmp_path, here="mine"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    for there in ("Muennighoff/natural-instructions", "squad"):
        with pytest.raises(InputError, match="needs the library datasets"):
            data(there)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("label", ["HEST", "Ladder", "All on"])
def test_the_real_study_of_budgets_on_a_small_model_and_data_set(
    label, model, tmp_path, monkeypatch
):
    """Every setting of configs/hest.yaml, or of its former method on its overlay, but names, paths
    and sizes."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    news = [
        {"article": f"{number} came", "highlights": f"{number}!", "id": "x"} for number in range(40)
    ]
    splits = {"train": news[:30], "test": news[30:]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(each) for name, each in splits.items()}
    ).save_to_disk(tmp_path / "news")
    flags = {
        "model.network.name": model,
        "data.tokenizer.name": model,
        "data.path": tmp_path / "news",
        "data.name": "null",
        "model.costs": "costs.json",
        "data.context": 60,
        "data.num_clients": 2,
        "trainer.max_rounds": 1,
        "trainer.max_local_steps": 2,
        "trainer.callbacks": [],
        "trainer.logger": "false",
        "trainer.workers": 1,
    }
    if label == "HEST":
        parts = (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
        table = costs("model", groups=[f"model.model.layers.0.{part}" for part in parts])
        files = ("hest_tokens.yaml", "overlays/cnn_dailymail.yaml")
        args = [part for file in files for part in ("--config", str(ROOT / "configs" / file))]
    else:
        table, args = branch_costs(1), cell_of(label)
        flags |= {"trainer.max_rounds": 4, "data.val_fraction": 0.2}
        del flags["data.tokenizer.name"]
        flags |= {
            "data.tokenizer": f"hf:{model}",
            "model.all_on_rounds": 1,
            "model.subset_rounds": 2,
            "model.levels": 1,
        }
    (tmp_path / "costs.json").write_text(to_json(table))
    assert main(["fit", *args, *(f"--{name}={value}" for name, value in flags.items())]) == 0
    (run,) = Path("runs").glob("*/*")
    metrics = list(csv.DictReader((run / "metrics.csv").open()))[-1]
    assert float(metrics["energy/joules"]) > 0
    if label != "All on":
        assert float(metrics["energy/spent"]) <= float(metrics["energy/granted"])
        assert float(metrics["energy/over_budget"]) == float(metrics["energy/refused"]) == 0


def cell_of(label: str) -> tuple[str, ...]:
    """The arguments of a method's first cell in the study of the real thing, whose claims can be
    read."""
    study = Study.read(ROOT / "configs" / "hest.yaml")
    assert len(study.parsed_criteria()) == len(study.criteria)
    assert len(study.parsed_premises()) == len(study.premises)
    return next(cell for cell in study.cells() if cell.method == label).args
