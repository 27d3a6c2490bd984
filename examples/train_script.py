"""FedAvg and FedProx on the scanned digits, from Python, on the same clients, cohorts and batches.

To run it:

    python examples/train_script.py
"""

from functools import partial

from torch.optim import SGD

from callbacks import StragglerDropout
from fl_lightning import FederatedTrainer
from fl_lightning.data import Dirichlet, FederatedImages
from fl_lightning.methods import FedAvg, FedProx

sgd = partial(SGD, lr=0.03, momentum=0.9)


def main() -> None:
    for method in (FedAvg(optimizer=sgd), FedProx(mu=0.1, optimizer=sgd)):
        data = FederatedImages(dataset="digits", num_clients=20, partition=Dirichlet(beta=0.5))
        trainer = FederatedTrainer(
            max_rounds=5,
            participation=0.5,
            callbacks=[StragglerDropout(probability=0.2)],
            experiment="train_script",
            logger=False,
        )
        result = trainer.fit(method, data, seed=0)
        accuracy = result["final/accuracy"]
        print(f"{type(method).__name__}: test accuracy {accuracy:.3f}, files in {trainer.run_dir}")


if __name__ == "__main__":
    main()
