"""Settings as they are written, packaged, checked and recorded."""
