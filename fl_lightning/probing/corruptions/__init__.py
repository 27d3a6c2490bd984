"""Images corrupted by the published recipes of CIFAR-C."""
