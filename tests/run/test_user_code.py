"""Of which code of the user a run says that it was trained by it."""

from __future__ import annotations

import json
import sys
from functools import partial
from hashlib import sha256
from importlib import import_module
from types import SimpleNamespace

import torch
from torch import nn
from toy import Points, on_points, run

from fl_lightning.clock import Clock, FedBuff
from fl_lightning.methods import FedAvg
from fl_lightning.run.directory import read_json
from fl_lightning.support.user_code import code_of
from fl_lightning.topology import Gossip

FILES = {
    "uc_network": "from torch.nn import Linear\nfrom uc_sizes import WIDTH\nmake = lambda: Linear(WIDTH, 1)\n",
    "uc_sizes": "WIDTH = 3\n",
    "uc_optimizer": "import torch\nclass Mine(torch.optim.SGD):\n    pass\n",
    "uc_other": "WIDTH = 4\n",
}


def write(files, folder, monkeypatch):
    """Write modules that can be imported, by name."""
    monkeypatch.syspath_prepend(folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_all_files_that_a_run_is_made_of_are_known(tmp_path, monkeypatch):
    """A function's file, a partial's class and what they import; not what was imported beside
    them."""
    write(FILES, tmp_path, monkeypatch)
    installed = tmp_path / "elsewhere" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "uc_installed.py").write_text("class Part: pass\n")
    monkeypatch.syspath_prepend(installed)
    import uc_installed
    import uc_network
    import uc_optimizer
    import uc_other  # noqa: F401

    method = SimpleNamespace(optimizer=partial(uc_optimizer.Mine, lr=0.1), network=nn.Linear(1, 1))
    known = code_of(method, uc_network.make, torch.optim.SGD, uc_installed.Part())
    assert known == {
        name: sha256(FILES[name].encode()).hexdigest()
        for name in ("uc_network", "uc_optimizer", "uc_sizes")
    }


def test_what_a_script_defines_itself_is_known_by_its_text():
    class First:
        def step(self):
            return 1

    class Second:
        def step(self):
            return 2

    for kind in (First, Second):
        kind.__module__, kind.__qualname__ = "__main__", "Mine"
    one, other = code_of(First()), code_of(Second())
    assert one.keys() == other.keys() == {"__main__.Mine"}
    assert one != other


PARTS = {
    "up_devices": "from fl_lightning.clock import SameDevice as Of\n",
    "up_availability": "from fl_lightning.clock import Diurnal as Of\n",
    "up_staleness": "from fl_lightning.clock import Hinge as Of\n",
    "up_graph": "from fl_lightning.topology.graphs import Ring as Of\n",
}


def test_the_parts_of_parts_are_known(tmp_path, monkeypatch):
    """Devices and availability of a clock, the staleness of rounds and the graph of a topology."""
    files = {name: f"{text}class Own(Of):\n    pass\n" for name, text in PARTS.items()}
    write(files, tmp_path, monkeypatch)
    made = {name: import_module(name).Own() for name in files}
    clock = Clock(devices=made["up_devices"], availability=made["up_availability"])
    rounds = FedBuff(concurrency=2, buffer=1, staleness=made["up_staleness"])
    found = set()
    for way in ({"rounds": rounds}, {"topology": Gossip(made["up_graph"])}):
        folder = tmp_path / "-".join(way)
        method = on_points(FedAvg(weigh_by="clients"))
        trainer = run(method, Points(), folder, max_rounds=1, clock=clock, **way)
        found |= read_json(trainer.run_dir / "metadata.json")["code"].keys()
    assert found >= PARTS.keys()


def test_rounds_that_edited_code_makes_anew_have_a_new_record(tmp_path, monkeypatch):
    """A store takes no metric back, so that it would keep the rounds of the code of before."""
    text = "from fl_lightning.methods import FedAvg\nclass Mine(FedAvg):\n    pass\n"
    write({"up_method": text}, tmp_path, monkeypatch)
    file = tmp_path / "up_method.py"
    kind, settings = import_module("up_method").Mine, {"checkpoint_every": 1, "keep_checkpoints": 9}
    run_dir = run(on_points(kind()), Points(), tmp_path, max_rounds=2, **settings).run_dir
    former = []
    for edit in (False, True):
        about = read_json(run_dir / "metadata.json") | {"tracking_run_id": "abc"}
        (run_dir / "metadata.json").write_text(json.dumps(about))
        if edit:
            file.write_text(f"{file.read_text()}# edited\n")
        first = str(run_dir / "checkpoints" / "round_000001")
        run(on_points(kind()), Points(), tmp_path, max_rounds=2, ckpt_path=first, **settings)
        former.append(read_json(run_dir / "metadata.json").get("former_tracking_runs"))
    assert former == [None, ["abc"]]
