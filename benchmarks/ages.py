"""Figures that are older than the code they were measured with: `python -m benchmarks.ages`.

Each file in benchmarks/results is measured by one benchmark, and each benchmark names the code that its figures depend
on. A figure is old where that code has changed in git since the file was last written. Prints them; never fails."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from benchmarks.harness import RESULTS, print_table

ROOT = Path(__file__).parents[1]
_RUNS = ("ddrl/acting", "ddrl/channels", "ddrl/envs", "ddrl/kernel", "ddrl/replay", "ddrl/rollout", "ddrl/run")
_LEARNING = (*_RUNS, "ddrl/learner", "ddrl/tasks")
_LINKS = ("ddrl/channels", "ddrl/distribution", "ddrl/kernel/codec.hpp", "ddrl/kernel/mailbox.hpp")

# The code under each benchmark, by its results' names up to the first underscore.
MEASURED: dict[str, tuple[str, ...]] = {
    "admix": ("ddrl/admix",),
    "algorithms": _LEARNING,
    "beside": ("ddrl/acting", "ddrl/rollout", *_LINKS),
    "cartpole": _LEARNING,
    "channels": ("ddrl/channels", "ddrl/kernel"),
    "classics": _LEARNING,
    "codecs": ("ddrl/distribution/codecs.py", "ddrl/kernel/codec.hpp"),
    "dashboard": ("dashboard", "ddrl/plots", "ddrl/telemetry"),
    "distribution": _LINKS,
    "lag": (*_RUNS, "ddrl/learner"),
    "loop": _LEARNING,
    "learner": ("ddrl/learner", *(f"ddrl/kernel/{name}.hpp" for name in ("adam", "losses", "plain_networks"))),
    "lunarlander": _LEARNING,
    "microbatch": ("ddrl/balance",),
    "mutations": ("ddrl", "tests"),
    "pong": _LEARNING,
    "pqn": _LEARNING,
    "pool": ("ddrl/pool", "ddrl/run"),
    "ranks": (*_LEARNING, "ddrl/distribution"),
    "replay": ("ddrl/kernel/replay", "ddrl/replay"),
    "rollout": ("ddrl/acting", "ddrl/channels", "ddrl/envs", "ddrl/rollout"),
    "space": _LEARNING,  # space_invaders
    "stability": ("ddrl", "tests"),
    "td3": _LEARNING,
    "telemetry": ("ddrl/telemetry", "ddrl/core/metrics.py"),
}


def measured_code(name: str) -> tuple[str, ...]:
    """The code under the results file NAME.json: the whole library where `MEASURED` does not know it."""
    return MEASURED.get(name.partition("_")[0], ("ddrl",))


def commits_since(path: Path, code: tuple[str, ...]) -> list[str]:
    """Commits, newest first, that changed the code after the one that last wrote more of the file than its command."""
    written = _git("log", "-1", "--format=%H", "-G", '^[^"]+("[^c]|$)', "--", str(path.relative_to(ROOT)))
    return _git("log", "--format=%h", f"{written[0]}..HEAD", "--", *code) if written else []


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks.ages", description=__doc__).parse_args()
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        code = measured_code(path.stem)
        commits = commits_since(path, code)
        if commits:
            measured = json.loads(path.read_text()).get("date", "")
            rows.append((path.stem, measured, len(commits), commits[0], ", ".join(code)))
    if rows:
        print("Warning: the code under these figures has changed since they were measured:")
        print_table(("figures", "measured", "commits since", "newest", "code"), rows)
    else:
        print("No figure is older than its code.")


if __name__ == "__main__":
    main()
