"""How does the console page look, in light and in dark?"""

# Texts have 4.5:1 against what is behind them, bars and lines 3:1, in both schemes; a test measures it.
LIGHT = {
    "ground": "#ffffff", "card": "#f4f6f8", "text": "#1b1f24", "quiet": "#57606a", "line": "#7f8891", "link": "#0b57c2",
    "good": "#166534", "bad": "#b3261e", "recipe": "#7a3ea8", "entrypoint": "#1f5fbf", "kvstore": "#8a6100",
    "prefill_lb": "#00727f", "prefill": "#2c7a31", "decode_lb": "#a94e14", "decode": "#b3261e", "vision": "#a8146c",
}  # fmt: skip
DARK = {
    "ground": "#14171c", "card": "#1e232a", "text": "#e6e9ed", "quiet": "#a6afba", "line": "#6e7884", "link": "#8ab4f8",
    "good": "#7ddf9a", "bad": "#ff9b92", "recipe": "#c9a0f0", "entrypoint": "#8ab4f8", "kvstore": "#e2b93b",
    "prefill_lb": "#4fc3cf", "prefill": "#81c784", "decode_lb": "#f0a46c", "decode": "#f28b82", "vision": "#f48fc0",
}  # fmt: skip
SERVICES = ("recipe", "entrypoint", "kvstore", "prefill_lb", "prefill", "decode_lb", "decode", "vision")


def _variables(scheme: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in scheme.items())


CSS = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    + "".join(f".{name}{{--own:var(--{name})}}" for name in SERVICES)
    + """
*{box-sizing:border-box}
body{margin:0;font:15px/1.45 system-ui,sans-serif;background:var(--ground);color:var(--text)}
header,main,footer{max-width:1180px;margin:auto;padding:12px 20px}
h1{font-size:1.5rem;margin:.3em 0}
h2{font-size:1.1rem;margin:1.6em 0 .5em}
a{color:var(--link)}
a:focus-visible,[tabindex]:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-999px}
.skip:focus{left:20px;background:var(--ground)}
.quiet{color:var(--quiet)}
.good{color:var(--good)}
.bad{color:var(--bad);font-weight:600}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:0}
.cards div{background:var(--card);border-radius:8px;padding:8px 14px;min-width:140px}
dt{color:var(--quiet);font-size:.85rem}
dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%}
caption{text-align:left;color:var(--quiet);padding-bottom:4px}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--card);vertical-align:top}
th{font-weight:600;color:var(--quiet);font-size:.85rem;white-space:nowrap}
td{font-variant-numeric:tabular-nums}
.number{text-align:right;white-space:nowrap}
code,.id{font-family:ui-monospace,monospace;font-size:.85rem;overflow-wrap:anywhere}
.who{white-space:nowrap}
.who::before{content:"";display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.45em;background:var(--own,var(--line))}
.bar{width:44%;min-width:260px}
.bar svg{display:block;width:100%;height:18px}
.bar rect.track{fill:var(--card)}
.bar rect.work{fill:var(--own,var(--line))}
.axis{display:flex;justify-content:space-between;font-weight:400}
.tree{white-space:pre;color:var(--quiet);font-family:ui-monospace,monospace}
.map{width:100%;max-width:820px;height:auto;display:block}
.map rect{fill:var(--card);stroke:var(--line);stroke-width:1.5}
.map .taken rect{stroke:var(--own);stroke-width:3}
.map text{fill:var(--quiet);font:15px system-ui,sans-serif;text-anchor:middle;dominant-baseline:central}
.map .taken text{fill:var(--text);font-weight:600}
.map line{stroke:var(--line);stroke-width:1.5;stroke-dasharray:3 5}
.map line.taken{stroke:var(--link);stroke-width:3;stroke-dasharray:none}
.map .step{fill:var(--ground);stroke:var(--link);stroke-width:1.5}
.map text.step-number{fill:var(--link);font-size:12px;stroke:none}
@media print{header a,footer{display:none}}
"""
)
