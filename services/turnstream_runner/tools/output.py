"""What a tool returned, as the text that the model sees: a string as it is, anything else as JSON."""

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from turnstream_runner.unicode import fit

OUTPUT_MAX = 64 << 20
"""Characters of one result; more is an error, not a cut."""
FAULTS_MAX = 10


def printed(value: object) -> str:
    """Raises ValueError or TypeError for what cannot be written."""
    match value:
        case str():
            text = value
        case bytes() | bytearray() | memoryview():
            text = bytes(value).decode(errors="replace")
        case _:
            text = _json(value)
    if len(text) > OUTPUT_MAX:
        raise ValueError(f"the result has {len(text)} characters, more than {OUTPUT_MAX}")
    return fit(text)


def described(error: ValidationError) -> str:
    """Which arguments do not fit, and why; never what was in them."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [f"{_path(fault['loc'])}{fault['msg'][:200]}" for fault in faults[:FAULTS_MAX]]
    if len(faults) > FAULTS_MAX:
        shown.append(f"and {len(faults) - FAULTS_MAX} more")
    return fit("; ".join(shown))


def _path(location: tuple[int | str, ...]) -> str:
    return f"{'.'.join(str(part)[:100] for part in location)}: " if location else ""


def _json(value: object) -> str:
    try:
        return _written(value)
    except (PydanticSerializationError, UnicodeEncodeError):  # for a lone surrogate in it, say
        return _written(_fitted(value))


def _written(value: object) -> str:
    return to_json(value, fallback=str, bytes_mode="base64", inf_nan_mode="strings").decode()


def _fitted(value: object) -> object:
    match value:
        case str():
            return fit(value)
        case dict():
            return {_fitted(key): _fitted(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_fitted(inner) for inner in value]
        case _:
            return value
