"""The training stack: each module usable alone in a loop of one's own, all of it by ``loop``.

``models`` and ``data`` are what is trained; ``optim`` are update rules, ``precision`` the dtypes of
the arithmetic, ``zero`` the optimizer that joins both over ranks, ``checkpoint`` what survives the
process; ``config`` and ``loop`` make a run of them that ``interruption`` ends in good order, and
``report`` and ``display`` show it, and ``trackers`` tell others.

Nothing here knows a chip: tensors go to ``chip.device()``, arithmetic through ``anychip.ops``.
"""
