"""Collectives of the host: the contract's own, over gloo; none that only this backend has.

The contract reduces host tensors in the order of the ranks
(:mod:`anychip.comm.c10d`), which every chip without collectives uses too.
"""
