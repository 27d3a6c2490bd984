"""What docs/results says in words is what its reports hold.

In the README.md of a study's folder every number and every verdict is followed by where it stands
in that study's report.json, in a comment that nobody sees on the page:

    FedMPQ-KD ends 1.2<!-- levels[epochs=1].differences[FedMPQKD,FedMPQ].mean * 100 --> points above

Numbers in code, in links and in tables of code need none.
"""

import csv
import json
import re
import tarfile
from collections import Counter
from itertools import combinations
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from outcomes import rows_of
from places import DOCS

from callbacks import ByzantineClients
from fl_lightning.rng import stream
from fl_lightning.sampling import ServerView, Uniform

RESULTS = DOCS / "results"
CLAIM = re.compile(
    r"(?P<said>[-−+]?\d[\d.]*|[a-z]+(?: tested)?)(?:\*\*)?<!--\s*(?P<path>[^>]*?)\s*-->"
)
STEP = re.compile(r"(\w+)|\[([^\]]+)\]|\.")
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d.]*(?![\w])")
WITH_MARGIN = re.compile(r"(?:criteria|premises)\[([^\]]*)\].*\.(?:difference|low|high)\b")
WITHOUT_CLAIM = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|\S*<!--.*?-->", re.DOTALL)


def value_at(document, path):
    """What stands at ``criteria[gain].levels[epochs=1].difference * 100``: keys, and in brackets a
    key that is no word, or what tells an entry of a list from the others: its name or criterion,
    its levels, the two methods that it compares, or ``only`` where there is one."""
    path, _, factor = path.partition(" * ")
    for word, bracket in (match.groups() for match in STEP.finditer(path)):
        if word or isinstance(document, dict):
            document = document[word or bracket] if (word or bracket) else document
        elif bracket:
            (document,) = [entry for entry in document if is_named(entry, bracket)]
    return document * float(factor) if factor else document


def is_named(entry, name):
    if name == "only":
        return True
    if name == entry.get("name"):  # a run's has an = in it
        return True
    if "=" in name and "levels" in entry and isinstance(entry["levels"], dict):
        return entry["levels"] == dict(one.split("=") for one in name.split(";"))
    if "a" in entry and "b" in entry:
        return name == f"{entry['a']},{entry['b']}"
    return name == entry.get("criterion")


def wrong_claims(text, document):
    """Every claim of the text that the document does not hold, and every number without one."""
    wrong = [
        f"{match['path']}: holds the criterion's margin"
        for match in CLAIM.finditer(text)
        if holds_margin(document, match["path"])
    ]
    for match in CLAIM.finditer(text):
        said, found = match["said"].replace("−", "-"), value_at(document, match["path"])
        digits = len(said.partition(".")[2])
        shown = found if isinstance(found, str) else f"{found:.{digits}f}"
        if shown.lstrip("-") == "0" + "." * bool(digits) + "0" * digits:
            shown = shown.lstrip("-")
        if said.lstrip("+") != shown:
            wrong.append(f"{match['path']}: said {said}, is {shown}")
    return wrong + [
        f"no source: {number}" for number in NUMBER.findall(WITHOUT_CLAIM.sub("", text))
    ]


def holds_margin(document, path):
    """Whether a path is to left - right of a criterion that compares with a number, which is in it:
    what is said of methods is the other side. Of ``p(A, B)`` it is A - B."""
    if (found := WITH_MARGIN.match(path)) is None:
        return False
    (entry,) = [one for one in document[path.partition("[")[0]] if is_named(one, found[1])]
    sides = re.split("[<>]=?", entry["criterion"])
    numbers = [float(side) for side in sides if re.fullmatch(r"\s*[-+]?\d[\d.e-]*\s*", side)]
    return not entry["criterion"].startswith("p(") and any(numbers)


STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/report.json"))


@pytest.mark.parametrize("study", STUDIES)
def test_what_the_results_say_is_in_the_report(study):
    text = (RESULTS / study / "README.md").read_text().partition("\n")[2]
    assert CLAIM.search(text)
    assert wrong_claims(text, json.loads((RESULTS / study / "report.json").read_text())) == []


@pytest.mark.parametrize("study", STUDIES)
def test_published_mean_ranks_are_those_of_the_runs(study):
    report = json.loads((RESULTS / study / "report.json").read_text())
    sign = -1 if report["higher_is_better"] else 1
    over_settings = []
    for level in report["levels"]:
        cells: dict[str, dict[int, float]] = {}
        for run in report["runs"]:
            if run["levels"] == level["levels"]:
                cell = cells.setdefault(run["method"], {})
                cell[run["seed"]] = round(sign * run["metrics"][report["metric"]], 12)
        ranks = ranks_of_all(cells)
        over_settings.append(ranks)
        said = {one["label"]: one["mean_rank"] for one in level.get("places", [])}
        means = {label: fmean(ranks[label].values()) for label in said}
        assert said == pytest.approx(means, abs=1e-9)
    for label, said in (report.get("overall") or {}).items():
        means = [fmean(ranks[label].values()) for ranks in over_settings]
        assert said["mean_rank"] == pytest.approx(fmean(means), abs=1e-9)


def ranks_of_all(cells):
    """The rank of each method in each seed that all have, those that tie at their mean place."""
    seeds = set.intersection(*({*cell} for cell in cells.values()))
    found = {label: {} for label in cells}
    for seed in seeds:
        values = [cell[seed] for cell in cells.values()]
        for label, cell in cells.items():
            before = sum(one < cell[seed] for one in values)
            found[label][seed] = before + (1 + values.count(cell[seed])) / 2
    return found


@pytest.mark.parametrize("study", [path.parent.name for path in RESULTS.glob("*/runs.tar.xz")])
def test_archived_runs_are_those_of_the_report(study):
    """Whoever unpacks them can add seeds: they are finished, and of what was registered."""
    report = json.loads((RESULTS / study / "report.json").read_text())
    with tarfile.open(RESULTS / study / "runs.tar.xz") as archive:
        texts = {one.name: archive.extractfile(one).read().decode() for one in archive}
    found = {
        name.split("/")[1]: json.loads(text)
        for name, text in texts.items()
        if name.endswith("/metadata.json")
    }
    weights = {name: one["weights_sha256"] for name, one in found.items()}
    elsewhere = {
        label
        for published in report.get("published", [])
        for label in json.loads((RESULTS / published["study"] / "report.json").read_text())[
            "methods"
        ]
    }
    own = [run for run in report["runs"] if run["method"] not in elsewhere]
    assert weights == {run["name"]: run["weights_sha256"] for run in own}
    assert {one["status"] for one in found.values()} == {"finished"}
    entries = json.loads(texts[f"{study}/registration.json"])["entries"]
    amended = {"leaderboard_brief", "leaderboard_brief_rest"}  # three seeds were registered first
    assert (len(entries) > 1) == (study in amended)
    known = {entry["sha256"][:16] for entry in entries}
    assert {one["tags"]["registration"] for one in found.values()} == known
    assert not any(re.search(r"/(work|tmp|home|root)/", text) for text in texts.values())


def refused_uploads(study):
    """How many uploads of each archived run were refused."""
    return summed(study, "clients/rejected")


def ends_of(report, method, levels):
    """What a method's seeds end with at some levels in the primary metric, the least first."""
    return sorted(
        run["metrics"][report["metric"]]
        for run in report["runs"]
        if (run["method"], run["levels"]) == (method, levels)
    )


def rounds_of(study):
    """The rows of each archived run's metrics, by its name."""
    with tarfile.open(RESULTS / study / "runs.tar.xz") as archive:
        tables = {
            one.name.split("/")[1]: archive.extractfile(one).read().decode().splitlines()
            for one in archive
            if one.name.endswith("/metrics.csv")
        }
    return {name: [*csv.DictReader(lines)] for name, lines in tables.items()}


def summed(study, metric):
    """The sum of a metric over the rounds of each archived run."""
    return {
        name: sum(float(row[metric]) for row in rows) for name, rows in rounds_of(study).items()
    }


def test_where_uploads_of_the_second_experiment_on_fashion_were_refused():
    counts = refused_uploads("exp2_fashion_brief")
    assert len(counts) == 320
    assert {name: count for name, count in counts.items() if count} == {
        "FedMPQ lb=0-noise=on-seed15": 6,
        "FedMPQ lb=0-noise=off-seed15": 6,
    }


def test_what_is_said_of_the_claim_by_epochs():
    counts = refused_uploads("exp1_fashion_epochs")
    assert len(counts) == 360
    assert {name: count for name, count in counts.items() if count} == {
        **{f"FedMPQ scaled-epochs=2-seed{seed}": 1 for seed in (14, 17, 18, 20)},
        **{f"FedMPQ-epochs=5-seed{seed}": 1 for seed in (5, 7)},
        "FedMPQ-epochs=5-seed15": 110,  # of 120
    }
    report = json.loads((RESULTS / "exp1_fashion_epochs" / "report.json").read_text())
    found = {one["levels"]["epochs"]: one for one in report["levels"]}
    for one in found.values():
        first = one["places"][0]
        assert (first["label"], first["alike"]) == ("FedMPQKD lb=0", [])
    ends = ends_of(report, "FedMPQ scaled", {"epochs": "2"})
    assert len(ends) == 20
    assert ends[0] < 0.105
    assert 0.595 < ends[-1] < 0.605
    criteria = {one["name"]: one for one in report["criteria"]}
    by_epochs = {
        name: {one["levels"]["epochs"]: one for one in criteria[name]["levels"]}
        for name in ("larger step", "bytes")
    }
    assert {epochs: one["decision"] for epochs, one in by_epochs["larger step"].items()} == {
        "1": "fails",
        "2": "undecided",
        "5": "fails",
    }
    bytes_by_epochs = by_epochs["bytes"]
    assert bytes_by_epochs["1"]["decision"] == "holds"
    assert all(bytes_by_epochs[e]["left"] > bytes_by_epochs[e]["right"] for e in "25")
    (last,) = criteria["more with one epoch, last step"]["levels"]
    assert last["seeds"] == [seed for seed in range(2, 22) if seed != 15]
    assert last["high"] < 0


def test_what_is_said_of_the_claim_by_rates():
    report = json.loads((RESULTS / "exp1_fashion_epochs_rates" / "report.json").read_text())
    assert {run["seed"] for run in report["runs"]} == {2, 3, 4}
    accuracy = {
        (*one["levels"].values(), label): found["metrics"]["final/last5_accuracy"]["mean"] * 100
        for one in report["levels"]
        for label, found in one["methods"].items()
    }
    rates, rivals = ("0.005", "0.041", "0.074"), ("FedMPQ", "FedMPQKD", "FedMPQ scaled")
    for epochs in "125":
        gains = [
            accuracy[epochs, rate, "FedMPQKD"] - accuracy[epochs, rate, "FedMPQ"] for rate in rates
        ]
        assert gains[0] > 0 > gains[2]
        assert (gains[1] < 0) == (epochs in "25")
        best = [max(accuracy[epochs, rate, label] for rate in rates) for label in rivals]
        assert 1.5 < best[1] - best[0] < 3.5
        assert best[2] > max(best[:2])
    own = [max(rates, key=lambda rate: accuracy[e, rate, "FedMPQ"]) for e in "125"]
    assert own == ["0.041", "0.041", "0.005"]
    assert 1.5 < accuracy["5", "0.005", "FedMPQKD"] - accuracy["5", "0.005", "FedMPQ"] < 2.5
    for label in rivals:
        assert max(rates, key=lambda rate: accuracy["5", rate, label]) == "0.005"
    runs = {
        name: {
            (
                run["method"],
                run["levels"]["epochs"],
                run["levels"].get("rate"),
                run["seed"],
            ): run["metrics"]["final/last5_accuracy"]
            for run in json.loads((RESULTS / name / "report.json").read_text())["runs"]
        }
        for name in ("exp1_fashion_epochs", "exp1_fashion_epochs_rates")
    }
    tuned = json.loads((RESULTS / "exp1_fashion_epochs" / "report.json").read_text())["tuned"]
    shared = 0
    for (label, epochs, rate, seed), value in runs["exp1_fashion_epochs_rates"].items():
        chosen = tuned["epochs"][epochs]["chosen"][label]["settings"]
        if f"{chosen['model.optimizer.init_args.lr']:.3f}" == rate:
            assert runs["exp1_fashion_epochs"][label, epochs, None, seed] == value
            shared += 1
    assert shared == 27


def test_where_uploads_of_the_leaderboard_were_refused():
    counts = refused_uploads("leaderboard_brief")
    refused = {name for name, count in counts.items() if count}
    assert (len(refused), len(counts)) == (71, 660)
    settings = Counter(re.search(r"setting=(\w+)", name)[1] for name in refused)
    assert settings == {"labels2": 35, "dirichlet01": 17, "attackers": 17, "stress": 2}
    kin = ("FedAvg", "FedProx", "QFedAvg")
    assert sum(name.startswith(kin) for name in refused) == 44


def test_what_is_said_of_the_leaderboard():
    report = json.loads((RESULTS / "leaderboard_brief" / "report.json").read_text())
    found = {one["levels"]["setting"]: one for one in report["levels"]}
    winners = {setting: one["winner"] for setting, one in found.items() if one["winner"]}
    assert winners == {"dirichlet01": "FedPer", "features": "FedPer"}
    seven = ["FedDyn", "FedProx", "FedAvg MultiKrum", "QFedAvg", "FedAvg", "SCAFFOLD", "FedAdam"]
    alike = {label: report["overall"][label]["alike"] for label in seven}
    apart = [(a, b) for a, b in combinations(seven, 2) if b not in alike[a]]
    assert len(apart) == 5
    pairs = {
        setting: {(pair["a"], pair["b"]): pair["p_holm"] for pair in one["differences"]}
        for setting, one in found.items()
    }
    assert {len(one) for one in pairs.values()} == {55}
    significant = {setting for setting, one in pairs.items() if one["FedMPQ", "FedMPQKD"] < 0.05}
    assert significant == {"labels2"}
    rivals = {
        (rival, setting): found[setting]["methods"][rival]["metrics"]["final/accuracy"]["mean"]
        for rival in ("FedAvg", "FedDyn", "FedLC")
        for setting in ("dirichlet01", "labels2")
    }
    better = {
        key for key in rivals if key[0] != "FedAvg" and pairs[key[1]]["FedAvg", key[0]] < 0.05
    }
    assert better == {("FedDyn", "labels2"), ("FedLC", "dirichlet01")}
    assert all(value >= rivals["FedAvg", setting] for (_, setting), value in rivals.items())
    dropped = summed("leaderboard_brief", "clients/dropped")
    assert {name for name, count in dropped.items() if count} == {
        name for name in dropped if "setting=stress" in name
    }
    attacked = ends_of(report, "FedAvg", {"setting": "attackers"})
    assert len(attacked) == 10
    assert attacked[4] < 0.11
    assert attacked[5] > 0.5


def test_what_is_said_of_the_rest_of_the_leaderboard():
    report = json.loads((RESULTS / "leaderboard_brief_rest" / "report.json").read_text())
    published = json.loads((RESULTS / "leaderboard_brief" / "report.json").read_text())
    assert report["seeds"] == [*range(10)]
    assert [one["winner"] for one in report["levels"]] == [None] * 6
    assert {len(one["differences"]) for one in report["levels"]} == {630}
    told = {  # the better one first
        one["levels"]["setting"]: {
            (pair["a"], pair["b"]) if pair["mean"] > 0 else (pair["b"], pair["a"])
            for pair in one["differences"]
            if pair["p_holm"] < 0.05
        }
        for one in report["levels"]
    }
    assert [len(one) for one in told.values()] == [438, 240, 278, 359, 122, 107]
    ranks = {label: one["mean_rank"] for label, one in report["overall"].items()}
    assert len(ranks) == 36
    assert {*published["methods"]} < {*ranks}
    names = "APFL FedRoD FedProto FedRep FedBABU FedPer FedALA Ditto FineTune"
    own = {*names.split()}
    order = sorted(ranks, key=ranks.get)
    assert {*order[:9]} == own
    assert {*order[-2:]} == {"FedMPQ", "FedMPQKD"}
    own.add("LGFedAvg")
    one_model = [label for label in order if label not in own]
    assert one_model[:3] == ["FedAvg median", "FedNTD", "FedLC"]
    assert len(one_model) == 26
    mixed = [(a in own) != (b in own) for one in told.values() for a, b in one]
    assert (len(mixed), sum(mixed)) == (1544, 925)
    of_own = {name: {pair for pair in one if {*pair} <= own} for name, one in told.items()}
    assert {name: len(one) for name, one in of_own.items()} == {
        "iid": 26,
        "dirichlet01": 1,
        "labels2": 6,
        "features": 23,
        "stress": 3,
        "attackers": 1,
    }
    below = ["Ditto", "FedALA", "APFL", "FedProto", "LGFedAvg", "FedBABU"]
    assert all((a, b) in told["iid"] for a in ("FineTune", "FedRoD", "FedPer") for b in below)
    above = {
        name: {a for a, b in one if b == "FedAvg" and a not in own} for name, one in told.items()
    }
    assert {name: sorted(one) for name, one in above.items() if one} == {
        "iid": ["FedExP"],
        "labels2": ["FedCM", "FedDyn", "FedSpeed", "MoFedSAM"],
    }
    behind = {
        name: {b for a, b in one if a == "FedAvg" and b not in own} for name, one in told.items()
    }
    assert {name: sorted(one) for name, one in behind.items() if one} == {
        "iid": [
            "FedAdagrad",
            "FedAdam",
            "FedAvgM",
            "FedCM",
            "FedDC",
            "FedDyn",
            "FedMPQ",
            "FedMPQKD",
            "FedSAM",
            "FedSpeed",
            "FedYogi",
            "MoFedSAM",
            "SCAFFOLD",
        ],
        "features": [
            "FedAdagrad",
            "FedAvg MultiKrum",
            "FedCM",
            "FedDyn",
            "FedMPQ",
            "FedMPQKD",
            "MoFedSAM",
        ],
    }
    apart = {
        frozenset((label, other))
        for label, one in report["overall"].items()
        for other in ranks
        if other not in (label, *one["alike"])
    }
    assert (len(apart), sum(len(pair & own) == 1 for pair in apart)) == (392, 234)
    of_fedavg = [label for label in one_model if frozenset((label, "FedAvg")) in apart]
    assert of_fedavg == ["FedAvg median", "FedNTD", "FedLC", "FedAvgM", "FedMPQKD", "FedMPQ"]
    assert ranks["FedLC"] <= ranks["FedAvg"] <= ranks["FedAvgM"]
    behind_others = {tuple(sorted(pair, key=ranks.get)) for pair in apart if pair <= own}
    assert behind_others == {
        (a, b)
        for b, others in {
            "FedBABU": ["APFL", "Ditto", "FedALA", "FedProto", "FedRoD"],
            "LGFedAvg": ["APFL", "Ditto", "FedALA", "FedPer", "FedProto", "FedRoD"],
            "Ditto": ["FedALA"],
        }.items()
        for a in others
    }
    last = [sum(label in pair for pair in apart) for label in ("FedMPQ", "FedMPQKD")]
    assert last == [33, 33]
    means = {
        (label, one["levels"]["setting"]): found["metrics"]["final/accuracy"]["mean"]
        for one in report["levels"]
        for label, found in one["methods"].items()
    }
    assert max(ranks, key=lambda label: means[label, "iid"]) == "FedExP"
    for setting, count in {"labels2": 9, "attackers": 9}.items():
        ends = sorted(ends_of(report, "FedExP", {"setting": setting}))
        assert ends[count - 1] == pytest.approx(0.1, abs=0.001)
        assert ends[count:] == [] or ends[count] > 0.101
    assert min(ranks, key=lambda label: means[label, "dirichlet01"]) == "FedAvgM"
    better = [a for a, b in told["dirichlet01"] if b == "FedAvgM" and a not in own]
    assert len(better) == 7
    few = sorted(one_model, key=lambda label: -means[label, "labels2"])[:4]
    assert few == ["FedSpeed", "FedCM", "MoFedSAM", "FedDyn"]
    assert all(("FedAvg", label) in told["iid"] for label in few)
    robust = sorted(one_model, key=lambda label: -means[label, "attackers"])[:2]
    assert robust == ["FedAvg median", "FedAvg MultiKrum"]
    beaten = ["FedExP", "AQFL", "FedCM", "MoFedSAM", "FedAdagrad", "FedMPQKD", "FedMPQ"]
    assert beaten == [
        label for label in order if all((one, label) in told["attackers"] for one in robust)
    ]
    ends = ends_of(report, "FedAvg", {"setting": "attackers"})
    assert max(ends) - min(ends) > 0.4
    dropped = summed("leaderboard_brief_rest", "clients/dropped")
    assert all(count for name, count in dropped.items() if "setting=stress" in name)
    for label in ("FedPQ", "AQFL"):
        assert abs(means[label, "iid"] - means["FedAvg", "iid"]) < 0.005
    refused = {name for name, count in refused_uploads("leaderboard_brief_rest").items() if count}
    assert len(refused) == 190
    settings = Counter(re.search(r"setting=(\w+)", name)[1] for name in refused)
    assert settings == {"attackers": 46, "dirichlet01": 57, "labels2": 81, "stress": 6}
    assert sum(name.startswith("LGFedAvg") for name in refused) == 17
    unused = Counter(
        name.partition("-")[0]
        for name, rows in rounds_of("leaderboard_brief_rest").items()
        if any(float(row["clients/trained"]) == 0 for row in rows)
    )
    assert unused == {
        "AQFL": 2,
        "FedACG": 2,
        "FedAvgM": 3,
        "FedExP": 5,
        "FedNTD": 2,
        "FedRep": 1,
        "FedSAM": 2,
        "LGFedAvg": 1,
    }


def test_hostile_clients_are_sampled_in_every_run_of_the_leaderboards_with_attackers():
    among, found = np.arange(20), []
    for seed in range(10):
        context = SimpleNamespace(seed=seed, data=SimpleNamespace(sizes=np.ones(20)))
        hostile = ByzantineClients(clients=0.1).attackers(context)
        views = (ServerView(seed, round, 0, among, stream, len) for round in range(1, 9))
        cohorts = [Uniform().draw(view, among, 10) for view in views]
        found.append(sum(not hostile.isdisjoint(cohort) for cohort in cohorts))
    assert (min(found), max(found)) == (4, 7)


def test_distillation_is_ahead_in_all_seeds_but_one_of_the_second_experiment_on_fashion():
    runs = json.loads((RESULTS / "exp2_fashion_brief" / "report.json").read_text())["runs"]
    found: dict[tuple[str, int], dict[str, float]] = {}
    for run in runs:
        cell = found.setdefault((run["levels"]["noise"], run["seed"]), {})
        cell[run["method"]] = run["metrics"]["final/last5_accuracy"]
    assert len(found) == 40
    behind = {key for key, cell in found.items() if cell["FedMPQKD"] <= cell["FedMPQ"]}
    assert behind == {("on", 21), ("off", 21)}


def test_every_run_of_fedvemoe_ends_with_four_experts_and_one_for_each_cluster():
    runs = json.loads((RESULTS / "vemoe_embedded" / "report.json").read_text())["runs"]
    found = [run["metrics"] for run in runs if run["method"] == "FedVEMoE"]
    assert len(found) == 15
    assert {(one["experts/active"], one["router/purity"]) for one in found} == {(4.0, 1.0)}
    # seed by seed, in each the three levels
    since = [int(one["target/rounds_to_purity"]) for one in found]
    assert (min(since), max(since)) == (8, 18)
    by_the_tenth = [sum(round <= 10 for round in since[level::3]) for level in range(3)]
    assert by_the_tenth == [3, 2, 2]


def test_what_is_said_of_the_rivals_of_a_ladder():
    report = json.loads((RESULTS / "hest_ladder_rivals" / "report.json").read_text())
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in report["runs"]:
        found.setdefault(run["method"], {})[run["seed"]] = run["metrics"]
    assert {len(runs) for runs in found.values()} == {10}
    each = [one for runs in found.values() for one in runs.values()]
    assert all(one["energy/over_budget"] == one["energy/refused"] == 0 for one in each)
    joules = {
        label: [round(1000 * one["energy/joules"]) for one in runs.values()]
        for label, runs in found.items()
    }
    assert {*joules["Enumeration"]} == {204}
    assert sorted(joules["Ladder"]) == [190] * 5 + [204] * 5
    same = [
        seed
        for seed, one in found["Random"].items()
        if one["test/perplexity"] == found["Ladder"][seed]["test/perplexity"]
    ]
    assert sorted(same) == [8, 10]
    (controller,) = [one for one in report["criteria"] if one["name"] == "a controller pays"]
    part = controller["levels"][0]["parts"][0][1]
    assert (round(part["low"], 3), round(part["high"], 3)) == (-0.005, 0.016)


def test_the_page_on_three_budgets_has_the_numbers_of_its_clients():
    page = (RESULTS / "hest_devices.md").read_text()
    with (RESULTS / "hest_devices" / "clients.csv").open() as file:
        clients = [row for row in csv.DictReader(file) if row["round"] == "44"]
    assert len(clients) == 6
    found: dict[float, list[tuple[float, float, float]]] = {}
    for row in clients:
        assert float(row["energy/over_budget"]) == float(row["energy/refused"]) == 0
        columns = ("granted", "spent", "joules", "joules_high")
        joules = " | ".join(f"{1e3 * float(row[f'energy/{name}']):.0f}" for name in columns)
        id, perplexity, exact = (
            int(row["client"]),
            float(row["perplexity"]),
            float(row["exact_match"]),
        )
        budget = (0.6, 0.8, 1.0)[id % 3]
        assert f"| {id} | {budget} | {joules} | {perplexity:.2f} | {100 * exact:.0f} |\n" in page
        share = float(row["energy/joules"]) / float(row["energy/joules_high"])
        found.setdefault(budget, []).append((round(share, 2), round(perplexity, 2), exact))
    assert {share for share, *_ in found[0.6]} == {0.54}
    assert {share for share, *_ in found[0.8]} == {0.77}
    ranges = {budget: sorted(one[1] for one in each) for budget, each in found.items()}
    assert ranges == {0.6: [2.16, 2.55], 0.8: [1.21, 1.42], 1.0: [1.24, 1.27]}
    assert max(exact for *_, exact in found[0.6]) < 0.1
    assert (
        min(int(row["val_examples"]) for row in clients),
        max(int(row["val_examples"]) for row in clients),
    ) == (25, 48)


def test_reports_name_no_folder_of_a_machine():
    for path in sorted(RESULTS.glob("*/report.*")):
        text = path.read_text()
        assert {*re.findall(r"default_root_dir=([^\s\"']*)", text)} <= {"runs"}, path
        assert not re.search(r"(?<![\w.])/(?:dev|home|root|tmp|work)/", text), path


def front(study, quality, sign):
    """Contenders whose mean joules and quality no other has or betters, by the study's levels."""
    report = json.loads((RESULTS / study / "report.json").read_text())
    means = {
        label
        + (level["levels"]["budget"] if label == "Ladder" and study == "hest_ladder" else ""): (
            found["metrics"]["energy/joules"]["mean"],
            sign * found["metrics"][quality]["mean"],
        )
        for level in report["levels"]
        for label, found in level["methods"].items()
    }
    return {
        label
        for label, (joules, loss) in means.items()
        if not any(
            other != (joules, loss) and other[0] <= joules and other[1] <= loss
            for other in means.values()
        )
    }


def test_the_fronts_are_those_that_the_pages_name():
    ladders = {f"Ladder{budget}" for budget in ("0.5", "0.6", "0.8", "0.9")}
    assert front("hest_ladder", "test/perplexity", 1) == {"One block", "All on", *ladders}
    by_answers = {"One block", "Three blocks", "All on", *ladders}
    assert front("hest_ladder", "test/exact_match", -1) == by_answers
    rivals = {"Gates", "Ladder", "Enumeration", "All on"}
    assert front("hest_ladder_rivals", "test/perplexity", 1) == rivals
    assert front("hest_ladder_rivals", "test/exact_match", -1) == rivals


def test_the_page_on_ladders_has_the_differences_of_its_seeds():
    page = (RESULTS / "hest_ladder" / "README.md").read_text()
    runs = json.loads((RESULTS / "hest_ladder" / "report.json").read_text())["runs"]
    whole = {run["seed"]: run["metrics"] for run in runs if run["method"] == "All on"}
    budgets = ("0.9", "0.8", "0.6", "0.5")
    for budget in budgets:
        ladders = {
            run["seed"]: run["metrics"]
            for run in runs
            if run["method"] == "Ladder" and run["levels"]["budget"] == budget
        }
        assert ladders.keys() == whole.keys() == {*range(1, 11)}
        cells = []
        for name, unit, measure in (
            ("test/perplexity", "%", lambda own, other: 100 * (own / other - 1)),
            ("test/exact_match", "points", lambda own, other: 100 * (own - other)),
        ):
            found = [measure(ladders[seed][name], whole[seed][name]) for seed in whole]
            mean = sum(found) / len(found)
            cells.append(
                f"`{mean:+.1f} {unit}` (`{min(found):+.1f}` to `{max(found):+.1f}`)".replace(
                    "-", "−"
                )
            )
        (row,) = (line for line in page.split("\n") if line.startswith(f"| `{budget}` |"))
        assert [cell.strip() for cell in row.split("|")][3:6:2] == cells
        levels = sorted(
            (one["energy/levels"], round(one["energy/least_share"], 2)) for one in ladders.values()
        )
        if budget == "0.8":
            assert levels == [(3, 0.77)] * 5 + [(4, 0.72)] * 5
        if budget == "0.9":
            assert levels == [(3, 0.77)] * 7 + [(3, 0.89)] * 3
        if budget == "0.6":
            two = {run["seed"]: run["metrics"] for run in runs if run["method"] == "Two blocks"}
            for seed, one in ladders.items():
                assert one["energy/joules"] == pytest.approx(two[seed]["energy/joules"])
                assert one["test/perplexity"] < two[seed]["test/perplexity"]


def test_the_page_on_smollm2_has_the_numbers_of_its_runs():
    page, folder = (RESULTS / "hest_smollm2.md").read_text(), RESULTS / "hest_smollm2"
    last, all_on, ladder = (
        rows_of(folder / f"{name}.csv") for name in ("metrics", "all_on", "ladder")
    )
    end, whole = last[-1], float(all_on[-1]["test/perplexity"])
    assert float(end["energy/over_budget"]) == float(end["energy/refused"]) == 0
    joules = [float(end[f"energy/{name}"]) for name in ("joules", "joules_high")]
    assert (
        f"| the ladder's last level | {joules[0]:.1f} | {float(end['test/perplexity']):.1f} |\n"
        in page
    )
    assert f"rounds | {joules[1]:.1f} | {whole:.1f} |\n" in page
    assert round(joules[0] / joules[1], 2) == round(8 / 9, 2)
    assert round(100 * (float(end["test/perplexity"]) / whole - 1)) == 17
    losses = [float(level["validation_loss"]) for level in ladder]
    assert [round(losses[level] - losses[0], 2) for level in (3, 5)] == [0.03, 0.11]
    assert round(1 - float(ladder[3]["energy_of_a_token"]), 2) == 0.08
    gone = ladder[-1]["left_out"].split()
    assert (len(ladder[3]["left_out"].split()), len(gone)) == (6, 9)
    assert sum("self_attn" in name for name in gone) == 7


def test_secure_runs_are_the_plain_ones_and_private_ones_never_move():
    runs = json.loads((RESULTS / "vemoe_protected" / "report.json").read_text())["runs"]
    weights = {(run["method"], run["seed"]): run["weights_sha256"] for run in runs}
    plain, secure = (
        [weights[method, seed] for seed in range(6, 11)]
        for method in ("FedVEMoE", "FedVEMoE secure")
    )
    assert plain == secure
    assert len(set(plain)) == 5
    private = {
        weights[f"FedVEMoE private {noise}", seed] for noise in (1, 4) for seed in range(6, 11)
    }
    assert len(private) == 1


def test_what_is_said_of_all_runs_on_equal_devices():
    """Nobody is late at the deadline: a run with it is the run that waits."""
    runs = json.loads((RESULTS / "time_embedded" / "report.json").read_text())["runs"]
    weights = {
        (run["method"], run["seed"]): run["weights_sha256"]
        for run in runs
        if run["levels"]["devices"] == "equal"
    }
    late = {one: found for one, found in weights.items() if one[0].endswith(" deadline")}
    assert {label for label, _ in late} == {
        f"{method} deadline" for method in ("FedAvg", "FedAdam", "SCAFFOLD", "FedMPQKD")
    }
    assert len(late) == 4 * 5
    for (label, seed), found in late.items():
        assert weights[label.removesuffix(" deadline"), seed] == found


def test_a_wrong_sentence_is_found():
    document = {
        "criteria": [
            {
                "name": "gain",
                "criterion": "accuracy(A) - accuracy(B) >= 0.01",
                "verdict": "not tested",
                "levels": [{"levels": {"epochs": "1"}, "left": 0.0123, "difference": 0.0023}],
            },
            {"criterion": "a < b", "verdict": "holds", "levels": []},
        ],
        "levels": [
            {"levels": {"epochs": "1"}, "differences": [{"a": "A", "b": "B", "mean": -0.5}]}
        ],
        "seeds": [1, 2],
    }
    right = (
        "It is **not tested**<!-- criteria[gain].verdict -->: 1.2<!-- criteria[gain].levels[epochs=1].left * 100"
        " --> points, −0.50<!-- levels[epochs=1].differences[A,B].mean -->; it holds<!-- criteria[a < b].verdict -->"
        " for `--jobs 2`."
    )
    assert wrong_claims(right, document) == []
    assert len(wrong_claims(right.replace("1.2", "1.3"), document)) == 1
    assert len(wrong_claims(right.replace("not tested**", "holds**"), document)) == 1
    margin = "It is 0.2<!-- criteria[gain].levels[epochs=1].difference * 100 -->."
    assert [one.partition(": ")[2] for one in wrong_claims(margin, document)] == [
        "holds the criterion's margin"
    ]
    document["criteria"][0]["criterion"] = "accuracy(A) - accuracy(B) >= 0"
    assert wrong_claims(margin, document) == []
    assert wrong_claims(right + " In 3 of 4 runs.", document) == ["no source: 3", "no source: 4"]


def test_what_holds_of_the_supernet_holds_by_its_interval_too():
    """Its criteria were judged as counts, and compare accuracies."""
    report = json.loads((RESULTS / "supernet" / "report.json").read_text())
    judged = [
        part
        for criterion in report["criteria"]
        if criterion["verdict"] == "holds"
        for level in criterion["levels"]
        for part in ([found for _, found in level["parts"]] or [level])
    ]
    assert len(judged) == 6
    assert all(part["low"] > 0 for part in judged)
