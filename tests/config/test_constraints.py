"""What an annotation allows, and how a class that is made otherwise refuses."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest

from fl_lightning.config.constraints import Constraint, at_least, constraints_of, one_of, within
from fl_lightning.config.recorded import Recorded, arguments_of
from fl_lightning.errors import InputError

Colour = Literal["red", "green"]


class Box(Recorded):
    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    def __init__(
        self,
        share: Annotated[float, within("(0, 1]", "a share lies in (0, 1]", 0.2)] = 1.0,
        rounds: Annotated[int | Literal["all"] | None, at_least(1)] = None,
        colour: Colour = "red",
        form: Annotated[
            Literal["a", "b"], Constraint("it is a or b", "for a square write form: a")
        ] = "a",
        shape: Annotated[
            str, one_of(("round", "flat"), "write round, or build one", near=True)
        ] = "round",
        free: Any = None,
    ) -> None:
        self.share = share


class LargeBox(Box):
    def __init__(
        self, height: Annotated[int, at_least(2)] = 2, share: float = 0.5, **settings: Any
    ) -> None:
        super().__init__(share=share, **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 0}, "Box(share=0); a share lies in (0, 1]; write share: 0.2"),
        ({"share": 1.5}, "Box(share=1.5); a share lies in (0, 1]; write share: 0.2"),
        ({"share": math.nan}, "Box(share=nan); a share lies in (0, 1]; write share: 0.2"),
        (
            {"share": "0.5"},
            "Box(share='0.5'); it is str, where a number is needed; write share: 0.2",
        ),
        (
            {"share": None},
            "Box(share=None); it is NoneType, where a number is needed; write share: 0.2",
        ),
        ({"rounds": 2.0}, "Box(rounds=2.0); it is float, where an int is needed; write rounds: 1"),
        ({"rounds": [1]}, "Box(rounds=[1]); it is list, where an int is needed; write rounds: 1"),
        ({"rounds": 0}, "Box(rounds=0); at least 1 is needed; write rounds: 1"),
        ({"colour": "blue"}, "Box(colour='blue'); one of red, green; write colour: red"),
        ({"form": "c"}, "Box(form='c'); it is a or b; for a square write form: a"),
        ({"shape": "roud"}, "Box(shape='roud'); one of round, flat; write round"),
        ({"shape": "x"}, "Box(shape='x'); one of round, flat; write round, or build one"),
    ],
)
def test_a_value_that_is_not_allowed(given, message):
    with pytest.raises(InputError) as error:
        Box(**given)
    assert str(error.value) == message
    with pytest.raises(InputError) as error:
        LargeBox(**given)
    assert str(error.value) == message.replace("Box", "LargeBox")


def test_what_is_allowed_is_recorded():
    for given in (
        {"share": 1},
        {"rounds": "all"},
        {"rounds": 1},
        {"rounds": None},
        {"shape": "flat"},
    ):
        assert arguments_of(Box(**given)).items() >= given.items()
    Box(1.0, 3)
    with pytest.raises(InputError):
        Box(1.0, 0)


def test_constraints_of_a_subclass_with_those_that_it_hands_on():
    """A parameter that it has anew is its own, whatever the base says of that name."""
    assert list(constraints_of(LargeBox)) == ["height", "rounds", "colour", "form", "shape"]
    assert constraints_of(LargeBox)["height"].given == "LargeBox(height={value})"
    assert constraints_of(int) == {}


def test_an_annotation_that_cannot_be_read_is_passed_over():
    class Strange(Recorded):
        def __init__(self, one: NotThere = 1, two: Annotated[int, at_least(1)] = 1) -> None:  # noqa: F821
            self.one = one

    assert Strange(0).one == 0
    with pytest.raises(InputError):
        Strange(two=0)
