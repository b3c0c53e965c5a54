"""A model over several ranks: a mesh of named axes, and a pipeline along one of them.

``mesh`` arranges ranks. ``actions`` are what each rank of a pipeline does, as data; ``schedule``
puts them in the known orders, ``lowering`` adds messages and what is done to weights;
``validation`` says whether a schedule can be carried out, ``simulator`` how long it takes.
``picture`` draws both. ``split`` cuts a model where stages cost alike, ``rates`` reads what a
device was measured to reach; ``stage`` makes modules of the parts; ``pipeline`` runs one, with the
messages of ``message``, and ``saved`` counts what it keeps meanwhile.
"""

from anychip.train.parallel.actions import HANDS_ON, Action, Schedule, ScheduleError, parse
from anychip.train.parallel.lowering import add_communication, add_weights
from anychip.train.parallel.mesh import Mesh
from anychip.train.parallel.picture import draw
from anychip.train.parallel.pipeline import Local, Pipeline
from anychip.train.parallel.rates import Rates, Speed, read_rates, speed
from anychip.train.parallel.saved import StageBytes, estimate_bytes
from anychip.train.parallel.schedule import (
    LOOPS,
    NAMES,
    SCHEDULES,
    VS,
    check_virtual,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    make_schedule,
    one_f_one_b,
    stages_per_rank,
    zbv,
    zero_bubble,
)
from anychip.train.parallel.simulator import Bytes, Costs, Span, Time, Timeline, simulate
from anychip.train.parallel.split import (
    LayerCost,
    estimate_costs,
    measure_costs,
    partition,
    split_layers,
    stage_costs,
    weigh_costs,
)
from anychip.train.parallel.stage import Stage, Stages, check_cut, make_stage, merge, num_layers
from anychip.train.parallel.state import whole_state_dict
from anychip.train.parallel.validation import validate

__all__ = [
    "HANDS_ON", "LOOPS", "NAMES", "SCHEDULES", "VS", "Action", "Bytes", "Costs", "LayerCost",
    "Local", "Mesh", "Pipeline", "Rates", "Schedule", "ScheduleError", "Span", "Speed", "Stage",
    "StageBytes", "Stages", "Time", "Timeline", "add_communication", "add_weights", "check_cut",
    "check_virtual", "draw", "dualpipev", "estimate_bytes", "estimate_costs", "gpipe",
    "interleaved", "looped_bfs", "make_schedule", "make_stage", "measure_costs", "merge",
    "num_layers", "one_f_one_b", "parse", "partition", "read_rates", "simulate", "speed",
    "split_layers", "stage_costs", "stages_per_rank", "validate", "weigh_costs", "whole_state_dict",
    "zbv", "zero_bubble",
]  # fmt: skip
