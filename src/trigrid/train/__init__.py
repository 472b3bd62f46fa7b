"""Training a job.

trainer.py        what one rank does, from joining the others to the summary
opening.py        the folder of a run, a new one or the one that goes on
training.py       the loop
course.py         which samples come next, and what is a spike
learning_rate.py  warm-up and cosine
meter.py          where the time of the steps goes
sampling.py       by category, of some steps, with what is held
machine.py        this machine's matmul rate and memory
processes.py      joining the other ranks
meeting.py        where each rank runs, and its place in the grid
failure.py        what a rank leaves behind when it fails, and who failed first
logs.py           logs and errors of ranks that torchrun or srun has started
local.py          all ranks on this machine
agent.py          torchrun's agent: forwards signals, ends and restarts ranks
stopping.py       signals to stop, the time of grace, the marker of a run that was stopped
watchdog.py       a thread that sees when nothing goes on
stall.py          what each rank says then, and who is the cause
"""
