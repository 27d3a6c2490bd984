"""The server's half of a method that needs nothing but sums of uploads; by default FedAvg's
mean."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType

import torch
from torch import Tensor, nn

from fl_lightning.aggregation.adapters.cohort import PRODUCTS
from fl_lightning.aggregation.adapters.plain_weights import AS_THEY_ARE, PlainWeights
from fl_lightning.aggregation.average import Average, NoAverageError
from fl_lightning.aggregation.averages import capped
from fl_lightning.aggregation.client_weights import BY_EXAMPLES, ClientWeights, Weighing
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, largest
from fl_lightning.aggregation.intake import AddedUploads, Uploads
from fl_lightning.aggregation.server_optimizers import EVALUATED, SQUARES, ServerOptimizer
from fl_lightning.aggregation.sums import Addend, Sums, sums_of
from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.errors import MisuseError
from fl_lightning.models.tensors import apart_from
from fl_lightning.support.hook_values import check_kept, check_returned
from fl_lightning.wire import Codes, Layout, LedgerEntry, Limit, Payload, PayloadError

log = logging.getLogger("fl_lightning")

SHARE_UNITS = 2**30
"""Shares that ``max_share`` bounds are integers in units of 1 / 2^30."""
SET_SERVER = 'set self.server["weights"] there, or call super(), and end it without a value'
RECEIVING = {"addends", "check", "decode", "starts", "upload_limits"}
"""The hooks that the server calls with a client's upload before the round is closed."""
LAST_UPDATE = "last_update/"
"""What the server's entries begin with that remember the last update of an average, by the name of
the sum."""


class SummingServer:
    """Makes the next server state of the sums over the clients that returned.

    What is not overridden is FedAvg: w <- sum_k p_k w_k.
    """

    average: Average
    max_share: float
    network: nn.Module
    server: dict[str, Tensor]
    layout: Layout
    trained_values: int = 0
    """Values of a vector of ``layout`` that are trained parameters; statistics and other buffers
    follow."""
    server_optimizer: ServerOptimizer | None = None
    """What the server makes of its clients' mean; None: the mean is what the next round starts
    from."""
    adapters: PlainWeights = AS_THEY_ARE
    """What becomes of the clients' low-rank adapters, and which values travel."""
    owns: frozenset[str] = frozenset()
    """Those of ``server_optimizer``, ``personal`` and ``finetune`` that the class is a name of, and
    sets by itself."""
    calls_server_optimizer: bool = False
    """Declares that an own ``next_state`` takes the weights from :meth:`next_weights`."""
    sums_over_any: bool = False
    """Declares that an own ``next_state`` makes a state of sums over any clients, such as those
    that one peer hears, and counts nothing over all clients."""
    receives_anywhere: bool = True
    """Declares that ``RECEIVING`` hooks write to nothing, so that worker processes may receive
    uploads. A class of one's own that overrides one of them says so anew."""
    reads_public: bool = False
    """Whether ``decode`` reads an upload with weights that its sender had before. A server knows
    them; peers know what the sender has told them last, which is then ``server["public"]``."""
    cohort: int = 1
    """Clients that were asked to take part in this round."""
    served: Sequence[int] = ()
    """Ids of the clients whose uploads count in this round, who keep what they made of its
    broadcast; known while ``next_state`` or ``aggregate`` runs."""
    steps_asked: Mapping[int, int] = {}
    """Local steps that each of them was asked for, by id."""
    most_examples: int = 1
    """The largest n_k of the enrolled clients."""
    seed: int = 0
    """The run's."""
    round: int = 0
    """The number of the round, from 1."""
    client_weights: ClientWeights = BY_EXAMPLES
    """The weight n_k of each client in averages, once ``build`` has seen the data."""
    weigh_by: Weighing = "examples"
    """What n_k counts."""
    root_update: Callable[[int], Tensor] | None = None
    """What the server makes of its weights on a root set in so many steps, minus these weights
    ``[P]``; set where ``average`` goes by it."""
    has_said_no_average: bool = False
    """Whether the log has it that a round had no average; it is said once in a run."""

    def start_server(self) -> None:
        """Make the server's first state: the network's weights, in the order of ``layout``, and
        what the server optimiser remembers. Call it again where ``layout`` has changed."""
        weights, parameters = self.layout.read(self.network), dict(self.network.named_parameters())
        sizes = {
            name: shape.numel() for name, shape in self.layout.shapes.items() if name in parameters
        }
        self.trained_values = sum(sizes.values())
        self.server = {"weights": self.layout.to_wire(weights)}
        if self.server_optimizer is not None:
            self.server |= self.server_optimizer.first_entries(weights, self.trained_values)

    @abstractmethod
    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        """Return the entries of this client's upload, and the shape of each."""

    def broadcast(self, client: Client) -> Payload:
        """Return what this client is sent at the start of the round."""
        return self.adapters.broadcast(self, client)

    def check(self, upload: Payload, client: Client) -> None:
        """Refuse an upload that must not be averaged.

        Raises:
            PayloadError: an entry that is missing or of the wrong size. (The loop has refused what
                is not finite, of another dtype, and ``examples`` that are not one positive
                integer.)
        """
        upload.tensor("examples")
        weights = self.decode(upload)
        self.layout.check(weights)
        if weights is not upload.get("weights") and not largest(weights) < MAX_MAGNITUDE:
            raise PayloadError(
                "it decodes to values that are not finite or too large",
                f"weights are below {MAX_MAGNITUDE:g}",
                "lower the lr",
            )

    def decode(self, upload: Payload) -> Tensor:
        """Return this client's weights after its round, as one vector of ``layout``, float32. The
        server still has those that it broadcast.

        Raises:
            PayloadError: an entry that is missing or of the wrong size.
        """
        return self.adapters.decode(self, upload.tensor("weights"))

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        """Make the next server state from what came back: client id -> payload, never empty.

        A method whose server needs sums alone overrides :meth:`addends` and :meth:`next_state`
        instead.
        """
        starts = self.starts() if self.average.guide == "last_update" else {}
        single = self.adapters.singles(self, uploads)
        sums = self.add_up(uploads, {id: examples_in(upload) for id, upload in uploads.items()})
        self._make_next_state(sums)
        if single is not None:
            mean = self.adapters.whole(self, sums.mean("weights"))
            self.server |= self.adapters.beside(self, single, mean)
        made = {name: sums.mean(name) - start for name, start in starts.items() if name in {*sums}}
        self.server |= {f"{LAST_UPDATE}{name}": update for name, update in made.items()}

    def add_up(self, uploads: Mapping[int, Payload], examples: Mapping[int, int]) -> Sums:
        """Return the sums over some of the clients that returned.

        Args:
            uploads: client id -> payload, of some clients.
            examples: client id -> n_k, of all clients that returned.
        """
        weights = self.bounded_weights(examples)
        addends = [self.acted_on(upload, id, weights[id]) for id, upload in sorted(uploads.items())]
        average = self.adapters.over(self.average)
        return sums_of(addends, average, max(self.cohort, len(examples)), self.guides())

    def intake(self) -> Uploads:
        """Return what takes the uploads of a round: they are added up as they come, unless their
        weights or their average depend on all of them."""
        average, own = self.adapters.over(self.average), ("add_up", "bounded_weights")
        if (
            self.max_share < 1
            or not average.is_sum
            or any(overrides(self, SummingServer, n) for n in own)
        ):
            return Uploads()
        sums = Sums(average, self.cohort)
        anywhere = receives_anywhere(self)
        return AddedUploads(
            sums, lambda upload, id: self.acted_on(upload, id, examples_in(upload)), anywhere
        )

    def product_addends(self, upload: Payload) -> dict[str, Addend]:
        """Return what a client adds under masks beside :meth:`addends`: the products of its
        adapters, where the rule for them reads products and the server sees no upload."""
        if not self.adapters.sums_products:
            return {}
        values = self.adapters.product_values(self, upload)
        return {PRODUCTS: Addend(values, examples_in(upload), self.largest_weight)}

    def take_sums(self, sums: Sums) -> None:
        """Make the next server state of sums over clients of whom it has seen no upload."""
        if PRODUCTS not in {*sums}:
            self._make_next_state(sums)
            return
        found = self.adapters.summed(self, sums.mean(PRODUCTS))
        made = self.adapters.made(self.adapters.whole(self, sums.mean("weights")), found)
        sums.replace("weights", made)
        self._make_next_state(sums)
        self.server |= self.adapters.beside(self, found, made)

    def keep_server(self) -> None:
        """Copy what ``server`` has of the module's own tensors, which go on to other values.

        Raises:
            MisuseError: an entry is no tensor that a checkpoint can hold.
        """
        check_kept("self.server", self.server)
        if isinstance(self, nn.Module):
            self.server = apart_from(self, self.server)

    def _make_next_state(self, sums: Sums) -> None:
        make: Callable[[Sums], object] = self.next_state
        check_returned(self, "next_state", make(sums), NoneType, SET_SERVER)

    def guides(self) -> Mapping[str, Tensor]:
        """Return the updates that ``average`` goes by in this round, by the name of the sum, of
        trained values alone; none where it goes by those of the clients alone."""
        P, guides = self.trained_values, dict[str, Tensor]()
        if self.average.guide == "root_update":
            assert self.root_update is not None, "prepare_guides comes after build"
            guides = {"weights": self.root_update(self.average.root_steps)}
        elif self.average.guide == "last_update":
            guides = {name: self.server[f"{LAST_UPDATE}{name}"] for name in self.starts()}
        size = self.layout.size  # a vector that ends with statistics
        return {name: one[:P] if len(one) == size else one for name, one in guides.items()}

    def first_guides(self) -> Mapping[str, Tensor]:
        """Return the entries of ``server`` in which it remembers the updates that ``average`` made,
        as they are before the first round."""
        if self.average.guide != "last_update":
            return {}
        return {
            f"{LAST_UPDATE}{name}": torch.zeros_like(start) for name, start in self.starts().items()
        }

    @property
    def is_sum(self) -> bool:
        """Whether the server needs sums over uploads alone, so that nobody has to see them all."""
        sums = self.average.is_sum and not self.adapters.reads_single
        return sums and not overrides(self, SummingServer, "aggregate")

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return what an upload adds to the server's sums, by name.

        Args:
            upload: of one client.
            client_id: whose it is.
            weight: n_k, within the bound of ``max_share``; an integer of at most
                ``self.largest_weight``.
        """
        start, vector = self.starts()["weights"], self._moving(self.decode(upload))
        found = {"weights": Addend(vector, weight, self.largest_weight, start)}
        if self.adds_squares:
            square = self._square(self.average.bounded(vector, start) - start)
            found[SQUARES] = Addend(square, weight, self.largest_weight)
        return found

    def acted_on(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return :meth:`addends`, and raise a MisuseError where it leaves out what ``average`` or
        ``server_optimizer`` goes by."""
        found, average, lacks = self.addends(upload, client_id, weight), self.average, ""
        if self.adds_squares and SQUARES not in found:
            lacks = f"no sum {SQUARES!r}, by which {type(self.server_optimizer).__name__} goes"
        elif not average.is_sum or overrides(average, Average, "bounded"):
            started = any(one.start is not None for one in found.values())
            if not started and (not overrides(self, SummingServer, "starts") or self.starts()):
                lacks = f"no start, by which {type(average).__name__} goes"
        if lacks:
            instead = "write Addend(..., start=self.starts()['weights']), or super().addends(...)"
            raise MisuseError(f"{type(self).__name__}.addends", f"it gives {lacks}", instead)
        return found

    @property
    def adds_squares(self) -> bool:
        """Whether each client adds the square of its update's length, from what it started from."""
        return self.server_optimizer is not None and self.server_optimizer.needs_squares

    def _square(self, update: Tensor) -> Tensor:
        """Return ||D_i||^2 over the trained parameters, ``[1]``, cut to what can be added up: an
        update of length 1024 ruins a model with or without extrapolation."""
        trained = self._moving(self.server["weights"][: self.trained_values])
        square = update[: len(trained)].double().square().sum()
        return square.clamp(max=MAX_MAGNITUDE - 1).reshape(1)

    def starts(self) -> Mapping[str, Tensor]:
        """Return the ``start`` of those addends that have one, by name. With ``trainer.privacy`` a
        server adds it to a mean of differences, also where it has seen no upload."""
        return {"weights": self._moving(self.server["weights"].float())}

    def _moving(self, vector: Tensor) -> Tensor:
        """Return what clients train in this round of a vector of ``layout``, or of its start."""
        half = self.adapters.moving(self)
        return vector if half is None else vector[half[: len(vector)]]

    def averaged(self, upload: Payload) -> Iterator[tuple[int, float, Tensor]]:
        """Yield the vectors of ``layout`` in an upload that enter a mean: the number of the mean,
        the weight and the values ``[P]``."""
        yield 0, float(examples_in(upload)), self.decode(upload)

    def entry_starts(self, upload: Payload) -> Mapping[str, Tensor]:
        """Return what entries of an upload were before the client trained them, by name, where no
        entry of its broadcast of the same name and shape says so."""
        return {}

    def beside_upload(self, client_id: int) -> Mapping[str, Tensor | Codes]:
        """Return what readers of a client's upload need beside it where no server knows what the
        client was sent: the entries that :meth:`addends` reads."""
        return {}

    def summing_state(self) -> Mapping[str, Tensor]:
        """Return the entries of ``server`` that ``check`` and ``addends`` read.

        In a deployment with a secure sum, clients make their addends themselves; they are sent
        those entries that their broadcast does not hold.
        """
        optimizer, hidden = self.server_optimizer, self.adapters.not_summed
        state = self.server if optimizer is None else optimizer.without_own(self.server)
        if hidden:
            return {name: tensor for name, tensor in state.items() if name not in hidden}
        return state

    def next_state(self, sums: Sums) -> None:
        """Make the next server state of the sums over the clients that returned.

        A method that overrides it, and takes the weights from :meth:`next_weights`, says so by
        ``calls_server_optimizer``.
        """
        before = dict(self.server)
        self.server["weights"] = self.layout.to_wire(self.next_weights(sums))
        self.server |= self.adapters.next_entries(self, before)

    def next_weights(self, sums: Sums) -> Tensor:
        """Return the weights that the next round starts from, float32 ``[P]``: the clients' mean,
        or what ``server_optimizer`` makes of it. What that remembers is then in ``server``."""
        mean, optimizer = self.adapters.whole(self, sums.mean("weights")), self.server_optimizer
        if optimizer is None:
            return mean
        squares = float(sums.mean(SQUARES)) if self.adds_squares else 0.0
        entries = optimizer.next_entries(
            self.server, mean, self.trained_values, self.round, squares
        )
        weights = entries.pop("weights")
        self.server = {**optimizer.without_own(self.server), **entries}
        return weights

    @property
    def evaluated_weights(self) -> Tensor:
        """The weights that are evaluated: those that the next round starts from, if
        ``server_optimizer`` has no others."""
        return self.server.get(EVALUATED, self.server["weights"])

    @property
    def largest_weight(self) -> int:
        """The largest weight that a client can have: the largest n_k of the enrolled clients, which
        everybody knows before anybody has answered."""
        return self.most_examples if self.max_share == 1 else SHARE_UNITS

    def weight_bounds(self, name: str, most: int, client_id: int, examples: int) -> tuple[int, int]:
        """Return the least and the largest weight that a client can have in a sum.

        A secure sum whose weights add up to something else is void. A weight in units of
        :attr:`largest_weight` is taken for n_k; where it is not, override this.

        Args:
            name: of the sum.
            most: largest weight of any client in it.
            client_id: the client.
            examples: n_k that it enrolled with.
        """
        return (1, examples) if most == self.largest_weight else (int(most == 1), most)

    def largest_value(self, name: str) -> float:
        """Return the largest magnitude of a value that a client adds to a sum, before its weight.

        A secure sum with a value that clients within this bound cannot have made is void.
        """
        return MAX_MAGNITUDE

    def bounded_weights(self, examples: Mapping[int, int]) -> dict[int, int]:
        """Return the weights of clients that returned, by id: n_k, or where ``max_share`` bounds
        them, their shares in units of 2^-30.

        Args:
            examples: n_k by id.
        """
        if self.max_share == 1:
            return dict(examples)
        shares = self._capped([examples[id] for id in sorted(examples)])
        units = [max(1, round(share * SHARE_UNITS)) for share in shares]
        return dict(zip(sorted(examples), units, strict=True))

    def shares(self, uploads: Iterable[Payload]) -> list[float]:
        """p_k = n_k / sum n_k over the clients that returned, none above ``max_share``."""
        return self._capped([examples_in(upload) for upload in uploads])

    def _capped(self, examples: Sequence[int]) -> list[float]:
        return capped([n / sum(examples) for n in examples], self.max_share)


def receives_anywhere(method: SummingServer) -> bool:
    """Return whether a process that is not the server's may receive uploads: whether the hooks that
    do are the package's, or declare that they write to nothing."""
    theirs = (cls for cls in type(method).__mro__ if not cls.__module__.startswith("fl_lightning."))
    says = {cls: vars(cls).get("receives_anywhere") for cls in (*theirs, SummingServer)}
    first = next(
        cls for cls, said in says.items() if said is not None or vars(cls).keys() & RECEIVING
    )
    return bool(says[first]) and not vars(method).keys() & RECEIVING


def examples_in(upload: Payload) -> int:
    """Return n_k of an upload."""
    return int(upload.tensor("examples"))


def set_next_state(
    method: SummingServer, round: int, entries: Iterable[LedgerEntry], make: Callable[[], object]
) -> bool:
    """Let the method make the server's next state, and return whether it did: the server keeps its
    last one where the next would not be finite, its weights would be too large for any upload of
    the next round, or the uploads have no average.

    Args:
        entries: those of the round's clients.
        make: makes it.
    """
    before = dict(method.server)
    method.served = [entry.client for entry in entries if entry.status == "trained"]
    try:
        check_returned(method, "aggregate", make(), NoneType, SET_SERVER)
    except NoAverageError as reason:
        method.server, method.served = before, []
        log.log(
            logging.DEBUG if method.has_said_no_average else logging.WARNING,
            "round %d: %s; such a round changes nothing (this is said once)",
            round,
            reason,
        )
        method.has_said_no_average = True
        return False
    method.keep_server()
    broken = [name for name, tensor in method.server.items() if not is_finite(tensor)]
    why = f"{', '.join(broken)} would not be finite" if broken else ""
    if not broken and not largest(method.server.get("weights", torch.zeros(0))) < MAX_MAGNITUDE:
        why = f"weights would reach {MAX_MAGNITUDE:g}, and uploads are below"
    if why:
        method.server, method.served = before, []
        log.warning("round %d: the server's next %s; it keeps its last state", round, why)
    return not why


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, in one pass without a mask of the tensor's size."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return all(math.isfinite(value) for value in torch.stack(torch.aminmax(tensor)).tolist())
