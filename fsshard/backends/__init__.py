"""How does an engine execute the plan? One file and one class per engine, with all that others ask of it.

Vendors are imported in the class that needs them, when it is used. A backend of another package needs
:class:`Backend`, :class:`EngineFacts`, :class:`Settings` and :func:`register_backend` only.
"""

from fsshard.backends.base import Backend
from fsshard.backends.facts import EngineFacts
from fsshard.backends.registry import backend_class, backend_names, register_backend
from fsshard.backends.settings import Settings

__all__ = ["Backend", "EngineFacts", "Settings", "backend_class", "backend_names", "register_backend"]
