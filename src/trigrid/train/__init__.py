"""Training a job.

trainer.py        what one rank does, from joining the others to the summary
opening.py        the folder of a run, a new one or the one that goes on
training.py       the loop
course.py         which samples come next, and what is a spike
learning_rate.py  warm-up and cosine
meter.py          where the time of the steps goes
machine.py        this machine's matmul rate and memory
processes.py      joining the other ranks
failure.py        what a rank leaves behind when it fails, and who failed first
local.py          all ranks on this machine
agent.py          torchrun's agent: forwards signals, ends and restarts ranks
stopping.py       signals to stop, the time of grace, the marker of a run that was stopped
watchdog.py       a thread that sees when nothing goes on
stall.py          what each rank says then, and who is the cause
"""
