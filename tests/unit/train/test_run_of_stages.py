"""What the settings of stages come to: a schedule, modules, and a plan. Runs: test_ranks.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

import anychip
from anychip.train import config, models, parallel, planning
from anychip.train.cutting import make_schedule
from tests.unit.train.small_runs import tiny

TINY = tiny("model.layers=4", "data.accumulation=4", "parallel.pipeline=2")


def test_schedule_of_the_settings_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(str(parallel.zbv(2, 4)))
    found = config.load(None, [*TINY, f"parallel.schedule={file}", "parallel.virtual=2"])
    assert make_schedule(found) == parallel.zbv(2, 4)
    assert found.parallel.stages == 4
    with pytest.raises(parallel.ScheduleError, match=r"2 stages and 4 microbatches expected, got"):
        make_schedule(config.load(None, [*TINY, f"parallel.schedule={file}"]))


def test_several_stages_as_one_module_have_the_parameters_and_names_of_the_model() -> None:
    """Those of the first and the last stage: what is tied is there twice, as on two ranks."""
    model: Any = models.build(config.load(None, TINY).model)
    parts = [parallel.make_stage(model, layers) for layers in (range(2), range(4, 6))]
    both = parallel.Stages([part for part in parts if isinstance(part, parallel.Stage)])
    wanted = parallel.merge([part.state_dict() for part in parts])
    assert both.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in both.state_dict().items())
    own = {id(param) for part in parts for param in part.parameters()}
    assert {id(param) for param in both.parameters()} == own
    below, above = both.tied
    assert below is model.transformer.wte.weight
    assert above is both.get_parameter("lm_head.weight")
    assert [*dict(both.get_submodule("transformer.h").named_children())] == ["0", "3"]
    both.double()
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float64}


def test_stages_with_whole_weights_are_for_stage_3_of_a_pipeline() -> None:
    settings = [*TINY, "parallel.schedule=zbv", "parallel.whole_stages=2", "optimizer.stage=3"]
    assert make_schedule(config.load(None, settings)) == parallel.add_weights(
        parallel.zbv(2, 4), whole=2
    )
    with pytest.raises(ValueError, match=r"whole_stages = 2 is for optimizer.stage = 3, in which"):
        make_schedule(config.load(None, settings[:-1]))
    with pytest.raises(ValueError, match=r"for stages of a pipeline; got whole_stages = 1 and"):
        config.load(None, ["parallel.whole_stages=1"])


def test_plan_says_which_rank_has_which_stages_and_what_they_send() -> None:
    settings = [*TINY, "parallel.schedule=zbv", "parallel.virtual=2"]
    plan = planning.plan(config.load(None, settings), anychip.use("cpu"))
    assert [stage.rank for stage in plan.stages] == [0, 1, 1, 0]
    assert [len(stage.layers) for stage in plan.stages] != [3, 3]
    # Stages 1 and 2 hand on within their rank; what is tied is joined on rank 0.
    message = 4 * 2 * 16 * 16 * 4
    assert [stage.pipeline_nbytes for stage in plan.stages] == [message] * 4
    assert plan.schedule == parallel.zbv(2, 4)
    assert plan.timeline is not None
    whole = planning.plan(config.load(None, TINY), anychip.use("cpu")).timeline
    assert whole is not None
    assert plan.timeline.makespan < whole.makespan


@pytest.mark.parametrize(("settings", "message"), [
    (["parallel.schedule=zb2p"], "schedule must be one of 1f1b, .* or a .csv file, got 'zb2p'"),
    (["parallel.virtual=2"], "schedule 1f1b has 1 stages per rank, got virtual = 2"),
    (["parallel.virtual=-1"], "virtual must be at least 0, got -1"),
])  # fmt: skip
def test_stages_that_a_schedule_has_not_are_refused_in_the_settings(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config.load(None, [*TINY, *settings])
