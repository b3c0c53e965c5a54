"""A model over several ranks: a mesh of named axes, and a pipeline along one of them.

``mesh`` arranges ranks. ``schedule`` says as data what each rank of a pipeline does, in which
order; ``validation`` whether that can be carried out, ``simulator`` how long it takes. ``split``
cuts a model where stages cost alike, ``rates`` reads what a device was measured to reach; ``stage``
makes modules of the parts; ``pipeline`` runs one, with the messages of ``message``.
"""

from anychip.train.parallel.mesh import Mesh
from anychip.train.parallel.pipeline import Pipeline
from anychip.train.parallel.rates import Rates, flops_per_byte, read_rates
from anychip.train.parallel.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    add_communication,
    gpipe,
    one_f_one_b,
    parse,
)
from anychip.train.parallel.simulator import Costs, Span, Timeline, simulate
from anychip.train.parallel.split import (
    LayerCost,
    estimate_costs,
    measure_costs,
    partition,
    split_layers,
    stage_costs,
)
from anychip.train.parallel.stage import Stage, make_stage, merge, num_layers
from anychip.train.parallel.state import whole_state_dict
from anychip.train.parallel.validation import validate

__all__ = [
    "SCHEDULES", "Action", "Costs", "LayerCost", "Mesh", "Pipeline", "Rates", "Schedule",
    "ScheduleError", "Span", "Stage", "Timeline", "add_communication", "estimate_costs",
    "flops_per_byte", "gpipe", "make_stage", "measure_costs", "merge", "num_layers",
    "one_f_one_b", "parse", "partition", "read_rates", "simulate", "split_layers", "stage_costs",
    "validate", "whole_state_dict",
]  # fmt: skip
