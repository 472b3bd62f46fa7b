"""Starting a job, here, under Slurm or in Kubernetes, and how its processes find each other.

place.py        a process's place in a job, as its launcher tells it
hosts.py        names of hosts, and the switches above them
seats.py        where the ranks really are: their order, and what is wrong with it
interface.py    the network interface on the way to another node
options.py      what a user may ask of a scheduler
start.py        what is started: command, environment, mounts
shape.py        how many nodes, and how many ranks on each
slurm.py        the sbatch file
partitions.py   what Slurm's partitions allow
kubernetes.py   TrainJob and JobSet
submit.py       handing it to sbatch or kubectl
"""
