"""What a Jupyter kernel shows of a run, and what an interrupt leaves."""

from __future__ import annotations

import html
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from places import ROOT
from refusals import refused
from rich.console import Console
from toy import Points, on_points

from callbacks import PartitionFigure, ProgressBar
from fl_lightning import FederatedTrainer, Meter, export_model
from fl_lightning.conformance.toy import images, on_images, run, trainer_in
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.run.log import RunLog
from fl_lightning.support.notebook import KernelDisplay

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    folder = tmp_path_factory.mktemp("run")
    return run(
        on_images(FedAvg()),
        images(),
        folder,
        max_rounds=2,
        workers=1,
        callbacks=[PartitionFigure()],
    )


class Handle:
    """Stands for a notebook's output: what was shown there, one after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, shown: Any, display_id: bool) -> Handle:
        assert display_id
        self.update(shown)
        return self

    def update(self, shown: Any) -> None:
        bundle = shown._repr_mimebundle_([], [])
        assert bundle["text/html"].startswith("<pre")
        self.shown.append(re.sub(r"\x1b\[[\d;]*m", "", bundle["text/plain"]))


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()
    display = pytest.importorskip("IPython.display")
    monkeypatch.setattr(display, "display", handle)
    return handle


def test_progress_in_the_output_of_a_cell(
    cell: Handle, tmp_path: Path, monkeypatch, caplog
) -> None:
    """One output, redrawn, which ends with the last round; no line goes to the log."""
    console = Console(force_jupyter=True, width=100)
    monkeypatch.setattr("callbacks.meters.progress_bar.Console", lambda stderr: console)
    caplog.set_level(logging.INFO)
    bar = ProgressBar(refresh_per_second=1e6)
    run(on_images(FedAvg()), images(), tmp_path, max_rounds=2, workers=1, callbacks=[bar])
    assert "first round" in cell.shown[0]
    assert "round 1/2" in cell.shown[0]
    assert [text for text in cell.shown if "client 3/6" in text]
    assert "round 2/2" in cell.shown[-1]
    assert "accuracy" in cell.shown[-1]
    assert "round 1/2  " not in caplog.text
    assert not bar._is_shown


def test_outside_a_kernel_and_a_terminal_progress_is_lines_of_the_log(
    cell: Handle, tmp_path: Path, caplog
) -> None:
    caplog.set_level(logging.INFO)
    run(on_images(FedAvg()), images(), tmp_path, max_rounds=2, workers=1, callbacks=[ProgressBar()])
    assert cell.shown == []
    assert "round 1/2  " in caplog.text


def test_a_display_is_not_redrawn_more_often_than_asked(cell: Handle) -> None:
    display = KernelDisplay("text", refresh_per_second=1e-6)
    display.refresh(at_once=True)
    assert cell.shown == [], "before it is started"
    display.start()
    for _ in range(3):
        display.refresh()
    assert len(cell.shown) == 1
    display.stop()
    assert len(cell.shown) == 2


def test_results_are_the_dictionary_that_they_were(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_rounds=1, workers=1)
    results = trainer.fit(on_images(FedAvg()), images())
    metadata = json.loads((trainer.run_dir / "metadata.json").read_text())
    assert results == {name: value for name, value in metadata.items() if name.startswith("final/")}
    assert isinstance(results, dict)
    assert json.loads(json.dumps(results)) == results
    assert yaml.safe_load(yaml.safe_dump(results)) == results
    assert (
        f"<tr><th>final/accuracy</th><td>{results['final/accuracy']:.6g}</td></tr>"
        in results._repr_html_()
    )


def test_history_is_the_table_of_the_run(trainer: FederatedTrainer) -> None:
    written = pd.read_csv(trainer.run_dir / "metrics.csv").set_index("round")
    history = trainer.history
    assert history.index.tolist() == [1, 2]
    pd.testing.assert_frame_equal(history[written.columns], written, check_dtype=False)


def test_figures_are_those_of_the_run_directory(trainer: FederatedTrainer) -> None:
    assert list(trainer.figures) == ["partition"]
    assert trainer.figures["partition"]._repr_png_().startswith(b"\x89PNG")
    assert "data:image/png;base64,iVBOR" in trainer.figures._repr_html_()


def test_a_trainer_says_where_its_run_is(trainer: FederatedTrainer, tmp_path: Path) -> None:
    shown = trainer._repr_html_()
    assert f"<td>{html.escape(str(trainer.run_dir))}</td>" in shown
    assert "<td>2 of 2</td>" in shown
    assert f"{trainer.history['test/accuracy'].iloc[-1]:.6g}" in shown
    new = trainer_in(tmp_path, max_rounds=7, run_name="<b>")
    assert "<td>7</td>" in new._repr_html_()
    assert "<td>&lt;b&gt;</td>" in new._repr_html_()
    assert "checkpoint_every" not in new._repr_html_(), "a default"
    assert new.history.empty
    assert list(new.figures) == []


def test_a_fit_that_is_refused_leaves_what_is_shown_of_the_run_before(tmp_path: Path) -> None:
    """Where the settings are others, where no directory can be made, and where there is no run."""
    trainer = trainer_in(tmp_path, max_rounds=1, workers=1)
    (tmp_path / "file").write_text("")
    trainer.experiment = "file"
    with pytest.raises(InputError, match="no run can be created"):
        trainer.fit(on_images(FedAvg()), images())
    assert "before its first run" in trainer._repr_html_()
    assert trainer.history.empty
    trainer.experiment = "folder"
    trainer.fit(on_images(FedAvg()), images())
    before = trainer.run_dir, trainer._repr_html_(), trainer.fitted, len(trainer.history)
    refusals = {
        "another configuration": ("folder", str(trainer.run_dir)),
        "created": ("file", None),
    }
    for said, (trainer.experiment, place) in refusals.items():
        with pytest.raises(InputError, match=said):
            trainer.fit(on_points(FedProx(mu=1)), Points(), ckpt_path=place)
        after = trainer.run_dir, trainer._repr_html_(), trainer.fitted, len(trainer.history)
        assert after == before, said


def test_a_trainer_tests_and_exports_the_run_that_it_has_fitted(tmp_path: Path) -> None:
    trainer, given = trainer_in(tmp_path, max_rounds=1), (on_images(FedAvg()), images())
    with refused("test without --ckpt_path"):
        trainer.test(*given)
    with refused("export without a run"):
        trainer.export(*given, to=str(tmp_path / "model"))
    trainer.fit(*given, seed=3)
    assert (
        trainer.test(*given, probes="clean")["test/accuracy"] == trainer.history["test/accuracy"][1]
    )
    about = json.loads(
        (trainer.export(*given, to=str(tmp_path / "model")) / "export.json").read_text()
    )
    assert about["run"] == trainer.run_dir.name
    with refused(f"{trainer.run_dir.name}/checkpoints/round_000001"):
        trainer.test(on_images(FedProx(mu=1)), images())


class Leaves(Meter):
    """Changes the working directory in the first round, as a script of the user's may."""

    def on_round_end(self, record, context):
        os.chdir("elsewhere" if record.round == 1 else ".")


def test_a_run_is_found_from_another_working_directory(tmp_path, monkeypatch, caplog) -> None:
    """What is said and recorded of its folder is as short as before."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    meters = [Leaves(), PartitionFigure()]
    trainer = run(on_images(FedAvg()), images(), "runs", max_rounds=2, workers=1, callbacks=meters)
    assert list(trainer.figures) == ["partition"]
    assert export_model(trainer, tmp_path / "model").exists()
    assert "default_root_dir: runs\n" in (trainer.run_dir / "config.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    caplog.clear()
    trainer = run(on_images(FedAvg()), images(), "runs", max_rounds=1)
    assert f"run directory  runs/fl_lightning/{trainer.run_dir.name}" in caplog.text
    assert f"<td>runs/fl_lightning/{trainer.run_dir.name}</td>" in trainer._repr_html_()
    (tmp_path / "file").write_text("")
    with refused("--trainer.default_root_dir file"):
        run(on_images(FedAvg()), images(), "file", max_rounds=1)


def test_warnings_are_shown_where_nobody_has_set_up_logging(capsys, monkeypatch) -> None:
    """The file's handler would otherwise be the only one, and Python shows warnings where there is
    none; of rejected uploads one is enough."""
    log = logging.getLogger("fl_lightning")
    monkeypatch.setattr(log, "propagate", False)  # pytest's own handlers are at the root
    monkeypatch.setattr(log, "handlers", [])
    for _ in range(2):
        with RunLog():
            log.info("a remark")
            log.warning("a warning")
            for client in range(3):
                log.warning("round %d: upload of client %d rejected", 1, client)
            log.error("stopped")
        shown = "a warning\nround 1: upload of client 0 rejected\nstopped\n"
        assert capsys.readouterr().err == shown
        assert log.handlers == []
    shown = logging.StreamHandler()
    log.addHandler(shown)
    with RunLog():
        log.error("once")
    assert capsys.readouterr().err == "once\n"
    assert log.handlers == [shown]


@pytest.mark.parametrize("set_up", [False, True])
def test_the_file_has_what_nobody_asked_to_see(set_up, tmp_path, capsys, monkeypatch) -> None:
    """Whether logging is at its default or at that of ``logging.basicConfig``."""
    log, root = logging.getLogger("fl_lightning"), logging.getLogger()
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler()] if set_up else [])
    with RunLog() as kept:
        kept.write_to(tmp_path)
        logging.getLogger("fl_lightning.data").info("a remark")
        log.warning("a warning")
    log.info("later")
    assert capsys.readouterr().err == "a warning\n"
    assert (
        re.sub(r"\S+Z ", "", (tmp_path / "run.log").read_text())
        == "INFO a remark\nWARNING a warning\n"
    )
    assert log.level == logging.NOTSET
    assert not any(handler.filters for handler in root.handlers)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a kernel is started in, without settings of the user's."""
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / ".jupyter"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries
def test_the_example_notebook(here: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(
        not cell.outputs and cell.execution_count is None
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(here)}}
    )
    client.execute()
    shown = [
        output.get("data", {}).get("text/html", output.get("text", ""))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    text = "\n".join(shown)
    assert len([one for one in shown if "round</span> 5/5" in one or "round 5/5" in one]) == 2
    assert "<th>final/accuracy</th>" in text
    assert '<table border="1" class="dataframe">' in text
    assert "data:image/png;base64," in text
    assert "<td>5 of 5</td>" in text
    assert "load_state_dict" in text
    assert (here / "digits_model" / "model.safetensors").exists()


START = """
import time
from callbacks import ProgressBar
from fl_lightning import FederatedTrainer, Meter
from fl_lightning.conformance.toy import images
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg, FedProx

class Waiting(Meter):
    waits = True
    def on_round_end(self, record, context):
        if record.round == 3 and self.waits:
            print("waiting")
            time.sleep(600)

data, method = images(), FedAvg()
waiting = Waiting()
trainer = FederatedTrainer(
    max_rounds=4, callbacks=[waiting, ProgressBar()], logger=False, checkpoint_every=1, workers=1
)
"""


@pytest.fixture
def kernel(here: Path) -> Iterator[Any]:
    manager_of = pytest.importorskip("jupyter_client.manager")
    manager, client = manager_of.start_new_kernel(
        kernel_name="python3", cwd=str(here), startup_timeout=120
    )
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def messages(client: Any, request: str) -> Iterator[tuple[str, dict]]:
    """Kind and content of what a cell gives, until it has ended."""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request:
            yield message["msg_type"], message["content"]
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return


def text_of(kind: str, content: dict) -> str:
    data = content.get("data", {})
    text = content.get("text", "") + data.get("text/plain", "") + content.get("ename", "")
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_says_how_to_go_on_and_leaves_the_kernel_alive(
    kernel: Any, here: Path
) -> None:
    """The line that it says is run as it stands, and ends the run."""
    manager, client = kernel
    list(messages(client, client.execute(START)))
    shown = ""
    for kind, content in messages(client, client.execute("trainer.fit(method, data, seed=0)")):
        shown += text_of(kind, content)
        if "waiting" in text_of(kind, content):
            manager.interrupt_kernel()
    assert "KeyboardInterrupt" in shown
    (line,) = re.findall(
        r"stopped in round 3; continue after round 2 with (trainer\.fit\(.*\))", shown
    )
    shown = "".join(
        text_of(*one) for one in messages(client, client.execute(f"waiting.waits = False; {line}"))
    )
    assert "'final/accuracy'" in shown
    shown = "".join(
        text_of(*one) for one in messages(client, client.execute("list(trainer.history.index)"))
    )
    assert "[1, 2, 3, 4]" in shown
