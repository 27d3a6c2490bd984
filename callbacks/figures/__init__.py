"""Callbacks that draw."""
