"""What a table of results says, in plain sentences: who wins, by how much, and what stands missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from zoo.results import Results, Row

# Metrics are errors, better when lower, unless a part of their name stands here.
_HIGHER_IS_BETTER = re.compile(
    r"(accuracy|acc|auc|auroc|auprc|ap\d*|map|f1|precision|recall|success|iou|r2|tanimoto|cosine"
    r"|top\d+|reward|revenue|return|served)"
)
# Neither low nor high is good by itself: coverage has a nominal level to meet.
_NO_DIRECTION = re.compile(r"(coverage|width)")
# Kinds of rows that a model's row is never shown without.
_COMPANY = {"twin": "dense twin", "baseline": "baseline"}


def findings(results: Results) -> list[str]:
    """Say in plain sentences how each model stands on its first metric against every other row.

    Rows are compared only if they were measured on the same data, split, protocol, units and number of
    samples.

    Args:
        results: Rows of a run.

    Returns:
        One sentence per finding: what is at or better than the model, by how much; what the model leads by if
        nothing is; what stands missing beside it; why a number is missing.
    """
    sentences: list[str] = []
    for model in (row for row in results.rows if row.kind == "model"):
        others = [row for row in results.rows if row.kind != "model" and comparable(row, model)]
        sentences += _standing(model, others)
        kinds = {row.kind for row in others}
        missing = [word for kind, word in _COMPANY.items() if kind not in kinds]
        if missing:
            sentences.append(
                f"{model.name} has no {' and no '.join(missing)} beside it{_cure(results.command)}."
            )
    for row in results.rows:
        gaps = [metric for metric, value in row.metrics.items() if value is None]
        if gaps:
            sentences.append(f"{row.name} has no {', '.join(gaps)}: {row.notes}.")
    return sentences


def is_best(row: Row, metric: str, rows: Sequence[Row]) -> bool:
    """Say whether no comparable row has a better value; a row without company is not called best."""
    sign, own = direction(metric), row.metrics.get(metric)
    rivals = [
        value for other in rows if comparable(row, other) and (value := other.metrics.get(metric)) is not None
    ]
    return (
        own is not None
        and sign != 0
        and len(rivals) > 1
        and own * sign == min(value * sign for value in rivals)
    )


def comparable(one: Row, other: Row) -> bool:
    """Say whether two rows were measured on the same samples in the same way."""
    return all(
        getattr(one, key) == getattr(other, key)
        for key in ("data", "split", "protocol", "n", "n_unit", "units")
    )


def direction(metric: str) -> int:
    """Return 1 if lower values of a metric are better, -1 if higher ones are, 0 if neither."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(_NO_DIRECTION.fullmatch(word) for word in words):
        return 0
    return -1 if any(_HIGHER_IS_BETTER.fullmatch(word) for word in words) else 1


def decimals(values: Sequence[float | None]) -> int:
    """Return the decimals that show three digits of the smallest value, at most six."""
    sizes = [abs(value) for value in values if value]
    return min(6, max(0, 2 - math.floor(math.log10(min(sizes))))) if sizes else 3


def _standing(model: Row, others: Sequence[Row]) -> Iterator[str]:
    """Say who is at or better than the model on its first metric, or else whom it leads."""
    metric = next(iter(model.metrics), "")
    sign, own = direction(metric), model.metrics.get(metric)
    rivals = [(value * sign, row) for row in others if (value := row.metrics.get(metric)) is not None]
    if not sign or own is None or not rivals:
        return
    rivals.sort(key=lambda rival: rival[0])
    for score, row in rivals:
        if score <= own * sign:
            yield _comparison(row, model, metric)
    if rivals[0][0] > own * sign:
        yield _comparison(model, rivals[0][1], metric)


def _comparison(winner: Row, loser: Row, metric: str) -> str:
    """Tell two rows' values of a metric in one sentence, with as many digits as tell them apart."""
    best, other = winner.metrics[metric], loser.metrics[metric]
    if best is None or other is None:
        raise ValueError(f"{winner.name} and {loser.name} need a value of {metric} to be compared")
    places = decimals([best, other])
    if best == other:
        return f"{winner.name} equals {loser.name} on {metric}: {best:.{places}f}."
    while f"{best:.{places}f}" == f"{other:.{places}f}":
        places += 1
    sentence = f"{winner.name} wins on {metric}: {best:.{places}f} against {other:.{places}f} of {loser.name}"
    spread = max(winner.spread.get(metric, 0.0), loser.spread.get(metric, 0.0))
    return sentence + (
        ", within one standard deviation of the seeds." if abs(best - other) <= spread else "."
    )


def _cure(command: str) -> str:
    """Name the command that makes the missing rows, where one word of this run's command does."""
    words = [word for word in command.split() if not word.startswith("rows=")]
    if "zoo.train" not in words or any(word.startswith("run=") for word in words):
        return ""
    return f" (made by: {' '.join(words)} rows=all)"
