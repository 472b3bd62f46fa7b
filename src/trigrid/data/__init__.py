"""What a model trains on: corpora, tokenizers, token files, the order of samples, batches.

`prepare.prepare` turns a corpus into token files once: `corpus` lists its sources, `shards` cuts them, `workers` run
`tokenise` on each shard, `merge` joins the parts, `build` leads them. `inspect` looks into token files.
`loader.Loader` reads any batch of them, on any layout. Only `loader` imports torch.
"""
