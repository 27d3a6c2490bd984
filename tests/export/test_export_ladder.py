"""The export of a ladder: the network of all branches, in a form that others load, and what each
level leaves out."""

from __future__ import annotations

import json
import runpy

import torch
from laddered import ladder_of
from tiny_language import fit

import fl_lightning


def test_every_branch_is_written_and_the_levels_are_named(tmp_path):
    trainer = fit(ladder_of(), tmp_path, max_rounds=5)
    network = trainer.fitted[0].deploy(trainer.data.client(0)).eval()
    levels = network.levels.tolist()
    assert len(levels) > 1
    folder = fl_lightning.export_model(trainer, tmp_path / "out", client=0, format="safetensors")
    said = json.loads((folder / "export.json").read_text())
    names = list(network.on.table.groups)
    assert [set(level["left_out"]) for level in said["levels"]] == [
        {name for name, on in zip(names, mask, strict=True) if not on} for mask in levels
    ]
    shares = [level["share"] for level in said["levels"]]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert said["budget"] == network.on.share
    card = (folder / "README.md").read_text()
    assert "has all branches" in card
    assert said["levels"][-1]["left_out"][0] in card
    ids = torch.randint(
        0, trainer.data.num_classes, (2, 6), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected = network.network(ids)
        load = runpy.run_path(str(folder / "load.py"))
        loaded = (
            load["network"]
            if "network" in load
            else load["load"](ladder_of().network(trainer.data.num_classes))
        )
        assert torch.allclose(loaded.eval()(ids), expected, atol=1e-5)
