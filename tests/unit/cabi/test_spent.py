"""Which name would a library list, so that it serves what torch called?"""

import pytest

from anychip.cabi.spent import listed_as

LISTED = {
    "aten::add.Tensor": "add.Tensor",
    "aten::add.out": "add.Tensor",
    "aten::add_.Tensor": "add.Tensor",
    "aten::sum.IntList_out": "sum.dim_IntList",
    "aten::_softmax.out": "_softmax",
    "aten::fill_.Scalar": "fill.Scalar",
    "aten::_copy_from": "copy",
    "aten::normal_": None,  # it draws numbers
    "aten::_fused_adamw_": None,  # it changes lists
    "aten::_foreach_add.List": None,  # it returns one
    "vendor::own": None,
}


@pytest.mark.parametrize("called", LISTED)
def test_name_to_list_is_that_of_the_functional_operator(called: str) -> None:
    assert listed_as(called) == LISTED[called]
