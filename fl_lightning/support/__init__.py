"""Helpers that every part of the package may import; they import no other part but ``errors``."""
