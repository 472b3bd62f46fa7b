"""What the user says: model, cluster, layout, run. Frozen dataclasses, and `rules.py` for what goes with what."""
