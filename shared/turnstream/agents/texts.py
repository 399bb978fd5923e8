"""The texts of a node that are carried out: templates and expressions, as fields of definitions.

Each is parsed where it is read, so that one that is wrong is refused with the place it is at.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, cast

from pydantic import AfterValidator

from turnstream.agents import expressions, templates
from turnstream.agents.expressions import ExpressionError
from turnstream.agents.templates import TemplateError
from turnstream.agents.terms import JsonObject, Place, Said, fault, refusal


def _is_template(text: str) -> str:
    try:
        templates.parse(text)
    except TemplateError as error:
        raise fault(str(error)) from None
    return text


def _is_expression(text: str) -> str:
    try:
        expressions.parse(text)
    except ExpressionError as error:
        raise fault(str(error)) from None
    return text


def _are_templates(arguments: Mapping[str, object]) -> Mapping[str, object]:
    faults: list[tuple[Place, str]] = []
    for place, text in strings_of(arguments):
        try:
            templates.parse(text)
        except TemplateError as error:
            faults.append((place, str(error)))
    if faults:
        raise refusal(faults)
    return arguments


def strings_of(value: object, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every text in a JSON value, the keys of objects not counted, with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, object]", value).items():
            yield from strings_of(inner, (*place, key))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(cast("list[object]", value)):
            yield from strings_of(inner, (*place, i))


TemplateText = Annotated[Said, AfterValidator(_is_template)]
ExpressionText = Annotated[Said, AfterValidator(_is_expression)]
Arguments = Annotated[JsonObject, AfterValidator(_are_templates)]
"""An object in which every text is a template."""
