"""Notice parameters and modules that are added to a model after it was sharded: they would never be trained."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from poplar.errors import ModelError


class ModelWatch:
    """Remembers the first thing that is added to ``model``; costs nothing in a step."""

    def __init__(self, model: nn.Module):
        # By identity, and not kept alive: modules may define equality, and may go.
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self.added: str | None = None
        self._handles = [
            register_module_module_registration_hook(self._on_module),
            register_module_parameter_registration_hook(self._on_parameter),
        ]

    def check(self) -> None:
        """Raise if something was added.

        Raises:
            ModelError: with its name.
        """
        if self.added is not None:
            raise ModelError(
                f"{self.added} was added to the model after initialize(); its parameters are not sharded and would "
                "not be trained. Build the whole model first"
            )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        is_known = parent._modules.get(name) is child  # set again, as by tie_weights()
        if child is not None and not is_known and parent in self._names and any(True for _ in child.parameters()):
            self._note(parent, name, "module")

    def _on_parameter(self, parent: nn.Module, name: str, param: nn.Parameter | None) -> None:
        is_known = parent._parameters.get(name) is param
        if param is not None and not is_known and parent in self._names:
            self._note(parent, name, "parameter")

    def _note(self, parent: nn.Module, name: str, kind: str) -> None:
        prefix = self._names[parent]
        self.added = self.added or f"{kind} {f'{prefix}.{name}' if prefix else name}"
