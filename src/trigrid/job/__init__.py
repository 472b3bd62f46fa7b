"""Jobs as TOML: read, resolved, checked, and written back.

sources.py   file < environment < command line, as one table with the place of each key
resolve.py   the model's base, types, the world, the rules
"""

from trigrid.job.resolve import dump_job, load_job

__all__ = ["dump_job", "load_job"]
