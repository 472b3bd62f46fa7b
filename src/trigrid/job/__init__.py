"""Jobs as TOML: read, resolved, checked, and written back.

keys.py       every key of a job file, its type and its meaning, read from the job's dataclasses
sources.py    file < environment < command line, as one table with the place of each key
spellings.py  what other tools call these keys
resolve.py    the model's base, types, the world, the batch, the rules
writing.py    jobs and values as TOML
starter.py    a commented job to begin with
schema.py     JSON Schema of the job file, for editors
reference.py  tables of all keys, for the documents
"""

from trigrid.job.resolve import job_from_text, load_job
from trigrid.job.writing import dump_job

__all__ = ["dump_job", "job_from_text", "load_job"]
