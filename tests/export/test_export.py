"""Exported models, loaded again by the libraries that they are for: their outputs are those of the
run."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported import loaded, of_peft
from outcomes import rows_of
from page_commands import documented
from places import DOCS
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_language import adam, records
from torch import Tensor, nn

import fl_lightning
from fl_lightning.__main__ import main
from fl_lightning.conformance.toy import images, run
from fl_lightning.data import IID, TokenData
from fl_lightning.data.text.tokens import HuggingFaceTokenizer
from fl_lightning.errors import InputError
from fl_lightning.export import formats
from fl_lightning.export.language import write_transformers
from fl_lightning.export.trained_model import TrainedModel
from fl_lightning.methods import (
    HEST,
    FedAvg,
    FedMosaic,
    FedMPQ,
    FedVEMoE,
    FineTune,
    LocalOnly,
)
from fl_lightning.models import LlamaTiny
from fl_lightning.models.language import hf
from fl_lightning.trainer import FederatedTrainer

OF_TENSORS = {"README.md", "export.json", "load.py", "model.safetensors"}
LOADED_ALONE = """
import runpy, sys, torch
from safetensors.torch import load_file, save_file
names = runpy.run_path(sys.argv[1] + "/load.py")
found = names["network"](load_file(sys.argv[2])["inputs"])
save_file({"outputs": getattr(found, "logits", found).detach().contiguous()}, sys.argv[3])
print(*sys.modules)
"""


def answers(trainer: FederatedTrainer, client: int | None = None) -> tuple[Any, Tensor]:
    """Inputs, and what the network of the run's end makes of them."""
    data, states = trainer.data, trainer.progress.done.states
    inputs = data.inputs("test", torch.arange(3))
    who = None if client is None else data.client(client, states.get(client))
    network = trainer.method.deploy(who).eval()
    with torch.no_grad():
        return inputs, network(inputs)


def outputs_of_a_new_process(
    folder: Path, inputs: Tensor, tmp_path: Path
) -> tuple[Tensor, set[str]]:
    """What ``load.py`` gives in a process of its own, and the modules that it has imported."""
    given, found = tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors"
    save_file({"inputs": inputs}, given)
    done = subprocess.run(
        [sys.executable, "-c", LOADED_ALONE, folder, given, found],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return load_file(found)["outputs"], set(done.stdout.split())


@pytest.fixture(scope="module")
def of_timm(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    folder = tmp_path_factory.mktemp("timm")
    return run(FedAvg(network="mobilenetv3_small_050"), images(), folder, max_rounds=1, workers=1)


@pytest.mark.slow
@pytest.mark.essential
def test_safetensors_are_loaded_without_the_package(of_timm: FederatedTrainer, tmp_path: Path):
    """timm and safetensors alone rebuild the global model, statistics of BatchNorm included."""
    inputs, expected = answers(of_timm)
    folder = fl_lightning.export_model(of_timm, tmp_path / "home")
    assert {path.name for path in folder.iterdir()} == OF_TENSORS
    found, modules = outputs_of_a_new_process(folder, inputs, tmp_path)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert "timm" in modules
    assert not any(name.startswith(("fl_lightning", "lightning")) for name in modules)
    about = json.loads((folder / "export.json").read_text())
    assert (about["method"], about["round"], about["client"]) == ("FedAvg", 1, None)
    assert about["pixels"]["mean"] == pytest.approx(of_timm.data.train_mean)
    card = (folder / "README.md").read_text()
    assert (folder / "load.py").read_text() in card
    assert str(list(of_timm.data.train_mean)) in card


class Two(nn.Module):
    """A network whose size is an argument."""

    def __init__(self, num_classes: int, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(768, width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("network", "call"),
    [
        (partial(Two, width=5), "Two(width=5, num_classes=4)"),
        ("small_cnn", "SmallCNN(num_classes=4, example_shape=(3, 16, 16))"),
        ("mlp", "MLP(num_classes=4, example_shape=(3, 16, 16))"),
        ("torchvision.models.shufflenet_v2_x0_5", "shufflenet_v2_x0_5(num_classes=4)"),
        ("timm.models.resnet.resnet10t", "timm.models.resnet.resnet10t(num_classes=4)"),
        (lambda num_classes: Two(num_classes), None),
    ],
    ids=["user", "own", "shape", "torchvision", "timm", "lambda"],
)
def test_the_loader_makes_the_network_again(network: Any, call: str | None, tmp_path: Path):
    trainer = run(FedAvg(network=network), images(), tmp_path, max_rounds=1, workers=1)
    inputs, expected = answers(trainer)
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    names = loaded(folder)
    assert (call or "def load(network)") in (folder / "load.py").read_text()
    made = names["network"] if call else names["load"](Two(4))
    if call is None:
        with refused("export of", "export_model(trainer, FOLDER)"):
            fl_lightning.export_model(trainer.run_dir, tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(made(inputs), expected, rtol=1e-4, atol=1e-4)
    assert not made.training


class OfFolder(Two):
    """A network whose width stands in a file of a folder."""

    def __init__(self, num_classes: int, folder: str, kind: str) -> None:
        assert kind == "plain"
        super().__init__(num_classes, int((Path(folder) / "width").read_text()))


@pytest.mark.parametrize("called", ["relative", "plain"])
def test_the_loader_finds_a_folder_from_anywhere(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A setting stays as it is, also where a folder happens to have its name."""
    monkeypatch.chdir(tmp_path)
    for name in (called, "elsewhere"):
        Path(name).mkdir()
    Path(called, "width").write_text("5")
    folder = called if called == "relative" else str(Path(called).absolute())
    method = FedAvg(network=partial(OfFolder, folder=folder, kind="plain"))
    trainer = run(method, images(), tmp_path / "runs", max_rounds=1, workers=1)
    inputs, expected = answers(trainer)
    fl_lightning.export_model(trainer, "home")
    monkeypatch.chdir("elsewhere")
    with torch.no_grad():
        found = loaded(tmp_path / "home")["network"](inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Drawn(Two):
    """It computes with numbers that are drawn anew in each process and are no part of its
    ``state_dict``."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("drawn", torch.randn(num_classes), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.drawn + super().forward(x)


def test_the_loader_is_tried_out(tmp_path: Path):
    """Where the class makes another network than that of the run, load.py does not say that it is
    the same."""
    trainer = run(FedAvg(network=Drawn), images(), tmp_path, max_rounds=1, workers=1)
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    assert "network" not in loaded(folder)
    assert loaded(folder)["load"](trainer.method.network) is trainer.method.network


def test_a_fit_that_is_refused_leaves_the_model_of_the_one_before(tmp_path):
    trainer = run(FedAvg(network=Two), images(), tmp_path, max_rounds=1, workers=1)
    inputs, expected = answers(trainer)
    with pytest.raises(InputError, match="tiny_cnn"):
        trainer.fit(FedAvg(network="tiny_cnn"), images(), seed=1)
    made = loaded(fl_lightning.export_model(trainer, tmp_path / "home"))["network"]
    with torch.no_grad():
        torch.testing.assert_close(made(inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    """Client 5 has no examples, and not all of the others were sampled."""
    folder = tmp_path_factory.mktemp("local")
    return run(LocalOnly(network=Two), images(), folder, max_rounds=1, participation=0.4, workers=1)


def test_a_client_of_a_personalised_method(local: FederatedTrainer, tmp_path: Path):
    trained = sorted(local.progress.done.states)
    assert 1 < len(trained) < 5
    for id in trained[:2]:
        inputs, expected = answers(local, id)
        folder = fl_lightning.export_model(local, tmp_path / str(id), client=id)
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(folder)["network"](inputs), expected, rtol=0, atol=1e-6
            )
        assert json.loads((folder / "export.json").read_text())["client"] == id
    found = [(tmp_path / str(id) / "model.safetensors").read_bytes() for id in trained[:2]]
    assert found[0] != found[1]


def test_a_clients_mixture_of_experts_goes_along(tmp_path: Path):
    """The loader gives the network its seats, and them the client's shares, which no state dict
    has."""
    settings = {"k_init": 3, "top_m": 3, "k_max": 4, "birth": "never", "tau": 1.0}
    method = FedVEMoE(network=LlamaTiny, optimizer=adam(), **settings)
    data = records(generate=False)
    trainer = run(method, data, tmp_path / "runs", max_rounds=2, max_local_steps=2, workers=1)
    folder = fl_lightning.export_model(trainer, tmp_path / "home", client=1)
    inputs, _ = data.inputs("test", torch.arange(3)), data.test_target
    client = data.client(1, trainer.progress.done.states[1])
    network = trainer.method.deploy(client).eval()
    shares = network.expert_gate.log_shares
    assert len(shares) == 2
    assert shares[0] != shares[1]
    with torch.no_grad():
        expected = network(inputs["input_ids"])
        found = loaded(folder)["network"](inputs["input_ids"])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_one_model_for_all_of_a_personalised_method(tmp_path: Path):
    tuned = run(
        FineTune(network=Two, finetune_steps=2),
        images(),
        tmp_path / "runs",
        max_rounds=1,
        workers=1,
    )
    inputs = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        for id in (None, 0):
            client = None if id is None else tuned.data.client(id)
            expected = tuned.method.deploy(client).eval()(inputs)
            folder = fl_lightning.export_model(tuned, tmp_path / f"of_{id}", client=id)
            card = (folder / "README.md").read_text()
            of_one, of_own = card.split("**Evaluation** of ")[1:]
            assert of_one.startswith("the one model for all")
            assert "| global/accuracy |" in of_one
            assert "| test/accuracy |" in of_own
            torch.testing.assert_close(
                loaded(folder)["network"](inputs), expected, rtol=0, atol=1e-6
            )


def test_what_cannot_be_exported_is_refused_and_nothing_is_created(
    local: FederatedTrainer,
    of_timm: FederatedTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    export, to = fl_lightning.export_model, tmp_path / "home"
    trained = sorted(local.progress.done.states)
    untrained = next(id for id in range(5) if id not in trained)
    with refused("export of LocalOnly without --client", f"--client {trained[0]}"):
        export(local, to)
    with refused(f"--client {untrained}", str(trained[0])):
        export(local, to, client=untrained)
    with refused("--client 6", str(trained[0])):
        export(local, to, client=6)
    with refused("--client 1", "leave --client out"):
        export(of_timm, to, client=1)
    with refused("--format pickle", "--format auto"):
        export(of_timm, to, format="pickle")  # type: ignore[arg-type]
    with refused("--checkpoint round_000009", "last or best"):
        export(of_timm, to, checkpoint="round_000009")
    with refused("export without --to"):
        of_timm.export(of_timm.method, of_timm.data, ckpt_path=str(of_timm.run_dir))
    monkeypatch.setattr(formats, "find_spec", lambda package: None)
    with refused("--format onnx without onnx, onnxscript", "fl_lightning[export]"):
        export(of_timm, to, format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_peft_cannot_hold_is_refused(of_timm: FederatedTrainer, tmp_path: Path):
    pytest.importorskip("peft")
    with refused("--format peft of a MobileNetV3", "safetensors"):
        fl_lightning.export_model(of_timm, tmp_path / "home", format="peft")
    assert list(tmp_path.iterdir()) == []


def test_files_are_overwritten_when_asked_and_others_stay(local: FederatedTrainer, tmp_path: Path):
    to, id = tmp_path / "home", min(local.progress.done.states)
    to.mkdir()
    (to / "mine.txt").write_text("mine")
    (to / "model.safetensors").write_text("another model")
    with refused(f"--to {to}", "--overwrite true"):
        fl_lightning.export_model(local, to, client=id)
    assert (to / "model.safetensors").read_text() == "another model"
    with refused(f"--to {to / 'mine.txt'}", "a new folder"):
        fl_lightning.export_model(local, to / "mine.txt", client=id)
    fl_lightning.export_model(local, to, client=id, overwrite=True)
    assert loaded(to)["network"](torch.zeros(1, 3, 16, 16)).shape == (1, 4)
    left = {"files": ["load.py", "model.safetensors", "old.bin", "../outside.txt"]}
    (tmp_path / "outside.txt").write_text("not of this folder")
    (to / "old.bin").write_text("of an export before")
    (to / "export.json").write_text(json.dumps(left))
    fl_lightning.export_model(local, to, client=id, overwrite=True)
    assert {path.name for path in to.iterdir()} == {*OF_TENSORS, "mine.txt"}
    assert len({path.stat().st_mode for path in to.iterdir()}) == 1, "others may read all of them"
    assert (tmp_path / "outside.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"home", "outside.txt"}, (
        "nothing is left beside it"
    )


def test_the_model_of_a_run_that_was_killed_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    trainer = run(FedAvg(network=Two), images(), tmp_path / "runs", max_rounds=1, workers=1)
    record = trainer.run_dir / "metadata.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "running"}))
    trainer.max_rounds = 4
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    assert "the run has not finished: this is its model after 1 of 4 rounds" in caplog.text
    assert json.loads((folder / "export.json").read_text())["of_rounds"] == 4
    assert "after round 1 of 4, when it had not finished" in (folder / "README.md").read_text()


@pytest.fixture
def mosaic(tmp_path: Path) -> FederatedTrainer:
    method = FedMosaic(network="residual_mlp", rank=2, num_blocks=2, reference="mlp")
    return run(method, images(), tmp_path / "runs", max_rounds=1, workers=1)


def test_each_client_of_fedmosaic_has_a_network_of_its_own(
    mosaic: FederatedTrainer, tmp_path: Path
):
    inputs, expected = answers(mosaic, 2)
    with refused("without --client"):
        fl_lightning.export_model(mosaic, tmp_path / "home")
    folder = fl_lightning.export_model(mosaic, tmp_path / "home", client=2)
    again = FedMosaic(network="residual_mlp", rank=2, num_blocks=2, reference="mlp")
    mosaic.prepare(again, mosaic.data, seed=1)  # other frozen weights, all of which are in the file
    with torch.no_grad():
        found = loaded(folder)["load"](again.network)(inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "network",
    [Two, pytest.param("mobilenetv3_small_050", marks=[pytest.mark.slow, pytest.mark.essential])],
)
def test_onnx_runtime_gives_the_same_outputs(network: Any, tmp_path: Path):
    """Of any number of examples, those of the exporter's own two included."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    trainer = run(FedMPQ(network=network), images(), tmp_path, max_rounds=1, workers=1)
    inputs, expected = answers(trainer)
    folder = fl_lightning.export_model(trainer, tmp_path / "home", format="onnx")
    session = loaded(folder)["network"]
    assert isinstance(session, onnxruntime.InferenceSession)
    (found,) = session.run(None, {"inputs": inputs.numpy()})
    scale = float(expected.abs().max())
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4 * scale)


class Branching(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(x.sum()) > 0 else 1)


def test_what_the_onnx_exporter_refuses_is_one_line(tmp_path: Path):
    pytest.importorskip("onnxscript")
    trainer = run(FedAvg(network=Branching), images(), tmp_path / "runs", max_rounds=1, workers=1)
    with refused("--format onnx of a Branching", "--format safetensors"):
        fl_lightning.export_model(trainer, tmp_path / "home", format="onnx")
    assert not (tmp_path / "home").exists()


def on_records(
    network: Any, folder: Path, adapter_average: str | None = None, **settings: Any
) -> FederatedTrainer:
    method = FedAvg(network=network, optimizer=adam(0.1), adapter_average=adapter_average)
    small = {"max_rounds": 1, "max_local_steps": 2, "workers": 1, **settings}
    return run(method, records(generate=False), folder, **small)


@of_peft
@pytest.mark.parametrize("kind", ["lora", "ffa", "pissa", "adalora", "svft", "spectral"])
def test_adapters_of_the_byte_model_are_loaded_by_peft(kind: str, tmp_path: Path):
    """Every kind is LoRA there, on a base that comes along; the base alone gives other answers."""
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    trainer = on_records(partial(LlamaTiny, rank=4, adapter=kind), tmp_path)
    inputs, expected = answers(trainer)
    ids = inputs["input_ids"]
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    assert {"adapter_config.json", "adapter_model.safetensors", "base"} <= {
        path.name for path in folder.iterdir()
    }
    network = loaded(folder)["network"]
    assert isinstance(network, peft.PeftModel)
    length, logits = trainer.data.example_shape[-1], f"logits [B, T, {trainer.data.num_classes}]"
    said = f"[B, T]; outputs are {logits}. T is any number of tokens that the model takes, {length} in the run's"
    assert said in " ".join((folder / "README.md").read_text().split())
    with torch.no_grad():
        assert network(input_ids=ids[:, :3]).logits.shape[:2] == (len(ids), 3)
        torch.testing.assert_close(network(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        with network.disable_adapter():
            assert not network(input_ids=ids).logits.allclose(expected, atol=1e-2)


def served(network: Any, ids: Tensor, new: int) -> list[list[int]]:
    """What transformers' ``generate`` answers to single prompts."""
    with torch.no_grad():
        return [
            network.generate(
                input_ids=row[None], max_new_tokens=new, do_sample=False, pad_token_id=0
            )[0][len(row) :].tolist()
            for row in ids
        ]


@of_peft
@pytest.mark.parametrize("rule", ["residual", "stack"])
def test_a_base_that_rounds_have_changed_goes_along(rule: str, tmp_path: Path):
    """After rounds that added to the frozen weights, plain peft answers as the run does, by
    ``generate`` too."""
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    settings = {"max_rounds": 2, "participation": 0.5}
    trainer = on_records(partial(LlamaTiny, rank=4), tmp_path, adapter_average=rule, **settings)
    inputs, expected = answers(trainer)
    ids = inputs["input_ids"]
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    auto = peft.AutoPeftModelForCausalLM
    network = loaded(folder)["network"]
    with torch.no_grad():
        torch.testing.assert_close(network(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        plain = auto.from_pretrained(on_disk(folder)).eval()(input_ids=ids).logits
        torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-4)
    own = trainer.method.deploy().eval()
    prompts = ids[:2, :6]
    ours = own.generate(prompts, torch.ones_like(prompts).bool(), max_new_tokens=5, eos=None, pad=0)
    assert served(network, prompts, 5) == ours.tolist()
    assert "has changed its frozen weights" in (folder / "README.md").read_text()


def on_disk(folder: Path) -> Path:
    """The folder, with its base named in full, for a program whose working directory is another
    one."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base"
    config["base_model_name_or_path"] = str(folder / "base")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("rank", [0, 4])
def test_the_byte_model_is_loaded_by_transformers(rank: int, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    trainer = on_records(partial(LlamaTiny, rank=rank), tmp_path)
    inputs, expected = answers(trainer)
    folder = fl_lightning.export_model(
        trainer, tmp_path / "home", format="transformers" if rank else "auto"
    )
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = network(input_ids=inputs["input_ids"]).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 50 tokens with a tokeniser, as ``save_pretrained`` writes them."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("llama")
    words = {"<eos>": 0, **{f"w{k}": k for k in range(1, 50)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>").save_pretrained(
        path
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    model.save_pretrained(path)
    return path


class Items(list, torch.utils.data.Dataset):
    """Items of a data set in the order of a list."""


def on_tokens(
    folder: Path, out: Path, adapter_average: str | None = None, rounds: int = 1, **settings: Any
) -> FederatedTrainer:
    items = Items([[1 + (7 * k + t) % 49 for t in range(9)] for k in range(24)])
    data = TokenData(
        items,
        context=8,
        num_clients=2,
        partition=IID(),
        batch_size=4,
        tokenizer=HuggingFaceTokenizer(str(folder)),
    )  # type: ignore[arg-type]
    network = partial(hf.TransformersLM, name=str(folder), **settings)
    method = FedAvg(network=network, optimizer=adam(0.05), adapter_average=adapter_average)
    return run(method, data, out, max_rounds=rounds, max_local_steps=2, workers=1)


@of_peft
@pytest.mark.parametrize("kind", ["lora", "ffa", "adalora", "svft", "spectral"])
def test_adapters_of_a_transformers_model_are_loaded_by_peft(
    kind: str, folder: Path, tmp_path: Path
):
    import peft
    import transformers

    trainer = on_tokens(folder, tmp_path, rank=3, adapter=kind)
    inputs, expected = answers(trainer)
    out = fl_lightning.export_model(trainer, tmp_path / "home")
    assert {path.suffix for path in out.iterdir() if "model" in path.name} == {".safetensors"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    network = peft.PeftModel.from_pretrained(plain, out).eval()
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(out).eval()  # by the base that it names
    for each in (network, auto, loaded(out)["network"]):
        with torch.no_grad():
            torch.testing.assert_close(
                each(input_ids=inputs["input_ids"]).logits, expected, rtol=1e-4, atol=1e-4
            )
    assert transformers.AutoTokenizer.from_pretrained(out).encode("w3 w7") == [3, 7]


@of_peft
@pytest.mark.parametrize("rule", ["residual", "stack", "alternate", "product"])
def test_adapters_of_peft_are_averaged_and_taken_home(rule: str, folder: Path, tmp_path: Path):
    """On a model of transformers: the rules are exact where they say so, and the base goes along if
    it moved."""
    import peft
    import transformers

    ranks = [2, 3] if rule in ("stack", "product") else 3
    trainer = on_tokens(folder, tmp_path, rule, rounds=2, rank=ranks)
    inputs, expected = answers(trainer)
    error = trainer.method.server_metrics()["average/factor_error"]
    assert (error < 1e-6) == (rule != "product")
    out = fl_lightning.export_model(trainer, tmp_path / "home")
    moved = rule in ("residual", "stack")
    assert (out / "base").is_dir() == moved
    plain = transformers.AutoModelForCausalLM.from_pretrained(out / "base" if moved else folder)
    ids = inputs["input_ids"]
    for network in (peft.PeftModel.from_pretrained(plain, out).eval(), loaded(out)["network"]):
        with torch.no_grad():
            found = network(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    own = trainer.method.deploy().eval()
    prompts = ids[:2, :4]
    ours = own.generate(prompts, torch.ones_like(prompts).bool(), max_new_tokens=3, eos=None, pad=0)
    assert served(network, prompts, 3) == ours.tolist()


def test_the_card_says_where_a_model_comes_from_and_how_it_did(tmp_path: Path):
    trainer = on_records(partial(LlamaTiny, rank=4), tmp_path / "runs", "solve", max_rounds=2)
    folder = fl_lightning.export_model(trainer, tmp_path / "home", format="safetensors")
    card, about = (
        (folder / "README.md").read_text(),
        json.loads((folder / "export.json").read_text()),
    )
    recorded = json.loads((trainer.run_dir / "metadata.json").read_text())
    assert about["data_sha256"] == recorded["content_sha256"]
    assert about["partition_sha256"] == recorded["partition_sha256"]
    rows = rows_of(trainer.run_dir / "ledger.csv")
    assert about["bytes"] == {
        way: sum(int(row[name]) for row in rows)
        for way, name in (("upload", "upload"), ("download", "download"), ("wasted", "wasted"))
    }
    assert about["evaluation"]["round"] == 2
    assert about["evaluation"]["test/perplexity"] == trainer.progress.summary["final/perplexity"]
    said = (
        "`fl_lightning.models.language.tiny.LlamaTiny`",
        recorded["content_sha256"],
        "| `adapter_average` | solve |",
    )
    for part in (*said, "**Method.** FedAvg", "| test/perplexity |"):
        assert part in card
    assert f"{about['bytes']['upload']:,} bytes went up" in card


@pytest.mark.parametrize(
    ("kind", "format"),
    [("lora", "transformers"), ("spectral", "transformers"), ("pissa", "auto"), (None, "auto")],
)
def test_a_transformers_model_is_loaded_by_from_pretrained(
    kind: str | None, format: Any, folder: Path, tmp_path: Path
):
    import transformers

    trainer = on_tokens(folder, tmp_path, **({"rank": 3, "adapter": kind} if kind else {"rank": 0}))
    inputs, expected = answers(trainer)
    out = fl_lightning.export_model(trainer, tmp_path / "home", format=format)
    for network in (
        transformers.AutoModelForCausalLM.from_pretrained(out).eval(),
        loaded(out)["network"],
    ):
        with torch.no_grad():
            found = network(input_ids=inputs["input_ids"]).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(out).encode("w3 w7") == [3, 7]


@of_peft
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "targets", "tied"),
    [
        ("lora", ["q_proj", "lm_head"], False),
        ("lora", ["embed_tokens"], False),
        ("spectral", ["q_proj", "lm_head"], False),
        ("lora", ["q_proj"], True),
    ],
)
def test_an_adapter_of_a_tied_head_is_merged_into_it_alone(
    kind: Any, targets: list[str], tied: bool, folder: Path, tmp_path: Path
):
    """Embedding and head have one weight, which the adapter of one of them must not change for the
    other."""
    import transformers

    auto, base, out = transformers.AutoModelForCausalLM, tmp_path / "base", tmp_path / "out"
    config = transformers.AutoConfig.from_pretrained(folder, tie_word_embeddings=True)
    auto.from_config(config).save_pretrained(base)
    network = hf.TransformersLM(50, str(base), rank=3, adapter=kind, targets=targets).eval()
    ids = torch.randint(0, 50, (2, 8))
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.5 * torch.randn_like(weight) if weight.requires_grad else 0)
        out.mkdir()
        write_transformers(TrainedModel(network, SimpleNamespace(tokenizer=None)), out)
        again = auto.from_pretrained(out).eval()
        torch.testing.assert_close(again(ids).logits, network(ids), rtol=1e-4, atol=1e-4)
    assert again.config.tie_word_embeddings == tied


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("adapted", [True, False])
def test_onnx_of_a_language_model_takes_any_length(adapted: bool, folder: Path, tmp_path: Path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    if adapted:
        trainer = on_records(partial(LlamaTiny, rank=4), tmp_path)
    else:
        trainer = on_tokens(folder, tmp_path, rank=0)
    inputs, _ = answers(trainer)
    ids = inputs["input_ids"][:, :5]
    out = fl_lightning.export_model(trainer, tmp_path / "home", format="onnx")
    (found,) = loaded(out)["network"].run(None, {"inputs": ids.numpy()})
    with torch.no_grad():
        expected = trainer.method.deploy().eval()(ids)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-3)


def test_a_network_under_a_budget_is_written_as_tensors(tmp_path: Path):
    """Layers that are switched by token are no model of peft or transformers; the tensors are those
    of client 1."""
    method = HEST(network=partial(LlamaTiny, rank=96, adapter="spectral"), optimizer=adam())
    small = {"max_rounds": 1, "max_local_steps": 1, "workers": 1}
    trainer = run(method, records(generate=False), tmp_path, **small)
    out = fl_lightning.export_model(trainer, tmp_path / "home", client=1)
    assert "fl_lightning" in (out / "README.md").read_text()
    weights = load_file(out / "model.safetensors")
    expected = trainer.method.deploy(
        trainer.data.client(1, trainer.progress.done.states[1])
    ).state_dict()
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in weights)
    pytest.importorskip("peft")
    with refused("--format peft of a BudgetedNetwork"):
        fl_lightning.export_model(trainer, tmp_path / "other", client=1, format="peft")


def test_the_best_checkpoint_is_that_of_its_round(tmp_path: Path):
    """A run of four rounds keeps the last and the best; each is exported with its own weights."""
    trainer = run(
        FedAvg(network=Two), images(), tmp_path, max_rounds=4, keep_checkpoints=1, workers=1
    )
    best = trainer.progress.done.best_round
    assert 0 < best < 4, "the test needs a best round before the last"
    found = {}
    for name in ("best", "last"):
        out = fl_lightning.export_model(trainer, tmp_path / name, checkpoint=name)
        about = json.loads((out / "export.json").read_text())
        found[name] = (about["round"], (out / "model.safetensors").read_bytes())
    assert (found["best"][0], found["last"][0]) == (best, 4)
    assert found["best"][1] != found["last"][1]


@pytest.mark.slow
@pytest.mark.essential
def test_the_commands_of_the_page(bare_directory: Path, capsys: pytest.CaptureFixture[str]):
    """After a run of one round in place of the real one, by its name; a trainer in Python gives the
    same files."""
    page = DOCS / "howto" / "export.md"
    commands = documented("export", page)  # of the global model, and of client 3
    few = [
        "--trainer.max_rounds",
        "1",
        "--trainer.logger",
        "false",
        "--trainer.participation",
        "1.0",
    ]
    for method, arguments in zip(("fedavg", "fedmosaic_digits"), commands, strict=True):
        name = ["--trainer.run_name", Path(arguments[1]).name]
        assert main(["fit", "--config", method, *few, *name, "--data.num_clients", "5"]) == 0
        assert main(arguments) == 0, capsys.readouterr().err
    assert {path.name for path in Path("digits_model").iterdir()} == OF_TENSORS
    assert json.loads(Path("client_3/export.json").read_text())["client"] == 3
    again = fl_lightning.export_model(Path(commands[0][1]), "again")
    assert (again / "model.safetensors").read_bytes() == Path(
        "digits_model/model.safetensors"
    ).read_bytes()
    capsys.readouterr()
    assert main(commands[0]) == 2
    assert "the folder exists and is not empty" in capsys.readouterr().err
    assert (
        main([*commands[0], "--overwrite", "true", "--checkpoint", "best", "--format", "onyx"]) == 2
    )
    assert main(["export", "nowhere", "--to", "new"]) == 2
    assert main(["export", "--to", "new"]) == 2
    assert not Path("new").exists()
