"""A bag of checked settings: how values are set, copied and frozen, whatever the settings are.

Invariant: every setting holds a value that its check accepts; once the constructor is through no new names appear; once
frozen nothing changes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from lgroup._config_checks import CHECKS, Check
from lgroup.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])


class _NotProvidedType:
    def __repr__(self) -> str:
        return "NotProvided"

    def __reduce__(self) -> str:
        return "NotProvided"  # pickled by name, so that there is one in each process


NotProvided: Any = _NotProvidedType()
"""The default of a keyword that leaves its setting as it is."""


def section(method: F) -> F:
    """Makes a method whose keywords are settings refuse others with a ConfigError that says where they belong.

    A method with a ``**`` parameter also takes settings that belong to no section.
    """
    parameters = inspect.signature(method).parameters.values()
    own = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)

    @functools.wraps(method)
    def checked(self: Settings, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in own:
                self.require_in_section(name, method.__name__, own, is_open)
        return method(self, *args, **kwargs)

    checked.__dict__["section_keywords"] = frozenset(own)
    return cast(F, checked)


class _SealedAfterInit(type):
    """Closes an object to new attributes when the outermost constructor is through."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.__dict__["_is_sealed"] = True
        return made


class Settings(metaclass=_SealedAfterInit):
    """Attributes set in ``__init__`` are settings; afterwards they can be changed but no others added."""

    checks: ClassVar[Mapping[str, Check]] = CHECKS
    """What each setting may be; a subclass adds its own: ``checks = {"clip_param": number(above=0)}``."""

    _is_sealed: bool = False
    _is_frozen: bool = False

    def __init__(self) -> None:
        self._cache: dict[str, Any] = {}

    @classmethod
    def check_of(cls, name: str) -> Check | None:
        """What the setting may be, if that is limited at all."""
        tables = (vars(owner).get("checks", {}) for owner in cls.__mro__)
        return next((table[name] for table in tables if name in table), None)

    @classmethod
    def sections(cls) -> Iterator[tuple[str, frozenset[str]]]:
        """The methods that take settings, each as ("training()", the names it takes), in whichever class they stand."""
        for owner in cls.__mro__:
            for method_name, member in vars(owner).items():
                if hasattr(member, "section_keywords"):
                    yield f"{method_name}()", member.section_keywords

    def require_in_section(self, name: str, section_name: str, own: Sequence[str], is_open: bool) -> None:
        """Raises ConfigError unless an open section may set ``name``."""
        places = [place for place, names in self.sections() if name in names]
        if places:
            raise ConfigError(f"{name} is not a setting of {section_name}(); set it with {' or '.join(places)}")
        if not is_open or name not in self.setting_names():
            known = [*own, *(self._settings_of_no_section() if is_open else ())]
            raise ConfigError.unknown(f"setting of {section_name}()", name, known)

    def _settings_of_no_section(self) -> list[str]:
        placed = {name for _, names in self.sections() for name in names}
        return [name for name in self.setting_names() if name not in placed]

    def setting_names(self) -> list[str]:
        """The names of all settings."""
        properties = [n for n in dir(type(self)) if isinstance(prop := getattr(type(self), n), property) and prop.fset]
        return [*(n for n in self.__dict__ if not n.startswith("_")), *properties]

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_frozen:
            raise ConfigError(f"{name} cannot be set: this {type(self).__name__} is frozen; change a copy() of it")
        if self._is_sealed and name not in self.__dict__ and name not in self.setting_names():
            raise ConfigError.unknown(f"setting of {type(self).__name__}", name, self.setting_names())
        check = self.check_of(name)
        if check is not None:
            check.require(name, value)
        object.__setattr__(self, name, value)

    def _set(self, values: Mapping[str, Any]) -> Self:
        """Sets what was provided of a section method's ``locals()``."""
        for name, value in values.items():
            if name not in ("self", "__class__", "algorithm_settings") and value is not NotProvided:
                setattr(self, name, value)
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether settings can no longer be changed."""
        return self._is_frozen

    def freeze(self) -> Self:
        """Makes every later change raise ConfigError."""
        self.__dict__["_is_frozen"] = True
        return self

    def copy(self, copy_frozen: bool | None = None) -> Self:
        """A copy whose dicts, lists and specs are its own. Frozen if asked for; None: if this one is."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update({name: _own(value) for name, value in self.__dict__.items()})
        twin.__dict__.update(_is_frozen=self._is_frozen if copy_frozen is None else copy_frozen, _cache={})
        return twin

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def update_from_dict(self, settings: Mapping[str, Any]) -> Self:
        """Sets each of ``settings``. ConfigError for unknown names and values that are not allowed."""
        for name, value in settings.items():
            setattr(self, name, value)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def __repr__(self) -> str:
        default = type(self)().__dict__
        changed = [
            f"{k}={v!r}" for k, v in self.__dict__.items() if not k.startswith("_is") and _differs(v, default.get(k))
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


def _own(value: Any) -> Any:
    """A copy of containers and specs; anything else (spaces, classes, functions) is shared."""
    if type(value) is dict:
        return {k: _own(v) for k, v in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_own, value))
    if hasattr(value, "as_multi_rl_module_spec"):
        return value.copy()
    dataclass_params = getattr(type(value), "__dataclass_params__", None)
    return value if dataclass_params is None or dataclass_params.frozen else copy.deepcopy(value)


def _differs(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except Exception:  # arrays compare elementwise
        return True
