"""What do the stages of a model hold together? Its state dict, as if it were whole."""

from typing import Any

from anychip.comm import gather_objects
from anychip.contract import Communicator
from anychip.train.parallel.stage import Stage, Stages, merge
from anychip.train.zero import Optimizer


def whole_state_dict(
    stage: Stage | Stages, comm: Communicator, optimizer: Optimizer
) -> dict[str, Any]:
    """The whole model's, on the host of every rank; a collective call.

    Args:
        comm: the ranks of the pipeline.
        optimizer: which may have taken the stage's weights apart.
    """
    return merge(gather_objects(comm, dict(optimizer.stands_for(stage).state_dict())))
