"""`python -m tests.mutants`: put small faults into the core modules and count those that their tests notice.

A sample of the mutants is drawn at random from a seed. Each runs the tests that mirror its package, until the first
failure. Printed are the score of each module and the difference of each mutant that survived. Those that no test can
notice are listed, with the reason, in `equivalent.toml`; they are printed, and not drawn.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

from tests.mutants.mutations import Mutant, iterate
from tests.mutants.runner import Runner, Verdict, preload

ROOT = Path(__file__).resolve().parents[2]
CORE = ("model/images", "service/engine", "service/http", "service/web", "service/cluster")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


def equivalent() -> dict[tuple[str, str, str, str], str]:
    """Return the keys of the mutants that behave as the original does, each with the reason."""
    with EQUIVALENT.open("rb") as file:
        entries = tomllib.load(file).get("mutant", [])
    return {(each["file"], each["function"], each["before"], each["after"]): each["reason"] for each in entries}


def main(arguments: list[str] | None = None) -> int:
    """Run the sample that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", default=CORE, help="modules or folders; default: the core")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants to draw; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--function", help="only inside this function, such as Jpeg.parse")
    options = parser.parse_args(arguments)

    known = equivalent()
    found = [
        mutant
        for mutant in iterate([ROOT / name for name in options.files], ROOT)
        if options.function in (None, mutant.function)
    ]
    drawn = [mutant for mutant in found if mutant.key not in known]
    print(f"{len(found)} mutants, {len(found) - len(drawn)} of them known to be equivalent")
    if options.sample and options.sample < len(drawn):
        drawn = random.Random(options.seed).sample(drawn, options.sample)
    drawn = [mutant for mutant in drawn if mutant.valid]
    print(f"{len(drawn)} are run, {options.jobs} at a time (seed {options.seed})", flush=True)

    os.chdir(ROOT)
    preload()
    began = time.monotonic()
    verdicts: dict[str, Counter[Verdict]] = defaultdict(Counter)
    survivors: list[Mutant] = []
    for number, (mutant, verdict) in enumerate(Runner(ROOT, options.jobs).run(drawn), 1):
        verdicts[mutant.path][verdict] += 1
        if verdict is Verdict.SURVIVED:
            survivors.append(mutant)
        print(f"{number:4}/{len(drawn)} {time.monotonic() - began:5.0f} s  {verdict.value:8}  "
              f"{mutant.path}:{mutant.line}  {mutant.function}", file=sys.stderr, flush=True)  # fmt: skip
    print_mutants("survived", dict.fromkeys(survivors, ""))
    print_mutants("equivalent", {mutant: known[mutant.key] for mutant in found if mutant.key in known})
    print_table(verdicts)
    return 0


def print_mutants(what: str, reasons: dict[Mutant, str]) -> None:
    """Print the difference that each mutant makes, and the reason why no test can notice it, where there is one."""
    for mutant, reason in sorted(reasons.items(), key=lambda each: (each[0].path, each[0].line)):
        print(f"\n{what}: {mutant.path}:{mutant.line}  {mutant.function}\n  - {mutant.before}\n  + {mutant.after}")
        if reason:
            print(f"  {reason}")


def print_table(verdicts: dict[str, Counter[Verdict]]) -> None:
    """Print how many mutants of each module were noticed. Noticed is killed by a failure or by the time limit."""
    print(f"\n{'file':45} {'mutants':>8} {'killed':>8} {'timeout':>8} {'survived':>8} {'score':>7}")
    total: Counter[Verdict] = sum(verdicts.values(), Counter())
    for path, counts in [*sorted(verdicts.items()), ("all", total)]:
        number = sum(counts.values())
        score = (number - counts[Verdict.SURVIVED]) / number if number else 1.0
        print(f"{path:45} {number:8}" + "".join(f" {counts[verdict]:8}" for verdict in Verdict) + f" {score:7.1%}")


if __name__ == "__main__":
    sys.exit(main())
