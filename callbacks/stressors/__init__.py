"""Callbacks that make life harder."""
