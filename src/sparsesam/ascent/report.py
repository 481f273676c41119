"""Describes what a step left out."""

from __future__ import annotations

from sparsesam.ascent.first_pass import FirstPass


def engine_report(first: FirstPass) -> dict[str, str]:
    """Returns a summary under "engine", then one line for each trainable parameter."""
    reused, full = first.prefix.reused, first.backward.why_full
    state = "on" if full is None else f"on, but the first backward was computed in full: {full}"
    if not reused and first.prefix.why_not is not None:
        state = f"on, but the second pass was computed in full: {first.prefix.why_not}"
    lines = {"engine": state}
    for key, name in first.plan.names.items():
        again = "; forward and graph of the first pass used again" if name in reused else ""
        lines[name] = _gradients(first, key) + again
    return lines


def _gradients(first: FirstPass, key: int) -> str:
    plan = first.plan
    needed = any(id(parameter) == key for parameter in plan.needed)
    want, called = plan.sliced.get(key), key in first.layers_called
    if first.backward.is_complete:
        text = "full weight gradient in the ascent"
    elif not needed:
        text = "not perturbed: no weight gradient in the ascent"
    elif want is None or want.mask.is_empty:
        text = "perturbed: full weight gradient in the ascent"
    elif not called:
        text = "full weight gradient: not used by a call of a linear or convolution layer"
    elif want.rows is not None and not want.dense:
        text = f"weight gradient for {len(want.rows)} of {want.mask.shape[0]} filters"
    else:
        text = "full weight gradient: the mask is not made of whole filters"
    if want is not None and want.implicit and called:
        text += "; no input gradient passes" if want.mask.is_empty else "; input gradient through the masked weights"
    return text


def layers_left_explicit(first: FirstPass) -> list[str]:
    """Returns the weights whose input gradient did not go through the mask, although the ascent is implicit."""
    return [first.plan.names[key] for key in first.plan.implicit if key not in first.layers_called]
