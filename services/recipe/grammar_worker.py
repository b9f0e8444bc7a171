"""Can this grammar be obeyed, and at what price? The compiler runs here, in a process that may be killed.

Run as a script by `grammars.py`: a job is a line of JSON on standard input, its answer one on standard output. Whoever
takes too long, or too much memory, is ended by limits this process sets for itself, so that even an orphan ends.
"""

import json
import re
import resource
import signal
import sys
from typing import Any

ADDRESS_BYTES = 512 << 20
"""Address space, most of which is never touched; a grammar that needs more ends the process."""
LIMITS: dict[str, Any] = {"max_grammar_size": 15_000, "max_lexer_states": 10_000, "verbose_errors": False}
"""Below those of the engines (kernels/grammar.py), so that what passes here passes there."""
_STEPS = 48
_EOS = 256
_HARMLESS = "no tokenizer"  # control tokens are ours alone, and named by their ids
_MAX_ERROR_CHARACTERS = 400
_INTERNAL = re.compile(r"panic|<backtrace>|grammar size|schema too large|TooComplex|fuel|lexer states|NoExtension")
_CALLERS = (
    (re.compile(r"oneOf constraints are not supported.*", re.DOTALL), "oneOf needs branches that exclude each other"),
    (re.compile(r"lookarounds not supported yet; \w+"), "anchors and look-around are not supported inside of patterns"),
)


class _Bytes:
    """A vocabulary of single bytes: what a language allows next can be asked without a model's tokenizer."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (_EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Checker:
    """The compiler with its limits."""

    def __init__(self) -> None:
        import llguidance

        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._bytes = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return {"body": text}, or {"error": text, "part": index, "is_too_complex": bool}.

        job: {"frame": Lark text or "", "parts": [{"json_schema" | "regex" | "lark": ...}]}.
        """
        parts = []
        for at, given in enumerate(job["parts"]):
            try:
                part = self._part(given)
            except Exception as exc:  # noqa: BLE001 - the reader of GBNF raises what it likes
                return _error(str(exc), at)
            if error := self._problem(part, walks=True):
                return _error(error, at)
            parts.append(part)
        named = [{"name": f"part{at}"} | part for at, part in enumerate(parts)]
        grammars = [{"lark_grammar": job["frame"]}, *named] if job["frame"] else parts
        body = json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
        error = self._problem(body, walks=False) if job["frame"] else ""
        return _error(error, 0) if error else {"body": body}

    def _part(self, given: dict[str, Any]) -> dict[str, Any]:
        if "json_schema" in given:
            return {"json_schema": given["json_schema"]}
        if "regex" in given:
            made = json.loads(self._matcher.grammar_from_regex(given["regex"]))
            return {"lark_grammar": made["grammars"][0]["lark_grammar"]}
        from llguidance.gbnf_to_lark import any_to_lark

        return {"lark_grammar": any_to_lark(given["lark"])}

    def _problem(self, grammar: str | dict[str, Any], *, walks: bool) -> str:
        """Return what is wrong with it, "" for nothing.  walks: also go some way into the language."""
        body = grammar if isinstance(grammar, str) else json.dumps({"grammars": [grammar]})
        is_error, messages = self._matcher.validate_grammar_with_warnings(body, limits=self._limits)
        said = [message for message in messages if is_error or not message.startswith(_HARMLESS)]
        if said:
            return said[0]
        return self._walk(body) if walks else ""

    def _walk(self, body: str) -> str:
        """Follow one answer for a while: some grammars are cheap to read, and without end to obey."""
        matcher = self._matcher(self._bytes, body, log_level=0, limits=self._limits)
        dice = 1
        for _ in range(_STEPS):
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(_EOS) if mask[byte >> 3] >> (byte & 7) & 1]
            if matcher.is_error() or not allowed:
                break
            dice = dice * 1103515245 + 12345 & 0x7FFFFFFF
            matcher.consume_token(allowed[(dice >> 8) % len(allowed)])
        return str(matcher.get_error()) if matcher.is_error() else ""


def _error(message: str, part: int) -> dict[str, Any]:
    """Return what the caller may read: nothing of the compiler's inside."""
    if _INTERNAL.search(message):
        return {"error": "it is too complex, or nothing satisfies it", "part": part, "is_too_complex": True}
    for pattern, plain in _CALLERS:
        message = pattern.sub(plain, message)
    message = " ".join(message.split())
    return {"error": message[:_MAX_ERROR_CHARACTERS], "part": part, "is_too_complex": False}


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib would be loaded for this alone
        return int(file.read().split()[1]) * resource.getpagesize()


def main(seconds: float) -> None:
    """Answer jobs until standard input ends.  seconds: longest time for one, after which the process is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends us: a Python handler would wait for the compiler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    checker = Checker()
    output = sys.stdout.buffer
    output.write(b"{}\n")
    output.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = checker.answer(json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        output.write(json.dumps(answer | {"resident_bytes": _resident_bytes()}).encode() + b"\n")
        output.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
