"""What a study asks: its file, its criteria, and the search of ``tune``."""
