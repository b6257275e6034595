"""The results table: form of the file, honest sentences, Markdown, CSV, command."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zoo import files, report
from zoo.errors import UserError
from zoo.findings import decimals, direction, findings, is_best
from zoo.report import Results, Row, combine, read_results, render, to_csv, to_markdown, write_results

TOP_KEYS = ["domain", "command", "data", "versions", "hardware", "rows"]
ROW_KEYS = [
    *("name", "kind", "data", "split", "protocol", "setting", "n", "n_unit", "metrics", "units"),
    *("seeds", "spread", "parameters_total", "parameters_active", "flops", "seconds", "notes"),
]


def make_row(
    name: str = "dynamic_tmoe", kind: str = "model", mse: float | None = 0.389, **changes: Any
) -> Row:
    values: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "data": "ETTh1",
        "split": "test",
        "protocol": "all windows, z-scored",
        "setting": {"lookback": 96, "horizon": 96},
        "n": 2785,
        "n_unit": "windows",
        "metrics": {"mse": mse},
        "units": "z-scores",
    }
    return Row(**(values | changes))


def make_results(*rows: Row, command: str = "python -m zoo.train domain=forecasting rows=model") -> Results:
    return Results(
        domain="forecasting",
        command=command,
        data=[{"name": "ETTh1", "file": "ETTh1.csv", "sha256": "ab" * 32}],
        versions={"torch": "2.14.1"},
        hardware={"cpu": "Some CPU", "cores": "2"},
        rows=list(rows),
    )


def full_table() -> Results:
    return make_results(
        make_row(
            metrics={"mse": 0.389, "mae": 0.401},
            seeds=[0],
            parameters_total=1_234_567,
            flops=4_560_000,
            seconds=61.24,
        ),
        make_row("dynamic_tmoe_dense", "twin", metrics={"mse": 0.392, "mae": 0.4}, seeds=[0]),
        make_row("ridge", "baseline", metrics={"mse": 0.383, "mae": 0.395}),
        make_row("naive", "baseline", metrics={"mse": 1.294, "mae": 0.713}),
    )


def as_terminal_text(results: Results) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(render(results))
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestCombine:
    def test_mean_sample_spread_seeds_and_seconds(self) -> None:
        rows = [
            make_row(mse=value, seeds=[seed], seconds=seconds, parameters_total=10)
            for seed, (value, seconds) in enumerate([(0.2, 10.0), (0.3, 20.0), (0.7, 60.0)])
        ]
        joined = combine(rows)
        assert joined.metrics["mse"] == pytest.approx(0.4)
        # deviations -0.2, -0.1, 0.3: squares sum to 0.14, over n - 1 = 2
        assert joined.spread["mse"] == pytest.approx(math.sqrt(0.07))
        assert joined.seeds == [0, 1, 2]
        assert joined.seconds == pytest.approx(30.0)
        assert joined.parameters_total == 10

    def test_one_row_comes_back(self) -> None:
        row = make_row(seeds=[3])
        assert combine([row]) is row

    def test_a_null_of_one_seed_is_not_averaged_away(self) -> None:
        joined = combine([make_row(mse=0.2), make_row(mse=math.nan)])
        assert joined.metrics == {"mse": None}
        assert joined.spread == {}
        assert joined.notes == "mse is nan, not a finite number"

    def test_counts_of_a_growing_network_become_mean_with_range(self) -> None:
        joined = combine([make_row(parameters_total=1000), make_row(parameters_total=2001)])
        assert joined.parameters_total == 1500
        assert joined.notes == "parameters_total is the mean of 1,000 to 2,001"

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"name": "ridge"}, "name"),
            ({"n": 1}, "n"),
            ({"setting": {}}, "setting"),
            ({"metrics": {}}, "metrics"),
        ],
    )
    def test_unlike_rows_are_refused(self, change: dict[str, Any], word: str) -> None:
        with pytest.raises(ValueError, match=f"differ in {word}:"):
            combine([make_row(), make_row(**change)])

    def test_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            combine([])


class TestRow:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_not_finite_becomes_null_with_a_note(self, value: float) -> None:
        row = make_row(mse=value, notes="stopped early")
        assert row.metrics == {"mse": None}
        assert row.notes == f"stopped early; mse is {value}, not a finite number"

    def test_null_without_reason_is_refused(self) -> None:
        with pytest.raises(ValueError, match="metric mse is null"):
            make_row(mse=None)

    def test_null_with_reason_stands(self) -> None:
        assert make_row(mse=None, notes="mse needs two windows").metrics == {"mse": None}

    def test_a_spread_that_is_not_finite_is_dropped(self) -> None:
        assert make_row(spread={"mse": math.nan}, seconds=math.nan).spread == {}


class TestFile:
    def test_exact_form(self, tmp_path: Path) -> None:
        row = make_row(
            seeds=[0, 1],
            spread={"mse": 0.01},
            parameters_total=10,
            parameters_active=4,
            seconds=1.5,
            notes="n",
        )
        path = write_results(make_results(row), tmp_path / "run")
        assert path == tmp_path / "run" / "results.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        assert list(record) == TOP_KEYS
        assert list(record["rows"][0]) == ROW_KEYS
        assert record["rows"] == [
            {
                "name": "dynamic_tmoe",
                "kind": "model",
                "data": "ETTh1",
                "split": "test",
                "protocol": "all windows, z-scored",
                "setting": {"lookback": 96, "horizon": 96},
                "n": 2785,
                "n_unit": "windows",
                "metrics": {"mse": 0.389},
                "units": "z-scores",
                "seeds": [0, 1],
                "spread": {"mse": 0.01},
                "parameters_total": 10,
                "parameters_active": 4,
                "flops": None,
                "seconds": 1.5,
                "notes": "n",
            }
        ]
        assert record["data"] == [{"name": "ETTh1", "file": "ETTh1.csv", "sha256": "ab" * 32}]

    def test_round_trip(self, tmp_path: Path) -> None:
        results = full_table()
        path = write_results(results, tmp_path)
        assert read_results(tmp_path) == results
        assert read_results(path) == results

    def test_nan_put_in_later_is_written_as_null_with_note(self, tmp_path: Path) -> None:
        results = make_results(make_row())
        results.rows[0].metrics["mse"] = math.nan
        path = write_results(results, tmp_path)
        assert "NaN" not in path.read_text(encoding="utf-8")
        row = read_results(tmp_path).rows[0]
        assert row.metrics == {"mse": None}
        assert row.notes == "mse is nan, not a finite number"

    def test_wrong_type_is_not_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"rows\[0\]\.n: expected a whole number, found \"many\""):
            write_results(make_results(make_row(n="many")), tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_failed_write_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_results(make_results(make_row(mse=0.5)), tmp_path)
        before = (tmp_path / "results.json").read_bytes()

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(files.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_results(make_results(make_row(mse=0.1)), tmp_path)
        assert (tmp_path / "results.json").read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (("rows", 0, "metrics", "mse"), "low", r"rows\[0\]\.metrics\.mse: expected a number or null"),
            (
                ("rows", 0, "kind"),
                "winner",
                r"rows\[0\]\.kind: expected model or twin or baseline or ablation",
            ),
            (("rows", 0, "n"), True, r"rows\[0\]\.n: expected a whole number, found true"),
            (("rows", 0, "seeds"), [0, "1"], r"rows\[0\]\.seeds\[1\]: expected a whole number"),
            (("rows", 0, "metrics", "mse"), None, "metric mse is null"),
            (("rows", 0), 7, r"rows\[0\]: expected an object, found 7"),
            (("rows",), {}, "rows: expected a list"),
            (("extra",), 1, "key extra is not known"),
            (("versions", "torch"), 2, "versions.torch: expected text, found 2"),
        ],
    )
    def test_damage_is_named_with_file_and_place(
        self, tmp_path: Path, place: tuple[str | int, ...], value: object, message: str
    ) -> None:
        path = write_results(full_table(), tmp_path)
        record = json.loads(path.read_text(encoding="utf-8"))
        part = record
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        path.write_text(json.dumps(record), encoding="utf-8")
        with pytest.raises(UserError, match=message) as caught:
            read_results(tmp_path)
        assert str(path) in str(caught.value)

    def test_missing_key(self, tmp_path: Path) -> None:
        path = write_results(full_table(), tmp_path)
        record = json.loads(path.read_text(encoding="utf-8"))
        del record["rows"][1]["units"]
        path.write_text(json.dumps(record), encoding="utf-8")
        with pytest.raises(UserError, match=r"rows\[1\]: key units is missing"):
            read_results(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "\x00"])
    def test_no_json(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "results.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"results\.json: damaged or no results file"):
            read_results(tmp_path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no such file; give the folder of a finished run"):
            read_results(tmp_path)


class TestFindings:
    def test_a_baseline_that_wins_is_named_first_and_plainly(self) -> None:
        assert findings(full_table()) == ["ridge wins on mse: 0.383 against 0.389 of dynamic_tmoe."]

    def test_the_model_leads(self) -> None:
        rows = [make_row(mse=0.375), make_row("twin", "twin", 0.38), make_row("ridge", "baseline", 0.383)]
        assert findings(make_results(*rows)) == ["dynamic_tmoe wins on mse: 0.375 against 0.380 of twin."]

    def test_every_row_at_or_better_gets_a_sentence(self) -> None:
        rows = [make_row(mse=0.4), make_row("twin", "twin", 0.4), make_row("ridge", "baseline", 0.3)]
        assert findings(make_results(*rows)) == [
            "ridge wins on mse: 0.300 against 0.400 of dynamic_tmoe.",
            "twin equals dynamic_tmoe on mse: 0.400.",
        ]

    def test_close_values_get_digits_that_tell_them_apart(self) -> None:
        rows = [make_row(mse=0.38342), make_row("t", "twin", 0.5), make_row("ridge", "baseline", 0.38338)]
        assert findings(make_results(*rows)) == [
            "ridge wins on mse: 0.38338 against 0.38342 of dynamic_tmoe."
        ]

    def test_a_lead_within_the_spread_is_called_so(self) -> None:
        rows = [
            make_row(mse=0.38, spread={"mse": 0.01}),
            make_row("t", "twin", 0.385),
            make_row("ridge", "baseline", 0.5),
        ]
        assert findings(make_results(*rows)) == [
            "dynamic_tmoe wins on mse: 0.380 against 0.385 of t, within one standard deviation of the seeds."
        ]

    def test_higher_is_better_for_accuracy(self) -> None:
        rows = [
            make_row(metrics={"accuracy": 0.9}),
            make_row("t", "twin", metrics={"accuracy": 0.95}),
            make_row("b", "baseline", metrics={"accuracy": 0.5}),
        ]
        assert findings(make_results(*rows)) == ["t wins on accuracy: 0.950 against 0.900 of dynamic_tmoe."]

    def test_a_lone_model_is_told_with_the_command(self) -> None:
        command = "python -m zoo.train domain=forecasting rows=model seeds=3"
        assert findings(make_results(make_row(), command=command)) == [
            "dynamic_tmoe has no dense twin and no baseline beside it "
            "(made by: python -m zoo.train domain=forecasting seeds=3 rows=all)."
        ]

    def test_rows_of_other_samples_are_no_company(self) -> None:
        rows = [make_row(), make_row("t", "twin", 0.1, n=5), make_row("ridge", "baseline", 0.1, split="val")]
        assert findings(make_results(*rows, command="python x.py")) == [
            "dynamic_tmoe has no dense twin and no baseline beside it."
        ]

    def test_the_reason_of_a_null_is_told(self) -> None:
        rows = [make_row(), make_row("t", "twin", 0.5), make_row("ridge", "baseline", math.nan)]
        assert findings(make_results(*rows))[-1] == "ridge has no mse: mse is nan, not a finite number."

    @pytest.mark.parametrize(
        ("metric", "sign"),
        [
            ("mse", 1),
            ("val/mae", 1),
            ("accuracy", -1),
            ("AP@0.5", -1),
            ("top10", -1),
            ("coverage_90", 0),
            ("map", -1),
        ],
    )
    def test_direction(self, metric: str, sign: int) -> None:
        assert direction(metric) == sign

    def test_best(self) -> None:
        rows = full_table().rows
        assert [is_best(row, "mse", rows) for row in rows] == [False, False, True, False]
        assert not is_best(rows[0], "mse", rows[:1])

    @pytest.mark.parametrize(
        ("values", "places"), [([0.383, 1.29], 3), ([14.2], 1), ([0.00123], 5), ([], 3), ([0.0], 3)]
    )
    def test_decimals(self, values: list[float], places: int) -> None:
        assert decimals(values) == places


class TestTables:
    def test_terminal(self) -> None:
        lines = as_terminal_text(full_table()).splitlines()
        assert lines[:3] == [
            "forecasting · ETTh1 · test",
            "protocol: all windows, z-scored",
            "setting: n counts windows, metrics in z-scores, lookback 96, horizon 96",
        ]
        cells = {
            line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
            for line in lines
            if "│" in line
        }
        assert cells["dynamic_tmoe"] == ["0.389", "0.401", "2785", "0", "1.23M", "–", "4.56M", "61.2"]
        assert cells["ridge"] == ["0.383 *", "0.395 *", "2785", "–", "–", "–", "–", "–"]
        assert lines[-2:] == [
            "* best of its column",
            "ridge wins on mse: 0.383 against 0.389 of dynamic_tmoe.",
        ]

    def test_spread_and_differing_settings_are_columns(self) -> None:
        rows = [
            make_row(spread={"mse": 0.0041}),
            make_row("no_growth", "ablation", setting={"lookback": 48, "horizon": 96}),
        ]
        text = as_terminal_text(make_results(*rows))
        assert "0.389 ± 0.004" in text
        assert "setting: n counts windows, metrics in z-scores, horizon 96" in text
        assert "│ no_growth" in text

    def test_markdown(self) -> None:
        results = full_table()
        results.rows[2] = replace(results.rows[2], notes="fit on the training split")
        lines = to_markdown(results).splitlines()
        assert "| name | mse | mae | n | seeds | params | active | flops | seconds |" in lines
        assert "| dynamic_tmoe | 0.389 | 0.401 | 2785 | 0 | 1.23M | – | 4.56M | 61.2 |" in lines
        assert "| ridge | **0.383** | **0.395** | 2785 | – | – | – | – | – |" in lines
        assert "- ridge wins on mse: 0.383 against 0.389 of dynamic_tmoe." in lines
        assert "- ridge: fit on the training split" in lines
        assert f"Data: ETTh1, ETTh1.csv, sha256 `{'ab' * 32}`  " in lines
        assert "Command: `python -m zoo.train domain=forecasting rows=model`  " in lines

    def test_csv_joins_runs_and_flattens(self) -> None:
        other = make_results(
            make_row("ridge", "baseline", metrics={"mae": 0.5}, notes='a "b", c', seeds=[0, 1])
        )
        lines = list(csv.DictReader(io.StringIO(to_csv([full_table(), other]))))
        assert [line["name"] for line in lines] == [
            "dynamic_tmoe",
            "dynamic_tmoe_dense",
            "ridge",
            "naive",
            "ridge",
        ]
        assert lines[0]["metrics.mse"] == "0.389"
        assert lines[0]["setting.horizon"] == "96"
        assert lines[0]["versions.torch"] == "2.14.1"
        assert lines[0]["hardware.cpu"] == "Some CPU"
        assert lines[0]["data_sha256"] == f"ETTh1.csv:{'ab' * 32}"
        assert lines[4]["metrics.mse"] == ""
        assert lines[4]["metrics.mae"] == "0.5"
        assert lines[4]["seeds"] == "0 1"
        assert lines[4]["notes"] == 'a "b", c'


class TestCommand:
    def test_markdown_to_the_terminal(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_results(full_table(), tmp_path)
        assert report.main([str(tmp_path)]) == 0
        assert capsys.readouterr().out == to_markdown(full_table())

    def test_csv_of_two_runs_to_a_file(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write_results(full_table(), tmp_path / name)
        out = tmp_path / "tables" / "all.csv"
        assert report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--to", "csv", "--out", str(out)]) == 0
        assert out.read_text(encoding="utf-8") == to_csv([full_table(), full_table()])

    @pytest.mark.parametrize("words", [[], ["nowhere"], ["x", "--to", "pdf"], ["x", "--unknown"]])
    def test_a_mistake_is_one_line_and_status_2(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report.main(words) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            report.main(["--help"])
        assert left.value.code == 0
        assert "--to {md,csv}" in capsys.readouterr().out

    def test_no_torch(self) -> None:
        code = "import sys, zoo.report, zoo.environment as e; e.versions(); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"
