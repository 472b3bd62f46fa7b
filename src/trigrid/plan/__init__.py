"""What a job will need: memory of every stage, time of a step, and why, in closed form and without a GPU.

plan.py       make_plan(job) → Plan, and the JSON contract
memory.py     bytes of every pipeline stage by category
compute.py    seconds of a unit's operations
network.py    seconds of collectives and messages; places.py: where groups sit
pipeline.py   stages put together, in closed form or for a replay
step.py       a step as parts that sum to it
goodput.py    how often to save, and the productive share
explain.py    formula, inputs and source of every figure
notes.py      warnings, each with its cost and the way out
software.py   what the trainer does apart from the layout; machine.py: the accelerator; setup.py: layout and batch
constants.py  the fitted constants, from constants.toml
validate.py   plans against published measurements; rows.py and facts.py read a row, evidence/ holds them
traffic.py    every collective and message of a step of this project's engine, counted
state.py      bytes of weights, gradients and optimizer of one rank of it, counted
"""
