"""The protocol is every setting that is not the method's own, and no watching callback."""

from __future__ import annotations

import callbacks
from fl_lightning.config.documents import document_hash
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.study.plan.protocol import WATCHERS, protocol_of


def test_the_callbacks_that_are_no_part_of_it_are_all_meters_of_the_project_that_end_no_run():
    """A meter that gives a reason to stop changes how many rounds there are."""
    classes = [getattr(callbacks, name) for name in callbacks.__all__]
    meters = [one for one in classes if issubclass(one, Meter) and not issubclass(one, Stressor)]
    by_name = {one.__name__ for one in meters if "stop_reason" not in vars(one)}
    # a stressor too, to see uploads, none of which it changes
    assert by_name | {"FactorError"} == WATCHERS


def test_callbacks_keep_their_order_and_their_numbers_do_not_count():
    def settings(*paths: str) -> dict[str, str]:
        return {f"trainer.callbacks.{number}.class_path": path for number, path in enumerate(paths)}

    noise, drop, bar = "callbacks.LabelNoise", "callbacks.StragglerDropout", "callbacks.ProgressBar"
    kept = settings(noise, drop)
    assert protocol_of(settings(bar, noise, bar, drop)) == kept
    assert protocol_of(settings(drop, noise)) == settings(drop, noise)
    assert document_hash(kept) != document_hash(settings(drop, noise))
    # nobody knows what it does
    assert protocol_of(settings("theirs.ProgressBar")) == settings("theirs.ProgressBar")


def test_what_only_the_method_decides_and_where_it_is_run_do_not_count():
    shared = {
        "trainer.max_rounds": 3,
        "data.init_args.batch_size": 8,
        "model.init_args.network.class_path": "a.B",
    }
    other = {
        "model.class_path": "FedProx",
        "model.init_args.mu": 1,
        "seed_everything": 5,
        "trainer.devices": 2,
    }
    assert protocol_of({**shared, **other}) == shared
