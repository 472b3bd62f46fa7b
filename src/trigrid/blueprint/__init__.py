"""What a model is made of, unit by unit: parameters, how they are cut over ranks, and how they lie in buckets.

parameters.py   one parameter: global shape, which dimension TP cuts, who owns the copies
decoder.py      the units of a decoder, and which stage holds which
frozen.py       which of them are not trained
buckets.py      the flat layout of a unit's parameters, which ZeRO cuts into shards
claims.py       operations, saved tensors and collectives of each kind of unit; terms.py: what they are told in
flops.py        floating-point operations of the model's matrix products
"""

from trigrid.blueprint.decoder import Blueprint, Unit, decoder, split_layers

__all__ = ["Blueprint", "Unit", "decoder", "split_layers"]
