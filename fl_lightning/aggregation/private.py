"""Client-level differential privacy in a run: what is refused, the noisy sums of each round, C,
epsilon and the budget.

One mechanism on the whole message (McMahan et al., ICLR 2018), with what one client adds to all
sums of the round as its message m_k:

    sum_k m_k min(1, C / ||m_k||_2)  +  N(0, (z C)^2),     divided by the size of the cohort
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import rng
from fl_lightning.aggregation.averages import WEIGHTED_MEAN
from fl_lightning.aggregation.clipped_sums import (
    COUNT,
    PrivateSums,
    clip_addends,
    common_starts,
    note_starts,
    starts_of_ranks,
)
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, fraction_bits
from fl_lightning.aggregation.intake import AddedUploads
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.sums import Addend, Sums, sums_of
from fl_lightning.config.overriding import overrides
from fl_lightning.distributed.collectives import world_size
from fl_lightning.errors import InputError, MisuseError, RunStopped, require
from fl_lightning.hooks import Meter, RoundRecord
from fl_lightning.privacy import (
    ClientPrivacy,
    Generator,
    NoisySums,
    Randomness,
    RoundAccountant,
    discrete_gaussian,
    rounded_gaussian,
    rounding_length,
)
from fl_lightning.wire import Payload

log = logging.getLogger("fl_lightning")
Sampler = Callable[[Generator, int, float], np.ndarray]

DEVIATIONS = 40
"""Noise is never as many standard deviations away from 0: the probability is below 1e-300."""
MOST_MOVED = 50.0
"""C changes by a factor of at most e^50 in a round, which no float overflows by."""
NOISE_OF_SEED = (
    "noise follows from the seed, so that the run can be repeated, "
    "and who knows the seed can remove it"
)
NOISE_OF_SYSTEM = "noise and cohorts are drawn from operating systems, and no seed tells them"
SUMS_FILE = "noisy_sums.csv"
"""In the directory of a run whose noise no seed tells: the noisy sums that were begun."""
TAKEN_BACK_FILE = "noise_taken_back.csv"
"""In the directory of a run that was taken back, where a seed tells the noise: its last round of
before, so that nobody draws that noise again for another sum."""
EXACT_BITS = 53
"""Integers up to 2^53 are exact in float64."""


class ClippedUploads(AddedUploads):
    """Uploads that are clipped and added up as they come.

    Args:
        privacy: clips them.
        method: says what they add, in its present round.
    """

    def __init__(self, privacy: PrivateAggregation, method: SummingServer) -> None:
        # what the sums start from is known here alone
        super().__init__(Sums(WEIGHTED_MEAN, privacy.cohort), self._message, anywhere=False)
        self.privacy, self.method = privacy, method
        self.starts: dict[str, Tensor] = {}

    def _message(self, upload: Payload, client: int) -> dict[str, Addend]:
        addends = self.method.addends(upload, client, 1)
        note_starts(self.starts, addends)
        return self.privacy.private_addends(self.method, addends, client, self.method.round)


class PrivateAggregation(Meter):
    """Makes a round's sums private and accounts for them.

    The trainer puts it before the callbacks of the configuration, so that C and the number of
    rounds survive a resume as the state of a callback does.

    Epsilon is that of the noisy sums that were begun. Noise that follows from the seed is the same
    in a round that is repeated, so these are the rounds. Noise of an operating system is not: a run
    that is taken back to an earlier checkpoint keeps the sums that it has begun, and a round that
    it repeats is one more.

    Args:
        settings: ``trainer.privacy``.
        randomness: what noise and cohorts are drawn from; streams of the run's seed, unless a
            deployment puts the operating system's there.

    Attributes:
        rounds: rounds that are done.
        begun: noisy sums that were begun, where no seed tells their noise.
        clipped_at: C of the round, which the next one may no longer have.
    """

    def __init__(self, settings: ClientPrivacy, randomness: Randomness = rng.stream) -> None:
        self.settings, self.randomness = settings, randomness
        self._forget()

    def _forget(self) -> None:
        self.clip_norm = self.clipped_at = self.settings.clip_norm
        self.rounds = self.begun = 0
        self.least_clip = 0.0

    @property
    def releases(self) -> int:
        """The noisy sums that epsilon is of."""
        return max(self.rounds, self.begun)

    @property
    def epsilon(self) -> float:
        """Epsilon of all noisy sums that were begun."""
        return self.accountant.epsilon(self.releases)

    def continue_in(self, run_dir: Path | None, done: int, *, there: int, changed: bool) -> None:
        """Count the sums that a run has begun, whichever of its checkpoints it goes on from.

        Args:
            run_dir: the run that is continued; None: it is a new one.
            done: rounds that it has done.
            there: rounds that it had done, of which later ones are taken back.
            changed: whether it goes on with other settings or code than those had.

        Raises:
            InputError: the file that says so cannot be read, some of the rounds were without
                privacy, none is done and the budget is spent, or the noise of a round would be that
                of another sum.
        """
        if run_dir is not None and self.randomness is rng.stream:
            there = max(there, NoisySums(run_dir / TAKEN_BACK_FILE).count)
        require(
            not (changed and there > done and self.randomness is rng.stream),
            f"--ckpt_path with trainer.privacy, changed after round {done}",
            "later rounds are done, their noise is a function of the seed, and the difference of two sums "
            "with one noise has none",
            "continue from the last checkpoint, or start a new run",
        )
        if run_dir is not None:
            self._count_begun(run_dir / SUMS_FILE)
        self._check_rounds(done)

    def _count_begun(self, path: Path) -> None:
        try:
            self.begun = max(self.begun, NoisySums(path).count)
        except OSError as error:
            raise InputError(
                f"{path}",
                f"it says how much of the budget is spent, and cannot be read ({error.strerror})",
                "let this user read it",
            ) from None

    def begin_sum(self, round: int, run_dir: Path) -> int:
        """Count the noisy sum of a round before anything of it is drawn, and return its number,
        from 1.

        Raises:
            RunStopped: it cannot be written down.
        """
        if self.randomness is rng.stream:
            return round
        self.begun = self.releases + 1
        path = run_dir / SUMS_FILE
        try:
            NoisySums(path).add(self.begun, round)
        except OSError as error:
            raise RunStopped(
                f"{path} cannot be written ({error})",
                "a noisy sum is counted before its noise is drawn",
                f"put that right, then continue with --ckpt_path {run_dir}",
            ) from error
        return self.begun

    # The run

    def on_check(self, context: Any) -> None:
        self._forget()  # what another run of the same trainer has done
        require(
            context.aggregation.privacy is self,
            "PrivateAggregation among trainer.callbacks",
            "a callback makes no sum private",
            "write --trainer.privacy.noise_multiplier",
        )
        method, settings, cohort = context.method, self.settings, context.cohort_size
        self.cohort, clients = cohort, len(context.data.active)
        require(
            settings.clip_norm <= self.largest_clip,
            f"--trainer.privacy.clip_norm {settings.clip_norm:g}",
            f"sums over {cohort} clients with noise_multiplier {settings.noise_multiplier:g} have room for "
            f"{self.largest_clip:g}",
            "write a smaller one",
        )
        masked = context.aggregation.masks
        if settings.is_distributed and masked is not None:
            require(  # whatever part of the cohort a stressor leaves
                masked.threshold >= settings.min_returned,
                f"--trainer.secure_sum.threshold {masked.threshold:g} below min_returned",
                "the server would get sums of fewer shares of noise than the whole noise",
                f"write --trainer.secure_sum.threshold {settings.min_returned:g}",
            )
        self.least_clip = 2 * rounding_length(method.layout.size, self.bits)
        require(
            settings.clip_norm >= self.least_clip,
            f"--trainer.privacy.clip_norm {settings.clip_norm:g}",
            f"the rounding of {method.layout.size} values to integers is as large as that",
            f"write {1.1 * self.least_clip:.2g} or more",
        )
        room = min(2.0 ** (EXACT_BITS - self.bits), MAX_MAGNITUDE) / 2 / DEVIATIONS
        require(
            (settings.count_noise or 0.0) <= room,
            f"--trainer.privacy.count_noise {settings.count_noise}",
            f"sums over {cohort} clients have room for {room:g}",
            "write a smaller one, or null",
        )
        self.accountant = RoundAccountant(
            settings.noise_multiplier, clients, cohort, settings.delta
        )
        first = self.accountant.epsilon(1)
        if settings.max_epsilon is not None and first > settings.max_epsilon:
            raise InputError(
                f"--trainer.privacy.max_epsilon {settings.max_epsilon:g}",
                f"the first round alone has epsilon {first:.4g} at delta {settings.delta:g}",
                "raise noise_multiplier, or let fewer clients take part",
            )
        if settings.delta >= 1 / clients:
            log.warning(
                "trainer.privacy.delta %g is not below 1 / %d clients: a mechanism that publishes one client "
                "in the clear would satisfy it",
                settings.delta, clients,
            )  # fmt: skip

    def on_setup(self, context: Any) -> None:
        most = math.inf if self.settings.max_epsilon is None else self.settings.max_epsilon
        again = self.releases - self.rounds
        sums = bisect_right(
            range(1, context.max_rounds + again + 1), most, key=self.accountant.epsilon
        )
        sums = max(sums, self.releases)  # the budget may have been made smaller since
        rounds = sums - again
        if again:
            log.warning(
                "%d noisy sums were begun for the %d rounds that are done: repeated rounds count again, and "
                "epsilon is %.4g",
                self.releases, self.rounds, self.epsilon,
            )  # fmt: skip
        log.info(
            "client-level privacy: epsilon %.4g at delta %g after %d round%s; %s",
            self.accountant.epsilon(sums), self.settings.delta, rounds, "s"[: rounds > 1]
            + f", as many of {context.max_rounds} as max_epsilon allows" * (rounds < context.max_rounds)
            + ", and more than it allows" * (self.accountant.epsilon(sums) > most),
            NOISE_OF_SEED if self.randomness is rng.stream else NOISE_OF_SYSTEM,
        )  # fmt: skip

    def on_round_start(self, round: int, context: Any) -> None:
        self.clipped_at = self.clip_norm

    def on_round_end(self, record: RoundRecord, context: Any) -> None:
        self.rounds = record.round
        record.metrics["privacy/epsilon"] = self.epsilon
        record.metrics["privacy/clip_norm"] = self.clipped_at

    def stop_reason(self) -> str:
        if not self.ends_with(self.rounds):
            return ""
        return (
            f"epsilon is {self.epsilon:.4g} at delta {self.settings.delta:g}, and "
            f"one more round would exceed max_epsilon {self.settings.max_epsilon:g}"
        )

    def ends_with(self, round: int) -> bool:
        """Return whether no round can follow this one within ``max_epsilon``."""
        most = self.settings.max_epsilon
        return most is not None and self.accountant.epsilon(max(self.releases, round) + 1) > most

    def state_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "releases": self.releases,
            "clip_norm": self.clip_norm,
            "first_clip_norm": self.settings.clip_norm,
            "accounted": self._accounted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require(
            state["accounted"] == self._accounted,
            f"--ckpt_path with trainer.privacy and {self._accounted}",
            f"its rounds had {state['accounted']}, and epsilon is that of equal rounds",
            "keep noise_multiplier, participation and clients, or start a new run",
        )
        self.rounds = state["rounds"]
        self.begun = max(self.begun, state.get("releases", 0))
        first = state.get("first_clip_norm", self.settings.clip_norm)
        if self.settings.is_adaptive and first == self.settings.clip_norm:
            self.clip_norm = state["clip_norm"]  # else it was changed for the rounds to come

    @property
    def _accounted(self) -> dict[str, float]:
        """What the epsilon of a round follows from."""
        z = self.accountant.noise_multiplier
        clients = self.accountant.clients
        cohort = self.accountant.cohort
        return {"noise_multiplier": z, "clients": clients, "cohort": cohort}

    def _check_rounds(self, done: int) -> None:
        require(
            done == self.rounds,
            f"--ckpt_path with trainer.privacy after {done} rounds",
            f"{self.rounds} of them are accounted, and those without noise have no epsilon",
            "start a new run, or leave trainer.privacy out",
        )
        spent = "" if done else self.stop_reason()
        require(
            not spent,
            f"--ckpt_path with trainer.privacy and {self.begun} noisy sums of no whole round",
            spent,
            "start a new run",
        )

    # The sums

    @property
    def bits(self) -> int:
        """F, the bits behind the binary point of the integers that are added up."""
        return fraction_bits(self.cohort)

    def least_returned(self, asked: int) -> int:
        """Return how many shares of noise are the whole noise, where clients add it.

        Args:
            asked: clients of the round; fewer than are sampled where a stressor takes some away.
        """
        return self.settings.least_returned(asked)

    @property
    def largest_clip(self) -> float:
        """Largest C for which no value of a sum with its noise leaves the integers that float64
        holds."""
        room = self.cohort + DEVIATIONS * self.settings.message_multiplier(self.cohort)
        return min(2.0 ** (EXACT_BITS - self.bits) / room, MAX_MAGNITUDE / 2)

    def sums(
        self, method: SummingServer, uploads: Mapping[int, Payload], returned: int, round: int
    ) -> PrivateSums | None:
        """Return the noisy sums of a round over the uploads of all processes; C then follows its
        quantile.

        Args:
            method: with the server's state that the round started from.
            uploads: those of this process.
            returned: number of uploads that all processes have.
            round: the noise is a function of it and of the seed.

        Returns:
            The sums; None where so few returned that shares of noise are missing, or nobody did of
            a method with ``addends`` of its own. Else central noise is added also where nobody
            returned: without it the model would say so.

        Raises:
            MisuseError: a callback has made the cohort larger than the one that is accounted.
        """
        if returned == 0:
            if overrides(method, SummingServer, "addends"):
                log.warning(
                    "round %d: nobody returned, and what %s adds up is not known without an upload: the "
                    "model stays, without noise, which says that nobody returned",
                    round, type(method).__name__,
                )  # fmt: skip
                return None
            sums = sums_of([self._empty_message(method)], WEIGHTED_MEAN, self.cohort)
        elif isinstance(uploads, ClippedUploads):
            sums = uploads.added()
        else:
            private = [self.message(method, upload, id, round) for id, upload in uploads.items()]
            sums = sums_of(private, WEIGHTED_MEAN, self.cohort)
        sums.merge_ranks()
        return self.finished(sums, method, uploads, returned, round)

    def message(
        self, method: SummingServer, upload: Payload, client: int, round: int
    ) -> dict[str, Addend]:
        """Return what a client adds: :meth:`private_addends` of what its upload adds."""
        return self.private_addends(method, method.addends(upload, client, 1), client, round)

    def finished(
        self,
        sums: Sums,
        method: SummingServer,
        uploads: Mapping[int, Payload],
        returned: int,
        round: int,
    ) -> PrivateSums | None:
        """Return the noisy sums, given those of all clients' messages, as :meth:`sums` does."""
        if max(method.cohort, returned) > self.cohort:
            raise MisuseError(
                f"a cohort of {max(method.cohort, returned)} clients with trainer.privacy",
                f"rounds of {self.cohort} are accounted",
                "raise trainer.participation instead",
            )
        least = self.least_returned(method.cohort)
        if self.settings.is_distributed and returned < least:
            log.warning(
                "round %d is void, and the model stays: %d of %d clients returned; with fewer than %d noise "
                "is missing",
                round, returned, method.cohort, least,
            )  # fmt: skip
            return None
        totals = {name: sums.total(name) for name in sums}
        # one draw for the whole message, the same on all ranks
        if not self.settings.is_distributed:
            sizes = {name: len(total) for name, total in totals.items()}
            noise = self._noise(
                rounded_gaussian, self.randomness(method.seed, "privacy", round, 0), sizes
            )
            totals = {name: total + noise[name] for name, total in totals.items()}
        # these are on the clients' machines
        if returned == 0 or (not uploads and world_size() == 1):
            starts = dict(method.starts())
        elif isinstance(uploads, ClippedUploads):
            starts = starts_of_ranks(uploads.starts)
        else:
            starts = common_starts(
                [method.addends(upload, id, 1) for id, upload in uploads.items()]
            )
        found = PrivateSums(totals, starts, self.cohort, self.deviation("update"))
        if self.settings.is_adaptive:
            self._follow_quantile(found.share_below)
        return found

    def largest_sum(self, method: SummingServer, name: str, clients: int) -> float:
        """Return the largest magnitude of a value of a sum over so many clients' messages, with the
        noise that they add by themselves."""
        message = 0.5 if name == COUNT else self.clip_norm
        shares = (
            clients / self.least_returned(method.cohort) if self.settings.is_distributed else 0.0
        )
        return clients * message + DEVIATIONS * self.deviation(name) * math.sqrt(shares)

    def private_addends(
        self, method: SummingServer, addends: Mapping[str, Addend], client: int, round: int
    ) -> dict[str, Addend]:
        """Return what a client adds: its clipped message, with its share of the noise where clients
        add it.

        All values are multiples of 2^-F, so that they can be masked and added up as integers
        without another rounding. Each share is a discrete Gaussian of the variance (z C)^2 /
        :meth:`least_returned`, so that with more clients the noise is larger than it has to be, and
        never smaller.
        """
        added, norm = clip_addends(addends, method.average, self.clip_norm, self.cohort)
        if self.settings.is_adaptive:
            added[COUNT] = Addend(torch.tensor([0.5 if norm <= self.clip_norm else -0.5]))
        if not self.settings.is_distributed:
            return added
        noise = self._noise(
            discrete_gaussian,
            self.randomness(method.seed, "privacy_share", round, client),
            {name: len(addend.values) for name, addend in added.items()},
            share=self.least_returned(method.cohort) ** -0.5,
        )
        return {name: Addend(addend.values + noise[name]) for name, addend in added.items()}

    def _empty_message(self, method: SummingServer) -> dict[str, Addend]:
        """Return zeros for each sum of :meth:`SummingServer.addends`."""
        empty = {"weights": Addend(torch.zeros(len(method.starts()["weights"])))}
        return empty | ({COUNT: Addend(torch.zeros(1))} if self.settings.is_adaptive else {})

    def deviation(self, name: str) -> float:
        """Return the standard deviation of the noise on a sum."""
        if name == COUNT:
            return self.settings.count_deviation(self.cohort)
        return self.settings.message_multiplier(self.cohort) * self.clip_norm

    def _noise(
        self, draw: Sampler, generator: Generator, sizes: Mapping[str, int], share: float = 1.0
    ) -> dict[str, Tensor]:
        """Return noise for sums of these sizes, multiples of 2^-F, of ``share`` times their
        standard deviation; drawn in the order of names."""
        unit = 2.0**-self.bits
        return {
            name: torch.from_numpy(
                draw(generator, sizes[name], share * self.deviation(name) / unit) * unit
            )
            for name in sorted(sizes)
        }

    def _follow_quantile(self, share_below: float) -> None:
        """C <- C exp(-rate (share below C - quantile)) (Andrew et al., NeurIPS 2021, algorithm
        1)."""
        quantile = self.settings.target_quantile
        assert quantile is not None
        exponent = -self.settings.clip_learning_rate * (share_below - quantile)
        moved = self.clip_norm * math.exp(min(max(exponent, -MOST_MOVED), MOST_MOVED))
        self.clip_norm = min(max(moved, self.least_clip), self.largest_clip)
