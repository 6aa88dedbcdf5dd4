"""An attack on ddrl: `python -m benchmarks.attack --part signals --count 300`. Long; it ends sooner by --seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.attack import messages, processes

PARTS: dict[str, tuple[int, int, Callable[[int, int, float], dict[str, Any]]]] = {  # count, count with --short
    "control": (1_000_000, 20_000, lambda count, seed, _: messages.in_process(count, seed)),
    "client": (100_000, 2_000, lambda count, seed, _: messages.from_a_client(count, seed)),
    "signals": (300, 4, processes.signals),
    "starts": (1_000, 4, processes.starts),
}


def main() -> int:
    """Attack, print and save; 1 where anything went wrong."""
    parser = harness.arguments("attack", __doc__ or "")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--count", type=int, default=0, help="how many; 0: the part's own number")
    parser.add_argument("--seconds", type=float, default=1e9, help="end a part after so long")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in PARTS if options.part == "all" else (options.part,):
        many, few, attack = PARTS[name]
        figures[name] = attack(options.count or (few if options.short else many), options.seed, options.seconds)
        shown = {key: value for key, value in figures[name].items() if key not in ("troubles", "by_kind")}
        print(f"{name}: {shown}", flush=True)
    if options.part != "all":
        options.json = options.json.with_name(f"attack_{options.part}.json")
    harness.save(options.json, figures)
    wrong = any(part.get("troubles") or part.get("segments_left") for part in figures.values())
    return int(wrong or not figures.get("client", {}).get("still_answers", True))


if __name__ == "__main__":
    sys.exit(main())
