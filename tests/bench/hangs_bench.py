"""`make bench-hangs`: how well verdicts do on the labelled corpus of hangs: rank, class, abstention.

Counted over cases that are not healthy, by rank: right (named and at fault), wrong (named and not at fault), missed
(at fault and not named). Class: of all cases that are not healthy, and of each class. Abstention: `unknown` where the
label says that it cannot be told. A healthy case is flagged where the run would be ended or a rank be named for it.
Cases in tests/hangs/independent, written by others without sight of rules and corpus, are scored apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from slurm.finding import Rule
from slurm.rules import RULES
from slurm.verdict import Verdict
from tests.hangs.cases import CORPUS, INDEPENDENT, Case, read_all

GOOD = 0.95


@dataclass(frozen=True)
class Row:
    """One case, and what was said of it."""

    case: Case
    said: Verdict

    @property
    def right_class(self) -> bool:
        return self.said.kind in (self.case.label.kind, *self.case.label.also)

    @property
    def right(self) -> int:
        return len({*self.said.ranks} & {*self.case.label.ranks})

    @property
    def wrong(self) -> int:
        return len({*self.said.ranks} - {*self.case.label.ranks})

    @property
    def missed(self) -> int:
        return len({*self.case.label.ranks} - {*self.said.ranks})

    @property
    def flagged(self) -> bool:
        return self.case.label.healthy and (self.said.ends or self.wrong > 0)

    @property
    def good(self) -> bool:
        if self.case.label.healthy:
            return not self.flagged
        ends = not self.case.label.stays
        return self.right_class and not self.wrong and not self.missed and self.said.ends == ends


@dataclass(frozen=True)
class Score:
    """Figures of a corpus; shares are None where there is nothing to take them of."""

    rows: tuple[Row, ...]

    @property
    def sick(self) -> list[Row]:
        return [row for row in self.rows if not row.case.label.healthy]

    @property
    def healthy(self) -> list[Row]:
        return [row for row in self.rows if row.case.label.healthy]

    @property
    def rank_precision(self) -> float | None:
        right, wrong = sum(row.right for row in self.sick), sum(row.wrong for row in self.sick)
        return _share(right, right + wrong)

    @property
    def rank_recall(self) -> float | None:
        right, missed = sum(row.right for row in self.sick), sum(row.missed for row in self.sick)
        return _share(right, right + missed)

    @property
    def class_share(self) -> float | None:
        return _share(sum(row.right_class for row in self.sick), len(self.sick))

    def of_class(self, kind: str) -> tuple[float | None, float | None, int]:
        """Precision and recall of one class, and how many cases have it."""
        said = [row for row in self.sick if row.said.kind == kind]
        have = [row for row in self.sick if row.case.label.kind == kind]
        return (
            _share(sum(row.right_class for row in said), len(said)),
            _share(sum(row.right_class for row in have), len(have)),
            len(have),
        )

    @property
    def innocent_blamed(self) -> int:
        return sum(row.wrong for row in self.rows)

    @property
    def flagged(self) -> int:
        return sum(row.flagged for row in self.healthy)

    @property
    def points(self) -> int:
        """Cases that are wholly right."""
        return sum(row.good for row in self.rows)


def score(cases: Iterable[Case], table: tuple[Rule, ...] = RULES) -> Score:
    """Judge `cases` by the rules of `table`."""
    return Score(tuple(Row(case, case.judge(table)) for case in cases))


def report(name: str, found: Score) -> str:
    """The figures of a corpus, and every case that is not wholly right."""
    real = [row for row in found.sick if not row.case.label.composed]
    lines = [
        f"{name}: {len(found.sick)} hangs ({len(real)} of real runs), {len(found.healthy)} healthy controls",
        f"  rank         precision {_text(found.rank_precision)}   recall {_text(found.rank_recall)}",
        f"  class        {_text(found.class_share)} right",
    ]
    for kind in sorted({row.case.label.kind for row in found.sick} | {row.said.kind for row in found.sick}):
        precision, recall, count = found.of_class(kind)
        title = "abstention (unknown)" if kind == "unknown" else kind
        lines.append(f"    {title:22}precision {_text(precision)}   recall {_text(recall)}   of {count}")
    lines += [
        f"  innocent ranks blamed      {found.innocent_blamed}",
        f"  healthy controls flagged   {found.flagged} of {len(found.healthy)}",
    ]
    for row in found.rows:
        if not row.good:
            label = row.case.label
            lines.append(f"  not right: {row.case.name}: {label.kind} {label.ranks}; said: {row.said.kind} "
                         f"{row.said.ranks}: {row.said.sentence}")  # fmt: skip
    return "\n".join(lines)


def good_enough(found: Score) -> bool:
    """Rank and class at 0.95 or more, nobody innocent blamed, nothing healthy flagged."""
    shares = (found.rank_precision, found.rank_recall, found.class_share)
    return all(share is None or share >= GOOD for share in shares) and not found.innocent_blamed and not found.flagged


def main(arguments: Sequence[str]) -> int:
    """Print the figures; 0 where the corpus is judged well enough. --sentences: print every verdict."""
    corpus = score(read_all(CORPUS))
    print(report("corpus", corpus))
    independent = score(read_all(INDEPENDENT))
    print(report("independent", independent) if independent.rows else "independent: no cases yet")
    if "--sentences" in arguments:
        for row in (*corpus.rows, *independent.rows):
            print(f"\n{row.case.name}: {row.said.sentence}")
    return 0 if good_enough(corpus) else 1


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _text(share: float | None) -> str:
    return "  -  " if share is None else f"{share:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
