"""A learning curve as a few hundred bytes of SVG: what a notebook's panel redraws every second without flicker or a
browser-side library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from ddrl.plots.frame import COLORS


def sketch(
    lines: Sequence[tuple[str, NDArray[np.float64], NDArray[np.float64]]],
    *,
    width: int = 640,
    height: int = 200,
    x_name: str = "",
    y_name: str = "",
) -> str:
    """SVG of (name, x [N], y [N]) lines on common axes; NaN points are left out. Colors follow the page's text, light
    or dark."""
    kept = [(name, x[np.isfinite(y)], y[np.isfinite(y)]) for name, x, y in lines]
    left = 52
    right = 8
    top = 18
    bottom = 34
    head = (
        f'<svg viewBox="0 0 {width} {height}" width="100%" '
        f'style="max-width:{width}px;color:var(--jp-ui-font-color1,currentColor)" '
        'font-family="sans-serif" font-size="11" role="img">'
    )
    parts = [head, f"<title>{escape(y_name or 'curve')}</title>"]
    points = [(x, y) for _, x, y in kept if len(x)]
    if not points:
        parts.append(
            f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle" fill="currentColor" '
            'opacity="0.6">no episode has ended '
            "yet</text>"
        )
        return "".join([*parts, "</svg>"])
    x_low, x_high = (float(f(np.concatenate([x for x, _ in points]))) for f in (np.min, np.max))
    y_low, y_high = (float(f(np.concatenate([y for _, y in points]))) for f in (np.min, np.max))
    y_low, y_high = min(y_low, 0.0) if y_high > 0 else y_low, y_high if y_high > y_low else y_low + 1.0

    def place(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
        across = left + (x - x_low) / max(x_high - x_low, 1e-12) * (width - left - right)
        down = height - bottom - (y - y_low) / max(y_high - y_low, 1e-12) * (height - top - bottom)
        return " ".join(f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True))

    for share in (0.0, 0.5, 1.0):
        down = height - bottom - share * (height - top - bottom)
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{down:.1f}" y2="{down:.1f}" '
            'stroke="currentColor" opacity="0.15"/>'
        )
        parts.append(
            f'<text x="{left - 6}" y="{down + 4:.1f}" text-anchor="end" '
            f'fill="currentColor">{y_low + share * (y_high - y_low):.4g}</text>'
        )
    for share, anchor in ((0.0, "start"), (1.0, "end")):
        across = left + share * (width - left - right)
        parts.append(
            f'<text x="{across}" y="{height - bottom + 14}" text-anchor="{anchor}" fill="currentColor">'
            f"{x_low + share * (x_high - x_low):,.0f}</text>"
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - bottom + 14}" text-anchor="middle" '
        f'fill="currentColor">{escape(x_name)}</text>'
    )
    for index, (name, x, y) in enumerate(kept):
        color = COLORS[index % len(COLORS)]
        dash = "" if index == 0 else f' stroke-dasharray="{6 // index + 2} 3"'
        parts.append(f'<polyline points="{place(x, y)}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{left + index * 120}" y="12" fill="{color}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])
