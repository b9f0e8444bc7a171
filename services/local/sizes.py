"""How is a number of bytes said to a person?"""

_STEP = 1024
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_TELLING = 10
"""From here on a decimal tells nobody anything."""


def in_words(num_bytes: float) -> str:
    """Return "1 byte", "900 bytes", "1.5 KiB" or "2.8 MiB": the largest unit of which there is one or more."""
    if num_bytes == 1:
        return "1 byte"
    value, unit = float(num_bytes), 0
    while value >= _STEP - 0.5 and unit + 1 < len(_UNITS):
        value, unit = value / _STEP, unit + 1
    decimals = 1 if unit and value < _TELLING else 0
    return f"{value:.{decimals}f} {_UNITS[unit]}"
