"""The calls that run_cells.py makes: what they must have among them."""

import pytest

from emulator import cells, grid


@pytest.mark.parametrize(("form", "source"), cells.families())
def test_grid_has_every_readme_cell_on_every_number_of_ranks(form, source):
    own = [cell for cell in cells.accepted() if (cell.form, cell.source) == (form, source)]
    calls = list(grid.grid(form, source))
    wanted = {(cell.activation, cell.shared, ranks) for cell in own for ranks in grid.RANKS}
    assert {(cell.activation, cell.shared, cell.ranks) for cell in calls} == wanted
    assert len(calls) >= grid.FEWEST
    assert {cell.tokens for cell in calls} == set(grid.FACTORS["tokens"])
    assert {(cell.experts, cell.top_k) for cell in calls} == set(grid.FACTORS["experts"])
    assert {cell.stats for cell in calls} == {False, True}
    assert {(cell.delay, cell.grid_id) for cell in calls} == set(grid.FACTORS["order"])
    seen = [any(getattr(c, name) for c in calls)
            for name in ("unrouted", "idle_experts", "idle_ranks", "replicas", "mask")]  # fmt: skip
    assert all(seen)


def test_grouped_calls_are_accepted_and_have_every_recipe():
    calls = list(grid.grouped())
    assert not [cell for cell in calls if cell.refusal()]
    assert {cell.form for cell in calls} == set(grid.GROUPED_ARCHS)
    assert {cell.ranks for cell in calls} == {1, 2}
    assert len({str(cell) for cell in calls}) == len(calls)
