"""Every method passes the kit; the command that runs it."""

from __future__ import annotations

import pytest
import torch
from all_methods import METHODS

from fl_lightning import methods
from fl_lightning.__main__ import main
from fl_lightning.compatibility import only
from fl_lightning.conformance import method_under_test, run_checks
from fl_lightning.conformance.checks_wire import (
    broadcast,
    bytes_on_the_wire,
    server_reads_uploads_only,
)

BUDGETS = {"AQFL", "FedMPQ", "FedMPQKD"}
NEUTRAL = {
    "FedAdaLoRA",
    "FedDyn",
    "FedNova",
    "FedSAM",
    "SCAFFOLD",
    "FedProx",
    "FedNTD",
    "QFedAvg",
    "FedKD",
    "FedVEMoE",
    "HEST",
    "HESTLadder",
}
NEUTRAL |= {"FedLC", "MOON", "FedCM", "MoFedSAM", "FedDC", "FedSpeed"}
NEUTRAL |= {"Ditto", "FedRoD", "APFL", "FedALA"}
NEUTRAL |= {"FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedExP", "FedACG"}
KEEPS = {
    "MOON",
    "SCAFFOLD",
    "FedDyn",
    "FedDC",
    "FedSpeed",
    "FedKD",
    "FedMosaic",
    "LocalOnly",
    "FedVEMoE",
    "HEST",
}
KEEPS |= {"Ditto", "FedRoD", "APFL", "FedALA", "FedProto"}
PERSONAL = {"Ditto", "FedRoD", "APFL", "FedALA", "FedProto"}
# the quadratic's network has one part alone
PARTS_STAY = {"FedPer", "FedRep", "FedBABU", "LGFedAvg"}
NO_MEAN = {"FineTune", "FedBN", *PARTS_STAY}  # or what is evaluated is not the mean of all weights
KEEPS |= {"FedPer", "FedRep", "FedBN", "LGFedAvg"}
SINGLE_UPLOADS = {"FedKD", "FedMosaic", "LocalOnly", "FedProto"}
OF_ITS_OWN = {"FedMosaic", "LocalOnly", "Oracle", "FedVEMoE"}
OF_TEXT = {"FedAdaLoRA", "FedVEMoE", "HEST", "HESTLadder"}
ON_THE_QUADRATIC = {
    "known optimum",
    "agreement",
    "learning",
    "federation size",
    "copies",
    "permutation",
}


LONG = [pytest.mark.slow, pytest.mark.essential]
IN_EVERY_RUN = {"FedAvg"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else LONG) for name in METHODS]
)
def test_every_method_conforms(name):
    outcomes = list(run_checks(method_under_test(getattr(methods, name))))
    assert [f"{o.check}: {o.detail}" for o in outcomes if o.verdict == "failed"] == []
    expected = {
        check
        for check, those in (
            ("budget", BUDGETS),
            ("neutral", NEUTRAL),
            ("kept state is used", KEEPS),
        )
        if name not in those
    }
    expected |= {"partial participation", "weights by examples"} if name in OF_ITS_OWN else set()
    expected |= {"weights by examples"} if name in PERSONAL else set()
    expected |= (
        {"broadcast"} if name in ("LocalOnly", "Oracle", "FedDyn", "FedSpeed", *OF_TEXT) else set()
    )
    # their servers need the single uploads
    expected |= {"order of uploads"} if name in SINGLE_UPLOADS else set()
    no_mean = {*SINGLE_UPLOADS, "FedExP", "FedVEMoE"}  # or none that takes another rule
    expected |= {"settings of the server"} if name in no_mean else set()
    expected |= {"control variates"} if name != "SCAFFOLD" else set()
    expected |= {"dynamic regularisation"}  # which methods of others declare
    if name in OF_TEXT:  # none of which can be stacked
        expected |= {"partial participation", "weights by examples", "stacked as alone"}
        expected |= ON_THE_QUADRATIC
    starts_apart = {
        "AQFL",
        "FedAdaLoRA",
        "FedKD",
        "HEST",
        "HESTLadder",
        "SCAFFOLD",
        "FedDyn",
        *OF_ITS_OWN,
    }
    starts_apart |= {"FedDC", "FedSpeed", "FedLC", "MOON", *PERSONAL}
    starts_apart |= {"FedBN", *PARTS_STAY}
    expected |= {"same start as declared"} if name in starts_apart else set()
    expected |= ON_THE_QUADRATIC if name in PARTS_STAY else set()
    unknown = {"known optimum", "agreement", "partial participation", "weights by examples"}
    expected |= unknown if name in NO_MEAN else set()
    assert {o.check for o in outcomes if o.verdict == "not applicable"} == expected
    details = {o.check: o.detail for o in outcomes}
    assert "as by hand formula" in details["bytes on the wire"]
    assert details["shapes of entries"].split()[1:] == ["refused"]
    assert details["stacked as alone"] == "" or name in OF_TEXT


@pytest.mark.slow
@pytest.mark.essential
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from fl_lightning.methods import FedAvg\n\nclass Half(FedAvg):\n    def __init__(self, part=0.5, **settings):\n"
        "        super().__init__(**settings)\n        self.part = part\n\n    def aggregate(self, uploads):\n"
        "        start = self.server['weights']\n        super().aggregate(uploads)\n"
        "        if self.part:\n"
        "            self.server['weights'] = start + (1 - self.part) * (self.server['weights'] - start)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["check", "--model", "mine.Half"]) == 1  # half a step is not a mean
    shown = capsys.readouterr().out
    assert "partial participation" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert (
        main(
            [
                "check",
                "--model",
                "mine.Half",
                "--settings",
                "{part: 0.0}",
                "--neutral",
                "{part: 0.0}",
            ]
        )
        == 0
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.py"]


class OfNumbers(methods.FedAvg):
    refuses = only("no_classes", "it predicts numbers")


@pytest.mark.parametrize(
    "model",
    [
        "FedAvgg",
        "no.such.Method",
        "..Foo",
        "torch.nn.Linear",
        "Centralised",
        f"{__name__}.OfNumbers",
    ],
)
def test_a_name_that_cannot_be_checked_is_refused_in_a_line(model, capsys):
    assert main(["check", "--model", model]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("QFedAvg", {"bits": 3, "bucket": 100}),
        ("QFedAvg", {"bits": 32}),
        ("AQFL", {"bits": 3, "download": "quantised"}),
        ("FedPQ", {"dim": 3, "centroids": 50}),
        ("FedMPQ", {"bits": [1, 2, 3, 5, 6, 7]}),
        ("FedMPQKD", {"bits": 2, "download": "quantised"}),
        ("FedKD", {"average_weights": True}),
        (
            "FedMosaic",
            {
                "rank": 3,
                "num_blocks": 2,
                "sketch_rows": 0.1,
                "networks": ["residual_mlp", "residual_mlp"],
            },
        ),
    ],
)
def test_bytes_by_hand_at_other_settings(name, settings):
    (outcome,) = run_checks(
        method_under_test(getattr(methods, name), settings), [bytes_on_the_wire]
    )
    assert (outcome.verdict, outcome.detail.split(", ")[-1]) == ("passed", "as by hand formula"), (
        outcome.detail
    )


@pytest.mark.quick("SCAFFOLD-head", "FedDC-norm", "MoFedSAM-features.0.*")
@pytest.mark.parametrize("personal", ["norm", "head", "features.0.*"])
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedNova", "FedCM", "FedDC", "MoFedSAM"])
def test_bytes_of_methods_with_a_second_vector_are_of_what_travels(name, personal):
    subject = method_under_test(getattr(methods, name), {"personal": personal})
    bytes_by_hand, sent = run_checks(subject, [bytes_on_the_wire, broadcast])
    assert bytes_by_hand.detail.endswith("as by hand formula"), bytes_by_hand.detail
    assert (bytes_by_hand.verdict, sent.verdict) == ("passed", "passed"), sent.detail


def test_scaffold_with_a_personal_head_by_hand():
    """Of 2 688 values 1 024 weights and 4 biases of the classifier stay, of 2 632 trained ones
    too."""
    (outcome,) = run_checks(
        method_under_test(methods.SCAFFOLD, {"personal": "head"}), [bytes_on_the_wire]
    )
    travels, trained = 2688 - 1028, 2632 - 1028
    up, down = 4 * (travels + trained) + 19 + 15 + 14 + 13, 4 * (travels + trained) + 19 + 14 + 8
    assert f"{up} bytes up, {down} down, as by hand formula" in outcome.detail


def test_fedavg_by_hand():
    """2 572 weights of convolutions and classifier, 4 biases, 56 of BatchNorm and 56 of its
    statistics; headers 19, 15 and 14."""
    (outcome,) = run_checks(method_under_test(methods.FedAvg), [bytes_on_the_wire])
    up, down = 4 * (2572 + 4 + 56 + 56) + 19 + 15 + 14, 4 * (2572 + 4 + 56 + 56) + 19 + 14
    assert f"{up} bytes up, {down} down, as by hand formula" in outcome.detail


@pytest.mark.parametrize(
    ("top", "bottom", "error"),
    [("LIMIT = int('ten')", "", "'ten'"), ("", "self.table = dict(mu)", "'float' object")],
)
def test_a_bug_in_a_file_of_ones_own_is_no_bad_input(tmp_path, monkeypatch, top, bottom, error):
    """As with `fit`: it keeps its type and its traceback, and a wrong setting is a line still."""
    name = f"bug_{len(top)}_{len(bottom)}"
    (tmp_path / f"{name}.py").write_text(
        f"from fl_lightning import Method\n\n{top}\n\nclass Mine(Method):\n"
        "    def __init__(self, mu=0.1, **settings):\n        super().__init__(**settings)\n"
        f"        {bottom}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    if bottom:
        assert main(["check", "--model", f"{name}.Mine", "--settings", "{muu: 1}"]) == 2
    with pytest.raises((TypeError, ValueError), match=error) as found:
        main(["check", "--model", f"{name}.Mine"])
    assert found.traceback[-1].path == tmp_path / f"{name}.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--settings", "{muu: 0.1}"],
        ["--neutral", "{muu: 0.1}"],
        ["--settings", "{mu: -1}"],
    ],
)
def test_settings_that_it_does_not_know(arguments, capsys):
    assert main(["check", "--model", "FedProx", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "mu" in error


@pytest.mark.parametrize("argument", ["--settings", "--neutral"])
@pytest.mark.parametrize("name", ["network", "optimizer"])
def test_what_the_kit_sets_itself(argument, name, capsys):
    assert main(["check", "--model", "FedProx", argument, f"{{{name}: nothing}}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{argument} with {name}; the kit sets" in error


def test_a_server_that_distils_is_checked_on_one_thread_as_it_runs():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (outcome,) = run_checks(method_under_test(methods.FedKD), [server_reads_uploads_only])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert outcome.verdict == "passed", outcome.detail
