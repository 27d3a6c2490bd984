"""Calibration: what the options of a network's layers cost on this device, measured."""
