"""Callbacks that measure."""
