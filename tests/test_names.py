"""The tables of other systems' names: each name was looked up, in a version that the table and the facts state."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("check_names", ROOT / "tools" / "check_names.py")
check_names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_names)


def test_every_name_was_looked_up_and_torch_s_stand_in_the_installed_one():
    assert check_names.problems() == []
    assert sum(1 for page in check_names.pages() for _ in check_names.rows(page)) > 150


@pytest.mark.parametrize(
    ("name", "text", "absent"),
    [
        ("GroupedMLP", "class TEGroupedMLP: ...", ["GroupedMLP"]),
        ("GroupedMLP", "class GroupedMLP(MegatronModule): ...", []),
        ("fully_shard(module, mesh=mesh)", "def fully_shard(module, *, mesh): ...", []),
        ("fully_shard(module, mesh=mesh)", "def fully_shard(model): ...", ["module", "mesh", "mesh"]),
        ("checkpoint(use_reentrant=False)", "use_reentrant = False", ["checkpoint"]),
    ],
)
def test_a_name_is_found_as_words(name, text, absent):
    assert check_names.missing(name, text) == absent


def test_a_name_that_nobody_looked_up_and_a_wrong_column_are_told(tmp_path, monkeypatch):
    page = tmp_path / "book" / "dp" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(
        "## Where it lives\n\n| here | elsewhere | names found in |\n|---|---|---|\n| `a` | torch `gone` | torch 1 |\n"
    )
    (tmp_path / "book" / "appendix").mkdir()
    (tmp_path / "book" / "appendix" / "facts.md").write_text("")
    monkeypatch.setattr(check_names, "ROOT", tmp_path)
    told = "\n".join(check_names.problems())
    assert "book/dp/page.md:5: 'gone' is not in names.csv" in told
    assert "the last column is 'torch 1', found in '–'" in told
    assert "facts.md lacks the row" in told
