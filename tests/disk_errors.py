"""Errors of the disk injected into the system calls of the trainer, and what must hold after each of them.

strace gives a call an error instead of executing it: once, or from this call on, as a disk that stays bad gives it to
every call that changes files. Writes then fail in whole; short ones come from a small disk (`small_disk`).
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kill_sessions import RUN, TRAIN, Results, Session, copy, log_of
from run_results import differences
from system_calls import OPENING, Call, calls
from workspace import TRAINER, Finished, Workspace

WRITING = ("ENOSPC", "EIO", "EDQUOT", "EFBIG")
SYNCING = ("EIO", "ENOSPC", "EDQUOT")
NAMING = ("ENOSPC", "EIO", "EDQUOT", "EROFS")
REMOVING = ("EIO", "EROFS")
CREATING = (*NAMING, "EMFILE")
READING = ("EIO", "EMFILE")
ERRORS = {
    "write": WRITING, "pwrite64": WRITING, "writev": WRITING, "copy_file_range": WRITING, "ftruncate": ("EIO", "EROFS"),
    "fsync": SYNCING, "fdatasync": SYNCING, "rename": NAMING, "renameat2": NAMING, "mkdir": NAMING, "symlink": NAMING,
    "unlink": REMOVING, "unlinkat": REMOVING, "rmdir": REMOVING, "flock": ("EIO", "ENOLCK"),
}  # fmt: skip
"""The errors that calls can give, apart from those that open files."""
LASTING = frozenset(ERRORS) - {"write", "flock"}
"""Calls that a disk which stays bad fails too. `write` is left out because it prints what the test reads."""
SAVING, CONTINUING = "checkpoint: {", "checkpoint: {on_error: continue, "
STOP, CONTINUE = '"on_error": "stop"', '"on_error": "continue"'
"""The two modes in `training.yaml` and in `resolved_config.json`."""
NOT_SAVED = "saved: "
"""Part of the warning that a checkpoint was not saved."""
SAVED = re.compile(r"^checkpoint .*/(step-\d+)$", re.MULTILINE)
STATE = "trainer_state.json"
QUOTED = re.compile(r'"([^"]*)"')
WRITTEN = (f"{RUN}", "artifacts/")
RANDOM = re.compile(r"tfevents.*\.tmp-|/\.E\.")
"""Names of files that are created which no later process uses: strace cannot tell their calls by the path."""
OWN_WORDS = (
    "not enough room", "`ulimit -f`", "the disk is full", "the file system is read-only",
    "the quota of disk space is used up",
)  # fmt: skip
"""What the programs say instead of the system's words."""
OF_STRACE = re.compile(r"^strace: .*\n", re.MULTILINE)
UNREMOVABLE = re.compile(r"^warning: cannot remove \S*/(\.?step-\d+\S*?): ", re.MULTILINE)
FIRST = ("step-00000002",)
INSTEAD = (*FIRST, "step-00000004", "best")
"""Checkpoints that are kept where later ones are not saved."""


@dataclass(frozen=True)
class Injection:
    """An error of one call of a session."""

    session: Session
    phase: str
    call: Call
    error: str
    lasting: bool
    on_error: str

    def __str__(self) -> str:
        lasts = "from here on" if self.lasting else "once"
        return f"{self.session.name}, {self.phase}, on_error {self.on_error}: {self.error} {lasts} of {self.call.label}"

    @property
    def words(self) -> str:
        """What the system says about the error."""
        return os.strerror(getattr(errno, self.error))

    @property
    def silences(self) -> bool:
        """Whether also what the program prints fails."""
        return self.lasting and self.call.name == "write"

    @property
    def options(self) -> list[str]:
        """The options of strace that inject it."""
        if self.call.name in OPENING:
            return [*self._rules({self.call.name: self._occurrence()})]
        return self._rules({self.call.name: self.call.ordinal} | (self._others() if self.lasting else {}))

    @property
    def path(self) -> str | None:
        """The path that is opened: threads share the reading of the data set, so that ordinals of opening vary."""
        return opened(self.call) if self.call.name in OPENING else None

    def _rules(self, ordinals: dict[str, int]) -> list[str]:
        last = "+" if self.lasting else ""
        rules = [f"inject={name}:error={self.error}:when={first}{last}" for name, first in ordinals.items()]
        return ["-e", f"trace={','.join(ordinals)}", *(word for rule in rules for word in ("-e", rule))]

    def _occurrence(self) -> int:
        """Return how often the program opens this path until then."""
        before = self._earlier()
        return 1 + sum(call.name == self.call.name and opened(call) == self.path for call in before)

    def _earlier(self) -> list[Call]:
        recorded = [call for _, call in self.session.calls]
        return recorded[: recorded.index(self.call)]

    def _others(self) -> dict[str, int]:
        """Return the next ordinal of the other calls that a bad disk fails."""
        before = self._earlier()
        names = sorted(name for name in LASTING if self.error in ERRORS[name] and name != self.call.name)
        return {name: 1 + sum(call.name == name for call in before) for name in names}


@dataclass(frozen=True)
class Outcome:
    """What came of an injection: the first call that failed, the program's end, and what is wrong with it."""

    failed: Call | None
    code: int
    problems: list[str]


def injections(sessions: Mapping[str, Session]) -> list[Injection]:
    """Return every injection of a session, given in both modes."""
    return [
        Injection(session, phase, call, error, lasting, on_error)
        for on_error, session in sessions.items()
        for phase, call in session.calls
        for error in possible_errors(call)
        for lasting in (False, True)
    ]


def possible_errors(call: Call) -> Sequence[str]:
    """Return the errors that a call on a file of the run can give."""
    if " = -1 E" in call.text or not any(folder in call.text for folder in WRITTEN):
        return ()
    if call.name in OPENING:
        if RANDOM.search(opened(call)):
            return ()
        return CREATING if call.changes_files else READING
    return ERRORS.get(call.name, ()) if call.changes_files else ()


def inject(injection: Injection, work: Path) -> Outcome:
    """Run the session in `work` with an error; return what came of it."""
    session = injection.session
    workspace = copy(session.base, work)
    finished = run_with_error(injection, session.command, workspace)
    failed = next((call for call in calls(log_of(work)) if "(INJECTED)" in call.text), None)
    if failed is None or not is_same(failed, injection.call):
        return Outcome(None, finished.code, [])
    problems = wrong_end(injection, finished) + damaged_checkpoints(workspace, finished.out)
    if finished.code == 0:
        problems += wrong_results(injection, workspace, finished)
    else:
        problems += session.problems(workspace)
    return Outcome(failed, finished.code, problems and [*problems, finished.out, finished.err])


def is_same(call: Call, recorded: Call) -> bool:
    """Whether a call has the name and the paths of a recorded one; if it failed it has no path as its result."""
    return set(call.label.split()) <= set(recorded.label.split())


def opened(call: Call) -> str:
    """Return the path that a call opens."""
    path = QUOTED.search(call.text)
    return path[1] if path else ""


def run_with_error(injection: Injection, command: Sequence[str | Path], workspace: Workspace) -> Finished:
    """Run a command under strace with an error.

    With `-D` the traced process is the one that was started, so that the shell knows its number, which is part of the
    names of staging files.
    """
    options = ["-f", "-qq", "--seccomp-bpf", "-y", "-e", "signal=none", *injection.options]
    before, _, after = re.sub(r"(?<=\.tmp-)\d+", "\0", injection.path or "").partition("\0")
    if after or before.endswith(".tmp-"):
        script = 'before=$1 after=$2; shift 2; exec strace -D -P "$before$$$after" "$@"'
        strace = ["sh", "-c", script, "sh", before, after]
    else:
        strace = ["strace", *(["-P", before] if before else [])]
    finished = workspace.command(*strace, *options, "-o", log_of(workspace.root), "--", *command)
    return replace(finished, err=OF_STRACE.sub("", finished.err))


def wrong_end(injection: Injection, finished: Finished) -> list[str]:
    """Return what is wrong with a program's exit code and messages."""
    problems = []
    if finished.code not in (0, 1, 2):
        problems.append(f"exit code {finished.code}")
    if "panicked" in finished.err or "Traceback" in finished.err:
        problems.append("panic or traceback")
    if finished.code == 0 or injection.silences:
        return problems
    error = finished.err.strip()
    if not error.startswith(("error: ", "orchestrate: ")) or "\n\n" in error:
        problems.append("the error is not one paragraph")
    if not any(words in error for words in (injection.words, *OWN_WORDS)):
        problems.append("the error lacks the system's words")
    if not any(folder in error for folder in WRITTEN):
        problems.append("the error names no file")
    return problems


def damaged_checkpoints(workspace: Workspace, output: str) -> list[str]:
    """Return a problem if one of the run's checkpoints is not intact, or the last one that was saved is not there."""
    checkpoints = workspace.checkpoints(RUN.name)
    problems = [f"{saved} is lost" for saved in SAVED.findall(output)[-1:] if saved not in checkpoints]
    if checkpoints:
        verified = workspace.command(TRAINER, "checkpoint", "verify", RUN)
        problems += [] if verified.code == 0 else [f"checkpoints are damaged: {verified.out}{verified.err}"]
    return problems


def wrong_results(injection: Injection, workspace: Workspace, finished: Finished) -> list[str]:
    """Return what differs, without an explanation, from the undisturbed run though the program ended well.

    A run that is only prepared is trained first.
    """
    if not (workspace.root / RUN / "checkpoints").exists():
        workspace.command(*TRAIN).succeeded()
    missing = unsaved(workspace.root)
    problems = []
    if missing and injection.on_error == "stop":
        problems.append("training continued")
    if not injection.silences and any(finished.out.count(f"warning: {text}\n") != 1 for text in missing.values()):
        problems.append("no warning names a missing checkpoint")
    # The next start removes what could not be removed, or was kept because a better checkpoint could not be read.
    removable = {*UNREMOVABLE.findall(finished.out), *(FIRST if FIRST[0] in workspace.checkpoints(RUN.name) else ())}
    problems += unexplained(injection.session, workspace, finished.out, {*missing, *removable})
    if removable - missing.keys() and not problems:
        injection.session.ways["--resume"](workspace)
        problems += unexplained(injection.session, workspace, finished.out, set(missing))
    return problems


def unexplained(session: Session, workspace: Workspace, output: str, checkpoints: set[str]) -> list[str]:
    """Return what differs from the undisturbed run, apart from some checkpoints, and was not announced."""
    found, expected = session.results(workspace), session.undisturbed
    return [
        f"{name} differs"
        for name in differences(found, expected)
        if not is_explained(name, output, checkpoints, found.get(name, b""), expected.get(name, b""))
    ]


def unsaved(root: Path) -> dict[str, str]:
    """Return the checkpoints that a run has not saved, each with the warning, from the advice in metrics.jsonl."""
    metrics = Workspace(root).metrics(RUN.name, "advice")
    return {f"step-{row['step']:08}": row["text"] for row in metrics if NOT_SAVED in row["text"]}


def is_explained(name: str, output: str, checkpoints: set[str], found: bytes, expected: bytes) -> bool:
    """Whether the program has said why a file differs."""
    folder, _, rest = name.partition("/")
    checkpoint = rest.partition("/")[0] if folder == "checkpoints" else ""
    if checkpoint in checkpoints:
        return not found or not expected
    if checkpoints and checkpoint in INSTEAD:
        return True
    file = Path(name).name
    if found and expected and file in (STATE, "MANIFEST.json"):
        has_ledger = "ledger.jsonl cannot be written" not in output
        return is_announced(file, found, expected, has_ledger, checkpoints)
    log = "events.out" if folder == "tensorboard" else name
    return re.search(rf"{re.escape(log)}\S* cannot be written", output) is not None and expected.startswith(found)


def is_announced(file: str, found: bytes, expected: bytes, has_ledger: bool, missing: set[str]) -> bool:
    """Whether the state of a checkpoint differs only in what was announced, or a manifest only in the state.

    A state records no ledger that could not be written, and as the best evaluation one whose checkpoint is saved.
    """
    contents, others = json.loads(found), json.loads(expected)
    if file != STATE:
        return all(contents["files"].get(name) == record for name, record in others["files"].items() if name != STATE)
    announced = {} if has_ledger else {"ledger": None}
    if f"step-{others['best']['step']:08}" in missing:
        announced["best"] = contents["best"]
    return bool(contents == others | {key: value for key, value in announced.items() if contents[key] != others[key]})


def continuing(session: Session, base: Path) -> Session:
    """Return the session with a config that lets it train on when a checkpoint cannot be saved."""
    config = copy(session.base, base).root / RUN / "training.yaml"
    assert SAVING in config.read_text()
    config.write_text(config.read_text().replace(SAVING, CONTINUING))

    def results(workspace: Workspace) -> Results:
        """Return the results as those of a run that has the session's own config."""
        found = session.results(workspace)
        for name, own, other in (("training.yaml", SAVING, CONTINUING), ("resolved_config.json", STOP, CONTINUE)):
            if name in found:
                found[name] = found[name].replace(other.encode(), own.encode())
        return found

    return replace(session, base=base, results=results)
