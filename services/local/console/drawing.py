"""How are a span's bar and the map of the eight services drawn? As SVG, which needs no script and no inline style."""

from html import escape

from services.local.console.journey import Journey, Row

_WIDTH, _HEIGHT = 120, 40
# Centres. The way of a text request runs from left to right; nobody's line to the engines crosses a balancer's box.
PLACES = {
    "recipe": (75, 180), "entrypoint": (250, 180), "kvstore": (430, 35), "prefill_lb": (430, 105),
    "prefill": (660, 140), "decode_lb": (430, 255), "decode": (660, 220), "vision": (250, 325),
}  # fmt: skip
LINES = (
    ("recipe", "entrypoint"), ("entrypoint", "kvstore"), ("entrypoint", "vision"), ("entrypoint", "prefill_lb"),
    ("entrypoint", "prefill"), ("entrypoint", "decode_lb"), ("entrypoint", "decode"), ("prefill", "decode"),
    ("prefill", "kvstore"),
)  # fmt: skip
"""Drawn for every request; others only where they were taken."""
_SMALLEST_SHARE = 0.004
"""A span of microseconds is still seen."""


def bar(row: Row, total_seconds: float) -> str:
    """Return a span's bar on the journey's time axis."""
    scale = 1000 / total_seconds if total_seconds > 0 else 0.0
    left = min(1000 * (1 - _SMALLEST_SHARE), max(0.0, row.start_seconds * scale))
    width = min(1000 - left, max(1000 * _SMALLEST_SHARE, row.seconds * scale))
    return (
        '<svg viewBox="0 0 1000 18" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="1000" height="18"/>'
        f'<rect class="work" x="{left:.1f}" y="3" width="{width:.1f}" height="12"/></svg>'
    )


def service_map(journey: Journey) -> str:
    """Return the eight services with the way that a request took; each line's number is the order of first calls."""
    steps = {pair: number for number, pair in enumerate(journey.path, 1)}
    known = [*LINES, *(pair for pair in steps if pair not in LINES and set(pair) <= PLACES.keys())]
    taken = {row.service for row in journey.rows}
    lines = "".join(_line(pair, steps.get(pair, 0)) for pair in sorted(known, key=lambda pair: pair in steps))
    boxes = "".join(_box(service, is_taken=service in taken) for service in PLACES)
    told = "; ".join(f"{number}. {caller} to {called}" for number, (caller, called) in enumerate(journey.path, 1))
    label = f"Map of the eight services. This request's way: {told or 'not known yet'}."
    return f'<svg class="map" viewBox="0 0 740 355" role="img" aria-label="{escape(label)}">{lines}{boxes}</svg>'


def _line(pair: tuple[str, str], number: int) -> str:
    (x1, y1), (x2, y2) = PLACES[pair[0]], PLACES[pair[1]]
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    if not number:
        return f"<line {ends}/>"
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return (
        f'<line class="taken" {ends}/><circle class="step" cx="{x}" cy="{y}" r="10"/>'
        f'<text class="step-number" x="{x}" y="{y}">{number}</text>'
    )


def _box(service: str, *, is_taken: bool) -> str:
    x, y = PLACES[service]
    return (
        f'<g class="{service}{" taken" if is_taken else ""}">'
        f'<rect x="{x - _WIDTH // 2}" y="{y - _HEIGHT // 2}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>'
        f'<text x="{x}" y="{y}">{service}</text></g>'
    )
