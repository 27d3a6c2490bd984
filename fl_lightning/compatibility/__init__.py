"""What fits what: the features that a run may have, what each of them needs, and one check of a
run.

A method says in ``refuses`` which features it cannot have, and why; a row of the table says what a
feature needs beside that. Constructors of methods, ``build``, ``fit``, ``check``, ``deploy``, nodes
and the plans of studies all call :func:`check_run`, and the page "What works with what" is printed
from the same rows.

Not here are values that are wrong by themselves, which constructors refuse; what a callback reads
of a run, which its ``on_check`` knows; and what only a machine, a file or a checkpoint can tell.
"""

from __future__ import annotations

from fl_lightning.compatibility import deployments, methods, protection, rounds
from fl_lightning.compatibility.features import (
    FORMER,
    SQUARES_UNKNOWN,
    TASKS,
    Feature,
    adopt_former,
    check_refuses,
    feature_of,
    methods_with,
    no_personal,
    only,
    why_not,
)
from fl_lightning.compatibility.runs import Refusal, Row, Run
from fl_lightning.errors import InputError

ROWS = (
    Row(
        "task", "The method can learn it; what compares logits needs classes.", methods.task, TASKS
    ),
    Row(
        "module",
        "Clients train a LightningModule of yours as the network.",
        methods.module,
        ("module",),
    ),
    Row(
        "terms of the received model",
        "Clients receive a model, which terms of the local loss compare with theirs.",
        methods.received_terms,
        ("received_terms",),
    ),
    Row(
        "server optimiser",
        "The server's next weights are a mean; an extrapolation sums squared lengths of updates too.",
        methods.server_optimizer,
        ("server_optimizer",),
    ),
    Row(
        "personal models",
        "Clients send weights; a part may stay with them, or a copy be tuned before it is evaluated.",
        methods.personal,
        ("personal", "finetune"),
    ),
    Row(
        "adapter average",
        "The server takes means of weights that hold the factors of LoRA; a rule that multiplies them reads "
        "single uploads, or under masks sums of products, and one with messages of its own needs FedAvg's.",
        methods.adapter_average,
        ("adapter_average",),
    ),
    Row(
        "attack",
        "Clients send what they have learned, which hostile ones replace.",
        protection.attack,
        ("attack",),
    ),
    Row(
        "guided average",
        "CenteredClipping and FLTrust go by updates of the server's weights, so the method averages weights.",
        protection.average,
    ),
    Row(
        "secure sum",
        "The server needs nothing of uploads but sums, with weights that each client knows by itself.",
        protection.secure_sum,
        ("secure_sum",),
    ),
    Row(
        "client-level privacy",
        "The server needs nothing of uploads but sums of messages that can be clipped and weigh the same.",
        protection.privacy,
        ("privacy",),
    ),
    Row(
        "clock",
        "Clients are simulated, since virtual seconds are not those of real machines.",
        rounds.clock,
    ),
    Row(
        "late clients",
        "`OverSelection`, `Deadline`, `FedBuff` and `FedAsync` go by a clock, and the server may leave out "
        "single uploads; the last two need clients that send weights alone and keep nothing, and no "
        "deployment.",
        rounds.late_clients,
    ),
    Row(
        "topology",
        "Edge servers and peers run the server's half of a method, each on sums of what it gets: "
        "`Hierarchy`, `Gossip` and `Moshpit` need a weighted mean, rounds that wait for everybody, "
        "and no server that remembers updates; peers weigh alike, and code updates for those who stay.",
        rounds.topology,
        ("topology",),
    ),
    Row(
        "clients that come and go",
        "The server may leave out single uploads, and a cohort is drawn from those that are online.",
        rounds.availability,
    ),
    Row(
        "samplers that look at clients",
        "`PowerOfChoice` and `Oort` see losses and times of single simulated clients, cohort by cohort; "
        "`Oort` goes by a clock.",
        rounds.sampler,
    ),
    Row(
        "deployment",
        "Stressors, callbacks and named metrics read nothing that is on nodes alone: labels, uploads before "
        "they are masked, outputs of personal models.",
        deployments.deployed,
    ),
    Row(
        "private deployment",
        "Shares of noise are sent under masks, where server and clients know what sums start from.",
        deployments.deployed_privacy,
    ),
    Row(
        "nodes' own data",
        "The server needs to know of a client's examples no more than how many there are.",
        deployments.own_data,
        ("own_data",),
    ),
)
"""The table; a run is checked in the order of its rows."""


def check_run(run: Run) -> None:
    """Refuse what cannot be combined, before anything is created.

    Raises:
        InputError: the first of it, in the order of :data:`ROWS`.
        MisuseError: the method refuses a feature that there is not.
    """
    check_refuses(run.method)
    for row in ROWS:
        for given, why, instead in row.refusals(run):
            # a method's reason may end with what to write for it
            rule, _, own = why.partition("; ")
            raise InputError(given, rule, own or instead)
