"""Meshes: who is where, who is in a group with whom, and what is said when sizes do not fit."""

import pytest
import torch

from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train.parallel import Mesh
from anychip.train.parallel.mesh import coordinates, groups

SIZES = {"data": 2, "tensor": 1, "pipeline": 3}


def test_mesh_coordinates_count_like_numpy_with_the_last_axis_fastest() -> None:
    order = torch.arange(24).view(2, 3, 4)
    for rank in range(24):
        place = tuple(coordinates({"a": 2, "b": 3, "c": 4}, rank).values())
        assert int(order[place]) == rank


@pytest.mark.parametrize(("axes", "wanted"), [
    (["data"], [[0, 3], [1, 4], [2, 5]]), (["tensor"], [[0], [1], [2], [3], [4], [5]]),
    (["pipeline"], [[0, 1, 2], [3, 4, 5]]), (["tensor", "pipeline"], [[0, 1, 2], [3, 4, 5]]),
    (["pipeline", "data"], [[0, 1, 2, 3, 4, 5]]),
])  # fmt: skip
def test_mesh_groups_along_axes_are_these(axes: list[str], wanted: list[list[int]]) -> None:
    assert groups(SIZES, *axes) == wanted


def test_mesh_groups_along_two_of_three_axes_are_slices_of_the_grid() -> None:
    grid = torch.arange(24).view(2, 3, 4)
    sizes = {"a": 2, "b": 3, "c": 4}
    assert groups(sizes, "a", "c") == [grid[:, b].flatten().tolist() for b in range(3)]
    assert groups(sizes, "b", "c") == [grid[a].flatten().tolist() for a in range(2)]


def test_mesh_merges_axes_into_one_group_that_it_makes_once() -> None:
    def work(comm: Communicator) -> tuple[float, list[int], bool]:
        mesh = Mesh(comm, {"data": 2, "pipeline": 2, "context": 2})
        merged = mesh.axis("context", "data")
        total = torch.tensor([float(comm.rank)])
        merged.all_reduce(total)
        assert merged.name == "data x context"
        return total.item(), list(merged.ranks), merged is mesh.axis("data", "context")

    for rank, found in enumerate(run_ranks(8, work)):
        ranks = [0, 1, 4, 5] if rank % 4 < 2 else [2, 3, 6, 7]
        assert found == (float(sum(ranks)), ranks, True)


def test_mesh_axis_joins_the_ranks_of_its_group_only() -> None:
    def work(comm: Communicator) -> dict[str, list[int]]:
        mesh = Mesh(comm, SIZES)
        heard = {}
        for name in SIZES:
            axis = mesh.axis(name)
            everyone = torch.empty(axis.world_size, dtype=torch.int64)
            axis.all_gather(everyone, torch.tensor([comm.rank]))
            heard[name] = everyone.tolist()
            assert axis.rank == mesh.coordinates[name]
            assert axis.name == name
            assert list(axis.ranks) == heard[name]
        return heard

    for rank, heard in enumerate(run_ranks(6, work)):
        for name in SIZES:
            assert heard[name] == next(g for g in groups(SIZES, name) if rank in g)


def test_mesh_of_one_rank_has_every_axis() -> None:
    mesh = Mesh(alone(), {"data": 1, "pipeline": 1})
    assert [mesh.axis(name).world_size for name in ("data", "pipeline")] == [1, 1]
    assert "data 0 of 1" in repr(mesh)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"data": 2, "pipeline": 3}, "data 2 x pipeline 3 = 6 ranks, and this job has 1 rank"),
    ({"data": 2, "pipeline": 1}, "start 2 ranks, or write data = 1"),
    ({"data": 0}, "axis 'data' must be at least 1, got 0"),
    ({"data": True}, "axis 'data' must be at least 1, got True"),
    ({}, "at least one axis expected"),
], ids=["too-many", "advice", "zero", "bool", "empty"])  # fmt: skip
def test_mesh_of_sizes_that_do_not_fit_says_what_would(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(alone(), sizes)


def test_mesh_advice_names_each_axis_that_can_make_it_fit() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"write data = 4, or write pipeline = 2$"):
            Mesh(comm, {"data": 8, "pipeline": 4})

    with pytest.raises(ValueError, match=r"start 6 ranks, or write pipeline = 2$"):
        run_ranks(4, lambda comm: Mesh(comm, {"data": 2, "pipeline": 3}))
    run_ranks(16, work)


def test_mesh_unknown_axis_suggests_the_near_one() -> None:
    mesh = Mesh(alone(), {"data": 1, "pipeline": 1})
    with pytest.raises(ValueError, match="did you mean 'pipeline'"):
        mesh.axis("pipelines")


def test_mesh_axis_of_no_name_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="it has data, pipeline"):
        Mesh(alone(), {"data": 1, "pipeline": 1}).axis()
