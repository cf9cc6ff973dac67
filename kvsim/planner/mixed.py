"""The table of techniques, placements alike in all layers, and the programme's mixes, together."""

from dataclasses import field

import numpy as np

from kvsim.frozen import frozen
from kvsim.planner.alike import Alike, alike
from kvsim.planner.batches import refined, within_layers
from kvsim.planner.improve import TRIED, Placements
from kvsim.planner.improved import Improved
from kvsim.planner.question import SIMPLEST, Question, Search, rank
from kvsim.planner.trials import Scored, Trials


@frozen
class Mixed:
    """What was added to a table of techniques.

    Attributes
    ----------
    placements
        The programme.
    rows
        Its mixes by their rows in the table.
    alike
        Placements whose layers are alike.
    """

    placements: Placements
    rows: dict[int, Improved] = field(default_factory=dict)
    alike: Alike = field(default_factory=Alike)

    def starts(self, value: float) -> list[Scored]:
        """From where a question a little different is answered: of every kind the best known.

        Layers of a mix may be alike too, though placements that are alike were not searched, or
        not as far.

        Parameters
        ----------
        value : of the best that is known; mixes are left out that are far behind.
        """
        found = list(self.alike.starts)
        for mix in self.placements.contenders(value):
            if mix.arrangement.blocks > 1:
                continue
            trials = Trials.of(mix.arrangement, float(mix.prediction.batch[0]))
            mine = Scored(trials, np.array([self.placements.goal(mix)]), np.zeros(1))
            found = [x for x in found if x.trials.does != trials.does or x.merits[0] < mine.goals[0]
                     or x.late[0] > 0]  # fmt: skip
            if all(x.late[0] > 0 or x.trials.does != trials.does for x in found):
                found.append(mine)
        return found


def with_mixes(
    question: Question, search: Search, roughly: bool = False, known: Placements | None = None
) -> Mixed:
    """Placements where the programme's bound is better than the table's best, as rows of it.

    Where full KV is as good as the best within the known error, a mix that is not better by more
    than that would not be chosen either: none is then looked for, and the bound says what is left.

    Parameters
    ----------
    roughly : one mix, as the programme gives it, is enough to see what would be chosen.
    known : the programme under other limits, whose batches are enough.
    """
    limits = question.limits.finite()
    best, chosen = search.best(limits), search.chosen(limits)
    rows = [row for row in (best, chosen) if row is not None]
    also = tuple(float(search.table.batch[row]) for row in rows)
    placements = known.under(question) if known else Placements(question, also)
    value = np.inf if best is None else search.value(best)
    if chosen is not None and rank(simplest := search.table.technique[chosen]) == SIMPLEST:
        own = search.value(chosen)
        value = min(value, own - question.between(simplest, simplest) * abs(own))
    tried, placements.polishes = (1, False) if roughly else (TRIED, True)
    bounded, same = placements.bounds(value), Alike()
    if not roughly and placements.promise(value, bounded):
        most = float(bounded.batches[-1])
        same = alike(question, placements.considered, placements.streams, most)
        for prediction in same.best:
            value = min(value, search.value(search.include(prediction)))
    better = placements.better_than(value, bounded, tried)
    mixes = {search.include(x.prediction): x for x in better}
    row = search.optimum(limits)
    top = np.inf if row is None else search.value(row)
    looked = row is not None and (row in mixes or value >= top)  # into what is no worse than it
    if row is not None and looked and not roughly and question.workload.batch is None:
        near = [mixes[row]] if row in mixes else placements.contenders(top)
        batch = float(search.table.batch[row])
        for found in refined(placements, near[0] if near else None, batch, min(value, top)):
            mixes[search.include(found.prediction)] = found
    if looked and not roughly and not question.workload.service:
        row = search.optimum(limits)
        assert row is not None
        batch, least = float(search.table.batch[row]), min(value, search.value(row))
        for found in within_layers(placements, batch, least):
            mixes[search.include(found.prediction)] = found
    return Mixed(placements, mixes, same)
