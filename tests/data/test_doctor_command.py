"""``python -m zoo.data``: words, exit status, table."""

import sys

import pytest

from zoo.data.__main__ import main


@pytest.fixture
def good(tmp_path):
    """Return a file of 300 good rows."""
    path = tmp_path / "good.csv"
    path.write_text("date,a\n" + "".join(f"{i},{i % 7}\n" for i in range(300)))
    return path


def test_good_file(good, capsys):
    assert main(["check", str(good), "lookback=24", "horizon=12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok       length      windows of 24 + 12 rows: train 175, val 19, test 49" in lines
    assert lines[-1] == f"{good}: refused: 0, warnings: 0"


def test_refused_file(good, capsys):
    assert main(["check", str(good)]) == 1
    assert "refusal  length      too short: the val split has 30 rows but needs 96" in capsys.readouterr().out


def test_lists_are_parted_by_commas(good, capsys):
    assert main(["check", str(good), "columns=a,b"]) == 1
    assert "no column 'b'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek", "f"], "unknown command 'chek' (did you mean 'check'?)"),
        (["check"], "check takes one FILE, not 0"),
        (["check", "f", "g"], "check takes one FILE, not 2"),
        (["check", "f", "lookbak=3"], "unknown word lookbak= (did you mean 'lookback'?)"),
        (["check", "f", "lookback=long"], "lookback=long is not a whole number"),
        (
            ["check", "f", "fill=maks"],
            "fill=maks is not one of none, mask, linear, last (did you mean 'mask'?)",
        ),
        (
            ["check", "f", "domain=forcasting"],
            "no doctor for domain 'forcasting' (did you mean 'forecasting'?)",
        ),
        (["check", "f", "fill=mask", "fill=last"], "fill= is given twice"),
        (["check", "f", "--fill", "mask"], "unknown flag --fill"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_help_lists_the_words_of_the_domain(capsys):
    assert main(["check", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: python -m zoo.data check FILE" in out
    assert "lookback=96   input rows of a window." in out
    assert "fill=none   how to fill gaps and missing values: none (refuse), mask, linear, last." in out
    assert main([]) == 2


def test_terminal_gets_a_table(good, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["check", str(good), "lookback=24", "horizon=12"]) == 0
    out = capsys.readouterr().out
    assert "windows of 24 + 12 rows" in out
    assert "refused: 0, warnings: 0" in out
