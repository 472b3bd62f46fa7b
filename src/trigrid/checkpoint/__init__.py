"""Checkpoints: what a run needs to go on after any end, on the same layout or another.

Torch's distributed checkpoint (DCP) plans who writes and who reads what; the files are safetensors and JSON, and
nothing that a checkpoint holds is ever run. `parts` knows what a rank has, `folder` where checkpoints lie, `manifest`
what is in one, `storage` how DCP writes and reads it, `saver` writes while training goes on, `restore` verifies and
reads. `reading` and `writing` do so box by box in one process, streamed; the commands are built on them:
`from_huggingface`, `to_huggingface`, `reshard`, `describe` and `text`.
"""
