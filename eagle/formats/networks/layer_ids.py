"""The layers that a head reads, which configs count in two ways: inputs at the top, outputs in eagle_config."""

from __future__ import annotations

from collections.abc import Iterator

from eagle.formats.reading import traps
from eagle.formats.reading.head_folder import HeadFolder
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike, strike

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def choose_taps(
    head: HeadFolder, layers: int | None, asked: tuple[int, ...] | None
) -> tuple[tuple[int, ...], list[str]]:
    """The layers whose inputs a head reads, with notes; two statements in its config must agree."""
    both = {LAYER_IDS: head.inputs, f"eagle_config.{LAYER_IDS} + 1": head.inputs_by_outputs}
    stated = {name: ids for name, ids in both.items() if ids is not None}
    if asked is not None:
        taps, note = asked, f"taps {asked} as asked; config.json says {stated or 'nothing'}"
    elif len(set(stated.values())) > 1:
        raise ValueError(
            f"the layer ids disagree: {stated}. The first count inputs of layers and the others, one less, outputs: "
            "say which inputs the head was trained on, with --taps"
        )
    elif stated:
        taps = next(iter(stated.values()))
        note = f"taps {taps}, from {' and '.join(stated)}"
    elif layers is None:
        raise ValueError(
            "no layer ids in config.json: say the inputs that the head was trained on with --taps, or the target with "
            "--target, so that they become 2, the middle and the last but two, as engines take them"
        )
    else:
        taps = (2, layers // 2, layers - 3)
        note = f"no layer ids: taps {taps}, as engines take them of a target with {layers} layers"
    end = layers if layers is not None else max(taps, default=0) + 1
    if len(taps) != head.tap_count or len(set(taps)) != len(taps) or not all(-1 <= tap < end for tap in taps):
        known = "" if layers is None else f" of 0 to {layers - 1}, the inputs of the layers of this target"
        expected = f"{head.tap_count} different ones (fc.weight reads so many){known}"
        raise ValueError(f"the taps are {taps}, expected {expected}: use --taps")
    unsorted = "the taps are not in ascending order; vLLM would sort them and feed fc the wrong way round"
    return taps, [note] if list(taps) == sorted(taps) else [note, unsorted]


def list_wrong_ids(head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
    """Layer ids that contradict each other, the tensors or the target: outer ones count inputs, inner ones outputs."""
    inputs, inner = head.inputs, head.inputs_by_outputs
    if inputs and inner and inputs != inner:
        same = " (they are the same numbers, but the inner ones count outputs)" if inputs == head.outputs else ""
        yield strike(traps.IDS_DISAGREE, inputs=inputs, outputs=head.outputs, same=same)
    ids = inputs or inner
    if not ids:
        yield strike(traps.NO_IDS)
        if target and len({2, target.layers // 2, target.layers - 3}) < 3:
            yield strike(traps.USUAL_IDS, layers=target.layers)
        return
    if len(ids) != head.tap_count or len(set(ids)) != len(ids):
        yield strike(traps.IDS_COUNT, ids=ids, count=head.tap_count)
    if list(ids) != sorted(ids):
        yield strike(traps.IDS_UNSORTED, ids=ids)
    if target and not all(-1 <= layer < target.layers for layer in ids):
        yield strike(traps.IDS_OUTSIDE, ids=ids, layers=target.layers, last=target.layers - 1)
