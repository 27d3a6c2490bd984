"""The secure sum: the server learns the sum over the clients of a round, and nothing else of any
client.

The protocol is that of Bonawitz et al. (CCS 2017, figure 4, for an honest-but-curious server), and
with a graph of ``neighbours`` that of Bell et al. (CCS 2020, SecAgg+). A round has four phases:

1. *keys*: each client sends two public keys, one for envelopes and one for masks.
2. *shares*: each client deals shares of two secrets to its neighbours, in envelopes that the server
   passes on and cannot open: the seed of its own mask, and the seed of its private mask key.
3. *masked*: each client sends its vector of integers plus its own mask, plus one mask for each
   neighbour that cancels that neighbour's, modulo 2^64.
4. *unmask*: of each client whose vector arrived, the neighbours give shares of its own mask's seed;
   of each client that dropped out, shares of its mask key's seed; never both of one client.

This package is the interface that needs no optional package; ``client``, ``server`` and
``simulation`` need the extra ``privacy``.
"""

from fl_lightning.privacy.secure.settings import PHASES, SecureSum
