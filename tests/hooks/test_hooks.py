"""Hooks have the arguments that the pages and the check at the start of a run say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from places import DOCS

from fl_lightning.__main__ import main
from fl_lightning.compatibility.signatures import hooks_of
from fl_lightning.conformance.toy import images, on_images, run
from fl_lightning.errors import InputError
from fl_lightning.hooks import Callback, Meter, Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.trainer import FederatedTrainer

HOWTO = DOCS / "howto"


@pytest.mark.parametrize(("page", "base"), [("stressor", Stressor), ("figure", Meter)])
def test_the_signatures_of_the_pages_are_those_of_the_code(page, base):
    wanted = "\n".join(
        f"def {name}{signature}".replace("'", "")
        for each in (base, Callback)
        for name, signature in hooks_of(each).items()
    )
    text = (HOWTO / f"{page}.md").read_text()
    (shown,) = re.findall(r"``` \{\.python\}\n(def .*?)\n```", text, re.DOTALL)
    assert shown == wanted, f"the block of docs/howto/{page}.md is to be:\n{wanted}"


class All(Stressor, Meter):
    """Records how each of its hooks is called."""

    def __init__(self) -> None:
        self.calls: dict[str, set[tuple[int, tuple[str, ...]]]] = {}


def _recorder(name: str) -> Any:
    def hook(self: All, *values: Any, **named: Any) -> Any:
        self.calls.setdefault(name, set()).add((len(values), tuple(named)))
        return (
            values[0]
            if name.startswith("change_")
            else {"state_dict": {}, "stop_reason": ""}.get(name)
        )

    return hook


for _base in (Callback, Stressor, Meter):
    for _name in hooks_of(_base):
        setattr(All, _name, _recorder(_name))


def test_hooks_are_called_with_the_arguments_of_the_base_class(tmp_path):
    """Of a run, an interrupted one and a resume: with as many positions, and the same names."""
    every = All()
    settings = {"callbacks": [every], "checkpoint_every": 1}
    trainer = run(on_images(FedAvg()), images(), tmp_path, max_rounds=1, **settings)
    again = {"max_rounds": 2, "ckpt_path": str(trainer.run_dir), "allow_changed": True}
    run(on_images(FedAvg()), images(), tmp_path, **settings, **again)
    every.on_round_start = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run(on_images(FedAvg()), images(), tmp_path, **settings, max_rounds=1)
    for base in (Callback, Stressor, Meter):
        for name, signature in hooks_of(base).items():
            _, *arguments = signature.parameters.values()
            named = tuple(one.name for one in arguments if one.kind is one.KEYWORD_ONLY)
            assert every.calls[name] == {(len(arguments) - len(named), named)}, name


WRONG = {
    "(self, cohort, context): pass": "on_cohort(self, cohort, context); it is called as on_cohort(cohort, round, context); "
    "write def on_cohort(self, cohort, round, context)",
    "(self, cohort, number, context): return cohort": "change_cohort(self, cohort, number, context); it is called as "
    "change_cohort(cohort, round=round, context=context); write def change_cohort(self, cohort, *, round, context)",
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_hook_that_cannot_be_called_is_refused_before_anything_is_created(
    wrong, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    base, hook = ("Stressor", "change_cohort") if "return" in wrong else ("Meter", "on_cohort")
    module = f"hooks_of_{base.lower()}"
    code = (
        f"from fl_lightning import {base}\n\n\nclass Wrong{base}({base}):\n    def {hook}{wrong}\n"
    )
    Path(f"{module}.py").write_text(code)
    assert main(["fit", "--config", "plain", f"--trainer.callbacks+={module}.Wrong{base}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"Wrong{base}.{WRONG[wrong]}")
    assert {path.name for path in tmp_path.iterdir()} <= {f"{module}.py", "__pycache__"}


def test_a_hook_may_have_other_parameters_as_long_as_it_can_be_called(tmp_path):
    class Fits(Stressor, Meter):
        def on_setup(self, *details): ...

        def on_cohort(self, those, turn, run, more=None): ...

        def change_cohort(self, cohort, **details):
            return cohort

    class NoFunction(Meter):
        on_round_end = 3

    assert FederatedTrainer(callbacks=[Fits()]).callbacks
    with pytest.raises(
        InputError, match=r"NoFunction.on_round_end = 3; it is called as on_round_end\("
    ):
        FederatedTrainer(callbacks=[NoFunction()])
