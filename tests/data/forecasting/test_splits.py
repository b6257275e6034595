"""Split borders and window counts of the field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.data.forecasting.splits import Borders, ett_borders, ratio_borders, require_windows, window_count
from zoo.errors import UserError


@pytest.mark.parametrize(
    ("borders", "rows", "lookback", "horizon", "windows"),
    [
        (ett_borders(1), (8640, 2880, 2880), 96, 96, (8449, 2785, 2785)),
        (ett_borders(1), (8640, 2880, 2880), 96, 720, (7825, 2161, 2161)),
        (ett_borders(4), (34560, 11520, 11520), 96, 96, (34369, 11425, 11425)),
        (ett_borders(4), (34560, 11520, 11520), 96, 720, (33745, 10801, 10801)),
        (ratio_borders(52_696), (36887, 5270, 10539), 96, 96, (36696, 5175, 10444)),
        (ratio_borders(52_696), (36887, 5270, 10539), 96, 720, (36072, 4551, 9820)),
        (ratio_borders(26_304), (18412, 2632, 5260), 96, 96, (18221, 2537, 5165)),
        (ratio_borders(17_544), (12280, 1756, 3508), 96, 96, (12089, 1661, 3413)),
        (ratio_borders(7_588), (5311, 760, 1517), 96, 96, (5120, 665, 1422)),
        (ratio_borders(7_588), (5311, 760, 1517), 96, 720, (4496, 41, 798)),
        (ratio_borders(966), (676, 97, 193), 36, 24, (617, 74, 170)),
        (ratio_borders(966), (676, 97, 193), 36, 60, (581, 38, 134)),
        (ratio_borders(52_416), (36691, 5242, 10483), 168, 24, (36500, 5219, 10460)),
    ],
)
def test_counts_of_the_public_sets(borders, rows, lookback, horizon, windows):
    assert tuple(borders.rows().values()) == rows
    assert tuple(borders.windows(lookback, horizon).values()) == windows


def test_ett_borders_leave_the_last_rows_unused():
    assert ett_borders(1) == Borders((0, 8640), (8640, 11520), (11520, 14400))


@given(st.integers(0, 10_000))
def test_ratio_borders_cover_every_row_once(n):
    borders = ratio_borders(n)
    assert borders.train[0] == 0
    assert borders.train[1] == borders.val[0]
    assert borders.val[1] == borders.test[0]
    assert borders.test[1] == n
    assert all(rows >= 0 for rows in borders.rows().values())


def test_only_the_first_split_pays_for_its_inputs():
    assert window_count(100, 24, 12, first=True) == 65
    assert window_count(100, 24, 12, first=False) == 89
    assert window_count(5, 24, 12, first=True) == 0


@pytest.mark.parametrize(
    ("n", "split", "rows", "needed"),
    [(30, "train", 21, 36), (47, "train", 32, 36), (100, "val", 10, 12)],
)
def test_short_series_name_the_split_and_a_way_out(n, split, rows, needed):
    with pytest.raises(UserError, match=rf"the {split} split has {rows} rows but needs {needed} ") as caught:
        require_windows(ratio_borders(n), 24, 12)
    assert "a file of at least 111 rows" in str(caught.value)
    for enough in range(111, 400):
        require_windows(ratio_borders(enough), 24, 12)
    with pytest.raises(UserError):
        require_windows(ratio_borders(110), 24, 12)


def test_120_rows_are_enough():
    borders = ratio_borders(120)
    require_windows(borders, 24, 12)
    assert borders.windows(24, 12) == {"train": 49, "val": 1, "test": 13}


@pytest.mark.parametrize("n", [10, 30, 47, 100, 110])
def test_the_way_out_leads_out(n):
    with pytest.raises(UserError) as caught:
        require_windows(ratio_borders(n), 24, 12)
    words = str(caught.value).replace(",", "").split()
    said = dict(word.split("=") for word in words if "=" in word)
    assert said
    require_windows(ratio_borders(n), int(said.get("lookback", 24)), int(said.get("horizon", 12)))


def test_hopeless_series_ask_for_a_longer_file():
    with pytest.raises(UserError, match=r"Use a file of at least 111 rows \(this has 3\)"):
        require_windows(ratio_borders(3), 24, 12)
