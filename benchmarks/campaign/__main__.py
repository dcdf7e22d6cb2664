"""`python -m benchmarks.campaign`: see `benchmarks/campaign/__init__.py`."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.campaign.framework import RESULTS, ROOT, SCRATCH, Counts, part, part_names, run_tries

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign: written by python -m benchmarks.campaign --write -->", "<!-- end of the campaign -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__)
    parser.add_argument("parts", nargs="*", help="these parts alone", metavar="PART")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="of each part")
    parser.add_argument("--tries", type=int, default=None, help="of each part in this session")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the counts")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process of one part
    arguments = parser.parse_args()
    known = part_names()
    unknown = [name for name in arguments.parts if name not in known]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = arguments.parts or ([] if arguments.write else known)
    if arguments.here:
        (name,) = chosen
        counts = Counts.read(arguments.results / f"{name}.csv")
        run_tries(
            part(name).tries(arguments.seed),
            counts,
            arguments.seed,
            most=arguments.tries,
            minutes=arguments.minutes,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        return
    failed = [name for name in chosen if in_own_process(name, arguments)]
    print(table(arguments.results))
    if arguments.write:
        write_page(arguments.results)
    sys.exit(1 if failed else 0)


def in_own_process(name: str, arguments: argparse.Namespace) -> int:
    """Run a part where JAX was not started yet; returns its exit code."""
    command = [sys.executable, "-m", "benchmarks.campaign", name, "--here", "--seed", str(arguments.seed)]
    command += ["--results", str(arguments.results)]
    for option in ("minutes", "tries"):
        value = getattr(arguments, option)
        command += [f"--{option}", str(value)] if value is not None else []
    with tempfile.TemporaryDirectory(prefix="holdfast-campaign-") as folder:
        started = time.monotonic()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": path, SCRATCH: folder, "JAX_PLATFORMS": "cpu"}
        code = subprocess.run(command, env=env).returncode
        tried, held = Counts.read(arguments.results / f"{name}.csv").totals()
        print(f"{name}: tried {tried}, held {held} ({time.monotonic() - started:.0f} s)", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return code


def table(folder: Path) -> str:
    """What was tried and what held, by part, as Markdown."""
    lines = ["| part | what is done, and what has to hold | tried | held |", "|---|---|---:|---:|"]
    for name in part_names():
        tried, held = Counts.read(folder / f"{name}.csv").totals()
        if tried:
            lines.append(f"| {name} | {part(name).ABOUT} | {tried:,} | {held:,} |")
    return "\n".join(lines)


def details(folder: Path) -> str:
    """The counts by what a fault was done to, as Markdown."""
    lines = ["| part | fault | outcome | times |", "|---|---|---|---:|"]
    for name in part_names():
        counts = Counts.read(folder / f"{name}.csv")
        found: dict[tuple[str, str], int] = {}
        for (_, what, how, held), count in counts.outcomes.items():
            key = (what, how if held else f"**{how}**")
            found[key] = found.get(key, 0) + count
        lines += [f"| {name} | {what} | {how} | {count:,} |" for (what, how), count in sorted(found.items())]
    return "\n".join(lines)


def write_page(folder: Path) -> None:
    """Put the tables between their marks in docs/reliability.md."""
    import jax

    import holdfast

    made_by = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, JAX {jax.__version__}, "
        f"Holdfast {holdfast.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    )
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = f"{BEGIN}\n\n{table(folder)}\n\n{made_by}.\n\nEvery kind of fault:\n\n{details(folder)}\n\n{END}"
    PAGE.write_text(before + body + after)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
