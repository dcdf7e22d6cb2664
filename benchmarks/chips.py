"""Training steps for TPUs, ours beside levanter's: compiled by libtpu, not run.

Equal shape and sharding: one row a device and micro-batch, parameters split over all devices, float32 parameters and
AdamW, bfloat16 activations, rematerialised layers, rows of one text. Rows of `benchmarks/results/chips.csv` are final:
what has its row, of the same program and the same libtpu, is not compiled again. Ours is the same program as long as
what JAX hands to the compiler is the same, levanter's as long as its version is.

MaxText is not among the peers: what is on PyPI needs Python 3.12.
"""

import csv
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import Bench, say
from benchmarks.environments import LEVANTER_VERSION, LIBTPU_VERSION, environment
from benchmarks.page import PAGE
from benchmarks.shapes import ADAMW
from benchmarks.workers import ROOT, our_command
from benchmarks.workers import environment as variables
from holdfast.analysis.chip_plan import LIBTPU
from holdfast.analysis.hlo import collectives
from holdfast.training.compile import refused_bytes

RESULTS = Path(__file__).parent / "results" / "chips.csv"
MINUTES = 20  # after which no further compilation is begun; the next run goes on
BEGIN, END = "<!-- chips: written by `python -m benchmarks --only chips` -->", "<!-- chips end here -->"
GIB = 2**30

MODELS: dict[str, dict[str, Any]] = {
    "1B": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "feed_forward": 8192, "tied": True},
    "8B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14336, "tied": False},
}
PRESETS = {"1B": "llama-1b", "8B": "llama-8b"}
VOCABULARY = 128_256


class Case(NamedTuple):
    """A program to compile: whose, of what, for which devices."""

    system: str  # "ours" or "levanter"
    kind: str  # "plain" or "anchored", with a reference and an exact KL
    model: str
    chip: str
    devices: str
    length: int
    micro_batches: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of the torus."""
        return math.prod(map(int, self.devices.split("x")))

    @property
    def shape(self) -> tuple[Any, ...]:
        """What a row of the page is about."""
        return self[2:]


class Found(NamedTuple):
    """What the compiler said of a program; all of one device."""

    program: str  # its digest, or its version
    libtpu: str
    memory: int
    temporaries: int | None  # None where the compiler refused, because it does not fit
    sent: int | None
    flops: float | None
    kernels: int | None
    seconds: int

    @property
    def whole(self) -> bool:
        """Whether all is known that can be."""
        return self.temporaries is None or self.sent is not None


def cases() -> Iterator[Case]:
    """All programs, those first that say most."""
    eight = (("v5e", "2x4"), ("v6e", "2x4"), ("v5p", "2x2x2"))
    shapes = [("1B", "v5e", "2x4", 2048, 1), ("1B", "v5e", "2x4", 2048, 16), ("1B", "v5e", "2x4", 8192, 1)]
    shapes += [("1B", "v5e", "2x4", 32768, 1), ("8B", "v5e", "4x8", 2048, 1), ("8B", "v5e", "4x8", 8192, 1)]
    shapes += [("1B", *torus, length, 1) for length in (2048, 8192) for torus in eight[1:]]
    for shape in shapes:
        yield Case("ours", "plain", *shape)
        yield Case("levanter", "plain", *shape)
    yield from (Case("ours", "anchored", *shape) for shape in shapes if shape[-1] == 1)


def run(bench: Bench) -> dict[str, Any]:
    """Compile what has no row yet, for about `MINUTES`, and write the page's section."""
    known, deadline = read(RESULTS), time.monotonic() + 60 * MINUTES
    levanter = environment("levanter-tpu")
    for case in list(cases())[: 1 if bench.quick else None]:
        if case.system == "levanter" and levanter.python is None:
            continue
        if time.monotonic() > deadline:
            say(f"chips: {MINUTES} minutes are over; the next run goes on")
            break
        say(f"chips: {' '.join(map(str, case))}")
        found = compiled(case, known.get(case), str(levanter.python), bench.folder)
        if found is not None and not bench.quick:
            known[case] = found
            write(RESULTS, known)
    if not bench.quick:
        write_page(known)
    return {" ".join(map(str, case)): found._asdict() for case, found in known.items()}


def compiled(case: Case, row: Found | None, levanter: str, folder: Path) -> Found | None:
    """Compile a case in a process of its own, and read what came of it; None where its row still holds.

    Args:
        levanter: the interpreter of its environment.
    """
    known = row.program if row is not None and row.libtpu == LIBTPU_VERSION and row.whole else None
    if case.system == "levanter" and known == LEVANTER_VERSION:
        return None
    started = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".hlo") as text:
        script = str(Path(__file__).parent / "peers" / "levanter_llama.py")
        command = our_command("chip_worker") if case.system == "ours" else [levanter, script]
        facts = asked([*command, json.dumps({**told(case), "text": text.name, "known": known})])
        program = facts.get("program", LEVANTER_VERSION)
        assert facts["libtpu"] == LIBTPU_VERSION, f"libtpu {facts['libtpu']}: put it into benchmarks/environments.py"
        if program == known:
            return None
        written = Path(text.name).read_text()
    seconds = round(time.monotonic() - started)
    if "refused" in facts:
        needed = refused_bytes(facts["refused"])
        assert needed is not None, facts["refused"]
        return Found(program, LIBTPU_VERSION, needed, None, None, None, None, seconds)
    memory = facts["memory"]
    total = sum(memory.values()) - 2 * memory["alias"]
    sent = sum(part.sent for part in collectives(written, case.num_devices))
    flops = facts["products"] / case.num_devices + (attention_flops(case) if case.system == "levanter" else 0)
    kernels = written.count('custom_call_target="tpu_custom_call"')
    return Found(program, LIBTPU_VERSION, total, memory["temp"], round(sent), flops, kernels, seconds)


def attention_flops(case: Case) -> float:
    """Products of attention inside kernels, which no trace shows, on one device: forward, again, and backward.

    A query sees (T + 1) / 2 keys on average; scores and their use are two products forward and four backward.
    """
    model, T = MODELS[case.model], case.length
    forward = 2 * 2 * model["width"] * (T + 1) / 2
    return 4 * forward * model["layers"] * T * case.micro_batches


def told(case: Case) -> dict[str, Any]:
    """What a worker is told."""
    names = {**MODELS[case.model], "preset": PRESETS[case.model], "vocabulary": VOCABULARY, "adamw": ADAMW}
    return {**case._asdict(), **names, "topology": f"{case.chip}:{case.devices}", "rows": 1}


def asked(command: list[str]) -> dict[str, Any]:
    """What a worker prints last."""
    done = subprocess.run(command, cwd=ROOT, env={**variables(), **LIBTPU}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])}: {done.stderr[-3000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def read(path: Path) -> dict[Case, Found]:
    """The rows so far."""
    if not path.exists():
        return {}
    rows = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            case = Case(*(row[name] for name in Case._fields[:5]), int(row["length"]), int(row["micro_batches"]))
            numbers = {name: float(row[name]) if row[name] else None for name in Found._fields[2:]}
            whole = {name: value if value is None or name == "flops" else int(value) for name, value in numbers.items()}
            rows[case] = Found(row["program"], row["libtpu"], **whole)  # type: ignore[arg-type]  # memory is there
    return rows


def write(path: Path, known: dict[Case, Found]) -> None:
    """All rows, in the order of `cases`."""
    order = {case: place for place, case in enumerate(cases())}
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*Case._fields, *Found._fields])
        for case in sorted(known, key=lambda case: order.get(case, len(order))):
            table.writerow([*case, *("" if value is None else value for value in known[case])])


INTRODUCTION = """## Accelerators: compiled, not run

Whole training steps for TPUs by libtpu's compiler ({libtpu}), ours beside levanter {levanter}: float32 parameters and
AdamW, bfloat16 activations, rematerialised layers, one row of one text a device and micro-batch, parameters split over
all devices, splash attention in both. No chip was there: memory and collectives are the compiler's, and nothing is
said about time. Levanter has its defaults otherwise, logits of a whole row among them. "Sent" is what a device sends in
a step, in rings. Operations are those of matrix products, with layers that are computed again, attention by formula and
halved; the compiler's own estimate of time is left out, because it counts nothing inside kernels. Kernels are calls of
Mosaic programs in the text.
"""

NOTES = """Where ours is not below: 8B at 2,048 tokens needs 1.02 times levanter's memory. Both compute a layer's
gradients in bfloat16. Ours go into float32 arrays inside the loop over layers, 832 MiB of a device; the loop of
levanter's traced step holds them in bfloat16, 416 MiB. In longer rows and smaller models other things are larger.

Levanter's step is plain: what stands beside anchored steps is what the anchor adds to it. All rows but the plain
ones of 32,768 tokens are counted as `holdfast plan --chip` counts now: sums that share a channel each, and once what
runs in pieces beside a product. Before, levanter's 8B at 2,048 was counted at 43.3 GiB; other rows of an unchanged
program moved by less than 0.1 %.

MaxText is missing: its releases on PyPI need Python 3.12 or later, and this repository is measured with
3.11.
"""


def write_page(known: dict[Case, Found]) -> None:
    """Put the section into the page, in the place of the one before."""
    text = PAGE.read_text(encoding="utf-8")
    section = f"{BEGIN}\n\n{page_section(known)}\n{END}"
    if BEGIN in text:
        before, rest = text.split(BEGIN)
        text = before + section + rest.split(END)[1]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    PAGE.write_text(text, encoding="utf-8")
    say(f"written: {PAGE}")


def page_section(known: dict[Case, Found]) -> str:
    """The section of the page: one line for each shape."""
    versions = {case.system: found for case, found in known.items()}
    libtpu = next(iter(known.values())).libtpu if known else "none"
    levanter = versions["levanter"].program if "levanter" in versions else "(not installed)"
    lines = [
        INTRODUCTION.format(libtpu=libtpu, levanter=levanter),
        "| model | chip | tokens of a row | micro-batches | | memory of a device | ours / levanter | sent "
        "| ours / levanter | operations | kernels |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    shapes = list(dict.fromkeys(case.shape for case in cases()))
    for shape in shapes:
        peer = known.get(Case("levanter", "plain", *shape))
        for system, kind in (("ours", "plain"), ("ours", "anchored"), ("levanter", "plain")):
            found = known.get(Case(system, kind, *shape))
            if found is not None:
                lines.append(line(Case(system, kind, *shape), found, peer if system == "ours" else None))
    missing = sum(case not in known or not known[case].whole for case in cases())
    if missing:
        lines += ["", f"{missing} of {len(list(cases()))} programs are not, or not wholly, compiled yet: run it again."]
    return "\n".join([*lines, "", NOTES])


def line(case: Case, found: Found, peer: Found | None) -> str:
    """One line of the table."""
    who = "levanter" if case.system == "levanter" else f"ours, {case.kind}"
    memory = f"{found.memory / GIB:.2f} GiB"
    if found.temporaries is None:
        memory += ", does not fit"
    sent = "" if found.sent is None else f"{found.sent / GIB:.2f} GiB"
    operations = "" if found.flops is None else f"{found.flops / 1e12:.1f} T"
    kernels = "" if found.kernels is None else str(found.kernels)
    by_memory = f"{found.memory / peer.memory:.2f}" if peer else ""
    by_sent = f"{found.sent / peer.sent:.2f}" if peer and peer.sent and found.sent is not None else ""
    shape = f"{case.model} | {case.chip} {case.devices} | {case.length:,} | {case.micro_batches}"
    return f"| {shape} | {who} | {memory} | {by_memory} | {sent} | {by_sent} | {operations} | {kernels} |"
