"""Collectives of the host: the core's own, over gloo; none that only this backend has.

The core reduces host tensors pairwise over the ranks (:mod:`anychip.comm.messages`), which every
chip without collectives uses too.
"""
