"""The training command from end to end, on a domain of a few lines."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

import zoo
from tests.zoo import toy
from zoo import registry
from zoo.errors import UserError
from zoo.train import main

Train = Callable[..., tuple[int, str, str]]

EVIL = 'from pathlib import Path\nPath("ran").touch()\nclass Spy: pass\n'
OWN = """\
from pytorch_lightning import Callback

class Witness(Callback):
    def on_fit_end(self, trainer, pl_module):
        print("witnessed", trainer.current_epoch)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZOO_RUNS", raising=False)
    monkeypatch.setattr(sys, "argv", ["zoo.train"])
    with toy.installed(tmp_path / "root"):
        yield


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Train:
    """Run the command in this process; returns exit status and what was printed."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(words)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def command(*words: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own, as a user does."""
    # A file, not -c: strategies start further processes from the same command line.
    Path("command.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.zoo import toy\nfrom zoo.train import main\n"
        "with toy.installed(Path('root')):\n    sys.exit(main())\n"
    )
    return subprocess.Popen(
        [sys.executable, "command.py", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores interrupts and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def folder_of(out: str) -> Path:
    """The run folder, named in the last printed line."""
    last = out.splitlines()[-1]
    assert last.startswith("run: ")
    return Path(last.removeprefix("run: "))


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_seconds_are_those_of_the_training_alone(train: Train) -> None:
    status, out, _ = train("domain=toy", "rows=model")
    assert status == 0
    folder = folder_of(out)
    elapsed = {
        name: torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)["callbacks"]["Timer"]
        for name in ("best", "last")
    }
    until = {name: float(state["time_elapsed"]["train"]) for name, state in elapsed.items()}
    seconds = json.loads((folder / "row.json").read_text())["seconds"]
    assert until["last"] <= seconds < until["last"] + until["best"]


def test_one_command_fits_tests_and_leaves_a_whole_run_folder(train: Train) -> None:
    status, out, _ = train("domain=toy", "data=long")
    folder = folder_of(out)
    assert status == 0
    assert folder.parent == Path("runs/toy")
    assert folder.name.endswith("-long-tiny")
    results = json.loads((folder / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["toy", "toy_dense", "bias", "zero"]
    assert [row["seeds"] for row in results["rows"]] == [[0], [0], [0], []]
    assert results["command"] == "python -m zoo.train domain=toy data=long"
    model = results["rows"][0]
    assert model["setting"]["size"] == "tiny"
    assert model["n"] == 32
    assert model["seconds"] > 0
    assert model["parameters_total"] == 2 * 4 + 4 + 4 + 1
    for name in ("results.md", "config.yaml", "environment.json", "metrics.csv", "log.txt", "line.png"):
        assert (folder / name).is_file(), name
    for row in (folder, folder / "rows/toy_dense-seed0", folder / "rows/bias-seed0"):
        assert sorted(path.name for path in (row / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
        assert yaml.safe_load((row / "config.yaml").read_text())["domain"] == "toy"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == results["versions"]["torch"]
    assert set(environment) == {"commands", "versions", "hardware", "git"}


def test_same_seed_same_numbers(train: Train) -> None:
    folders = [
        folder_of(train("domain=toy", "rows=model", f"seed_everything={seed}")[1]) for seed in (3, 3, 4)
    ]
    scores = [json.loads((folder / "row.json").read_text())["metrics"]["mse"] for folder in folders]
    assert scores[0] == scores[1] != scores[2]


def test_seeds_are_combined_with_their_spread(train: Train) -> None:
    _, out, _ = train("domain=toy", "rows=twin", "seeds=2", "seed_everything=5")
    folder = folder_of(out)
    first = json.loads((folder / "row.json").read_text())["metrics"]["mse"]
    second = json.loads((folder / "rows/toy-seed6/row.json").read_text())["metrics"]["mse"]
    model, twin, _ = json.loads((folder / "results.json").read_text())["rows"]
    assert model["seeds"] == twin["seeds"] == [5, 6]
    assert model["metrics"]["mse"] == pytest.approx((first + second) / 2)
    assert model["spread"]["mse"] == pytest.approx(abs(first - second) / 2**0.5)
    assert "not trained: bias; to add them: python -m zoo.train run=" in out


def test_stage_fit_only_fits(train: Train) -> None:
    _, out, _ = train("fit", "domain=toy")
    folder = folder_of(out)
    assert (folder / "checkpoints/best.ckpt").is_file()
    assert not (folder / "results.json").exists()
    assert not (folder / "rows").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("model.num_experts=8", "unknown key 'model.num_experts'. Did you mean model.gate.num_experts=8?"),
        ("trainer.max_epoch=3", "unknown key 'trainer.max_epoch'. Did you mean trainer.max_epochs=3?"),
        ("model.widht=3", "unknown key 'model.widht'. Did you mean model.width=3?"),
        ("horizon=48", "unknown key 'horizon'. Did you mean data.horizon=48?"),
        ("siez=base", "unknown key 'siez'. Did you mean size=base?"),
        ("model.width=abc", "model.width: expected int, found 'abc'"),
        ("data.rows=1e2", "data.rows: expected int, found '100.0'"),
        ("data.columns=3", "data.columns: expected list[str] or null, found '3'"),
        ("trainer.max_epochs=abc", "trainer.max_epochs: expected int or null, found 'abc'"),
        (
            "model.gate.router=softmx",
            "model.gate.router: expected 'softmax' or 'sigmoid', found 'softmx'. Did you mean 'softmax'?",
        ),
        ("model.top_k=9", "top_k=9 must lie in 1..num_experts=4"),
        ("model.width=5000", "width=5000 must lie in 1..1000"),
        ("data.batch_size=0", "data.batch_size=0 must be at least 1"),
        ("data.path=none.csv", "none.csv: no such file"),
        ("--config bad.yaml", "unknown key 'model.wdith' in bad.yaml. Did you mean model.width?"),
        ("--config typed.yaml", "model.width in typed.yaml: expected int, found 'wide'"),
        ("trainer.strategy=fast", "trainer: You selected an invalid strategy name: `strategy='fast'`."),
        (
            "trainer.callbacks+=EarlyStopping",
            "trainer.callbacks: EarlyStopping: the following arguments are required",
        ),
        ("seed_everything=false", "seed_everything=false: give a number"),
        ("ckpt_path=none.ckpt", "none.ckpt: no such checkpoint"),
        ("allow=../mine", "allow=../mine: expected the name of a Python package"),
        ("allow=jsonargparse", "allow=jsonargparse: Import paths under 'jsonargparse' can't be allowed"),
    ],
)
def test_wrong_settings_are_told_in_one_line_and_leave_nothing(train: Train, words: str, line: str) -> None:
    Path("bad.yaml").write_text("model: {wdith: 3}\n")
    Path("typed.yaml").write_text("model: {width: wide}\n")
    status, out, err = train("domain=toy", *words.split())
    assert status == 2
    assert err.startswith(f"error: {line}"), err
    assert err.count("\n") == 1
    assert out == ""
    assert not Path("runs").exists()


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_DEBUG", "1")
    with pytest.raises(ValueError, match="top_k=9 must lie in"):
        main(["domain=toy", "model.top_k=9"])
    with pytest.raises(UserError, match="unknown domain"):
        main(["domain=tyo"])


def test_print_config_prints_all_and_runs_nothing(train: Train) -> None:
    status, out, _ = train("domain=toy", "size=base", "data=short", "model.lr=0.5", "--print_config")
    config = yaml.safe_load(out)
    assert status == 0
    assert config["model"]["width"] == 16
    assert config["model"]["lr"] == 0.5
    assert config["data"]["horizon"] == 3
    assert config["domain"] == "toy"
    assert config["checkpoint"]["monitor"] == "val/mse"
    assert not Path("runs").exists()


def test_help_of_a_domain_shows_its_settings_with_help(train: Train) -> None:
    status, out, _ = train("domain=toy", "size=base", "--help")
    assert status == 0
    assert "model.width=16  (int)\n      Hidden units." in out
    assert "model.gate.num_experts=4  (int)" in out
    assert "data.horizon=1" in out
    assert "trainer.max_epochs=2" in out
    assert "trainer.profiler" not in out
    assert len([line for line in out.splitlines() if line.startswith("  trainer.")]) <= 12
    assert "trainer.profiler" in train("domain=toy", "--help_all")[1]


def test_saved_config_reruns_to_the_same_numbers(train: Train) -> None:
    first = folder_of(train("domain=toy", "size=base", "data=short", "model.lr=0.02", "rows=model")[1])
    second = folder_of(train("--config", str(first / "config.yaml"))[1])
    assert first != second
    assert second.name.rpartition("-")[2] == "base"
    for name in ("config.yaml", "metrics.csv"):
        assert (first / name).read_text() == (second / name).read_text()


def test_run_continues_as_if_never_stopped(train: Train) -> None:
    whole = folder_of(train("domain=toy", "rows=model", "trainer.max_epochs=4", "model.dropout=0.5")[1])
    half = folder_of(train("fit", "domain=toy", "trainer.max_epochs=2", "model.dropout=0.5")[1])
    status, out, _ = train(f"run={half}", "trainer.max_epochs=4", "rows=model")
    assert status == 0
    assert folder_of(out) == half
    assert metrics(half) == metrics(whole)
    scores = [json.loads((run / "results.json").read_text())["rows"][0]["metrics"] for run in (half, whole)]
    assert scores[0] == scores[1]
    assert yaml.safe_load((half / "config.yaml").read_text())["trainer"]["max_epochs"] == 4


def test_last_checkpoint_is_of_the_last_epoch_even_if_it_is_not_the_best(train: Train) -> None:
    folder = folder_of(train("fit", "domain=toy", "trainer.max_epochs=3", "model.lr=3")[1])
    epochs = {
        name: torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)["epoch"]
        for name in ("best", "last")
    }
    assert epochs["last"] == 2
    assert epochs["best"] < 2


def test_finished_rows_are_not_trained_again(train: Train) -> None:
    folder = folder_of(train("domain=toy", "rows=twin")[1])
    files = [folder / "checkpoints/last.ckpt", folder / "rows/toy_dense-seed0/checkpoints/last.ckpt"]
    before = [path.stat().st_mtime_ns for path in files]
    table = json.loads((folder / "results.json").read_text())["rows"]
    log = metrics(folder)
    status, out, _ = train(f"run={folder}", "rows=all")
    assert status == 0
    assert [path.stat().st_mtime_ns for path in files] == before
    assert out.count("training ") == 1
    assert "training bias, seed 0" in out
    results = json.loads((folder / "results.json").read_text())
    assert [row for row in results["rows"] if row["name"] != "bias"] == table
    assert (
        results["command"]
        == f"python -m zoo.train domain=toy rows=twin && python -m zoo.train run={folder} rows=all"
    )
    assert metrics(folder) == log


def test_interrupted_run_of_many_rows_is_finished_by_its_folder(train: Train) -> None:
    process = command("domain=toy", "rows=twin", "trainer.max_epochs=150", "early_stopping.patience=1000")
    twin = None
    while process.poll() is None and twin is None:
        time.sleep(0.05)
        twin = next(Path().glob("runs/toy/*/rows/toy_dense-seed0/checkpoints/last.ckpt"), None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert twin is not None
    folder = twin.parents[3]
    assert err.splitlines()[-1] == f"interrupted; to continue: python -m zoo.train run={folder}"
    assert not (folder / "results.json").exists()
    status, out, _ = train(f"run={folder}")
    assert status == 0
    assert "training toy," not in out
    assert "training toy_dense," in out
    epochs = [line["epoch"] for line in metrics(twin.parents[1]) if line["train/loss"]]
    assert epochs == [str(epoch) for epoch in range(150)]


def test_finished_run_is_tested_and_validated(train: Train) -> None:
    folder = folder_of(train("domain=toy", "rows=model")[1])
    stored = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    status, out, _ = train("test", f"run={folder}")
    assert status == 0
    assert "all points" in out
    assert "toy" in out
    assert folder_of(out) == folder
    status, out, _ = train("validate", f"run={folder}")
    value = float(json.loads((folder / "row.json").read_text())["metrics"]["mse"])
    assert f"{'val/mse':<24} {value:.6g}" in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == stored


def test_test_without_a_checkpoint_is_refused(train: Train) -> None:
    assert train("test", "domain=toy")[::2] == (2, "error: test of what? Add run=DIR, or ckpt_path=FILE\n")


def test_key_that_changes_shapes_is_refused_by_name(train: Train) -> None:
    folder = folder_of(train("fit", "domain=toy")[1])
    for words in (["fit", "model.width=99"], ["model.width=99"], ["test", "model.lr=1", "model.width=99"]):
        status, _, err = train(*words, f"run={folder}")
        assert status == 2
        assert err == (
            f"error: model.width=99 changes the shapes of the network in {folder} (saved 4): "
            "start a new run or drop the word\n"
        )
    assert "model.network=bias changes the shapes" in train(f"run={folder}", "model.network=bias")[2]
    assert "model.width=16 changes the shapes" in train(f"run={folder}", "size=base")[2]
    status, _, _ = train(
        "fit", f"run={folder}", "model.lr=0.5", "model.gate.num_experts=9", "trainer.max_epochs=3"
    )
    assert status == 0


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
def test_damaged_checkpoint_is_refused(train: Train, content: bytes) -> None:
    folder = folder_of(train("fit", "domain=toy")[1])
    for name, stage in (("best", "test"), ("last", "fit")):
        path = folder / f"checkpoints/{name}.ckpt"
        path.write_bytes(content)
        assert train(stage, f"run={folder}")[::2] == (
            2,
            f"error: {path}: damaged, or no checkpoint of the zoo\n",
        )


def test_checkpoint_of_another_network_is_refused(train: Train) -> None:
    folder = folder_of(train("fit", "domain=toy")[1])
    path = folder / "checkpoints/best.ckpt"
    status, _, err = train("test", "domain=toy", f"ckpt_path={path}", "model.width=99")
    assert status == 2
    assert err.startswith(
        f"error: {path} does not fit the network of these settings: size mismatch for net.0.weight"
    )
    torch.save({"weights": torch.zeros(2)}, path)
    assert "not a checkpoint of the zoo" in train("test", f"run={folder}")[2]


def test_callbacks_are_appended(train: Train) -> None:
    words = ("trainer.callbacks+=LearningRateMonitor", "trainer.callbacks+=RichModelSummary")
    folder = folder_of(train("fit", "domain=toy", *words)[1])
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["callbacks"]
    assert [entry["class_path"].rpartition(".")[2] for entry in saved] == [
        "LearningRateMonitor",
        "RichModelSummary",
    ]
    assert any(key.startswith("lr-AdamW") for key in metrics(folder)[0])


def test_early_stopping_is_a_setting_and_the_users_own_replaces_it(train: Train) -> None:
    words = ("fit", "domain=toy", "trainer.max_epochs=30", "model.lr=3")
    ours = folder_of(train(*words, "early_stopping.patience=1")[1])
    own = (
        "trainer.callbacks+=EarlyStopping",
        "trainer.callbacks.monitor=val/mse",
        "trainer.callbacks.patience=1",
    )
    theirs = folder_of(train(*words, *own)[1])
    assert 1 < len(metrics(ours)) == len(metrics(theirs)) < 30


def test_loggers_of_the_user_stand_beside_the_metrics_file(train: Train) -> None:
    own = ("trainer.logger=CSVLogger", "trainer.logger.save_dir=elsewhere")
    folder = folder_of(train("fit", "domain=toy", *own)[1])
    assert metrics(folder)
    assert list(Path("elsewhere").rglob("metrics.csv"))
    none = folder_of(train("fit", "domain=toy", "trainer.logger=false")[1])
    assert not (none / "metrics.csv").exists()
    assert (none / "checkpoints/best.ckpt").is_file()


def test_root_of_runs_can_be_moved(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_RUNS", "here")
    assert folder_of(train("fit", "domain=toy")[1]).parent == Path("here/toy")
    assert folder_of(train("fit", "domain=toy", "trainer.default_root_dir=there")[1]).parent == Path(
        "there/toy"
    )


def test_fast_dev_run_and_no_checkpoints_still_end_in_a_table(train: Train) -> None:
    for word in ("trainer.fast_dev_run=true", "trainer.enable_checkpointing=false"):
        status, out, _ = train("domain=toy", "rows=model", word)
        assert status == 0
        assert (folder_of(out) / "results.json").is_file()


@pytest.mark.parametrize("place", ["word", "file", "saved"])
def test_class_of_a_stranger_is_refused_unimported(train: Train, place: str) -> None:
    Path("evilmod.py").write_text(EVIL)
    text = "trainer: {callbacks: [{class_path: evilmod.Spy}]}\n"
    if place == "word":
        words = ["domain=toy", "trainer.callbacks+=evilmod.Spy"]
    elif place == "file":
        Path("evil.yaml").write_text(text)
        words = ["domain=toy", "--config=evil.yaml"]
    else:
        Path("evil.yaml").write_text(f"domain: toy\nallow: evilmod\n{text}")
        words = ["--config=evil.yaml"]
    process = command(*words)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count("\n") == 1
    if place != "saved":
        assert (
            "classes of 'evilmod' may not be named here; if you trust that package, add allow=evilmod" in err
        )
    assert not Path("ran").exists()
    assert not Path("runs").exists()


def test_allowed_package_brings_its_callback() -> None:
    Path("mypkg.py").write_text(OWN)
    process = command("fit", "domain=toy", "allow=mypkg", "trainer.callbacks+=mypkg.Witness")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "witnessed 2" in out


def test_two_processes_share_one_folder() -> None:
    process = command("domain=toy", "rows=twin", "trainer.strategy=ddp", "trainer.devices=2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("run: ") == 1
    folder = folder_of(out)
    assert list(Path("runs/toy").iterdir()) == [folder]
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["toy", "toy_dense", "zero"]
    assert rows[0]["n"] == 16


def test_create_model_builds_by_name_with_facts_and_settings() -> None:
    network = zoo.create_model("toy_base", channels=5)
    assert network(torch.zeros(3, 5)).shape == (3, 1)
    assert network[0].weight.shape == (16, 5)
    assert zoo.create_model("toy_dense_tiny", width=6)[0].weight.shape == (6, 2)
    assert isinstance(registry.create_model("bias_tiny"), torch.nn.Linear)


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("toy_huge", {}, "unknown model 'toy_huge'"),
        ("toy_tiny", {"widht": 3}, "unknown override of toy_tiny 'widht'. Did you mean 'width'?"),
        ("toy_tiny", {"width": "wide"}, "toy_tiny: .*Expected a <class 'int'>"),
        ("toy_tiny", {"width": 5000}, "toy_tiny: width=5000 must lie in 1..1000"),
    ],
)
def test_create_model_refuses_in_one_line(name: str, overrides: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        zoo.create_model(name, **overrides)
    assert "\n" not in str(caught.value)
