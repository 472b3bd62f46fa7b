"""The parallel runtime on torch.distributed.

comm.py      every collective and point-to-point call, counted
activity.py  what a rank does now, for a watchdog
traced.py    its collectives as operators of torch, for graphs
matmul.py    how products of fp32 matrices are computed
tensor.py    tensor parallelism: regions, vocabulary-parallel embedding and loss
again.py     tensors that backward makes again, where autograd would keep them
dropout.py   masks that are hashes of what each element is
units.py     a stage as a list of units; autograd runs per unit
zero.py      buckets: weights and gradients of a unit, sharded over data parallelism as the ZeRO stage says
pipeline.py  the interpreter of schedules
finish.py    the end of a step: last sums, norm, guard, clip, AdamW, gather
random.py    initial values that are the same for every layout
runtime.py   one rank's engine, put together from the above
"""
