"""What a report is for a paper and for a browser: LaTeX that compiles and fits, one HTML file that
fetches nothing."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from compared import GRID, OFF, ON, A, B, comparison_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic_runs import make_run, make_study

from callbacks.figures.bit_width_figure import bit_width_figure
from callbacks.figures.option_figure import option_figure
from callbacks.meters.gradient_norms import gradient_figure
from fl_lightning.__main__ import main
from fl_lightning.study.report import compare as command
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.page import page

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")

DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs,graphicx}
\begin{document}
\input{tables.tex}\input{timings.tex}
\end{document}
"""


def study(
    root: Path, labels=("FedAvg", "FedMPQKD with a_long & odd name, 50 %", "[C]"), **history
) -> Path:
    """Three methods of which the second is the best in accuracy and the last in nothing; bits are
    32 in all."""
    for place, label in enumerate(labels):
        for seed in range(3):
            own = {"bits/average": 32.0, "upload": 1_000_000 * (1 + place), **history}
            make_run(root / "study", label, seed, 0.8 + 0.01 * seed + 0.05 * (place == 1), **own)
    return root


def tabulars(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table; every table is closed, and all its rows have as many cells as
    columns."""
    found = []
    for part in text.split(r"\begin{table}")[1:]:
        body, end, _ = part.partition(r"\end{table}")
        assert end
        assert body.count("{") - body.count(r"\{") == body.count("}") - body.count(r"\}")
        columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", body)[1]
        top, middle, bottom = (body.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom"))
        lines = [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in
                 (body[top:middle] + body[middle:bottom]).splitlines() if line.endswith(r" \\")]  # fmt: skip
        assert {len(line) for line in lines} == {len(columns)}
        assert r"\caption{" in body
        assert r"\label{" in body
        found.append((lines[0], lines[1:]))
    return found


def test_tables_on_paper_have_what_differs_in_short_with_the_best_in_bold(tmp_path):
    compare("study", tmp_path / "out", study(tmp_path / "runs"))
    text = (tmp_path / "out/tables.tex").read_text()
    (header, rows), *_ = tabulars(text)
    plain = [
        re.sub(r"\\shortstack\[.\]\{(.*)\}", r"\1", cell).replace(r" \\ ", " ") for cell in header
    ]
    assert plain[:3] == ["method", "accuracy, last five (\\%)", "accuracy, last round (\\%)"]
    assert "up (kB)" in plain
    # equal in all rows
    assert not [name for name in plain if "bits" in name or "seeds" in name or "ECE" in name]
    assert all(
        len(line) <= 16
        for cell in header
        for line in re.sub(r"\\shortstack\[.\]|[{}]", "", cell).split(r" \\ ")
    )
    assert "over 3 seeds; the best mean is bold" in text
    bold = {
        row[0]: [name for name, cell in zip(plain, row, strict=True) if r"\textbf" in cell]
        for row in rows
    }
    assert list(bold) == [r"FedMPQKD with a\_long \& odd name, 50 \%", "FedAvg", "{[}C]"]
    assert bold["FedAvg"] == ["up (kB)", "down (kB)", "all rounds (MB)"]  # the least bytes
    assert bold["{[}C]"] == []
    assert len(re.findall(r"\\label\{(.*)\}", text)) == len({*re.findall(r"\\label\{(.*)\}", text)})


def test_columns_caption_and_label_are_as_asked(tmp_path, capsys):
    root = study(tmp_path / "runs")
    args = ["compare", "--study", "study", "--root", str(root), "--out"]
    own = [
        "--columns",
        "accuracy,bits/average, upload",
        "--caption",
        r"What $\mu$ does",
        "--label",
        "tab:main",
    ]
    assert main([*args, str(tmp_path / "out"), *own]) == 0
    text = (tmp_path / "out/tables.tex").read_text()
    (header, rows), *_ = tabulars(text)
    assert len(header) == 4
    assert "bits per" in header[2]  # asked for, though all are equal
    assert rows[0][2] == r"32.00 $\pm$ 0.00"
    assert r"\caption{What $\mu$ does}" in text
    assert re.findall(r"\\label\{(.*)\}", text) == [
        "tab:main",
        "tab:main-places",
        "tab:main-differences",
    ]
    capsys.readouterr()
    for flags, said in (
        (["--columns", "acuracy"], "--columns acuracy; no run has this metric; write "),
        (
            ["--columns", "ece,,upload"],
            "--columns ece,,upload; it is names of metrics with commas between them",
        ),
        (["--label", "my label"], "--label my label; a label has letters, digits and"),
    ):
        assert main([*args, str(tmp_path / "refused"), *flags]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "refused").exists()


def test_levels_of_a_grid_have_tables_and_labels_of_their_own(tmp_path):
    make_study(tmp_path / "runs", {"A": {ON: A, OFF: B}, "B": {ON: B, OFF: A}}, **GRID)
    compare("study", tmp_path / "out", tmp_path / "runs", caption="Mine.", label="tab:x")
    text = (tmp_path / "out/tables.tex").read_text()
    assert r"\caption{Mine. (noise$=$on)}" in text
    assert r"\label{tab:x-noise-on}" in text
    assert r"\label{tab:x-differences-noise-off}" in text
    tabulars(text)


def test_levels_that_share_a_label_or_are_read_as_markup(tmp_path, figures):
    levels = ["p q", "p+q", "x>0", "a]b"]
    grid = {"axis": {level: {"settings": {"data.beta": n}} for n, level in enumerate(levels)}}
    values = {(("axis", level),): A for level in levels}
    make_study(tmp_path / "runs", {"A $x$": values, "a$_$ {b": values}, grid=grid)
    compare("study", tmp_path / "out", tmp_path / "runs", caption="Mine.", label="tab:x")
    text = (tmp_path / "out/tables.tex").read_text()
    found = re.findall(r"\\label\{([^}]*)\}", text)
    assert len(set(found)) == len(found)
    assert {"tab:x-axis-p-q", "tab:x-axis-p-q-2"} <= {*found}
    drawn = {path.stem for path in (tmp_path / "out/figures").glob("*.png")}
    page = (tmp_path / "out/report.html").read_text()
    assert page.count('src="data:image/svg+xml') == len(drawn)  # no label is taken for a formula
    assert "accuracy_over_rounds-axis=x~3e0" in drawn


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex here")
def test_the_tables_compile_and_none_is_wider_than_the_page(tmp_path):
    compare("study", tmp_path / "out", study(tmp_path / "runs"))
    (tmp_path / "out/paper.tex").write_text(DOCUMENT)
    done = subprocess.run(["pdflatex", "-interaction=nonstopmode", "paper.tex"], cwd=tmp_path / "out",
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout


class Elements(HTMLParser):
    """All elements of a page, each with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_page_is_the_markdown_with_its_figures_and_fetches_nothing(tmp_path, figures):
    make_study(tmp_path / "runs", {"A": A, "B <img src=x onerror=alert(1)>": B})
    compare("study", tmp_path / "out", tmp_path / "runs")
    text, markdown = (
        (tmp_path / "out" / name).read_text() for name in ("report.html", "report.md")
    )
    assert markdown.startswith("# study\n\n**Not registered**")
    elements = Elements(text)
    loads = [
        a[key] for _, a in elements.found for key in ("src", "href", "srcset", "data") if key in a
    ]
    images = [load for load in loads if load.startswith("data:image/svg+xml;base64,")]
    assert all(load.startswith("#") for load in loads if load not in images)
    names = re.findall(r"!\[(.*)\]\(<figures/", markdown)
    # the last is the enlarged one
    assert [image["alt"] for image in elements.of("img")[:-1]] == names
    for image in images:
        drawn = ElementTree.fromstring(base64.b64decode(image.partition(",")[2]))
        assert drawn.tag.endswith("svg")
        links = [
            value
            for part in drawn.iter()
            for key, value in part.attrib.items()
            if key.endswith("href")
        ]
        assert all(link.startswith(("#", "data:")) for link in links)
    assert len(elements.of("table")) == markdown.count("| --- |")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    assert "<td>B &lt;img src=x onerror=alert(1)&gt;</td>" in text
    allowed = base64.b64encode(sha256(scripts[0].encode()).digest()).decode()
    (policy,) = (a["content"] for a in elements.of("meta") if "http-equiv" in a)
    assert (
        policy
        == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    )
    headings = [
        re.sub(r"^#+ ", "", line) for line in markdown.splitlines() if re.match("##? ", line)
    ]
    assert all(len(heading) < 60 for heading in headings)
    assert {a["href"] for a in elements.of("a")} <= {
        f"#{a['id']}" for _, a in elements.found if "id" in a
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser here")
def test_in_a_browser_tables_are_sorted_and_figures_enlarged(tmp_path):
    table = "# s\n\n| a | b |\n| --- | ---: |\n| x | 9.00 ± 1.00 |\n| y | − |\n| z | 10.00 ± 1.00 |\n| v | −3.00 |\n| w | - |\n"
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    text = page(table + "\n![f](<figures/f.png>)\n", {"f": svg})
    text = re.sub("<meta http-equiv[^>]*>", "", text)  # it would forbid what the test adds
    probe = """<script>
    const column = () => [...document.querySelectorAll("tbody tr")].map((row) => row.cells[0].textContent).join("");
    const heads = document.querySelectorAll("th button"), seen = [];
    for (const head of [heads[1], heads[1], heads[0]]) { head.click(); seen.push(column()); }
    document.querySelector("figure button").click();
    seen.push(dialog.open, large.src.startsWith("data:"));
    large.click();
    document.title = JSON.stringify([...seen, dialog.open]);
    </script></body>"""
    (tmp_path / "page.html").write_text(text.replace("</body>", probe))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    done = subprocess.run(
        ["chromium", *options, f"file://{tmp_path}/page.html"], capture_output=True, text=True
    )
    assert '<title>["vxzyw","zxvyw","vwxyz",true,true,false]</title>' in done.stdout, done.stderr


@pytest.mark.parametrize("rounds", [2, 3, 40])
def test_rounds_are_whole_numbers_on_axes_and_bands_have_edges_and_patterns(
    tmp_path, figures, rounds
):
    for label, of_label in (("A", A), ("B", B)):
        for seed, accuracy in of_label.items():
            make_run(tmp_path / "study", label, seed, accuracy, rounds=rounds)
    drawn = dict(command.figures(comparison_of(tmp_path)))["accuracy_over_rounds"]
    FigureCanvasAgg(drawn).draw()
    axes = drawn.axes[0]
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == round(tick) for tick in ticks)
    bands = [band for band in axes.collections if band.get_hatch()]
    assert len({band.get_hatch() for band in bands}) == 2
    edges = [line for line in axes.lines if line.get_linewidth() < 1]
    assert len(edges) == 4
    assert len({line.get_linestyle() for line in edges}) == 2


def test_figures_of_a_run_have_whole_rounds_and_names_that_can_be_read(figures):
    layers = [
        f"layers.{block}.{name}"
        for block in range(4)
        for name in ("self_attn.q_proj", "mlp.up_proj")
    ]
    seen = {"rounds": [3], "joules": [0.004], "high": [0.008], "prices": [[3, 0.1, 0.2, 0.3]]}
    options = option_figure(np.full((8, 44), 0.5), layers, seen, 0.6, "a table")
    bits = bit_width_figure(
        [0, 1],
        np.full((2, 8), 4),
        np.zeros(2),
        [f"{name}.weight" for name in layers],
        np.full(8, 9),
    )
    norms = gradient_figure([(1, {"task": 1.0}), (6, {"task": 0.5})])
    for figure, over_rounds in ((options, (1, 2)), (bits, (0, 1)), (norms, (0,))):
        FigureCanvasAgg(figure).draw()
        for place in over_rounds:
            axes = figure.axes[place]
            low, high = axes.get_xlim()
            ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
            assert ticks
            assert all(tick == round(tick) for tick in ticks)
    for figure in (options, bits):
        labels = figure.axes[0].get_yticklabels()
        assert labels[0].get_text().startswith("0.self_attn.q_proj")
        assert min(label.get_fontsize() for label in labels) >= 9
        assert figure.legends  # outside the axes
        assert not any(axes.get_legend() for axes in figure.axes)
    assert {line.get_markersize() for line in norms.axes[0].lines} == {8}


def test_a_column_is_sorted_by_its_numbers_however_they_are_written():
    """The expression is the same in Python as in the script of the page."""
    script = (Path(command.__file__).parent / "report.js").read_text()
    number = re.search(r"match\(/(.+)/\)", script)[1]
    texts = ["1e-05", "0.0002", "71.8 ± 0.9 (2 of 3)", "[-1, 2]", "< 0.001", "2.5e+06 MB"]
    found = [float(re.match(number, text)[1]) for text in texts]
    assert found == [1e-5, 0.0002, 71.8, -1.0, 0.001, 2.5e6]
    assert re.match(number, "e5") is None
