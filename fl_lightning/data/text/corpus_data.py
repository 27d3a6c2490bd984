"""A federation over the text that is at hand: each client holds the docstrings of one package."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np

from fl_lightning.config.constraints import Constraint, within
from fl_lightning.data.text.corpora import Corpus, packages, standard_library
from fl_lightning.data.text.federation import TextData, TextExamples
from fl_lightning.data.text.text_files import joined_windows, part_of_windows
from fl_lightning.data.text.tokens import encode_windows
from fl_lightning.errors import require


class CorpusData(TextData):
    """Docstrings of installed Python packages: a package is a domain, a group and a client.

    The text is read where it is installed; nothing is imported or copied. It differs between
    versions, and ``partition.json`` holds its SHA-256. It is cut into windows that do not overlap
    in what they predict, and every token is labelled. The last windows of each domain are its test
    text.

    Args:
        corpus: standard_library: the packages of CPython, which ``llama_tiny`` has seen; packages:
            those that are named.
        packages: import names of installed packages, with ``corpus: packages``.
        max_characters: largest number of characters of a domain; what follows is left out. null:
            all.
        min_characters: smaller domains of the standard library are left out.
        num_clients: number of clients, which hold the domains with the most text; 0: one for each
            domain.
        test_fraction: share of each domain that is its test text, in (0, 1).
        settings: those of all text, see :class:`~fl_lightning.data.TextData`; ``context`` is the
            length of a window.
    """

    def __init__(
        self,
        corpus: Annotated[
            Literal["packages", "standard_library"],
            Constraint(given="corpus {value}", instead="write corpus packages"),
        ] = "packages",
        packages: tuple[str, ...] | list[str] = ("numpy", "pandas", "scipy", "sklearn"),
        max_characters: int | None = 100_000,
        min_characters: int = 0,
        num_clients: Annotated[
            int,
            within(
                "[0, inf)", "a federation has at least one client", "write 0 for one of each domain"
            ),
        ] = 0,
        test_fraction: Annotated[
            float, within("(0, 1)", "a share in (0, 1)", "write e.g. 0.1")
        ] = 0.1,
        **settings: Any,
    ) -> None:
        require(
            corpus == "standard_library" or packages,
            "packages=[]",
            "a client holds the docstrings of a package",
            "name installed packages, such as numpy",
        )
        self.dataset = corpus
        super().__init__(num_clients=num_clients or 1, generate=False, **settings)
        self.count_clients, self.test_fraction = num_clients == 0, test_fraction
        self.packages = tuple(dict.fromkeys(packages))
        self.max_characters, self.min_characters = max_characters, min_characters

    def corpus(self) -> Corpus:
        """Return the text by domain.

        Raises:
            InputError: a package is not installed, or there are no docstrings.
        """
        if self.dataset == "standard_library":
            return standard_library(self.max_characters, self.min_characters)
        return packages(*self.packages, max_characters=self.max_characters)

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Read the text and cut it into windows.

        Raises:
            InputError: there is none, there are fewer domains than clients, or a domain has a
                single window.
        """
        corpus = self.corpus()
        if self.count_clients:
            self.num_clients = len(corpus.domains)
        require(
            self.num_clients <= len(corpus.domains),
            f"num_clients={self.num_clients}",
            f"the corpus has {len(corpus.domains)} domains",
            "write 0 for one client of each",
        )
        largest = sorted(corpus.domains, key=lambda name: (-len(corpus.domains[name]), name))
        self.groups = tuple(sorted(largest[: self.num_clients]))
        self._corpus = Corpus(
            corpus.name, {name: corpus.domains[name] for name in self.groups}, corpus.left_out
        )
        train, test = [], []
        for number, name in enumerate(self.groups):
            windows = encode_windows(self._corpus.domains[name], self.tokenizer, self.context)
            tested = 0 if self.run_form else max(1, round(self.test_fraction * len(windows)))
            first = len(windows) - tested
            require(
                first >= 1,
                f"domain {name} with {len(windows)} windows of context={self.context}",
                "it has no text for training beside that of the test",
                "write a smaller context, or min_characters",
            )
            train.append((number, part_of_windows(windows, slice(0, first))))
            test.append((number, part_of_windows(windows, slice(first, None))))
        examples = joined_windows(train), joined_windows(test)
        return examples[0], self._named(examples[1])

    def _named(self, test: TextExamples) -> TextExamples:
        """Return the test windows with their domain as the kind by which ``test`` reports them."""
        names = np.array(self.groups)[test.group].tolist()
        return TextExamples(test.sequences, test.group, None, names)

    @property
    def text_summary(self) -> dict[str, Any]:
        """What identifies the text: its SHA-256, the version of Python, and the characters of each
        domain."""
        return self._corpus.summary()
