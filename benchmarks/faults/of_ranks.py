"""Faults of ranks: one does something more, less or in another order than the others, or is killed, stopped or late."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.faults.loop import ENDS, KILLED, LATE, SOMETIME, Op
from benchmarks.faults.oracle import Expected, close, simulate
from benchmarks.faults.ranks import Seen, run
from benchmarks.faults.verdicts import Found
from benchmarks.faults.worker import Raised

STAGES = (0, 1, 2, 3)
WORLDS = (2, 3, 4)
WHO = ("first", "middle", "last")
MOMENTS = {"first": ("", 0), "later": ("", 2), "evaluated": ("E", 1)}
"""What all ranks do before each step of the fault's kind, and how many steps they do before the faulty one."""
AFTER = 4
"""Steps that follow the faulty one."""


@dataclass(frozen=True)
class Fault:
    """One step of the loop as every rank does it, and as the faulty rank does it once."""

    name: str
    loop: str
    fault: str
    legal: bool = False
    """It must not be refused."""
    patient: bool = False
    """It takes longer than the usual timeout: ranks are to warn."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Clipping a plain gradient sends nothing: under stage 0 no rank can know what another does to its own."""


FAULTS = [
    Fault("none", "FBSZ", "FBSZ", legal=True),
    Fault("none-of-all", "EAFBGSZDC", "EAFBGSZDC", legal=True),
    Fault("larger-batch", "FBSZ", "LBSZ", legal=True),
    Fault("more-forward-before", "FBSZ", "FFBSZ"),
    Fault("more-forward-after", "FBSZ", "FBSZF"),
    Fault("more-forward-backward", "FBSZ", "FBFBSZ"),
    Fault("more-forward-backward-zero", "FBSZ", "FBZFBSZ"),
    Fault("more-backward", "FBSZ", "FRBSZ"),
    Fault("more-backwards", "FBSZ", "FRRBSZ"),
    Fault("more-evaluation", "FBSZ", "FBSZE"),
    Fault("more-evaluation-first", "FBSZ", "EFBSZ"),
    Fault("more-evaluation-within", "FBSZ", "FEBSZ"),
    Fault("more-evaluation-before-step", "FBSZ", "FBESZ"),
    Fault("more-evaluation-mode", "FBSZ", "VFBSZ"),
    Fault("more-evaluations", "EFBSZ", "EEEFBSZ"),
    Fault("more-step", "FBSZ", "FBSSZ"),
    Fault("more-step-and-all", "FBSZ", "FBSZFBSZ"),
    Fault("more-micro-batch", "FBSZ", "AFBSZ"),
    Fault("more-micro-batches", "AFBSZ", "AAAFBSZ"),
    Fault("more-train-step", "T", "TT"),
    Fault("more-evaluation-train-step", "T", "ET"),
    Fault("more-zero", "FBSZ", "FBZSZ"),
    Fault("more-save", "FBSZ", "FBSZC"),
    Fault("more-state", "FBSZ", "DFBSZ"),
    Fault("more-state-within", "FBSZ", "FDBSZ"),
    Fault("more-clip", "FBSZ", "FBGSZ", stages=(1, 2, 3)),
    Fault("more-load", "FBSZ", "OFBSZ"),
    Fault("less-step-of-all", "FBSZ", ""),
    Fault("less-forward-backward", "FBSZ", "SZ"),
    Fault("less-backward", "FBSZ", "FSZ"),
    Fault("less-step", "FBSZ", "FBZ"),
    Fault("less-step-and-zero", "FBSZ", "FB"),
    Fault("less-zero", "FBSZ", "FBS"),
    Fault("less-evaluation", "EFBSZ", "FBSZ"),
    Fault("less-micro-batch", "AFBSZ", "FBSZ"),
    Fault("less-micro-batches", "AAAFBSZ", "AFBSZ"),
    Fault("less-train-step", "T", ""),
    Fault("less-save", "FBSZC", "FBSZ"),
    Fault("less-state", "FBSZD", "FBSZ"),
    Fault("less-clip", "FBGSZ", "FBSZ", stages=(1, 2, 3)),
    Fault("order-evaluation", "EFBSZ", "FBSZE"),
    Fault("order-evaluation-within", "EFBSZ", "FEBSZ"),
    Fault("order-micro-batch", "AFBSZ", "FBASZ"),
    Fault("order-step", "FBSZ", "FSBZ"),
    Fault("order-zero", "FBSZ", "FBZS"),
    Fault("order-two-graphs", "FFBBSZ", "FBFBSZ"),
    Fault("order-save-and-state", "FBSZCD", "FBSZDC"),
    Fault("order-save", "FBCSZ", "FCBSZ"),
    Fault("order-state", "FBDSZ", "DFBSZ"),
    Fault("order-clip", "FBGSZ", "FGBSZ", stages=(1, 2, 3)),
    Fault("evaluates-in-place", "FBSZ", "ESZ"),
    Fault("micro-batch-in-place", "FBSZ", "ASZ"),
    Fault("settings-of-all", "YFBySZ", "YFBySZ", legal=True),
    Fault("other-rate", "FBSZ", "YFBSZ"),
    Fault("other-rate-within", "FBSZ", "FYBSZ"),
    Fault("other-rate-before-step", "FBSZ", "FBYSZ"),
    Fault("other-rate-after-step", "FBSZ", "FBSYZ"),
    Fault("other-decay", "FBSZ", "FBSZy"),
    Fault("other-rate-train-step", "T", "YT"),
    Fault("order-settings", "YFBSZ", "FBYSZ"),
    Fault("other-arithmetic", "FBSZ", "fBSZ"),
    Fault("other-program", "FBSZ", "gBSZ"),
    Fault("killed", "FBSZ", "KFBSZ"),
    Fault("killed-before-backward", "FBSZ", "FKBSZ"),
    Fault("killed-before-step", "FBSZ", "FBKSZ"),
    Fault("killed-sometime", "FBSZ", "kFBSZ"),
    Fault("killed-sometime-evaluating", "EEFBSZ", "kEEFBSZ"),
    Fault("killed-sometime-train-step", "T", "kT"),
    Fault("exits", "FBSZ", "XFBSZ"),
    Fault("exits-before-backward", "FBSZ", "FXBSZ"),
    Fault("raises", "FBSZ", "!FBSZ"),
    Fault("raises-evaluating", "EFBSZ", "E!FBSZ"),
    Fault("raises-in-hook", "FBSZ", "FhSZ"),
    Fault("raises-in-optimizer", "FBSZ", "FBo"),
    Fault("raises-in-loss", "T", "t"),
    Fault("raises-between-micro-batches", "AAFBSZ", "A!AFBSZ"),
    Fault("stopped", "FBSZ", "PFBSZ"),
    Fault("stopped-before-backward", "FBSZ", "FPBSZ"),
    Fault("stopped-and-continued", "FBSZ", "FpBSZ", legal=True),
    Fault("late", "FBSZ", "WFBSZ", legal=True, patient=True),
    Fault("late-before-backward", "EFBSZ", "EFWBSZ", legal=True, patient=True),
    Fault("late-train-step", "T", "WT", legal=True, patient=True),
    Fault("late-saving", "FBSZC", "FBSZWC", legal=True, patient=True),
    Fault("never-back", "FBSZ", "NFBSZ", patient=True),
    Fault("never-back-saving", "FBSZC", "FBSZN", patient=True),
]


@dataclass(frozen=True)
class Case:
    """A fault, where and when; its name says all of it."""

    fault: Fault
    stage: int
    world: int
    who: str
    moment: str

    @property
    def name(self) -> str:
        return f"{self.fault.name}/stage{self.stage}/world{self.world}/{self.who}/{self.moment}"

    @property
    def culprit(self) -> int:
        return {"first": 0, "middle": self.world // 2, "last": self.world - 1}[self.who]

    def scripts(self) -> list[list[Op]]:
        """What each rank is told to do."""
        before, count = MOMENTS[self.moment]
        loop = self.fault.loop
        scripts = []
        for rank in range(self.world):
            step = self.fault.fault if rank == self.culprit else loop
            letters = (before + loop) * count + step + loop * AFTER
            scripts.append([Op(letter, place) for place, letter in enumerate(letters)])
        return scripts


def cases(count: int, seed: int) -> list[Case]:
    """At least each fault in each stage once; further rounds are at other moments, worlds and ranks."""
    chance = random.Random(seed)
    places = [
        (world, who, moment) for world, who, moment in product(WORLDS, WHO, MOMENTS) if (world, who) != (2, "middle")
    ]
    meant = [(fault, stage) for fault, stage in product(FAULTS, STAGES) if stage in fault.stages]
    rounds = {(fault.name, stage): chance.sample(places, len(places)) for fault, stage in meant}
    every = [Case(f, stage, *rounds[f.name, stage][n]) for n in range(len(places)) for f, stage in meant]
    return every[:count]


def all_cases() -> Iterator[Case]:
    """Whatever `--only` may name."""
    return (Case(*chosen) for chosen in product(FAULTS, STAGES, WORLDS, WHO, MOMENTS))


def judge(case: Case, timeout: float) -> Found:
    """Run a case under groups of this timeout in seconds, and say what came of it."""
    scripts = case.scripts()
    expected = simulate(scripts, sharded_gradients=case.stage >= 2)
    timeout = max(timeout, 2 * LATE) if case.fault.patient else timeout
    absent = [case.culprit] if set(case.fault.fault) & set(ENDS + SOMETIME) else []
    seen = run(scripts, case.stage, timeout, absent)
    verdict, why = _verdict(case, seen, expected, timeout)
    return Found(case.name, case.fault.name, verdict, why)


def _verdict(case: Case, seen: Sequence[Seen], expected: Sequence[Expected], timeout: float) -> tuple[str, str]:
    healthy = [rank for rank in range(case.world) if rank != case.culprit]
    for rank, one in enumerate(seen):
        if one.died is not None and (rank in healthy or not set(KILLED) & set(case.fault.fault)):
            return "abort", f"rank {rank} ended with {one.died} in {one.doing}: {one.log}"
    for rank in healthy:
        if seen[rank].late(timeout):
            return "hang", f"rank {rank} in {seen[rank].doing}: {seen[rank].raised}"
    raised = {rank: error for rank in healthy if (error := seen[rank].raised)}
    for rank, error in raised.items():
        if not error.typed:
            return "raw", f"rank {rank}: {error.kind}: {error.text}"
    wrong = next((text for rank in range(case.world) if (text := _wrong(case, rank, seen[rank], expected[rank]))), "")
    failed = raised or seen[case.culprit].raised
    if wrong:
        return "mixed" if failed else "silent", wrong
    return _right(case, seen, expected, raised) if failed else _ended(case, seen, expected, healthy)


def _ended(case: Case, seen: Sequence[Seen], expected: Sequence[Expected], healthy: Sequence[int]) -> tuple[str, str]:
    """The verdict on ranks that all came to their end, with right values."""
    if not all(expected[rank].complete for rank in healthy):
        return "silent", "some backwards have no partner"
    return _warned(case, {rank: seen[rank] for rank in healthy}) or ("harmless", "")


def _right(
    case: Case, seen: Sequence[Seen], expected: Sequence[Expected], raised: dict[int, Raised]
) -> tuple[str, str]:
    """The verdict on ranks some of which raised, before anything wrong was done; others may have done all there is."""
    told = next(f"rank {rank}: {one.raised.kind}: {one.raised.text}" for rank, one in enumerate(seen) if one.raised)
    if case.fault.legal:
        return "refused", told
    for rank, one in enumerate(seen):
        if rank != case.culprit and not one.raised and not expected[rank].complete:
            return "some", f"no error on rank {rank}: {[one.raised for one in seen]}"
    for rank, error in raised.items():
        if not names(error.text, case.culprit):
            return "unnamed", f"rank {rank}: {error.kind}: {error.text}"
    return _warned(case, {rank: seen[rank] for rank in raised}) or ("error", told)


def _warned(case: Case, seen: dict[int, Seen]) -> tuple[str, str] | None:
    """The verdict on ranks that waited for long and did not say for whom."""
    for rank, one in seen.items():
        if one.longest > LATE - 1 and not any(names(text, case.culprit) for text in one.warnings):
            return "unsaid", f"rank {rank} waited for {one.longest:.0f} s, warnings: {one.warnings}"
    return None


RANKS = re.compile(r"\branks? (\d+(?:(?:, | and |, and )\d+)*)")
WHERE = re.compile(
    r"\b(program|forward|backward|evaluat\w+|step|line|group \d|embed|head|blocks\.\d|the seed of random numbers"
    r"|save_checkpoint|load_checkpoint|full_state_dict|clip_grad_norm_?)\b"
)


def names(text: str, culprit: int) -> bool:
    """Whether a message says which rank, and where."""
    ranks = {int(number) for listed in RANKS.findall(text) for number in re.findall(r"\d+", listed)}
    return culprit in ranks and bool(WHERE.search(text))


def _wrong(case: Case, rank: int, seen: Seen, expected: Expected) -> str:
    """What a rank has seen that cannot be right; nothing if all is."""
    if len(seen.steps) > len(expected.steps):
        return f"rank {rank}: optimizer step {len(expected.steps)} took what does not belong together"
    for number, (rows, params) in enumerate(zip(seen.steps, expected.steps, strict=False)):
        if not close([torch.tensor(row) for row in rows], [_own(p, rank, case) for p in params]):
            return f"rank {rank}: wrong parameters after optimizer step {number}"
    if seen.raised:
        return ""
    for place, loss in seen.losses.items():
        if place in expected.losses and abs(loss - expected.losses[place]) > 1e-4:
            return f"rank {rank}: operation {place} gave {loss} in place of {expected.losses[place]}"
    for place, values in seen.states.items():
        if place in expected.states and not close([torch.tensor(v) for v in values], expected.states[place]):
            return f"rank {rank}: operation {place} gave a wrong full_state_dict"
    return ""


def _own(param: torch.Tensor, rank: int, case: Case) -> torch.Tensor:
    """The rows of a parameter that a rank keeps."""
    if case.stage == 0:
        return param
    chunks = param.chunk(case.world)
    return chunks[rank] if rank < len(chunks) else param[:0]
