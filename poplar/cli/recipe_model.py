"""``--model module:name``: a recipe's own model, measured on the meta device. Torch is imported when it is."""

from __future__ import annotations

from poplar.errors import ConfigError
from poplar.simulation.model_spec import ModelSpec

_BATCH_SIZE = 2


def spec_of_recipe(reference: str, tokens_per_sample: int | None) -> ModelSpec:
    """Measure the model and the loss of the recipe ``reference`` on its probe, or on its first samples.

    Args:
        tokens_per_sample: None: the recipe's own weight of a sample.

    Raises:
        ConfigError: no such recipe, a data set of less than two samples, or a loss that does not run on meta.
    """
    import torch

    from poplar.recipe_loading import load_recipe
    from poplar.zero.tree import map_tensors

    recipe = load_recipe(reference)
    if recipe.probe is not None:
        batch = recipe.probe(_BATCH_SIZE)
    else:
        dataset = recipe.dataset()
        if len(dataset) < _BATCH_SIZE:  # type: ignore[arg-type]
            raise ConfigError(
                f"{reference}: a data set of {_BATCH_SIZE} samples or more is needed to measure the model"
            )
        batch = recipe.collate([dataset[index] for index in range(_BATCH_SIZE)])
    if tokens_per_sample is None:
        tokens_per_sample = round(float(recipe.weight(batch)) / _BATCH_SIZE) if recipe.weight is not None else 1
    with torch.device("meta"):
        module = recipe.model()
    return ModelSpec.from_module(
        module,
        recipe.loss,
        map_tensors(lambda tensor: tensor.to("meta"), batch),
        batch_size=_BATCH_SIZE,
        tokens_per_sample=max(1, tokens_per_sample),
        name=reference,
    )
