"""What a job will need, in closed form.

traffic.py  every collective and message of a step, counted
state.py    bytes of weights, gradients and optimizer on one rank
"""
