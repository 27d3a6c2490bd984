"""The gate for imports, as the parser sees it: jsonargparse imports what a class path names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import RLock

from jsonargparse import set_parsing_settings

# there is no documented way to take a policy back
from jsonargparse._common import parsing_settings

from fl_lightning.config.import_gate import allowed_imports, gate
from fl_lightning.errors import require

_LOCK = RLock()


@contextmanager
def only_imports(names: Collection[str]) -> Iterator[None]:
    """Return a context in which the parser and the networks by name import nothing but these names.

    jsonargparse asks before it imports, and again with the place where what it found was defined,
    so that ``package.os.system`` is ``os.system``. Its policy is of the whole process.

    Args:
        names: dotted names, each with all below it.

    Raises:
        InputError: a name is none, or would let a configuration change this policy.
    """
    for name in names:
        good = (
            all(part.isidentifier() for part in name.split("."))
            and name.split(".")[0] != "jsonargparse"
        )
        require(
            good, f"package {name}", "it cannot be allowed", "write the name of a package of yours"
        )
    with _LOCK:
        before = parsing_settings["import_path_verdicts"]
        denied = {name: verdict for name, verdict in before.items() if not verdict}
        parsing_settings["import_path_verdicts"] = denied
        try:
            set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(names))
            with gate(names):
                yield
        finally:
            parsing_settings["import_path_verdicts"] = before


@contextmanager
def more_imports(names: Collection[str]) -> Iterator[None]:
    """Return a context in which these names may be imported too; it changes nothing where no gate
    is."""
    if (allowed := allowed_imports()) is None:
        yield
        return
    with only_imports({*allowed, *names}):
        yield
