"""Text classification: tokens and masks of labelled texts, and classifiers of transformers that
read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from page_commands import PAGE, documented
from tiny_language import adam
from toy import run

from fl_lightning.__main__ import main
from fl_lightning.data import IID, LabelledText, Natural
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg, FedMPQKD, FedProx, Method
from fl_lightning.models import build_network
from fl_lightning.models.language.hf_classifier import TransformersClassifier

GOOD, BAD = ["good", "great", "fine"], ["bad", "poor", "dull"]
WORDS = ["the", "film", "was", "very", "a", *GOOD, *BAD]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = len(SPECIAL) + len(WORDS)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    for name in ("datasets", "tokenizers", "transformers", "peft"):
        pytest.importorskip(name, reason="pip install -e '.[language]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def reviews(n: int) -> dict[str, list]:
    """Reviews of different lengths, whose sixth word or so tells what they say; four critics."""
    texts = []
    for i in range(n):
        word = (GOOD if i % 2 else BAD)[i // 2 % 3]
        texts.append(f"the film was {'very ' * (i % 5)}{word}{' a film' * (i % 3)}")
    return {
        "text": texts,
        "label": [i % 2 for i in range(n)],
        "kind": [("bad", "good")[i % 2] for i in range(n)],
        "critic": [f"critic {i // 2 % 4}" for i in range(n)],
    }


def make(folder: Path, dropout: float = 0.0) -> Path:
    """Write the reviews, a BERT of two small layers, and its tokeniser."""
    import datasets
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    numbers = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    fast.save_pretrained(folder / "bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        initializer_range=0.2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder / "bert")
    splits = {
        "train": datasets.Dataset.from_dict(reviews(160)),
        "test": datasets.Dataset.from_dict(reviews(30)),
    }
    datasets.DatasetDict(splits).save_to_disk(folder / "reviews")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    return make(tmp_path_factory.mktemp("text"))


def text_of(made: Path, **settings) -> LabelledText:
    common = {
        "tokenizer": f"hf:{made / 'bert'}",
        "test": "test",
        "max_length": 16,
        "num_clients": 4,
    }
    return LabelledText(str(made / "reviews"), **{**common, "partition": IID(), **settings})


def ready(made: Path, **settings) -> LabelledText:
    data = text_of(made, **settings)
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def test_a_batch_has_the_tokens_and_the_mask_of_each_text(made):
    data = ready(made, client="critic", num_clients=0, partition=Natural(), target="kind")
    assert data.names.classes == ["bad", "good"]
    assert data.names.clients == [f"critic {i}" for i in range(4)]
    assert (data.num_classes, data.example_shape) == (2, (16,))
    texts, index = reviews(160)["text"], torch.tensor([4, 0, 7])
    numbers = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    expected = [[2, *(numbers[word] for word in texts[i].split()), 3] for i in index.tolist()]
    inputs = data.inputs("train", index)
    assert (
        inputs["input_ids"].shape == inputs["attention_mask"].shape == (3, max(map(len, expected)))
    )
    for ids, mask, right in zip(
        inputs["input_ids"], inputs["attention_mask"], expected, strict=True
    ):
        assert ids[mask].tolist() == right
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
    assert data.train_target[index].tolist() == [0, 0, 1]
    assert "sha256" in data.partition_summary()["examples"]
    cut = ready(made, max_length=5)
    assert cut.inputs("train", index)["input_ids"][:, [0, -1]].tolist() == [[2, 3]] * 3


def networks() -> dict:
    """A small model of each kind: encoders, one with relative positions, and causal ones."""
    import transformers

    common = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 24, "initializer_range": 0.5}  # fmt: skip
    relative = {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]}
    return {
        "bert": transformers.BertConfig(**common),
        "roberta": transformers.RobertaConfig(**common),
        "modernbert": transformers.ModernBertConfig(**{**common, "initializer_range": 0.2}, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3),
        "deberta": transformers.DebertaV2Config(**common, **relative),
        "distilbert": transformers.DistilBertConfig(vocab_size=VOCABULARY, dim=16, hidden_dim=32, n_layers=2, n_heads=2, initializer_range=0.5),
        "llama": transformers.LlamaConfig(**common),
        "gpt2": transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=24, initializer_range=0.5, bos_token_id=0, eos_token_id=0),
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "modernbert", "deberta", "distilbert", "llama", "gpt2"]
)
def test_padding_does_not_change_the_logits(made, tmp_path, kind, rank, capfd):
    """The texts of a batch get the logits that each gets alone, without any padding, whatever
    stands there."""
    import transformers

    torch.manual_seed(0)
    transformers.AutoModel.from_config(networks()[kind]).save_pretrained(tmp_path / kind)
    torch.manual_seed(1)
    capfd.readouterr()
    network = TransformersClassifier(3, str(tmp_path / kind), rank=rank).eval()
    assert capfd.readouterr() == ("", "")
    inputs = ready(made).inputs("train", torch.arange(12))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert mask.sum(1).unique().numel() > 3
    logits = network(inputs)
    assert logits.shape == (12, 3)
    assert logits.std(0).min() > 1e-3
    theirs = network.model(
        input_ids=ids.where(mask, network.pad), attention_mask=mask.long()
    ).logits
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-5)
    for row in range(12):
        alone = ids[row : row + 1, mask[row]]
        expected = network(
            {"input_ids": alone, "attention_mask": torch.ones_like(alone, dtype=torch.bool)}
        )
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-4, atol=1e-5)
    other = {"input_ids": ids.where(mask, 7), "attention_mask": mask}
    torch.testing.assert_close(network(other), logits, rtol=0, atol=0)
    torch.manual_seed(1)
    again = TransformersClassifier(3, str(tmp_path / kind), rank=rank).eval()
    assert torch.equal(again(inputs), logits)  # the head is drawn from torch's generator
    logits.logsumexp(-1).mean().backward()
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    with_gradient = {name for name, weight in network.named_parameters() if weight.grad is not None}
    assert with_gradient <= trained
    assert any("classifier" in name or "score" in name for name in trained)
    if rank:
        assert {name for name in trained if "lora_" in name}
        heads = ("classifier", "score", "pooler", "head")
        assert all("lora_" in name or any(head in name for head in heads) for name in trained)


@pytest.mark.parametrize("adapter", ["ffa", "pissa", "svft", "spectral"])
def test_the_head_is_trained_beside_every_kind_of_adapter(made, adapter):
    network = TransformersClassifier(2, str(made / "bert"), rank=2, adapter=adapter)
    trained = [name for name, weight in network.named_parameters() if weight.requires_grad]
    assert sum("classifier" in name for name in trained) == 2
    assert len(trained) > 2
    assert not any("embeddings" in name or "LayerNorm" in name for name in trained)


def test_the_name_of_a_network_goes_by_the_data(made):
    data = ready(made)
    network = build_network(
        f"hf:{made / 'bert'}", 2, (16,), task=data.task, inputs=data.example_inputs()
    )
    assert isinstance(network, TransformersClassifier)
    with pytest.raises(InputError, match=r"a language model reads examples of tokens|causal"):
        build_network(f"hf:{made / 'bert'}", 2, (3, 8, 8))
    for network in ("small_cnn", "mlp"):
        with pytest.raises(
            InputError, match=r"it does not read tokens; write --model\.network hf:NAME_OR_FOLDER"
        ):
            build_network(network, 2, (16,), task=data.task, inputs=data.example_inputs())
    longer = ready(made, max_length=40)
    with pytest.raises(
        InputError, match=r"sequences of 40 tokens; .* 24 positions; write --data\.max_length 24"
    ):
        build_network(
            f"hf:{made / 'bert'}", 2, (40,), task=data.task, inputs=longer.example_inputs()
        )


def method_of(made: Path, cls: type[Method] = FedAvg, rank: int = 0) -> Method:
    def network(num_classes: int) -> TransformersClassifier:
        return TransformersClassifier(num_classes, str(made / "bert"), rank=rank)

    return cls(network=network, optimizer=adam())


@pytest.mark.parametrize(("cls", "rank"), [(FedAvg, 0), (FedProx, 4), (FedMPQKD, 0)])
def test_it_learns_what_a_review_says(made, tmp_path, cls, rank):
    run(method_of(made, cls, rank), text_of(made), tmp_path, max_rounds=8, workers=1)
    (found,) = tmp_path.rglob("metadata.json")
    assert json.loads(found.read_text())["final/accuracy"] > 0.75  # guessing is 0.5


def test_engines_agree(made, tmp_path):
    """Without dropout the clients of a batch of clients get the weights that each gets by
    itself."""
    from torch.nn.utils import parameters_to_vector

    found = {}
    for engine in ("sequential", "batched"):
        method = method_of(made, rank=4)
        run(method, text_of(made), tmp_path / engine, max_rounds=2, workers=1, engine=engine)
        found[engine] = parameters_to_vector(method.deploy().parameters())
    torch.testing.assert_close(found["sequential"], found["batched"], rtol=1e-3, atol=1e-4)


def test_mistakes_are_one_line(made, tmp_path):
    import datasets

    rows = reviews(20)
    kinds = {
        "numbers": {**rows, "text": list(range(20))},
        "gap": {**rows, "text": [*rows["text"][:19], None]},
        "shares": {**rows, "label": [i / 20 for i in range(20)]},
        "lists": {**rows, "label": [[1, 0]] * 20},
    }
    for name, columns in kinds.items():
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / name)
    for name, settings, words in (
        ("numbers", {}, "item 0, column text; it has texts, and this is a int; write --data.text"),
        ("numbers", {"text": "texts"}, "there is no column texts; write text"),
        ("gap", {}, "item 19, column text; it has texts, and this is missing; leave the row out"),
        ("shares", {}, "item 1; a class is a whole number or a text, and this is a float"),
        ("lists", {}, "item 0; a class is a whole number or a text, and this is a list"),
        ("gap", {"target": "labels"}, "there is no column labels; write label"),
        ("gap", {"tokenizer": str(tmp_path / "none")}, "tokenizer .*none'; it cannot be read"),
        ("gap", {"max_length": 1}, "max_length=1; a text has 2 tokens or more"),
    ):
        with pytest.raises(InputError, match=words) as error:
            of_folder(tmp_path / name, made, **settings)
        assert "\n" not in str(error.value)


def of_folder(path: Path, made: Path, **settings) -> None:
    common = {"tokenizer": str(made / "bert"), "num_clients": 2, "partition": IID()}
    data = LabelledText(str(path), **{**common, **settings})
    data.prepare_data()
    data.setup()


@pytest.mark.slow
@pytest.mark.essential
def test_the_documented_command_trains_adapters_of_each_critic(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bert", "reviews"):
        (tmp_path / name).symlink_to(made / name)
    first, second = documented("LabelledText", PAGE.with_name("text_data.md"))
    for command in (first, second):
        assert main([*command, "--trainer.max_rounds", "12", "--trainer.logger", "false"]) == 0
        (found,) = (tmp_path / "runs").rglob("metadata.json")
        assert json.loads(found.read_text())["final/accuracy"] > 0.75
        (partition,) = (tmp_path / "runs").rglob("partition.json")
        assert json.loads(partition.read_text())["num_clients"] == 4
        (tmp_path / "runs").rename(tmp_path / f"runs of {command[2]}")
