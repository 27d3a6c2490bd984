"""Federated learning for people who know PyTorch Lightning."""

__version__ = "0.1.0"
