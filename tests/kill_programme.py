"""Which calls are killed at, and how often that ends well: a random sample of each phase, or all of them.

What a kill leaves on the disk depends only on the calls that change files which came before it. So the complete
programme kills before each of those, and before every n-th of the others, which are many more and of other threads too.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kill_sessions import Kill, Session
from system_calls import Call

ATTEMPTS = 3
"""A thread that takes its turn earlier than in the recorded session may make the call that is killed at."""
OTHERS_PER_PHASE = 20
"""The complete programme kills about so often in each phase before calls that change no file."""


@dataclass
class Counts:
    """What came of the kills of a phase."""

    calls: int = 0
    """Calls of the programme that change files."""
    killed: int = 0
    others: int = 0
    """Kills at other calls, which change no file."""
    missed: int = 0
    """Calls at which no attempt killed."""
    equal: int = 0
    problems: list[str] = field(default_factory=list)


def sample(session: Session, chance: random.Random, changing: int, others: int) -> list[tuple[str, Call]]:
    """Draw calls of each phase of a session; those that change files are of different files, as far as there are."""
    drawn = []
    for phase, calls in _by_phase(session.calls).items():
        by_label = defaultdict(list)
        for call in calls:
            if call.changes_files:
                by_label[call.label].append(call)
        labels = chance.sample(sorted(by_label), min(changing, len(by_label)))
        drawn += [(phase, chance.choice(by_label[label])) for label in labels]
        unchanging = [call for call in calls if not call.changes_files]
        drawn += [(phase, call) for call in chance.sample(unchanging, min(others, len(unchanging)))]
    return drawn


def complete(session: Session, every: int = 1) -> list[tuple[str, Call]]:
    """Return every call of a session that changes files, or every n-th one, and some others of each phase."""
    chosen = []
    for phase, calls in _by_phase(session.calls).items():
        changing = [call for call in calls if call.changes_files][::every]
        others = [call for call in calls if not call.changes_files]
        chosen += [(phase, call) for call in changing]
        chosen += [(phase, call) for call in others[:: max(1, every * len(others) // OTHERS_PER_PHASE)]]
    return chosen


def kill_until_hit(session: Session, call: Call, work: Path) -> Kill | None:
    """Kill a session before a call; tries again where another call was hit, or the session ended first."""
    kill = session.kill(call, work)
    for _ in range(ATTEMPTS - 1):
        if is_hit(call, kill) or (kill is not None and kill.problems):
            break
        kill = session.kill(call, work)
    return kill


def is_hit(call: Call, kill: Kill | None) -> bool:
    """Whether a kill came before the call that was meant, or one in its place: folders are read in any order."""
    return kill is not None and kill.call.changes_files == call.changes_files


def count(counts: Counts, call: Call, kill: Kill | None) -> None:
    """Count what came of a kill."""
    counts.calls += call.changes_files
    if not is_hit(call, kill):
        counts.missed += 1
    elif call.changes_files:
        counts.killed += 1
    else:
        counts.others += 1
    if kill is not None and kill.problems:
        counts.problems.append(f"killed before {kill.call.label}: {'; '.join(kill.problems)}")
    elif kill is not None:
        counts.equal += 1


def _by_phase(calls: Sequence[tuple[str, Call]]) -> dict[str, list[Call]]:
    phases: dict[str, list[Call]] = defaultdict(list)
    for phase, call in calls:
        phases[phase].append(call)
    return phases
