"""The front door: ``python -m zoo.train domain=NAME key=value …`` trains, tests and prints the results table.

Lists, help and wrong words are answered here without loading torch.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence

from zoo.errors import UserError
from zoo.registry import DOMAINS, Domain, data_presets, sizes
from zoo.words import translate

USAGE = (
    "python -m zoo.train [fit|validate|test|predict] domain=NAME [size=…] [data=…] [run=DIR]\n"
    "                    [rows=model|twin|all] [seeds=N] [allow=PACKAGE] key=value … [--flags]"
)

_FAMILY = 5  # names with one beginning from which the overview tells them as one

_EXAMPLES = (
    ("domain={name}", "train the model, test it, print the table"),
    ("domain={name} trainer.max_epochs=3", "any setting, typed and checked"),
    ("domain={name} --help", "its settings; --help_all for every one"),
    ("domain={name} rows=all seeds=3", "with the dense twin and baselines, over three seeds"),
    ("run=DIR trainer.max_epochs=20", "continue a run, or finish an interrupted one"),
    ("test run=DIR", "test the best checkpoint of a run"),
    ("predict run=DIR input=FILE", "predict a file of your own"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Words of the command; those of the process when None.

    Returns:
        Exit status: 0, 2 for a user's mistake, 130 when interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _answer(given)
    except UserError as error:
        if os.environ.get("ZOO_DEBUG") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:
        # --print_config and --help_all print and leave.
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BrokenPipeError:
        # The reader of a pipe (head, less) has left; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(given: list[str]) -> int:
    if not given or given in (["-h"], ["--help"], ["--help_all"]):
        print(overview())
        return 0
    if given[0] == "predict":
        from zoo.predict import main as predict

        return int(predict(given[1:]))
    words = translate(given)
    from zoo.session import run

    return run(words, given)


def overview() -> str:
    """The page behind a bare ``--help``: the grammar, the domains with their words, examples."""
    commands = [(words.format(name=next(iter(DOMAINS))), meaning) for words, meaning in _EXAMPLES]
    width = max(len(words) for words, _ in commands)
    examples = [f"  python -m zoo.train {words:<{width}}  {meaning}" for words, meaning in commands]
    pages = [f"Usage: {USAGE}", "Domains:", *map(_describe, DOMAINS.values())]
    return "\n\n".join([*pages, "\n".join(["Examples:", *examples])])


def _describe(domain: Domain) -> str:
    presets = [f"{size} (default)" if size == domain.size else size for size in _grouped(sizes(domain.name))]
    marks = {domain.model: " (model)", domain.twin: " (twin)"}
    networks = [network + marks.get(network, "") for network in domain.networks]
    return (
        f"  {domain.name}  {domain.title}\n"
        f"    size=  {', '.join(presets) or 'none'}\n"
        f"    data=  {', '.join(data_presets(domain.name)) or 'none'}\n"
        f"    rows   {', '.join(networks)}"
    )


def _grouped(names: tuple[str, ...]) -> list[str]:
    """Names with long families told as one: ``paper_a_1``, ``paper_a_2``, … become ``paper_* (36)``."""
    families = Counter(name.split("_")[0] for name in names)
    told = []
    for name in names:
        family = name.split("_")[0]
        told.append(name if families[family] < _FAMILY else f"{family}_* ({families[family]})")
    return list(dict.fromkeys(told))


if __name__ == "__main__":
    sys.exit(main())
