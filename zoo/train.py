"""The front door: ``python -m zoo.train domain=NAME key=value …`` trains, tests and prints the results table.

Lists, help and wrong words are answered here without loading torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zoo.errors import UserError
from zoo.registry import DOMAINS, Domain, data_presets, sizes
from zoo.words import translate

USAGE = (
    "python -m zoo.train [fit|validate|test|predict] domain=NAME [size=…] [data=…] [run=DIR]\n"
    "                    [rows=model|twin|all] [seeds=N] [allow=PACKAGE] key=value … [--flags]"
)

EXAMPLES = """\
Examples:
  python -m zoo.train domain={name}                       train the model, test it, print the table
  python -m zoo.train domain={name} trainer.max_epochs=3  any setting, typed and checked
  python -m zoo.train domain={name} --help                its settings; --help_all for every one
  python -m zoo.train domain={name} rows=all seeds=3      with the dense twin and baselines, over three seeds
  python -m zoo.train run=DIR trainer.max_epochs=20       continue a run, or finish an interrupted one
  python -m zoo.train test run=DIR                        test the best checkpoint of a run
  python -m zoo.train predict run=DIR input=FILE          predict a file of your own"""


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
    pages = [f"Usage: {USAGE}", "Domains:", *map(_describe, DOMAINS.values())]
    return "\n\n".join([*pages, EXAMPLES.format(name=next(iter(DOMAINS)))])


def _describe(domain: Domain) -> str:
    presets = [f"{size} (default)" if size == domain.size else size for size in sizes(domain.name)]
    marks = {domain.model: " (model)", domain.twin: " (twin)"}
    networks = [network + marks.get(network, "") for network in domain.networks]
    return (
        f"  {domain.name}  {domain.title}\n"
        f"    size=  {', '.join(presets) or 'none'}\n"
        f"    data=  {', '.join(data_presets(domain.name)) or 'none'}\n"
        f"    rows   {', '.join(networks)}"
    )


if __name__ == "__main__":
    sys.exit(main())
