"""What a model trains on: corpora, tokenizers, token files, the order of samples, batches.

`prepare.prepare` turns a corpus into token files once; `loader.Loader` reads any batch of them, on any layout.
Only `loader` imports torch.
"""
