"""The accuracy guard of the open toolchain's quantise step (which turns a float model into an int8 model). In rounds,
the guard leaves more and more layers of the int8 model in float. It stops when the int8 model and the float model
agree.

The layers that add most noise become float first. Each round makes and measures one model. It keeps twice as many
layers in float as the previous round, so that few rounds are needed. The ranges of the tensors are measured only once,
before the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.pipelines.conversion.toolchain.layer_sensitivity import NoisyLayer

#: The guard's goal: the int8 model and the float model give the same top-1 answer for this fraction of the samples. So
#: one answer in a hundred may differ.
GOAL = 0.99
#: At most this many layers become float. A model that needs more is better used in float as a whole.
MAX_FLOAT_LAYERS = 64


@dataclass(frozen=True, slots=True)
class Guarded:
    """What the guard did. `before` and `after`: the agreement, which is the fraction of samples for which the int8
    model and the float model give the same top-1 answer. `before`: when the int8 model had no layer in float. `after`:
    with `float_layers` in float.
    """

    before: float
    after: float
    float_layers: Sequence[NoisyLayer]

    def report(self) -> dict[str, Any]:
        return self.summary() | {"float_layers": [layer.report() for layer in self.float_layers]}

    def summary(self) -> dict[str, Any]:
        """The same members as the report, but `float_layers` is only the number of the layers."""
        return {
            "goal": GOAL,
            "reached": self.after >= GOAL,
            "agreement_before": self.before,
            "agreement": self.after,
            "float_layers": len(self.float_layers),
        }


def guard(
    agreement: float,
    find_layers: Callable[[], Sequence[NoisyLayer]],
    quantise_again: Callable[[Sequence[NoisyLayer]], float],
) -> Guarded:
    """Leave more and more layers in float. Stop when the agreement reaches GOAL, or when no further layer may become
    float.

    `agreement`: the agreement of the model with no layer in float. `find_layers`: returns the layers of the model that
    was made last, the noisiest first. The guard calls `find_layers` only while the agreement is below the goal.
    `quantise_again`: makes a model with these layers in float, and returns its agreement. If the model of the last
    round is worse than an earlier model (or than the model with no layer in float), the guard calls `quantise_again`
    once more, with the layers of the best model. So the model that was made last is always the best.
    """
    before, float_layers = agreement, list[NoisyLayer]()
    best_agreement, best_count = agreement, 0
    while agreement < GOAL and len(float_layers) < MAX_FLOAT_LAYERS:
        names = {layer.name for layer in float_layers}
        # The noise of one layer hides the noise of later layers. So each round measures the noise anew.
        candidates = [
            layer for layer in find_layers() if layer.has_weights and layer.added > 0 and layer.name not in names
        ]
        if not candidates:
            break
        # The first round makes one layer float. Each later round adds as many layers as are in float already.
        more = min(max(len(float_layers), 1), MAX_FLOAT_LAYERS - len(float_layers))
        float_layers += candidates[:more]
        agreement = quantise_again(float_layers)
        if agreement > best_agreement:
            best_agreement, best_count = agreement, len(float_layers)
    if agreement < best_agreement:  # the rounds after the best round have made the model worse
        float_layers = float_layers[:best_count]
        agreement = quantise_again(float_layers)
    return Guarded(before, agreement, float_layers)
