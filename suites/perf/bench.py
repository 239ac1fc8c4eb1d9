"""The bench: alternating starts of two arms until every cell is decided, kept after each start."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from suites.perf import progress, traps
from suites.perf.arms import Arm, Host, Session
from suites.perf.cells import Cell, Kind, prompt_seed
from suites.perf.errors import ArmError, BenchStoppedError, RecordError
from suites.perf.gate import gate_records
from suites.perf.gate_result import GateResult, has_void
from suites.perf.judging import kept_pairs, pairs_of, verdicts
from suites.perf.order import arms_of
from suites.perf.progress import Forecast, Progress
from suites.perf.rates import Sample, sample_of, value_of, warm_up
from suites.perf.run_record import (
    SCHEMA,
    CellSamples,
    FailedStart,
    RunRecord,
    Start,
    load_record,
    save_record,
)
from suites.perf.states import Canary, StateLimits, reference_of, refuse_capped
from suites.perf.stats import Policy

REFERENCE_CANARIES = 3
ARMS = ("A", "B")
Report = Callable[[Progress], None]


@dataclass(frozen=True)
class BenchPlan:
    """What a bench measures under which rules; A is the base, B the head.

    `outputs_rule`: "identical" wants one logprob hash over both arms, "needle" the needle only.
    `reference`: what the host does when healthy; None takes the best of three canaries at first.
    """

    cells: tuple[Cell, ...]
    policy: Policy = Policy()
    limits: StateLimits = StateLimits()
    idle_s: float = 180.0
    outputs_rule: str = "identical"
    base_commit: str = ""
    failures_max: int = 3
    reference: Canary | None = None


@dataclass(frozen=True)
class RunStore:
    """The two files of a session in one folder."""

    folder: Path

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.folder / "base.json", self.folder / "head.json"

    def save(self, record: RunRecord) -> None:
        save_record(record, self.paths[ARMS.index(record.arm)])

    def load(self) -> tuple[RunRecord, RunRecord] | None:
        """Both records, or None when there is no session here; RecordError when one is missing."""
        base, head = self.paths
        if not base.exists() and not head.exists():
            return None
        return load_record(base), load_record(head)


@dataclass(frozen=True)
class BenchResult:
    """The two records, why the bench ended, and the gate's answer to them."""

    base: RunRecord
    head: RunRecord
    ended: str
    gate: GateResult


class Bench:
    """One session; the only state is the two records, which are on disk after every start."""

    def __init__(
        self, plan: BenchPlan, arms: tuple[Arm, Arm], host: Host, store: RunStore, report: Report
    ) -> None:
        self.plan = plan
        self.arms = dict(zip(ARMS, arms, strict=True))
        self.host = host
        self.store = store
        self.report = report
        self.records: dict[str, RunRecord] = {}
        self.forecast: Forecast | None = None

    def run(self) -> BenchResult:
        """Measure until decided, resuming what the store holds.

        Raises HostCappedError, BenchStoppedError, TraceError, RecordError; finished starts stay.
        """
        self._open()
        while not (ended := why_done(self.base, self.head)):
            self._next_start()
        return BenchResult(self.base, self.head, ended, gate_records(self.base, self.head))

    @property
    def base(self) -> RunRecord:
        return self.records["A"]

    @property
    def head(self) -> RunRecord:
        return self.records["B"]

    def _open(self) -> None:
        stored = self.store.load()
        if stored is None:
            reference = self.plan.reference or self._reference()
            session = self._session_name()
            self.records = {arm: self._empty(arm, session, reference) for arm in ARMS}
            for record in self.records.values():
                self.store.save(record)
            self.forecast = progress.forecast(self.base, self.head)
        else:
            self.records = dict(zip(ARMS, stored, strict=True))
            refuse_other_session(self.plan, self.base, self.head, self.arms)
            self.forecast = progress.forecast(self.base, self.head)
            self._say("resume", f"{len(self.base.starts) + len(self.head.starts)} starts kept")

    def _reference(self) -> Canary:
        self._say("canary", "what this host can do")
        return reference_of(tuple(self.host.canary() for _ in range(REFERENCE_CANARIES)))

    def _session_name(self) -> str:
        targets = "/".join(arm.facts().target for arm in self.arms.values())
        text = f"{self.host.clock()!r}/{targets}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _empty(self, arm: str, session: str, reference: Canary) -> RunRecord:
        plan = self.plan
        return RunRecord(
            SCHEMA,
            session,
            arm,
            self.arms[arm].facts(),
            plan.base_commit,
            plan.policy,
            plan.limits,
            reference,
            plan.outputs_rule,
            plan.idle_s,
            plan.cells,
        )

    def _next_start(self) -> None:
        pair, arm, slot = next_start(self.base, self.head)
        self._say("idle", f"pair {pair + 1}, arm {arm}: idle {self.plan.idle_s:.0f} s")
        self.host.sleep(self.plan.idle_s)
        done = self._start(arm, pair, slot)
        record = self.records[arm]
        if isinstance(done, Start):
            self.records[arm] = record.with_start(done)
        else:
            self.records[arm] = record.with_failure(done)
        self.store.save(self.records[arm])
        self.forecast = progress.forecast(self.base, self.head)
        if isinstance(done, FailedStart):
            self._say("failed", done.reason)
            self._refuse_endless(arm)
        self._say("start done", f"pair {pair + 1}, arm {arm}")

    def _refuse_endless(self, arm: str) -> None:
        failed = self.records[arm].failed
        if len(failed) >= self.plan.failures_max:
            raise BenchStoppedError(
                "starts-failed",
                f"arm {arm}: {len(failed)} starts failed, {self.plan.failures_max} end the bench;"
                f" last: {failed[-1].reason}",
            )

    def _start(self, arm: str, pair: int, slot: int) -> Start | FailedStart:
        drop = self.host.drop_cache()
        self._say("canary", f"page cache: {drop.how}")
        before = self._canary()
        began_s = self.host.clock()
        self._say("start", f"arm {arm}: {self.records[arm].facts.target}")
        try:
            session = self.arms[arm].start()
            ready_s = self.host.clock()
            try:
                cells = tuple(self._cell(session, cell, pair) for cell in self.plan.cells)
                outputs = session.check_outputs(pair)
            finally:
                session.stop()
        except ArmError as error:
            return FailedStart(pair, slot, self.host.clock(), str(error))
        ended_s = self.host.clock()
        return Start(
            pair,
            slot,
            session.identity,
            began_s,
            ready_s,
            ended_s,
            before,
            self._canary(),
            drop,
            cells,
            outputs,
        )

    def _canary(self) -> Canary:
        canary = self.host.canary()
        refuse_capped(canary, self.base.reference, self.plan.limits)
        return canary

    def _cell(self, session: Session, cell: Cell, pair: int) -> CellSamples:
        def window(phase: str, index: int) -> Sample:
            seed = prompt_seed(self.base.session, pair, cell, phase, index)
            return sample_of(cell, session.measure(cell, seed))

        if cell.kind is Kind.GAUGE:
            return CellSamples(cell.name, (window("gauge", 0),), 0, settled=True)
        self._say("warm-up", cell.name)
        warm = warm_up(lambda index: value_of(cell, window("warm", index)), cell.windows_max)
        self._say("measure", cell.name)
        samples = tuple(window("measure", index) for index in range(cell.samples))
        return CellSamples(cell.name, samples, len(warm.values), warm.settled)

    def _say(self, event: str, text: str) -> None:
        self.report(Progress(event, text, self.forecast))


def run_bench(
    plan: BenchPlan,
    arms: tuple[Arm, Arm],
    host: Host,
    store: RunStore,
    report: Report = lambda _: None,
) -> BenchResult:
    """Compare two arms; see Bench.run."""
    return Bench(plan, arms, host, store, report).run()


def next_start(base: RunRecord, head: RunRecord) -> tuple[int, str, int]:
    """(pair, arm, slot) of the next start: the open half of the last pair, else a new pair."""
    taken = {"A": {s.pair for s in base.starts}, "B": {s.pair for s in head.starts}}
    slot = sum(len(record.starts) + len(record.failed) for record in (base, head))
    pair = max(taken["A"] | taken["B"], default=0)
    open_arms = [arm for arm in arms_of(pair) if pair not in taken[arm]]
    if open_arms:
        return pair, open_arms[0], slot
    return pair + 1, arms_of(pair + 1)[0], slot


def why_done(base: RunRecord, head: RunRecord) -> str:
    """Why no further start is needed; empty while one is."""
    if len(base.starts) != len(head.starts) or not base.starts:
        return ""
    if has_void(traps.trap_findings(base, head)):
        return "void: more starts would not mend it"
    attempts, kept = len(pairs_of(base, head)), len(kept_pairs(base, head))
    if kept >= base.policy.pairs_min:
        judged = verdicts(base, head)
        deciding = [v for v, cell in zip(judged, base.cells, strict=True) if cell.gates]
        if all(verdict.decided for verdict in deciding):
            return f"decided after {kept} pairs"
        if base.policy.stop_at_worse and any(verdict.worse for verdict in deciding):
            return f"worse after {kept} pairs"
    if kept >= base.policy.pairs_max:
        return f"{kept} pairs, the most that were planned"
    if attempts >= base.policy.attempts_max:
        return f"{attempts} pairs tried, {attempts - kept} of them excluded"
    return ""


def refuse_other_session(
    plan: BenchPlan, base: RunRecord, head: RunRecord, arms: dict[str, Arm]
) -> None:
    """RecordError when the stored session is not this plan's: resuming would mix two runs."""
    for record in (base, head):
        planned = {
            "facts": arms[record.arm].facts(),
            "cells": plan.cells,
            "policy": plan.policy,
            "limits": plan.limits,
            "outputs_rule": plan.outputs_rule,
            "idle_s": plan.idle_s,
            "base_commit": plan.base_commit,
        }
        for name, value in planned.items():
            if getattr(record, name) != value:
                raise RecordError(
                    "resume",
                    f"arm {record.arm}: stored {name} {getattr(record, name)}, asked {value};"
                    " choose another --out or the stored options",
                )
    if base.session != head.session:
        raise RecordError("resume", f"the files are of sessions {base.session}, {head.session}")
