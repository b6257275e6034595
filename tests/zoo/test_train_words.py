"""The words of the training command: what they become, and what is refused, without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import zoo
from zoo import registry
from zoo.errors import UserError
from zoo.registry import Domain
from zoo.train import main
from zoo.words import translate

DOMAIN = Domain(
    name="pond",
    title="Ponds",
    task="nowhere:Task",
    data="nowhere:Data",
    predictor="nowhere:Predictor",
    model="frog",
    twin="frog_dense",
    networks=("frog", "frog_dense", "newt"),
)


@pytest.fixture(autouse=True)
def pond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "root" / "configs" / "pond"
    for name in ("default", "model/tiny", "model/base", "data/long", "data/short"):
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    monkeypatch.setitem(registry.DOMAINS, "pond", DOMAIN)
    monkeypatch.chdir(tmp_path)
    zoo.__path__.append(str(tmp_path / "root"))
    yield folder
    zoo.__path__.remove(str(tmp_path / "root"))


def saved_run(folder: Path = Path("run")) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    content = {"domain": "pond", "size": "base", "model": {"width": 3}, "data": {"rows": 7, "odd": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder


def test_files_come_first_from_general_to_special_then_the_words(pond: Path) -> None:
    words = translate(["model.width=3", "data=long", "domain=pond", "size=base", "model.width=4"])
    assert words.stage is None
    assert words.name == "long-base"
    assert words.arguments == [
        f"--config={pond / 'default.yaml'}",
        f"--config={pond / 'model/base.yaml'}",
        f"--config={pond / 'data/long.yaml'}",
        "--domain=pond",
        "--size=base",
        "--model.width=3",
        "--model.width=4",
    ]


def test_default_size_is_taken_and_named(pond: Path) -> None:
    words = translate(["fit", "domain=pond"])
    assert words.stage == "fit"
    assert words.name == "tiny"
    assert words.arguments[1:] == [f"--config={pond / 'model/tiny.yaml'}", "--domain=pond", "--size=tiny"]


def test_files_of_the_user_come_after_presets_and_before_words(pond: Path) -> None:
    Path("my.yaml").write_text("model: {width: 2}\n")
    for given in (["--config", "my.yaml"], ["--config=my.yaml"], ["-c", "my.yaml"]):
        words = translate(["data.rows=1", *given, "domain=pond", "data=short"])
        assert words.arguments[2:] == [
            f"--config={pond / 'data/short.yaml'}",
            "--config=my.yaml",
            "--domain=pond",
            "--size=tiny",
            "--data.rows=1",
        ]


@pytest.mark.parametrize(
    ("word", "argument"),
    [
        ("data.path=my.csv", "--data.path=my.csv"),
        ("data.path=a=b.csv", "--data.path=a=b.csv"),
        ("data.path=two words.csv", "--data.path=two words.csv"),
        ("data.path=", "--data.path="),
        ("model.shift=-1.5", "--model.shift=-1.5"),
        ("data.columns=[1,2]", "--data.columns=[1,2]"),
        ("data.columns=null", "--data.columns=null"),
        ('data.columns=["a b","c=d"]', '--data.columns=["a b","c=d"]'),
        ("model.gate.top_k=2", "--model.gate.top_k=2"),
        ("seed_everything=3", "--seed_everything=3"),
        ("ckpt_path=x.ckpt", "--ckpt_path=x.ckpt"),
        ("trainer.callbacks+=EarlyStopping", "--trainer.callbacks+=EarlyStopping"),
        ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks+=EarlyStopping"),
        ("--print_config", "--print_config"),
        ("--model.width=3", "--model.width=3"),
        ("data.note=line\nbreak", "--data.note=line\nbreak"),
    ],
)
def test_words_keep_their_values(word: str, argument: str) -> None:
    assert translate(["domain=pond", word]).arguments[-1] == argument


def test_flag_takes_the_next_token_unless_it_is_a_word() -> None:
    assert translate(["--model.width", "-3", "domain=pond"]).arguments[-1] == "--model.width=-3"
    assert translate(["--model.width", "domain=pond"]).arguments[-1] == "--model.width"
    assert translate(["--print_config", "domain=pond"]).arguments[-1] == "--print_config"


def test_words_of_the_run_become_settings() -> None:
    words = translate(["domain=pond", "rows=twin", "seeds=3", "allow=mine,ours.sub"])
    assert words.arguments[-2:] == ["--rows=twin", "--seeds=3"]
    assert words.allow == ("mine", "ours.sub")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("domain=pnod", "unknown domain 'pnod'. Did you mean 'pond'? Known: forecasting, pond."),
        ("domain=pond size=huge", "unknown size of pond 'huge'. Known: base, tiny."),
        ("domain=pond size=bsae", "unknown size of pond 'bsae'. Did you mean 'base'? Known: base, tiny."),
        (
            "domain=pond data=lnog",
            "unknown data preset of pond 'lnog'. Did you mean 'long'? Known: long, short.",
        ),
        ("domain=pond data=../model/base", "unknown data preset of pond '../model/base'."),
        ("domain=pond rows=al", "unknown rows 'al'. Did you mean 'all'? Known: model, twin, all."),
        ("trian domain=pond", "unknown stage 'trian'."),
        (
            "tets domain=pond",
            "unknown stage 'tets'. Did you mean 'test'? Known: fit, validate, test, predict.",
        ),
        ("domain=pond seeds=0", "seeds=0: expected a whole number of at least 1"),
        ("domain=pond seeds=two", "seeds=two: expected a whole number of at least 1"),
        ("domain=pond size=tiny size=base", "size= is given twice: 'tiny' and 'base'"),
        ("domain=pond domain=pond", "domain= is given twice"),
        ("domain=pond size=", "size= has no value"),
        ("domain=pond base", "expected key=value, found 'base'."),
        ("domain=pond size base", "expected key=value, found 'size'. Did you mean size=…?"),
        ("domain=pond --size=base", "write size=… without dashes"),
        ("domain=pond --allow=mine", "write allow=… without dashes"),
        ("domain=pond 3x=4", "expected key=value, found '3x=4'."),
        ("model.width=3", "say which domain: domain=NAME; python -m zoo.train --help lists them"),
        ("domain=pond --config none.yaml", "--config none.yaml: no such file"),
        ("test domain=pond seeds=2", "rows= and seeds= belong to a whole run: leave out the stage word test"),
        ("run=none", "run=none: there is no none/config.yaml; give the folder of a run"),
    ],
)
def test_wrong_words_are_told_in_one_line_with_status_2(
    given: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {line}")
    assert printed.err.count("\n") == 1


def test_run_stands_for_the_files_and_words_still_win(pond: Path) -> None:
    run = saved_run()
    words = translate([f"run={run}", "trainer.max_epochs=9"])
    assert words.run == run
    assert words.domain.name == "pond"
    assert words.name == "base"
    assert yaml.safe_load(words.arguments[0].removeprefix("--config="))["model"] == {"width": 3}
    assert words.arguments[1:] == ["--domain=pond", "--trainer.max_epochs=9"]


def test_run_with_other_data_keeps_no_key_of_the_old_data(pond: Path) -> None:
    words = translate(["test", f"run={ready(saved_run())}", "data=short"])
    files = [argument.removeprefix("--config=") for argument in words.arguments if "--config" in argument]
    assert [files[0], files[1], files[3]] == [
        str(pond / name) for name in ("default.yaml", "model/base.yaml", "data/short.yaml")
    ]
    assert "data" not in yaml.safe_load(files[2])
    assert yaml.safe_load(files[2])["model"] == {"width": 3}


def ready(run: Path) -> Path:
    (run / "checkpoints" / "best.ckpt").touch()
    return run


def test_size_after_a_run_is_laid_over_it(pond: Path) -> None:
    words = translate([f"run={saved_run()}", "size=tiny"])
    assert words.arguments[1:] == [f"--config={pond / 'model/tiny.yaml'}", "--domain=pond", "--size=tiny"]


def test_saved_configuration_names_its_domain_and_replaces_the_presets() -> None:
    run = saved_run()
    words = translate(["--config", str(run / "config.yaml"), "model.width=5"])
    assert words.run is None
    assert yaml.safe_load(words.arguments[0].removeprefix("--config="))["data"] == {"rows": 7, "odd": 1}
    assert words.arguments[1:] == ["--domain=pond", "--model.width=5"]


@pytest.mark.parametrize("stage", ["test", "validate"])
def test_run_without_a_best_checkpoint_cannot_be_measured(stage: str) -> None:
    run = saved_run()
    with pytest.raises(UserError, match=r"run=run: there is no run/checkpoints/best\.ckpt; train it with"):
        translate([stage, f"run={run}"])
    assert translate([stage, f"run={run}", "ckpt_path=other.ckpt"]).stage == stage


def test_run_that_has_no_checkpoint_yet_can_be_trained() -> None:
    assert translate(["fit", f"run={saved_run()}"]).run == Path("run")


@pytest.mark.parametrize("text", ["a: [", "- 1", "just text", "model: {}"])
def test_folder_with_other_yaml_is_no_run(text: str) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"run/config\.yaml"):
        translate(["run=run"])


def test_run_of_another_domain_is_refused() -> None:
    with pytest.raises(UserError, match="domain=forecasting does not fit a configuration of domain pond"):
        translate([f"run={saved_run()}", "domain=forecasting"])


def test_yaml_tags_are_not_obeyed() -> None:
    Path("evil.yaml").write_text("domain: !!python/object/apply:os.mkdir [evil]\n")
    with pytest.raises(UserError, match=r"evil\.yaml: not readable as YAML"):
        translate(["domain=pond", "--config=evil.yaml"])
    assert not Path("evil").exists()


@pytest.mark.parametrize("given", [[], ["--help"], ["-h"]])
def test_overview_lists_domains_with_their_words(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 0
    page = capsys.readouterr().out
    assert "pond  Ponds" in page
    assert "size=  base, tiny (default)" in page
    assert "data=  long, short" in page
    assert "frog (model), frog_dense (twin), newt" in page
    assert "rows=model|twin|all" in page


def test_help_of_a_domain_is_told_apart() -> None:
    assert translate(["domain=pond", "--help"]).help == "keys"
    assert translate(["domain=pond", "--help_all"]).help == "all"
    assert translate(["domain=pond"]).help is None


def test_models_are_listed_and_filtered() -> None:
    assert registry.list_models(domain="pond") == [
        f"{network}_{size}" for network in DOMAIN.networks for size in ("base", "tiny")
    ]
    assert registry.list_models("frog*_tiny", domain="pond") == ["frog_tiny", "frog_dense_tiny"]
    assert registry.list_models("nothing*") == []
    assert registry.get_entry("newt_base").size == "base"
    with pytest.raises(UserError, match=r"unknown model 'newt_bsae'\. Did you mean 'newt_base'\?"):
        registry.get_entry("newt_bsae")


@pytest.mark.parametrize(
    "command",
    [
        "[]",
        "['--help']",
        "['domain=forcasting']",
        "['domain=forecasting', 'size=hgue']",
        "['domain=forecasting', 'data=hgue']",
        "['tset', 'domain=forecasting']",
        "['domain=forecasting', 'rows=al']",
        "['run=nowhere']",
    ],
)
def test_lists_and_wrong_words_load_no_torch(command: str, root: Path) -> None:
    code = (
        f"import sys, zoo, zoo.train; code = zoo.train.main({command}); zoo.list_models(); "
        "heavy = {'torch', 'pytorch_lightning', 'numpy', 'pandas', 'jsonargparse'} & set(sys.modules); "
        "print(code, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{0 if 'help' in command or command == '[]' else 2} []"


def test_data_presets_set_nothing_but_data(root: Path) -> None:
    presets = sorted((root / "configs").glob("*/data/*.yaml"))
    assert presets
    for preset in presets:
        assert set(yaml.safe_load(preset.read_text())) == {"data"}, preset


def test_sizes_and_defaults_set_model_data_and_trainer_only(root: Path) -> None:
    for path in [*(root / "configs").glob("*/model/*.yaml"), *(root / "configs").glob("*/default.yaml")]:
        assert set(yaml.safe_load(path.read_text())) <= {
            "model",
            "data",
            "trainer",
            "early_stopping",
            "checkpoint",
        }, path
