"""Tables of costs: arithmetic by hand, files, what is refused; meters; fits; the command."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from fl_lightning.__main__ import main
from fl_lightning.energy import (
    CostCurve,
    CostLine,
    CostTable,
    MeasuredCost,
    ModelledMeter,
    NVMLMeter,
    RAPLMeter,
    Removal,
    best_meter,
    from_json,
    one_label,
    read_table,
    shipped_table,
    to_json,
)
from fl_lightning.energy.calibration import calibrate as calibration
from fl_lightning.energy.calibration.fitting import (
    high_quantile,
    line_or_curve,
    measured_cost,
    relative_errors,
    robust_mean,
)
from fl_lightning.energy.calibration.samples import Measured, tables_of
from fl_lightning.energy.calibration.works import LinearShape, ZeroOutput
from fl_lightning.models import LlamaTiny
from fl_lightning.models.adapters import adapter_layers

LABEL = "modelled: CPU seconds x 15 W"


def measured(a: float, b: float, more: float = 2.0) -> MeasuredCost:
    return MeasuredCost(CostLine(a, b), CostLine(more * a, more * b))


def table(**changed) -> CostTable:
    """int8 costs 10 + n, off 3 n and high 4 n: int8 pays from 4 tokens on, and makes off useless
    from 5 on."""
    first = {"off": measured(0, 3), "int8": measured(10, 1), "high": measured(0, 4)}
    second = {
        "off": measured(0, 1),
        "int8": measured(9, 9),
        "high": MeasuredCost(CostCurve((1, 4), (2.0, 3.5)), CostLine(4, 4)),
    }
    settings = {
        "label": LABEL,
        "device": "a desk",
        "scope": "adapter",
        "context": 64,
        "groups": {"a.q": first, "b.o": second},
        "rest": measured(100, 10),
    }
    return CostTable(**{**settings, **changed})


def test_joules_by_hand():
    found = table().tensors(4)
    assert found.dtype == torch.float64
    assert found.tolist() == [[12.0, 14.0, 16.0], [4.0, 45.0, 3.5]]
    assert table().tensors(4, "q99").tolist() == [[24.0, 28.0, 32.0], [8.0, 90.0, 20.0]]
    assert table().by_tokens(2)[:, 1].tolist() == [[0.0, 11.0, 12.0], [0.0, 18.0, 27.0]]
    assert table().all_high(4) == 100 + 40 + 16 + 3.5
    one = 110 + 4 + 2
    assert table().all_high_sequence(prompt=4, new=3) == 159.5 + 3 * one
    assert table().all_high_sequence(prompt=0, new=2) == 2 * one
    assert table().all_high_sequence(prompt=4, new=0, kind="q99") == 280 + 32 + 20


def test_what_is_no_cheaper_than_something_better_is_removed_and_reported():
    at = {n: table().without_useless(n) for n in (1, 4, 5)}
    inf = math.inf
    assert at[1].tensors(1).tolist() == [[3.0, inf, 4.0], [1.0, inf, 2.0]]
    assert at[1].tensors(64)[0].tolist() == [192.0, inf, 256.0], "a removal holds for every step"
    assert at[4].tensors(4).tolist() == [[12.0, 14.0, 16.0], [inf, inf, 3.5]]
    assert at[5].available(5).tolist() == [[False, True, True], [False, False, True]]
    assert [str(r) for r in at[5].removed] == [
        f"{g}: {z} from 1 tokens" for g, z in (("a.q", "off"), ("b.o", "off"), ("b.o", "int8"))
    ]
    ranges = table().without_useless()
    assert [(r.option, r.first, r.last) for r in ranges.removed if r.group == "a.q"] == [
        ("off", 5, None),
        ("int8", 1, 3),
    ]
    assert ranges.tensors(4)[0].tolist() == [12.0, 14.0, 16.0]
    assert ranges.tensors(5)[0].tolist() == [inf, 15.0, 20.0]
    assert at[1].by_tokens(3)[0, 1].tolist() == [0.0, inf, inf, inf]
    assert ranges.without_useless() == ranges
    again = ranges.without_useless(1)
    assert set(again.removed) == {*ranges.removed, *at[1].removed}, "what is removed stays so"


def test_what_is_removed_stays_removed_and_makes_nothing_useless():
    """Without int8, off is the cheaper option of a.q again, from 5 tokens on."""
    found = table(removed=(Removal("a.q", "int8"), Removal("b.o", "off", 2, 2))).without_useless()
    assert found.tensors(5)[0].tolist() == [15.0, math.inf, 20.0]
    assert [found.available(n)[1, 0].item() for n in (1, 2)] == [True, False]


def test_a_file_is_exact(tmp_path):
    odd = {
        "off": measured(0.1, 1 / 3),
        "int8": measured(math.pi, 2.0**-60),
        "high": measured(0, 1e300),
    }
    before = replace(
        table(groups={"x": odd, "y": odd}),
        removed=(Removal("y", "off", 2, 9), Removal("x", "int8")),
    )
    (tmp_path / "costs.json").write_text(to_json(before))
    assert read_table(tmp_path / "costs.json") == before
    assert len(json.loads(to_json(before))["costs"]) == 1, "equal costs are written once"


@pytest.mark.parametrize(
    ("path", "value", "given"),
    [
        (["label"], "guessed", "label guessed"),
        (["scope"], "half", "scope half"),
        (["groups"], {}, "without groups"),
        (["groups", "a.q"], 7, "a.q at 7"),
        (["costs", 0, "int8"], None, "int8"),
        (["costs", 0, "int9"], {}, "int9"),
        (["costs", 0, "off", "mean", "a"], -1.0, "costs[0].off.mean"),
        (["costs", 0, "off", "mean", "a"], math.nan, "costs[0].off.mean"),
        (["costs", 0, "off", "mean", "a"], "1", "costs[0].off.mean"),
        (["costs", 1, "high", "mean", "tokens"], [4, 1], "a curve"),
        (["costs", 1, "high", "mean", "joules"], [1.0], "a curve"),
        (["rest"], None, "rest"),
        (["format"], 2, "the table"),
        (["high"], "float16", "high float16"),
        (["high"], 16, "the table"),
        (["context"], -1, "the table"),
        (
            ["removed"],
            [{"group": "a.q", "option": "high", "first": 1, "last": None}],
            "removed a.q: high",
        ),
        (
            ["removed"],
            [{"group": "z", "option": "off", "first": 1, "last": None}],
            "removed z: off",
        ),
        (["removed"], [{"group": "a.q"}], "removed"),
    ],
)
def test_damaged_files_are_refused_by_name(path, value, given):
    document = json.loads(to_json(table()))
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with refused(given):
        from_json(json.dumps(document))
    if path[-1] in ("a.q", "int9", "high"):  # a table without the last is one of before
        return
    del at[path[-1]]
    with refused(""):
        from_json(json.dumps(document))


def test_a_file_that_is_no_table_is_told_from_one_that_lacks_keys():
    for text in (
        "{}",
        "[]",
        json.dumps({"device": "cpu", **{f"key {index}": index for index in range(30)}}),
    ):
        with refused("metrics.json", "name what --calibrate --out wrote"):
            from_json(text, "metrics.json")
    document = json.loads(to_json(table()))
    del document["rest"]
    with refused("old.json without rest"):
        from_json(json.dumps(document | {"more": 1}), "old.json")


def test_other_networks_and_mixed_labels_are_refused():
    assert list(table().for_groups(["b.o", "a.q"]).groups) == ["b.o", "a.q"]
    with refused("which also has c", "calibrate"):
        table().for_groups(["a.q", "b.o", "c"])
    with refused("which has no b.o", "calibrate"):
        table().for_groups(["a.q"])
    assert one_label([LABEL, LABEL]) == LABEL
    with refused("RAPL and of modelled"):
        one_label([LABEL, "RAPL"])
    with refused("no table of costs for nothing", "--calibrate"):
        shipped_table("nothing")


# Meters


def domain(folder, name: str, label: str, joules: int, largest: int = 1_000_000) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file, value in (("name", label), ("energy_uj", joules), ("max_energy_range_uj", largest)):
        (folder / name / file).write_text(f"{value}\n")


def test_rapl_adds_packages_and_memory_and_wraps_around(tmp_path):
    domain(tmp_path, "intel-rapl:0", "package-0", 900_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 5)
    domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    domain(tmp_path, "intel-rapl:1", "package-1", 0, 500)
    domain(tmp_path, "intel-rapl:2", "psys", 0)
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 900_000)
    meter = RAPLMeter(tmp_path)
    assert [path.name for path in meter.domains] == [
        "intel-rapl:0",
        "intel-rapl:0:1",
        "intel-rapl:1",
    ]
    assert meter.read() == 0.0
    # 100 000 to its range, and 100 000
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100000")
    (tmp_path / "intel-rapl:0:1" / "energy_uj").write_text("60")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999999")
    assert meter.read() == pytest.approx(0.200050)
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("400")
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100007")
    assert meter.read() == pytest.approx(0.200457)
    assert best_meter("cpu", powercap=tmp_path).label == "RAPL"


def test_without_counters_joules_are_modelled(tmp_path):
    domain(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    with refused("no RAPL counter", "modelled"):
        RAPLMeter(tmp_path)
    clock = iter([2.0, 5.0])
    meter = best_meter("cpu", watts=12.5, powercap=tmp_path / "none")
    assert (type(meter), meter.label) == (ModelledMeter, "modelled: CPU seconds x 12.5 W")
    assert ModelledMeter(10, clock=lambda: next(clock)).joules_of(lambda: None) == 30.0
    replace(table(), label=meter.label)  # a table takes it
    with refused("--watts 0"):
        ModelledMeter(0)


def test_the_card_is_read_by_pynvml_or_zeus(monkeypatch):
    counter = iter([0, 1_000, 3_500])
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: ("card", index),
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: (
            next(counter) if handle == ("card", 1) else None
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    meter = best_meter("cuda:1")
    assert (type(meter), meter.label) == (NVMLMeter, "NVML")
    assert meter.joules_of(lambda: None) == 2.5
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = SimpleNamespace(get_total_energy_consumption=lambda index: 7_000 + index)
    monkeypatch.setitem(sys.modules, "zeus.device.gpu", SimpleNamespace(get_gpus=lambda: gpus))
    monkeypatch.setitem(sys.modules, "zeus.device", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "zeus", SimpleNamespace())
    assert NVMLMeter(2).read() == pytest.approx(7.002)
    monkeypatch.setitem(sys.modules, "zeus.device.gpu", None)
    with refused("card 0", "nvidia-ml-py"):
        NVMLMeter()


# Fits and calibration


def test_a_line_is_found_and_a_bend_is_kept():
    tokens = [1, 2, 4, 8, 16]
    line = line_or_curve(tokens, 3.0 + 0.5 * np.array(tokens))
    assert isinstance(line, CostLine)
    assert (line.a, line.b) == pytest.approx((3.0, 0.5))
    through_zero = line_or_curve(tokens, 0.9 * np.array(tokens) - 0.1)
    assert isinstance(through_zero, CostLine)
    assert through_zero.a == 0.0
    bent = np.array([10.0, 10.0, 10.0, 10.0, 90.0])
    assert line_or_curve(tokens, bent).at(tokens).tolist() == bent.tolist()
    samples = np.full(800, 2.0)
    # one of a hundred, all in one moment: they are the 0.99 quantile, and not the mean
    samples[70:78] = 90.0
    assert robust_mean(samples) == 2.0
    assert high_quantile(samples) == 90.0
    assert relative_errors({3: 1.0}, {3: samples}) == {3: pytest.approx(-0.5)}
    cost = measured_cost([1, 2], np.array([1.0, 2.0]), np.array([0.5, 9.0]))
    assert cost.q99.at([1, 2]).tolist() == [1.0, 9.0]


@given(st.lists(st.tuples(*[st.floats(0.5, 2.0)] * 2), min_size=4, max_size=4))
def test_a_quantile_is_nowhere_below_its_mean(points):
    """Both are fitted to noise within the tolerance of a line and beyond it."""
    tokens = [1, 2, 4, 8]
    means, more = (np.array(values) for values in zip(*points, strict=True))
    cost = measured_cost(tokens, means * tokens, means * tokens * np.maximum(more, 1.0) ** 0.1)
    between = np.linspace(1, 8, 50)
    assert (cost.q99.at(between) >= cost.mean.at(between) * (1 - 1e-9)).all()


def test_the_quantile_of_noise_that_a_line_fits_does_not_cross_the_mean():
    """The line of the means is 1.047 at one token, that of the quantiles 1.0 without the rule."""
    tokens, means = [1, 2, 3], np.array([1.0, 1.1, 1.0])
    cost = measured_cost(tokens, means, np.array([1.0, 1.1, 1.21]))
    assert (cost.q99.at(tokens) >= cost.mean.at(tokens) * (1 - 1e-9)).all()


def test_no_quantile_is_charged_less_than_was_measured():
    """The line is within 5 % of these quantiles, and below those of 2 and of 4 tokens."""
    tokens, means, quantiles = [1, 2, 3, 4], np.arange(1.0, 5.0), np.array([1.05, 2.2, 3.15, 4.4])
    assert isinstance(line_or_curve(tokens, quantiles), CostLine)
    assert measured_cost(tokens, means, quantiles).q99.at(tokens).tolist() == quantiles.tolist()
    on_a_line = measured_cost(tokens, means, 0.3 + 1.1 * means)
    assert isinstance(on_a_line.q99, CostLine)


def test_what_layers_cost_more_in_the_network_is_added():
    """Two groups of 10 + n, 5 + n and 7 + 2 n joules alone, a rest of 3, and 4 more a layer in
    steps (of int8 9); 50 for a step of the held-out length. Of one token every second sample is
    held out, which is half as much."""
    shape = LinearShape(4, 4)
    alone = {"off": (10, 1), "int8": (5, 1), "high": (7, 2)}
    samples = {}
    for (z, (a, b)), n in itertools.product(alone.items(), (1, 2, 3, 4)):
        step = 3.0 + 2 * (a + b * n + (9 if z == "int8" else 4))
        samples[f"4x4 {z}", n] = np.full(10, a + b * n)
        samples[f"step {z}", n] = (
            np.array([step, step / 2] * 5) if n == 1 else np.full(10, 50.0 if n == 3 else step)
        )
    samples |= {("rest", n): np.full(10, 3.0) for n in (1, 2, 4)}
    groups = {"a": shape, "b": shape}

    def evaluated(scope: str = "adapter"):
        return tables_of({"": Measured(samples, groups, scope)}, LABEL, 8)[""]

    found = evaluated()
    assert found.table.tensors(2).numpy() == pytest.approx(np.array([[16, 11, 15]] * 2))
    assert [found.table.fixed(n) for n in (1, 2, 4)] == pytest.approx([3] * 3)
    assert found.table.all_high(4) == pytest.approx(3 + 2 * 19)
    assert found.errors["4x4 int8"] == {
        1: pytest.approx(0, abs=1e-9),
        3: pytest.approx(0, abs=1e-9),
    }
    assert found.errors["step high"] == {
        1: pytest.approx(1.0),
        3: pytest.approx((3 + 2 * 17) / 50 - 1),
    }
    assert found.largest_error("step high") == 1.0
    skipping = evaluated("model")
    # off by itself
    assert skipping.table.tensors(2)[0].tolist() == pytest.approx([16, 7 + 6.5, 11 + 6.5])
    samples["step high", 2][:] = 300.0
    charged = evaluated().table
    assert charged.all_high(2, "q99") == pytest.approx(300)
    # a disturbed moment: nothing is taken away
    samples |= {("rest", n): np.full(10, 500.0) for n in (1, 2, 4)}
    found = evaluated()
    assert found.table.tensors(2).numpy() == pytest.approx(np.array([[12, 7, 11]] * 2))


@pytest.fixture
def few_tokens(monkeypatch):
    monkeypatch.setattr(calibration, "KNOTS", (1, 2, 4))
    monkeypatch.setattr(calibration, "HELD_OUT", (3,))


def test_a_calibration_has_the_groups_of_its_network(few_tokens):
    network = LlamaTiny(259).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = calibration.calibrate(network, ModelledMeter(15), seconds=0.1, context=8)
    assert list(found.table.groups) == list(adapter_layers(network))
    assert len(found.table.groups) == 16
    assert {*found.errors} == {
        f"{shape} {z}"
        for shape in ("96x96", "96x288", "96x512", "256x96")
        for z in ("off", "int8", "high")
    } | {"step off", "step int8", "step high"}
    assert found.table.label == LABEL
    assert (found.table.tensors(3, "q99") >= found.table.tensors(3) * (1 - 1e-9)).all()
    assert from_json(to_json(found.table)) == found.table
    after = network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with refused("without adapted linear layer"):
        calibration.calibrate(LlamaTiny(259, rank=0), ModelledMeter(15))


def test_the_rest_has_no_group_and_the_step_is_the_network():
    """The step's logits are those of the whole sequence, and without groups no linear layer is
    computed."""
    network = LlamaTiny(259).eval()
    with torch.inference_mode(), calibration.rng.torch_stream(0, "calibration"):
        prefix = calibration.prefix_of(network, tokens=3, context=8)
        step = calibration.step_work(network, prefix)
        first, again = step(), step()
        whole = network(prefix.ids)[:, -1]
    assert prefix.ids.shape == (1, 8)
    assert prefix.before == 5
    assert torch.equal(first, again), "the cache of earlier tokens is not written into"
    torch.testing.assert_close(first, whole)
    switched, layers = calibration.switched_copy(network, "adapter")
    empty = calibration.without_groups(switched)
    assert not adapter_layers(empty)
    assert sum(isinstance(module, ZeroOutput) for module in empty.modules()) == len(layers) == 16
    assert len(adapter_layers(network)) == len(adapter_layers(switched)) == 16


# The command


def test_the_command_prints_a_table_and_measures_one(tmp_path, capsys, monkeypatch, few_tokens):
    monkeypatch.setenv("COLUMNS", "140")
    (tmp_path / "costs.json").write_text(to_json(table()))
    assert main(["energy", "--table", str(tmp_path / "costs.json")]) == 0
    printed = capsys.readouterr().out
    assert LABEL in printed
    assert "scope adapter" in printed
    assert "not cheaper than a better option" in printed
    out = tmp_path / "mine.json"
    flags = [
        "--meter",
        "modelled",
        "--watts",
        "7.5",
        "--seconds",
        "0.1",
        "--context",
        "4",
        "--out",
        str(out),
    ]
    assert main(["energy", "--calibrate", *flags]) == 0
    assert "step high" in capsys.readouterr().out
    assert read_table(out).label == "modelled: CPU seconds x 7.5 W"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--table", "none.json"], "none.json"),
        (["--out", "x.json"], "--out x.json"),
        (["--calibrate", "--table", "x.json"], "--table x.json"),
        (["--calibrate", "--network", "resnet20"], "resnet20"),
        (["--calibrate", "--meter", "guess"], "guess"),
        (["--calibrate", "--watts", "-1", "--meter", "modelled"], "-1"),
        (["--calibrate", "--out", "no/such/folder.json"], "no/such/folder.json"),
        (["--calibrate", "--seconds", "0"], "--seconds 0"),
        (["--calibrate", "--adapter", "merged", "--scope", "adapter"], "merged --scope adapter"),
        (["--calibrate", "--adapter", "glue"], "--adapter glue"),
        (["--calibrate", "--scope", "modell"], "write --scope model\n"),
        (["--calibrate", "--high", "float16"], "--high float16"),
        (["--calibrate", "--targets", "q_proj"], "q_proj"),
        (["--network", "nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_line(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["energy", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
