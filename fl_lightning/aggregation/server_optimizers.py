"""What a server makes of its clients' mean: momentum, adaptive steps, extrapolation, a momentum
that travels.

x are the server's weights when the round starts, y_i those of client i after it, p_i its share
among the clients whose uploads arrived, and

    D = sum_i p_i (y_i - x)        over the trained parameters

Without an optimiser the next weights are x + D, the mean. Statistics of BatchNorm and other buffers
are averaged, whatever the optimiser: a variance that goes on falling is negative one day.

A rule computes in float64, and as the mean plus what it adds to it, so that where it adds nothing
the next weights are the mean bit for bit. What it remembers is in ``method.server``, so it is in
every checkpoint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import InputError, MisuseError, require
from fl_lightning.support.hook_forms import form_of

OWN = "optimizer/"
"""What the names of an optimiser's entries of ``method.server`` begin with."""
EVALUATED = f"{OWN}evaluated"
"""The entry of ``method.server`` with the weights that are evaluated, where they are not those that
the next round starts from."""
SQUARES = "squares"
"""The sum of p_i ||D_i||^2, for an optimiser that asks for it."""

WRITE = "write return Step(weights, state)"

Rate = Annotated[float, within("(0, inf)", "a rate is above 0 and finite", 1.0)]
Share = Annotated[float, within("[0, 1)", "a share of what was before lies in [0, 1)", 0.9)]
LongShare = Annotated[float, within("[0, 1]", "a share of what was before lies in [0, 1]", 0.99)]
Tau = Annotated[float, within("(0, inf)", "tau is above 0 and finite", 0.001)]
Eps = Annotated[float, within("(0, inf]", "eps is above 0", 0.001)]
Decay = Annotated[float, within("(0, 1]", "a factor lies in (0, 1]", 1.0)]


@dataclass(frozen=True)
class ClientMean:
    """What a round has found, over the trained parameters, float64 ``[P]``.

    Args:
        before: x, what the clients started from.
        mean: sum p_i y_i.
        round: its number, from 1.
        squares: sum p_i ||y_i - x||^2, where the optimiser asks for it; else 0.
    """

    before: Tensor
    mean: Tensor
    round: int
    squares: float = 0.0

    @property
    def change(self) -> Tensor:
        """D."""
        return self.mean - self.before


@dataclass(frozen=True)
class Step:
    """What an optimiser makes of it, float64.

    Args:
        weights: what the next round starts from, ``[P]``.
        state: what the optimiser remembers, by name, of any shape; kept as float32. No name is
            ``evaluated``.
        evaluated: the weights that are evaluated until the next step, ``[P]``; None: ``weights``.
    """

    weights: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    evaluated: Tensor | None = None


class ServerOptimizer(Recorded, ABC):
    """A rule from the clients' mean to the weights that the next round starts from."""

    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    needs_squares: bool = False
    """Whether it asks for sum p_i ||D_i||^2, one number more that each client adds to the sums."""
    evaluates_iterates: bool = False
    """Whether what is evaluated is made of the last weights alone, and is no state of its own."""
    keeps_mean: bool = False
    """Whether with its settings the next weights, and those that are evaluated, are the mean."""

    @abstractmethod
    def start(self, weights: Tensor) -> Step:
        """Return what is remembered before the first round, given the initial parameters, float64
        ``[P]``."""

    @abstractmethod
    def step(self, found: ClientMean, state: Mapping[str, Tensor]) -> Step:
        """Return the next weights, given what the optimiser remembers, float64."""

    def first_entries(self, weights: Tensor, trained: int) -> dict[str, Tensor]:
        """Return the optimiser's entries of ``method.server`` before the first round.

        Args:
            weights: the initial vector of the method's layout, float32 ``[size]``.
            trained: P, its values that are trained parameters, which come first.
        """
        given = weights[:trained].double()
        step = self._checked("start", self.start, (given,), len(given))
        entries = _entries(step, weights[trained:])
        del entries["weights"]
        return entries

    def next_entries(
        self, server: Mapping[str, Tensor], mean: Tensor, trained: int, round: int, squares: float
    ) -> dict[str, Tensor]:
        """Return the entries of ``method.server`` after a round: ``weights`` and the optimiser's
        own.

        Args:
            server: the entries before it.
            mean: of the clients' vectors, float32 ``[size]``.
            trained: as :meth:`first_entries` has it.
            round: its number, from 1.
            squares: sum p_i ||D_i||^2; 0 where it is not asked for.
        """
        found = ClientMean(
            server["weights"][:trained].double(), mean[:trained].double(), round, squares
        )
        state = {
            name.removeprefix(OWN): tensor.double()
            for name, tensor in server.items()
            if name.startswith(OWN)
        }
        step = self._checked("step", self.step, (found, state), len(found.mean))
        return _entries(step, mean[trained:])

    def _checked(
        self, name: str, hook: Callable[..., Any], arguments: tuple[Any, ...], size: int
    ) -> Step:
        """Return the step that a hook makes of its arguments, the last of which is the state, if
        it has two.

        Raises:
            MisuseError: it makes none of ``size`` finite weights, takes no such arguments, or reads
                what is not remembered.
        """
        name, known = f"{type(self).__name__}.{name}", arguments[-1] if arguments[1:] else {}
        try:
            found = hook(*arguments)
        except TypeError as error:
            if getattr(error.__traceback__, "tb_next", None):  # of its own code
                raise
            rule = f"it is called with {len(arguments)} of them ({error})"
            instead = "write def start(self, weights), and def step(self, found, state)"
            raise MisuseError(f"the arguments of {name}", rule, instead) from error
        except KeyError as error:
            if error.args[:1] and error.args[0] in known:
                raise
            raise MisuseError(
                f"{name}, which asked for {error}",
                f"remembered is {', '.join(known) or 'nothing'}",
                "return it in the state of start, and of each step",
            ) from error
        if not isinstance(found, Step):
            raise MisuseError(
                f"{name}, which returned {form_of(found)}", "it returns a Step", WRITE
            )
        vectors: dict[str, Any] = {"weights": found.weights, "evaluated": found.evaluated}
        for what, vector in vectors.items():
            if vector is None and what == "evaluated":
                continue
            if not (_is_finite(vector) and vector.is_floating_point() and vector.shape == (size,)):
                given = f"{name}, whose Step has {form_of(vector)} as {what}"
                raise MisuseError(given, f"they are float64 [{size}], and finite", WRITE)
        if not isinstance(found.state, Mapping):
            given = f"{name}, whose Step has {form_of(found.state)} as state"
            raise MisuseError(given, "it is a dictionary of tensors by name", WRITE)
        for key, value in found.state.items():
            if not (isinstance(key, str) and key and OWN + key != EVALUATED and _is_finite(value)):
                raise MisuseError(
                    f"{name}, whose state has {key!r}: {form_of(value)}",
                    "what is remembered is finite tensors by name, and none is called evaluated",
                    "write torch.tensor(...), or another name",
                )
        return found

    @staticmethod
    def without_own(server: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of ``method.server`` that are not the optimiser's."""
        return {name: tensor for name, tensor in server.items() if not name.startswith(OWN)}


def _is_finite(value: Any) -> bool:
    is_real = isinstance(value, Tensor) and not value.is_complex()
    return is_real and bool(value.isfinite().all())


def _entries(step: Step, statistics: Tensor) -> dict[str, Tensor]:
    """Return a step as entries of ``method.server``, float32; ``statistics`` follow the
    parameters."""
    entries = {OWN + name: tensor.float() for name, tensor in step.state.items()}
    for name, vector in (("weights", step.weights), (EVALUATED, step.evaluated)):
        if vector is not None:
            entries[name] = torch.cat([vector.float(), statistics.float()])
    return entries


class ServerSGD(ServerOptimizer):
    """Stochastic gradient descent with momentum, -D for a gradient: FedAvgM (Hsu et al., 2019) and
    the outer optimiser of DiLoCo (Douillard et al., 2023).

        v <- momentum v - D,     x <- x - lr v;     with Nesterov x <- x - lr (momentum v - D)

    v is 0 at first, so that the first round moves x by lr D; it is torch's SGD without dampening.
    After many rounds a step is about lr / (1 - momentum) times D.

    Args:
        lr: server rate, above 0; with 1 and no momentum the next weights are the mean.
        momentum: share of v that is kept, in [0, 1).
        nesterov: whether the step looks ahead by the new v.
    """

    def __init__(self, lr: Rate = 1.0, momentum: Share = 0.0, nesterov: bool = False) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.keeps_mean = lr == 1 and momentum == 0

    def start(self, weights: Tensor) -> Step:
        return Step(weights, {"velocity": torch.zeros_like(weights)})

    def step(self, found: ClientMean, state: Mapping[str, Tensor]) -> Step:
        before, velocity = state["velocity"], self.momentum * state["velocity"] - found.change
        # x - lr v, written as the mean and what is added to it
        again = self.lr * self.momentum * (velocity if self.nesterov else before)
        return Step(found.mean + (self.lr - 1) * found.change - again, {"velocity": velocity})


def with_server_lr(settings: Mapping[str, Any], server_lr: float) -> dict[str, Any]:
    """Return the settings of a method with a server's step of this length, as its optimiser.

    Raises:
        InputError: they have another optimiser.
    """
    if server_lr == 1:
        return {**settings}
    require(
        settings.get("server_optimizer") is None,
        f"--model.server_lr {server_lr:g} with --model.server_optimizer",
        "an optimiser of the server has its own rate",
        "write the rate as its lr",
    )
    return {**settings, "server_optimizer": ServerSGD(server_lr)}


class AdaptiveOptimizer(ServerOptimizer):
    """The rules of Reddi et al. (ICLR 2021), algorithm 2, which differ in how v grows,
    :meth:`second`.

        m <- betas[0] m + (1 - betas[0]) D,     x <- x + lr m / (sqrt v + tau)

    m is 0 and v is tau^2 at first. There is no bias correction.

    Args:
        lr: server rate, above 0; it depends on the task more than any other setting.
        betas: shares of m and of v that are kept, in [0, 1]; m's is below 1.
        tau: what keeps the divisor from 0, above 0; the larger, the less adaptive.
    """

    def __init__(
        self, lr: Rate = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: Tau = 1e-3
    ) -> None:
        if not (0 <= betas[0] < 1 and 0 <= betas[1] <= 1):
            raise InputError(
                f"{type(self).__name__}(betas={list(betas)})",
                "they are shares of what was before: the first in [0, 1), the second in [0, 1]",
                "write betas: [0.9, 0.99]",
            )
        self.lr, self.betas, self.tau = lr, (betas[0], betas[1]), tau

    def start(self, weights: Tensor) -> Step:
        first = torch.zeros_like(weights)
        return Step(
            weights, {"first_moment": first, "second_moment": torch.full_like(first, self.tau**2)}
        )

    def step(self, found: ClientMean, state: Mapping[str, Tensor]) -> Step:
        change, keep = found.change, self.betas[0]
        first = keep * state["first_moment"] + (1 - keep) * change
        second = self.second(state["second_moment"], change.square())
        step = self.lr * first / (second.sqrt() + self.tau)
        return Step(found.mean + (step - change), {"first_moment": first, "second_moment": second})

    @abstractmethod
    def second(self, before: Tensor, square: Tensor) -> Tensor:
        """Return the next v, given the last one and D^2."""


class ServerAdam(AdaptiveOptimizer):
    """FedAdam: v <- betas[1] v + (1 - betas[1]) D^2."""

    def second(self, before: Tensor, square: Tensor) -> Tensor:
        return self.betas[1] * before + (1 - self.betas[1]) * square


class ServerYogi(AdaptiveOptimizer):
    """FedYogi: v <- v - (1 - betas[1]) D^2 sign(v - D^2)."""

    def second(self, before: Tensor, square: Tensor) -> Tensor:
        return before - (1 - self.betas[1]) * square * torch.sign(before - square)


class ServerAdagrad(AdaptiveOptimizer):
    """FedAdagrad: v <- v + D^2. It has no use for betas[1]."""

    def second(self, before: Tensor, square: Tensor) -> Tensor:
        return before + square


class Extrapolation(ServerOptimizer):
    """FedExP (Jhunjhunwala et al., ICLR 2023): the more the clients' directions differ, the longer
    the step.

        G = max(1, sum_i p_i ||D_i||^2 / (2 (||D||^2 + eps_t))),     x <- x + G D
        eps_t = eps eps_decay^(t - 1) in round t = 1, 2, ...

    Evaluated is the mean of the last two x, as the paper has it, since x oscillates; after the
    first round that counts it is x. Each client adds ||D_i||^2 to the sums, of an update that
    ``average`` has bounded, 2^20 at most.

    Args:
        eps: what keeps the divisor from 0, above 0.
        eps_decay: factor of eps from round to round, in (0, 1]; the square of the local rate's,
            where that decays.
        mean_of_two: whether the mean of the last two x is evaluated; else x is.
    """

    needs_squares = True
    evaluates_iterates = True

    def __init__(self, eps: Eps = 1e-3, eps_decay: Decay = 1.0, mean_of_two: bool = True) -> None:
        self.eps, self.eps_decay, self.mean_of_two = eps, eps_decay, mean_of_two
        self.keeps_mean = math.isinf(eps) and not mean_of_two

    def start(self, weights: Tensor) -> Step:
        gain = weights.new_zeros(1)  # 0: no round has counted
        return Step(weights, {"gain": gain}, weights if self.mean_of_two else None)

    def step(self, found: ClientMean, state: Mapping[str, Tensor]) -> Step:
        eps = self.eps * self.eps_decay ** (found.round - 1)
        gain = max(1.0, found.squares / (2 * (float(found.change.square().sum()) + eps)))
        weights = found.mean + (gain - 1) * found.change
        evaluated = (weights + found.before) / 2 if float(state["gain"]) else weights
        remembered = {"gain": torch.full_like(state["gain"], gain)}
        return Step(weights, remembered, evaluated if self.mean_of_two else None)


class Lookahead(ServerOptimizer):
    """FedACG's momentum (Kim et al., CVPR 2024), which travels: clients start where it leads.

        sent is x' = x + lam M;     x <- sum_i p_i y_i,     M <- lam M + sum_i p_i (y_i - x')

    M is 0 at first. Evaluated is x. The broadcast is as large as without it.

    Args:
        lam: share of M that is kept, in [0, 1); 0.85 in the paper. 0: the next weights are the
            mean.
    """

    def __init__(self, lam: Share = 0.85) -> None:
        self.lam, self.keeps_mean = lam, lam == 0

    def start(self, weights: Tensor) -> Step:
        return Step(weights, {"momentum": torch.zeros_like(weights)}, weights)

    def step(self, found: ClientMean, state: Mapping[str, Tensor]) -> Step:
        momentum = self.lam * state["momentum"] + found.change
        return Step(found.mean + self.lam * momentum, {"momentum": momentum}, found.mean)
