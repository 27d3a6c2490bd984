"""Of which code of the user a run says that it was trained by it."""

from __future__ import annotations

import sys
from functools import partial
from hashlib import sha256
from types import SimpleNamespace

import torch
from torch import nn

from fl_lightning.support.user_code import code_of

FILES = {
    "uc_network": "from torch.nn import Linear\nfrom uc_sizes import WIDTH\nmake = lambda: Linear(WIDTH, 1)\n",
    "uc_sizes": "WIDTH = 3\n",
    "uc_optimizer": "import torch\nclass Mine(torch.optim.SGD):\n    pass\n",
    "uc_other": "WIDTH = 4\n",
}


def test_all_files_that_a_run_is_made_of_are_known(tmp_path, monkeypatch):
    """A function's file, a partial's class and what they import; not what was imported beside
    them."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
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
