import logging
import os
import shutil
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path

import hypothesis
import lightning.fabric.fabric
import pytest
import torch

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("project")

# started in the background of a script; processes made by tests inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# thousands of run directories of small files, which wait for the disk: in memory where it has much
# room
MEMORY, ROOM = Path("/dev/shm"), 12 << 30
if "TMPDIR" not in os.environ and MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if min(shutil.disk_usage(MEMORY).free, free) > ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_addoption(parser):
    parser.addoption(
        "--golden", default=str(Path(__file__).parent / "golden"), help="folder of worked examples"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where a few parameters stand for all, the others are slow."""
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is not None and not any(f"-{id}-" in f"-{item.callspec.id}-" for id in quick.args):
            item.add_marker("slow")
            item.add_marker("essential")


@pytest.fixture
def golden(request) -> Path:
    return Path(request.config.getoption("--golden"))


def pytest_sessionstart():
    """Threads per process change how a sum is rounded, in what a module's fixture trains too; one
    is also fastest for toys."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """Modules of tests' own lie in folders whose contents tests look at."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture(autouse=True)
def own_tracking_store():
    """``mlflow.set_tracking_uri`` writes to the environment, where the next test's processes would
    find it."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if before is not None:
        os.environ["MLFLOW_TRACKING_URI"] = before


@pytest.fixture(scope="session", autouse=True)
def quick_starts_and_writes():
    """No test cuts the power: what a process has written is there for all others without waiting
    for the disk, forty times a run. And the packages that extend Lightning are looked up once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        extensions = cache(lightning.fabric.fabric._load_external_callbacks)
        patch.setattr(lightning.fabric.fabric, "_load_external_callbacks", extensions)
        yield


LOG_LEVEL = logging.getLogger("fl_lightning").level


@pytest.fixture(autouse=True)
def own_log_level():
    """A test starts without the log level and handlers that a command has set, in the test before
    it or in a fixture of its module."""
    log = logging.getLogger("fl_lightning")
    log.setLevel(LOG_LEVEL)
    log.handlers[:] = []
    yield
    log.setLevel(LOG_LEVEL)
    log.handlers[:] = []


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> Path:
    """An empty MLflow store; making one takes seconds."""
    mlflow = pytest.importorskip("mlflow")
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def figures():
    """For tests of ``compare`` that look at its figures."""


@pytest.fixture
def figures_only_where_looked_at(request, monkeypatch):
    """A figure takes half a second."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("fl_lightning.study.report.compare.figures", lambda comparison: [])


@pytest.fixture
def bare_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with no settings in the environment; what a command adds to
    ``sys.path`` is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in os.environ if name.startswith("FL_LIGHTNING_")]:
        monkeypatch.delenv(name)
    return tmp_path
