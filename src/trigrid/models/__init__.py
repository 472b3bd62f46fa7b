"""Models as ordinary torch code over engine layers.

decoder.py   Llama-style decoders, unit by unit
rope.py      rotary positions
build.py     an engine for a job
"""
