"""Classes with the names and signatures of a vendor's recorded API, and the behaviour of a stand-in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Argument:
    """One argument of a recorded signature."""

    def __init__(self, text: str) -> None:
        declared, separator, default = text.partition(" = ")
        self.name, _, self.kind = declared.partition(": ")
        self.optional = bool(separator)
        self.default = default


def arguments_of(signature: str) -> list[Argument]:
    """Those of `name(self: …, size: int = 0) -> None`, without `self`."""
    inner = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    return [Argument(part) for part in _split(inner) if not part.startswith("self:") and part not in ("*", "/")]


def _split(text: str) -> Iterator[str]:
    """At the commas that stand in no brackets."""
    depth, begin = 0, 0
    for at, character in enumerate(text):
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def bind(signatures: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that were left out excepted.

    Raises:
        TypeError: no signature takes them.
    """
    for signature in signatures:
        arguments = arguments_of(signature)
        values = {argument.name: value for argument, value in zip(arguments, given, strict=False)}
        known = {argument.name for argument in arguments}
        missing = {argument.name for argument in arguments if not argument.optional} - set(values) - set(named)
        if len(given) <= len(arguments) and not missing and set(named) <= known - set(values):
            values |= named
            if all(_fits(argument.kind, values[argument.name]) for argument in arguments if argument.name in values):
                return values
    shown = "\n".join(f"    {signature}" for signature in signatures)
    raise TypeError(
        f"incompatible function arguments. The following are supported:\n{shown}\nInvoked with: {given}, {dict(named)}"
    )


def _fits(kind: str, value: Any) -> bool:
    """Whether a value is of a type that a signature names; of types that are not known here, any is."""
    plain = re.sub(r"^(typing\.|typing_extensions\.|collections\.abc\.)", "", kind)
    if plain in ("int", "SupportsInt", "SupportsInt | SupportsIndex"):
        return isinstance(value, int) and not isinstance(value, bool)
    if plain == "bool":
        return isinstance(value, bool)
    if plain == "str":
        return isinstance(value, str)
    if plain in ("buffer", "Buffer", "bytes"):
        return isinstance(value, bytes | bytearray | memoryview)
    if plain in ("tuple", "list") or plain.endswith("Dims"):
        return isinstance(value, list if plain == "list" else tuple) and all(type(each) is int for each in value)
    if isinstance(value, Member):
        return plain.endswith(f".{value.owner}")
    return True


class Member:
    """A value of an enumeration."""

    def __init__(self, owner: str, name: str, value: int) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __int__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"{self.owner}.{self.name}"


def make_enumeration(name: str, record: Mapping[str, Any]) -> type:
    """A class with the recorded members and no others."""
    members = {each: Member(name, each, value) for each, value in record["members"].items()}
    return type(name, (), {**members, "__members__": members})


def make_class(name: str, record: Mapping[str, Any], behaviour: type) -> type:
    """A class with the recorded methods and properties and no others.

    Args:
        behaviour: what its methods do, by the recorded names of their arguments. Its private names are its own.
    """
    methods, properties = record["methods"], record["properties"]
    body: dict[str, Any] = {each: _absent(name, each) for each in dir(behaviour) if not each.startswith("_")}
    for method, signatures in methods.items():
        if not method.startswith("__") or method in ("__init__", "__len__", "__getitem__"):
            body[method] = _checked(method, signatures, getattr(behaviour, method, None))
    for each in properties:
        if hasattr(behaviour, each):
            body[each] = getattr(behaviour, each)
        else:
            body[each] = _not_simulated(name, each)

    for each, nested in record.get("classes", {}).items():
        body[each] = make_enumeration(f"{name}.{each}", nested)

    def set_attribute(self: Any, attribute: str, value: Any) -> None:
        settable = properties.get(attribute, {"settable": False})["settable"]
        # As with the real ones, classes made of them in Python take any attribute.
        if type(self) is made and not attribute.startswith("_") and not settable:
            raise AttributeError(f"{name!r} object has no attribute {attribute!r} that can be set")
        object.__setattr__(self, attribute, value)

    def truth(self: Any) -> bool:
        raise AssertionError(f"whether a {name} is true says nothing of it")

    made = type(name, (behaviour,), {**body, "__setattr__": set_attribute, "__bool__": truth})
    return made


def _checked(name: str, signatures: Sequence[str], function: Any) -> Any:
    def call(self: Any, *given: Any, **named: Any) -> Any:
        values = bind(signatures, given, named)
        if function is None:
            raise NotImplementedError(f"the stand-in does not do {name}")
        return function(self, **values)

    return call


def _absent(owner: str, name: str) -> property:
    def get(self: Any) -> Any:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    return property(get)


def _not_simulated(owner: str, name: str) -> property:
    def get(self: Any) -> Any:
        raise NotImplementedError(f"the stand-in does not do {owner}.{name}")

    return property(get)
