"""Proofs about the engine.

pool.py     worker processes that live on while layouts come and go
parity.py   every layout against the single process, by law 1
prove.py    the real program of one rank of a large job, on a fake process group
doctor.py   a machine or a cluster looked over before a run: of one node (doctor_host, doctor_gpus), of all together
            (doctor_network), and what is wrong (doctor_judge)
"""
