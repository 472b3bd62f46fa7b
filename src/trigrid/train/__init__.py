"""Training a job.

trainer.py        the loop
learning_rate.py  warm-up and cosine
meter.py          where the time of the steps goes
machine.py        this machine's matmul rate and memory
processes.py      joining the other ranks
failure.py        what a rank leaves behind when it fails, and who failed first
local.py          torchrun on this machine
"""
