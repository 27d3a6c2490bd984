"""A deployment whose nodes are simulated by Flower's own engine, in Ray's workers."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
from test_deploy_flower import IMAGES, ROOT, SHARDS, SMALL, finish, metadata_in, ours, simulated

from fl_lightning.deploy.command import Deployment
from fl_lightning.deploy.flower import _answer
from fl_lightning.deploy.flower.simulated import require_ray, run_words
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.errors import InputError


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (importlib.util.find_spec("flwr") and importlib.util.find_spec("ray")),
    reason="Flower's simulation engine is not installed: pip install 'flwr[simulation]'",
)
@pytest.mark.parametrize(
    "more", [[], ["--trainer.secure_sum={threshold: 0.6}"]], ids=["plain", "secure"]
)
def test_simulated_nodes_give_the_weights_of_the_simulation(more, tmp_path):
    """Of a secure sum all phases are answered by one worker."""
    if more:
        pytest.importorskip("Crypto")
    words = ["--config", str(ROOT / "configs" / "fedavg.yaml"), *SMALL, *IMAGES, *SHARDS, *more]
    deploy = ["deploy", *words, "--trainer.default_root_dir=deployed", "--deploy.simulation=2"]
    process, log = ours(*deploy, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    assert finish(process, log) == 0, log.read_text()
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated(tmp_path, words)["weights_sha256"]
    nodes = found["deployment"]["nodes"]
    assert {name.split(" ")[0]: ids for name, ids in nodes.items()} == {
        "simulated-0": [0, 2],
        "simulated-1": [1, 3],
    }


def test_simulated_nodes_need_ray_and_are_all_waited_for(monkeypatch):
    assert Deployment(simulation=3).rules().min_nodes == 3
    settings = "num-supernodes=3 client-resources-num-cpus=1"
    assert run_words(3, one_worker=False) == ["--federation-config", settings]
    assert run_words(3, one_worker=True) == [
        "--federation-config",
        f"{settings} init-args-num-cpus=1",
    ]
    monkeypatch.setattr("fl_lightning.deploy.flower.simulated.find_spec", lambda name: None)
    with pytest.raises(InputError, match="Flower's simulation engine needs Ray"):
        require_ray()


def test_a_supernode_outside_of_a_simulation_makes_no_node_of_itself(tmp_path):
    """Else a server could have it write where it says."""
    context = SimpleNamespace(
        node_config={"partition-id": 0, "num-partitions": 1},
        run_config={"job": str(tmp_path)},
    )
    job = {"nodes": str(tmp_path / "nodes"), "directory": str(tmp_path)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    answer = Message.from_bytes(_answer(Message({"kind": "check"}).to_bytes(), context))
    assert "has no socket in its --node-config" in answer.header["reason"]
    assert not (tmp_path / "nodes").exists()
