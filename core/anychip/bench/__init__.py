"""Benchmarks of a backend next to named peers and to the bound, in one run.

``timing`` is the protocol, ``dispatch`` and ``operators`` are subjects, ``report`` prints and
writes. No figure is compared with one from another run.
"""
