"""A plugin that was written for contract 1.0: each command says, once each, what it must change."""

import json

from tests.integration.plugins.environments import Environment, good_plugin

ROW = """
@Good.operators.forward("linear")
def linear(x, weight, bias):
    return x
"""
TOLD = ("Rows for linear take out_dtype=None, the dtype of the result.", "State api = (2, 0).")


def test_plugin_of_an_earlier_contract_is_told_once_by_each_command(
    environment: Environment,
) -> None:
    environment.add_plugin("old", good_plugin("old").replace("(2, 0)", "(1, 0)") + ROW)
    listed = environment.anychip("backends", "--json")
    (record,) = (r for r in json.loads(listed.stdout)["backends"] if r["name"] == "old")
    assert record["status"] == "incompatible"
    asked = {
        "doctor": environment.anychip("doctor", "old", COLUMNS="400"),
        "conformance": environment.anychip("conformance", "--backend", "old", COLUMNS="400"),
        "use": environment.run("-c", "import anychip; anychip.use('old')"),
    }
    texts = {name: done.stdout + done.stderr for name, done in asked.items()}
    for name, text in {**texts, "backends": record["fix"]}.items():
        for sentence in TOLD:
            assert text.count(sentence) == 1, (name, text)
    assert {name: done.returncode for name, done in asked.items()} == {
        "doctor": 3, "conformance": 3, "use": 1,
    }  # fmt: skip
