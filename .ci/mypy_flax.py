"""A plugin for mypy: `flax.struct.dataclass` adds the method `replace`."""

from mypy.nodes import ARG_STAR2, Argument, Var
from mypy.plugin import Plugin
from mypy.plugins.common import add_method_to_class
from mypy.plugins.dataclasses import dataclass_class_maker_callback
from mypy.types import AnyType, TypeOfAny
from mypy.typevars import fill_typevars


def _add_replace(context) -> bool:
    anything = AnyType(TypeOfAny.explicit)
    changes = Argument(Var("changes", anything), anything, None, ARG_STAR2)
    made = fill_typevars(context.cls.info)
    add_method_to_class(context.api, context.cls, "replace", [changes], made)
    return dataclass_class_maker_callback(context)


class _Flax(Plugin):
    def get_class_decorator_hook_2(self, fullname: str):
        return _add_replace if fullname == "flax.struct.dataclass" else None


def plugin(version: str) -> type[Plugin]:
    """The entry point that mypy looks for."""
    return _Flax
