"""How does a conversation become one prompt text? The model's own jinja template, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.recipe.refusals import ModelFolderError, refuse


class ChatTemplate:
    """A compiled chat template. It is the operator's, so it is trusted to end; messages are not trusted."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], auto_reload=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        try:
            tree = environment.parse(source)
            self.literals = _literals(tree)
            self.takes_tools = "tools" in meta.find_undeclared_variables(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ModelFolderError(f"the chat template does not parse: line {exc.lineno}: {exc.message}") from exc
        self._variables = dict(variables)
        self.literals += tuple(self._variables.values())

    def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None) -> str:
        """Return the prompt up to where the assistant's answer begins; raise a 400 with the template's own words."""
        try:
            return self._template.render(
                **self._variables,
                messages=list(messages),
                add_generation_prompt=True,
                tools=list(tools) if tools else None,
                documents=None,
            )
        except jinja2.TemplateError as exc:
            raise refuse("messages", f"the model's chat template refuses them: {exc}") from exc
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as exc:
            # What template expressions raise when a message is not what they expect.
            raise refuse("messages", f"the model's chat template fails on them: {type(exc).__name__}") from exc


def load_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the folder's template: chat_template.jinja, or the one (or "default" one) in tokenizer_config.json."""
    source: object = tokenizer_config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    elif isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default") or next(iter(named.values()), None)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _token_variables(tokenizer_config))


def _token_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token and its like; each is a string or, in older files, a dict with its content."""
    found = {}
    for name, value in tokenizer_config.items():
        spelled = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(spelled, str):
            found[name] = spelled
    return found


def _literals(tree: nodes.Template) -> tuple[str, ...]:
    data = [node.data for node in tree.find_all(nodes.TemplateData)]
    constants = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return (*data, *constants)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # jinja's own filter escapes for HTML; prompts are not HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
