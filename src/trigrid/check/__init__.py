"""Proofs about the engine.

pool.py     worker processes that live on while layouts come and go
parity.py   every layout against the single process, by law 1
prove.py    the real program of one rank of a large job, on a fake process group
"""
