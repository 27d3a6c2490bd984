"""Print the word list of the instruction federation, one word a line.

    python benchmarks/word_list.py > fl_lightning/data/text/words.txt

A word is kept if it stands in lower case, between spaces, in the docstrings of at least four of
CPython's language reference, the standard library, numpy, scipy, torch and scikit-learn; the WORDS
most frequent ones that are plain English are printed in alphabetical order. Other versions of these
packages give a list that differs in some words: the committed list is the one that records are made
of.
"""

from __future__ import annotations

import re
from collections import Counter

from fl_lightning.data.text.corpora import packages, standard_library, topics

WORDS, SOURCES = 1500, 4
WORD = re.compile(r"(?:(?<=\s)|(?<=^))[a-z]{2,7}(?=[,.;:]?(?:\s|$))")
EXCLUDED = """
abort aborted aka al alias aliased aliases alpha api approx arg argmax args async atol attr autograd ax backed
backend beta bin binned bins bitwise bool boolean builtin callee char cls codecs col cols cond config const
cov ctypes cutoff def default del delta dict dicts diff dim dims dist doc docs doctest dst dt dtype dtypes
dummy dx eg elif else emulate enum env eps epsilon eq et etc exp fake fd fn fname foo fp func functor gamma
getter globals gpu grad hashed hex html id ids idx iff illegal impl incurs inexact inf info init inplace int
ints io iter json kill killed kwarg kwargs lambda lib lookup lookups lr mapper master max meta min mixin
mocked mod modulo ms msg mu namedtuple nan nans ndarray ndim non nonzero np nt nth num numpy obj op opcode os
param params phi pi plt pos pp pre prefetch pytest python radix raveled regex renamed repr res reshape rng rs
rtol runtime sanity scipy seq setup slave slot snippet spec st std stderr stdin stdlib stdout str struct stub
subtree subtype sync sys tbd tensor tensors theta timeout tmp todo tol tuple tuples unary unicode unpack url
urls usec utf val vals var varargs versa vice void von vs xs
"""
"""Names of code, abbreviations, Greek letters, and words that hurt."""


def main() -> None:
    sources = {
        "topics": topics().text,
        **{name: packages(name).text for name in ("numpy", "scipy", "torch", "sklearn")},
        "standard_library": standard_library().text,
    }
    counts = {name: Counter(WORD.findall(text)) for name, text in sources.items()}
    total = sum(counts.values(), Counter())
    excluded = set(EXCLUDED.split())
    common = [
        word
        for word in total
        if word not in excluded and sum(word in count for count in counts.values()) >= SOURCES
    ]
    print(*sorted(sorted(common, key=lambda word: (-total[word], word))[:WORDS]), sep="\n")


if __name__ == "__main__":
    main()
