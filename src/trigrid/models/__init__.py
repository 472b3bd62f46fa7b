"""Models as ordinary torch code over engine layers.

decoder.py    decoders, unit by unit
block.py      what all blocks have in common; llama.py, gpt.py: what they do not
compiled.py   blocks as graphs of torch.compile
attention.py  causal attention, fused or with dropout of its probabilities
norms.py      RMSNorm, LayerNorm
rope.py       rotary positions
build.py      an engine for a job
generate.py   logits and text, without a loss
huggingface.py  where transformers keeps each parameter
"""
