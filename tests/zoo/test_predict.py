"""The front door for users' files, with a predictor of a few lines."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from zoo import predict, predictor, registry
from zoo.errors import UserError
from zoo.predictor import Prediction, Predictor, Word


@dataclass(kw_only=True)
class Sum(Prediction):
    """The sum of a line's numbers, scaled."""

    value: float = 0.0


NEWEST = "note: predicting with the newest run, runs/sums/20260102-000000-b; name another by run=DIR"


class Summing(Predictor[tuple[str, str], Sum]):
    """Adds up the numbers of every line of a text file; one line is one item."""

    words: ClassVar[dict[str, Word]] = {
        "scale": Word(kind=float, default=1.0, help="factor on every sum"),
        "digits": Word(kind=int, default=2, help="digits after the point"),
        "mode": Word(kind=str, default="sum", choices=("sum", "mean"), help="what is computed"),
    }
    suffixes = (".txt",)
    pulled: ClassVar[list[str]] = []

    def __init__(self, scale: float, digits: int, mode: str) -> None:
        self.scale, self.digits, self.mode = scale, digits, mode

    @classmethod
    def from_run(cls, run: Path, **words: Any) -> Self:
        if (run / "checkpoints" / "best.ckpt").read_text() == "damaged":
            raise UserError(f"{run}: damaged checkpoint")
        return cls(**words)

    def read(self, path: Path) -> Iterator[tuple[str, str]]:
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines:
            raise UserError(f"{path}: is empty")
        for number, line in enumerate(lines):
            self.pulled.append(line)
            yield f"{path.name}#{number}", line

    def run(self, items: Iterator[tuple[str, str]]) -> Iterator[Sum]:
        for name, line in items:
            try:
                value = self.scale * sum(map(float, line.split()))
            except ValueError:
                yield Sum(item=name, refused=True, message=f"{line!r} holds no numbers")
                continue
            self.pulled.append("done")
            notice = "empty line counts as zero" if not line else ""
            yield Sum(item=name, table=[{"value": round(value, self.digits)}], value=value, message=notice)

    def draw(self, row: Sum, stem: Path) -> Path | None:
        if row.value == 0:
            return None
        stem.parent.mkdir(exist_ok=True)
        path = stem.with_suffix(".svg")
        path.write_text(f"<svg>{row.value}</svg>")
        return path

    def finish(self, directory: Path) -> list[str]:
        (directory / "summary.json").write_text(json.dumps({"mode": self.mode}))
        return [f"mode was {self.mode}"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a finished run of a domain whose predictor is the one above."""
    domain = replace(registry.DOMAINS["forecasting"], name="sums", predictor="sums:Summing")
    monkeypatch.setattr(predict, "DOMAINS", {"sums": domain})
    monkeypatch.setattr(registry, "DOMAINS", {"sums": domain})
    monkeypatch.setattr(predict, "resolve", lambda _: Summing)
    monkeypatch.delenv("ZOO_RUNS", raising=False)
    monkeypatch.delenv("ZOO_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("20260101-000000-a", "20260102-000000-b"):
        make_run(Path("runs", "sums", name))
    Path("in.txt").write_text("1 2 3\n4 5\n")
    Summing.pulled.clear()
    return tmp_path


def make_run(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "best.ckpt").write_text("weights")
    (folder / "config.yaml").write_text("domain: sums\n")


def table(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


class TestOutput:
    def test_all_ok(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert predict.main(["domain=sums", "input=in.txt", "out=o", "scale=2"]) == 0
        assert table(Path("o/predictions.csv")) == [
            ["item", "value"],
            ["in.txt#0", "12.0"],
            ["in.txt#1", "18.0"],
        ]
        assert table(Path("o/status.csv")) == [
            ["item", "status", "message", "outputs"],
            ["in.txt#0", "ok", "", "predictions.csv pictures/in.svg"],
            ["in.txt#1", "ok", "", "predictions.csv pictures/in-2.svg"],
        ]
        assert Path("o/pictures/in.svg").read_text() == "<svg>12.0</svg>"
        assert json.loads(Path("o/summary.json").read_text()) == {"mode": "sum"}
        shown = capsys.readouterr()
        assert shown.out.splitlines() == ["mode was sum", "predicted 2 of 2 items", "out: o"]
        assert shown.err == f"{NEWEST}\n"

    def test_record_says_how_it_was_made(self) -> None:
        predict.main(["domain=sums", "input=in.txt", "out=o", "digits=0"])
        record = json.loads(Path("o/prediction.json").read_text())
        assert record["command"] == "python -m zoo.predict domain=sums input=in.txt out=o digits=0"
        assert record["run"] == "runs/sums/20260102-000000-b"
        assert record["words"] == {"scale": 1.0, "digits": 0, "mode": "sum"}
        assert record["versions"]["python"].count(".") == 2

    def test_a_refused_item_and_a_refused_file_do_not_stop_the_others(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("a.txt").write_text("1\nx\n\n")
        Path("b.txt").write_text("")
        assert predict.main(["domain=sums", "input=a.txt,b.txt,in.txt", "out=o"]) == 1
        assert table(Path("o/status.csv"))[1:] == [
            ["a.txt#0", "ok", "", "predictions.csv pictures/a.svg"],
            ["a.txt#1", "refused", "'x' holds no numbers", ""],
            ["a.txt#2", "ok", "empty line counts as zero", "predictions.csv"],
            ["b.txt", "refused", "b.txt: is empty", ""],
            ["in.txt#0", "ok", "", "predictions.csv pictures/in.svg"],
            ["in.txt#1", "ok", "", "predictions.csv pictures/in-2.svg"],
        ]
        assert [line[0] for line in table(Path("o/predictions.csv"))[1:]] == [
            *("a.txt#0", "a.txt#2", "in.txt#0", "in.txt#1")
        ]
        shown = capsys.readouterr()
        assert shown.out.splitlines()[-2:] == ["predicted 4 of 6 items (2 refused, see status.csv)", "out: o"]
        assert shown.err.splitlines() == [
            NEWEST,
            "refused: a.txt#1: 'x' holds no numbers",
            "note: a.txt#2: empty line counts as zero",
            "refused: b.txt: b.txt: is empty",
        ]

    def test_without_pictures(self) -> None:
        assert predict.main(["domain=sums", "input=in.txt", "out=o", "pictures=no"]) == 0
        assert not Path("o/pictures").exists()
        assert table(Path("o/status.csv"))[1][3] == "predictions.csv"

    def test_items_are_pulled_one_by_one(self) -> None:
        predict.main(["domain=sums", "input=in.txt", "out=o"])
        assert Summing.pulled == ["1 2 3", "done", "4 5", "done"]

    def test_default_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert predict.main(["domain=sums", "input=in.txt"]) == 0
        out = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("out: "))
        assert out.parent == Path("predictions/sums")
        assert (out / "predictions.csv").is_file()

    def test_a_crash_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def crash(self: Summing, directory: Path) -> list[str]:
            assert (directory / "predictions.csv").is_file()
            raise RuntimeError("broken")

        monkeypatch.setattr(Summing, "finish", crash)
        before = sorted(os.listdir())
        with pytest.raises(RuntimeError, match="broken"):
            predict.main(["domain=sums", "input=in.txt", "out=o"])
        assert sorted(os.listdir()) == before

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(self: Summing, items: Iterator[Any]) -> Iterator[Sum]:
            raise KeyboardInterrupt

        monkeypatch.setattr(Summing, "run", stop)
        assert predict.main(["domain=sums", "input=in.txt", "out=o"]) == 130
        assert not Path("o").exists()

    def test_item_names_cannot_leave_the_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            Summing, "read", lambda self, path: iter([("../../x", "1"), ("..", "2"), ("ä/ö.y", "3")])
        )
        assert predict.main(["domain=sums", "input=in.txt", "out=o"]) == 0
        assert sorted(path.name for path in Path("o/pictures").iterdir()) == [
            "item-2.svg",
            "item.svg",
            "x.svg",
        ]


class TestInput:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("d", ["a.txt", "b.TXT"]),
            ("d/*.md", ["c.md"]),
            ("d/c.md,d/a.txt", ["c.md", "a.txt"]),
            ("d/a.txt,d", ["a.txt", "b.TXT"]),
            ("d/**/*.txt", ["a.txt", "e.txt"]),
            ("one,two.txt", ["one,two.txt"]),
        ],
    )
    def test_files(self, text: str, names: list[str]) -> None:
        Path("d/sub").mkdir(parents=True)
        for name in ("d/b.TXT", "d/a.txt", "d/c.md", "d/.hidden.txt", "d/sub/e.txt", "one,two.txt"):
            Path(name).write_text("1\n")
        assert predict.main(["domain=sums", f"input={text}", "out=o"]) == 0
        assert [line[0].partition("#")[0] for line in table(Path("o/status.csv"))[1:]] == names


class TestWords:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["domain=sum", "input=in.txt"], "unknown domain 'sum'. Did you mean 'sums'?"),
            (["domain=sums"], "input= is missing"),
            (["input=in.txt"], "domain= is missing. Known: sums."),
            (["domain=sums", "input=none.txt"], "input=none.txt: no such file"),
            (["domain=sums", "input=empty"], "input=empty: no files ending in .txt"),
            (
                ["domain=sums", "input=in.txt", "scle=2"],
                "unknown word of domain=sums 'scle'. Did you mean 'scale'?",
            ),
            (["domain=sums", "input=in.txt", "scale=big"], "scale=big must be a number"),
            (["domain=sums", "input=in.txt", "digits=1.5"], "digits=1.5 must be a whole number"),
            (["domain=sums", "input=in.txt", "mode=max"], "mode=max is not known; choose one of: sum, mean"),
            (["domain=sums", "input=in.txt", "pictures=maybe"], "pictures=maybe must be yes or no"),
            (["domain=sums", "input=in.txt", "--fast"], "'--fast' is no key=value word"),
            (["domain=sums", "input=in.txt", "input=in.txt"], "input= is given twice"),
            (["domain=sums", "input="], "input= has no value"),
            (["domain=sums", "input=in.txt", "run=none"], "run=none: no finished run"),
            (
                ["domain=sums", "input=in.txt", "run=other"],
                "run=other: is a run of domain=x, not of domain=sums",
            ),
            (
                ["domain=sums", "input=in.txt", "weights=w"],
                "weights=w: published weights arrive with the hub",
            ),
            (["run=runs", "input=in.txt"], "runs/config.yaml: cannot be read"),
            (["domain=sums", "input=in.txt", "out=full"], "out=full: exists already"),
            (["domain=sums", "input=in.txt", "out=in.txt"], "out=in.txt: exists already"),
            (["domain=sums", "input=in.txt", "run=damaged"], "damaged: damaged checkpoint"),
        ],
    )
    def test_a_wrong_word_is_one_line_and_status_2(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("empty").mkdir()
        Path("full").mkdir()
        Path("full/keep").touch()
        for name in ("other", "damaged"):
            make_run(Path(name))
        Path("other/config.yaml").write_text("domain: x\n")
        Path("damaged/checkpoints/best.ckpt").write_text("damaged")
        before = sorted(os.listdir())
        assert predict.main(words) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"error: {message}")
        assert shown.err.count("\n") == 1
        assert sorted(os.listdir()) == before

    def test_domain_comes_from_the_run(self) -> None:
        assert predict.main(["run=runs/sums/20260101-000000-a", "input=in.txt", "out=o"]) == 0
        assert json.loads(Path("o/prediction.json").read_text())["run"] == "runs/sums/20260101-000000-a"

    def test_no_run_names_the_command_that_makes_one(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("ZOO_RUNS", "elsewhere")
        assert predict.main(["domain=sums", "input=in.txt"]) == 2
        assert capsys.readouterr().err == (
            "error: no finished run under elsewhere/sums; name one by run=DIR "
            "or make one: python -m zoo.train domain=sums\n"
        )

    def test_an_empty_folder_may_be_named(self) -> None:
        Path("o").mkdir()
        assert predict.main(["domain=sums", "input=in.txt", "out=o"]) == 0

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert predict.main(["domain=sums", "--help"]) == 0
        page = capsys.readouterr().out
        assert "  scale=        factor on every sum\n" in page
        assert "what is computed [sum|mean]" in page
        assert predict.main([]) == 0
        assert "domains: sums" in capsys.readouterr().out

    def test_bool(self) -> None:
        word = predictor.Word(kind=bool, help="")
        assert [word.parse("w", text) for text in ("yes", "True", "no")] == [True, True, False]


def test_wrong_words_are_answered_without_torch() -> None:
    code = (
        "import sys, zoo.predict as p; p.main(['domain=nothing', 'input=x']); print('torch' in sys.modules)"
    )
    root = Path(predict.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"
