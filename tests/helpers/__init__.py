"""What several tests share, importable in the worker processes too."""
