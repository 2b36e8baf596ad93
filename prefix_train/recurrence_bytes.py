"""Bytes of a Gated DeltaNet mixer whose recurrence plain torch computes (`chunked`), call by call. No torch.

The recurrence is float32, [rows, heads, width]. Its tensors are named in the order in which they are made;
tests/numerics/test_block_bytes.py counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefix_train.geometry import Geometry
from prefix_train.shape import Call, Shape


@dataclass(frozen=True)
class Reference:
    """One mixer. keys: heads of keys, each of `key` elements. heads: of values, each of `value` elements. itemsize: of
    the model's dtype."""

    keys: int
    heads: int
    key: int
    value: int
    itemsize: int

    @classmethod
    def of(cls, geometry: Geometry, itemsize: int) -> Reference:
        """As the model has it."""
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        keys, heads, key, value = (int(geometry.text[f"linear_{name}"]) for name in names)
        return cls(keys, heads, key, value, itemsize)

    def bytes(self, shape: Shape) -> tuple[int, int]:
        """What the mixer keeps for its backward, the hidden states that it is given apart, and what it takes beside
        that at its worst: when one of the calls ends, or in the backward of one."""
        kept = [self._kept(call) for call in shape.calls]
        moments = []
        for place, call in enumerate(shape.calls):
            before, after = shape.calls[:place], shape.calls[place + 1 :]
            so_far = sum(kept[: place + 1])
            moments.append(so_far + self._forward(shape) + self._ending(call, before))
            moments.append(so_far + self._backward(shape) + self._beginning(call) + sum(map(self._left, after)))
        total = sum(kept) + self._around(shape, 1, 3)
        return total, max(moments) - total

    @property
    def _inputs(self) -> int:
        """Query, key, value, decay and beta of a head."""
        return 2 * self.key + self.value + 2

    def _around(self, shape: Shape, mixed: int, values: int) -> int:
        """So many tensors as wide as all that is convolved, and as the values, in the model's dtype; queries and keys
        before they are normalised and gates in float32."""
        keys, width = self.keys * self.key, self.heads * self.value
        own = self.itemsize * (mixed * (2 * keys + width) + values * width)
        return shape.positions * (own + 4 * (2 * keys + 4 * self.heads))

    def _forward(self, shape: Shape) -> int:
        """Beside the calls: before, within and after the convolution; the gate; what the calls are given, the query
        also before it is scaled, and once more where it has to be put in order."""
        given = shape.positions * (3 * self.key + self.value) + shape.reordered * self._inputs
        return self._around(shape, 3, 1) + 4 * self.heads * given

    def _backward(self, shape: Shape) -> int:
        """Beside the calls: the convolution's input; gradients of the output and of the gate."""
        return self._around(shape, 1, 2)

    def _kept(self, call: Call) -> int:
        """What a call's forward leaves for its backward."""
        width = self.value + self.key  # the solved system
        width += 2 * self.key  # what chunks read of a state
        width += 5 * self.key  # keys times beta; products' own copies: of these, of queries, and of keys twice
        width += self.value  # updates, put together
        width += 5 * call.chunk  # decays between tokens; the system and the scores, with these and without
        total = width * call.rows + self._inputs * (call.tokens + call.rows)  # as they come, and in chunks
        total += self.value * call.written + self.key * (call.copied + call.rows * (call.written > call.copied))
        return 4 * self.heads * (total + self.key * self.value * (call.segments + call.handed))

    def _ending(self, call: Call, before: tuple[Call, ...]) -> int:
        """What else there is when a call ends: the system's right side; what was read, its sum with what the chunk
        itself gives, and that in order; earlier calls' outputs; states as they were inherited."""
        tensors = call.rows * (self.key + 4 * self.value)
        outputs = self.value * (call.tokens + sum(one.tokens for one in before))
        inherited = self.key * self.value * call.segments * bool(before)
        return 4 * self.heads * (tensors + outputs + inherited)

    def _beginning(self, call: Call) -> int:
        """Most that a call's backward makes beside what it has kept: when it begins, or when it comes to the scores."""
        begins = call.chunk + 3 * self.value
        scores = self.value + 2 * max(call.chunk, self.key)
        return 4 * self.heads * call.rows * max(begins, scores)

    def _left(self, call: Call) -> int:
        """What a call's backward leaves for those that come after it: gradients of what it was given."""
        return 4 * self.heads * self._inputs * call.tokens
