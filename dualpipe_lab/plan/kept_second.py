"""`second_tensors`: what the prediction of a second token keeps on the last stage, besides its layer.

Chapter: book/whole/two-tokens.  In: the table of its layer.  Out: named bytes, as `LayerTable.last` has them.
  norms        the input of the embedding's, T' h b, and the scales of both: the other's input is the last norm's too
  projection   its input of 2 h, and the ids of a copy of the embedding; under sequence parallelism its gathered output,
               (T - T') h b beyond the layer's input, which is a view of it
  head         the input of the norm behind the layer, the head's, and logits once more
"""

from collections.abc import Iterator

from dualpipe_lab.plan.kept_tensors import KeptTensor, LayerTable


def second_tensors(table: LayerTable, has_table: bool) -> Iterator[KeptTensor]:
    """Yield the tensors; `has_table`: the embedding is a copy, which the second token looks up itself."""
    if has_table:
        yield from table.first()
    scales = 2 * table.local_tokens * table.scale
    yield KeptTensor("second norms' inputs", table.boundary_bytes + scales)
    yield KeptTensor("second projection's input", 2 * table.input_bytes)
    others = table.num_tokens - table.local_tokens
    yield KeptTensor("second projection's output", others * table.hidden * table.element)
    yield from table.last()


def second_weights(table: LayerTable) -> dict[str, int]:
    """Return the elements of the projection's weight on this rank."""
    return {"second projection": 2 * table.hidden * table.shard(table.hidden)}
