"""What is done with a CUDA device once one can be had: checks, then benchmarks, stage by stage.

``benchmarks/h200.sh`` builds and calls ``python -m benchmarks.cuda``, which runs each stage in a
process of its own with a limit of time. Every stage is a program, ``python -m benchmarks.cuda.NAME
--help``, and runs with ``--backend cpu --tiny`` on a machine without a device.
"""
