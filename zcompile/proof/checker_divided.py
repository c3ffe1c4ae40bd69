"""Values that are divided over the ranks of a group, as the checker reads them.

    part 1 1 4 2 (t)         each of 2 ranks has 4 rows of `t` along dimension 1, which has one run of all rows
    part 1 1 4 2 zigzag (t)  likewise, in zig-zag order
    share 2 (t)              `t` is the sum over 2 ranks of such values

Operations of parts are read as those of the rows of a loop are: see `zcompile.proof.checker_rows`. Operators of
`ops.zcompile` change how a value is divided, or compute parts of what a kernel of attention gives of the whole, and
nothing else; so what is whole again has the term of the traced step.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from zcompile.proof.checker_rows import SUM, At, Loop, flat, literal_or_none
from zcompile.proof.checker_texts import dotted, refusal
from zcompile.proof.checker_values import TermTable, TermValue

ADDITIVE = frozenset({"add", "clone", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view"})
"""Operations that give, of shares, shares of what they give of the sums."""


START, WAIT = "ops.zcompile.start_all_to_all.default", "ops.zcompile.wait_all_to_all.default"


class How(NamedTuple):
    """How a value is divided over ranks; a share has no rows."""

    ranks: int
    dim: int = 0
    outer: int = 0
    """The number of runs of all rows along the dimension."""
    rows: int = 0
    """The rows of a rank."""
    order: str = ""


def how_divided(terms: TermTable, term: int) -> tuple[How | None, int]:
    """Return how a value is divided, None if it is whole, and the term of the whole."""
    kind, *said = terms.heads[term].split(" ")
    if kind == "share" and len(said) == 1:
        return How(int(said[0])), terms.args[term][0]
    if kind == "part" and len(said) in (4, 5):
        dim, outer, rows, ranks = map(int, said[:4])
        return How(ranks, dim, outer, rows, "".join(said[4:])), terms.args[term][0]
    return None, term


def mean_over_ranks(terms: TermTable, term: int, ranks: int) -> int:
    """Return the mean of a value over ranks: that of a share times their number is the sum."""
    how, whole = how_divided(terms, term)
    if how != How(ranks) or terms.heads[whole] != "aten.mul.Tensor":
        return term
    value, times = terms.args[whole]
    return value if terms.heads[times] == f"int {ranks}" else term


def divided_call(evaluation: Any, call: ast.Call) -> Any:
    """Return the value of a call that divides a value, or takes divided ones; None of any other."""
    name = dotted(call.func)
    if name in (START, WAIT):
        return _in_flight(evaluation, call, name)
    if not evaluation.ranks or not name.startswith(("aten.", "ops._c10d_functional.", "ops.zcompile.")):
        return None
    found = {given: evaluation.scope.get(given) for given in map(dotted, flat(call))}
    values = {given: value for given, value in found.items() if isinstance(value, TermValue)}
    how = {given: how_divided(evaluation.terms, value.term)[0] for given, value in values.items()}
    if not any(how.values()) and not name.startswith("ops.zcompile."):
        return None
    return _Divided(evaluation, values, how).value(call)


def _in_flight(evaluation: Any, call: ast.Call, name: str) -> TermValue:
    """Return what an exchange has started, or what has arrived of one that was started with the same arguments."""
    terms, args = evaluation.terms, [*map(literal_or_none, call.args[1:])]
    if call.keywords or None in args:
        raise refusal(terms.here, "exchanges parts by arguments that are not written out")
    head = f"in flight {args}"
    if name == START:
        whole = ast.parse("ops.zcompile.all_to_all.default", mode="eval").body
        term = terms.make(head, evaluation._call(ast.copy_location(ast.Call(whole, call.args, []), call)).term)
    else:
        (started,) = evaluation._values(call.args[:1])
        if terms.heads[started.term] != head:
            raise refusal(terms.here, "waits for an exchange that was not started so")
        term = terms.args[started.term][0]
    return evaluation._made(term)  # type: ignore[no-any-return]


class _Divided(Loop):
    """A call of which each rank computes a part, as the only line of a loop whose turns are the ranks'."""

    def __init__(self, evaluation: Any, values: dict[str, TermValue], how: dict[str, How | None]) -> None:
        self.of, self.how, self.scaled = evaluation, how, set()
        self.scope = {
            name: evaluation._made(how_divided(evaluation.terms, evaluation._alive(value).term)[1])
            for name, value in values.items()
        }
        divided = [one for one in how.values() if one is not None]
        parts = {(one.rows, one.ranks, one.order) for one in divided if one.rows}
        self.ranks = divided[0].ranks if divided else 0
        self.size, _, self.order = next(iter(parts), (1, 1, ""))
        self.rows, self.alike = self.size * self.ranks, len(parts) <= 1
        self.at: dict[str, Any] = {
            name: (one.dim, one.outer) if one and one.rows else SUM if one else None for name, one in how.items()
        }

    def value(self, call: ast.Call) -> Any:
        name = dotted(call.func)
        packet, draws = name.split(".")[-2], len(self.of.effects["random draw"])
        if name.startswith("ops.zcompile.") and not packet.startswith("ring"):
            return self._changed(packet, call)
        found: Any = None
        if packet.startswith("ring"):
            found = self._ring(packet, call)
        elif "scaled_dot_product" in packet:
            found = self._attention(packet, call)
        elif SUM in self.at.values():
            found = self._shares(packet, call)
        elif self.alike:
            at, lifted = self._placed(call)
            found = self._computed(lifted, at)
        else:
            self._refuse("takes values of which ranks have different parts")
        if len(self.of.effects["random draw"]) != draws:
            self._refuse("draws numbers, others on each rank")
        return found

    def _whole(self, call: ast.Call) -> TermValue:
        """Return the value of a call with whole values."""
        outer, self.of.scope = self.of.scope, {**self.of.scope, **self.scope}
        found: TermValue = self.of._call(call)
        self.of.scope = outer
        return found

    def _computed(self, call: ast.Call, at: Any) -> Any:
        whole = self._whole(call)
        if type(at) is list:
            return [self._as(place, self.of._item(whole, index)) for index, place in enumerate(at)]
        return self._as(at, whole)

    def _as(self, at: At, whole: TermValue) -> TermValue:
        if at is None:
            return whole
        order = f" {self.order}" if self.order else ""
        head = f"share {self.ranks}" if at == SUM else f"part {at[0]} {at[1]} {self.size} {self.ranks}{order}"
        made: TermValue = self.of._made(self.of.terms.make(head, whole.term))
        if (shape := self.of.terms.shapes.get(whole.term)) is not None:  # loops over rows of a part ask for it
            own = at[0] if type(at) is tuple else -1
            sizes = (size // self.ranks if dim == own else size for dim, size in enumerate(shape))
            self.of.terms.shapes[made.term] = tuple(sizes)
        return made

    def _shares(self, packet: str, call: ast.Call) -> TermValue:
        """Return a share of what an operation gives of sums, if it adds up."""
        names = [dotted(node) for node in flat(call)]
        shares = [name for name in names if self.at[name] == SUM]
        adds = packet in ADDITIVE and shares == names and len(names) == 1 + (packet == "add")
        scaled = packet == "mul" and shares == names[:1] and dotted(call.args[0]) == names[0]
        if {one for one in self.how.values() if one} != {How(self.ranks)} or not (scaled or adds):
            self._refuse("reads a share before all ranks' have been added up")
        if scaled and len(names) == 1:  # by the number of ranks, which the traced step need not do
            times = self.of._value(call.args[1])
            return self._as(
                SUM, self.of._made(self.of.terms.make("aten.mul.Tensor", self.scope[names[0]].term, times.term))
            )
        return self._as(SUM, self._whole(call))

    def _attention(self, packet: str, call: ast.Call) -> list[TermValue]:
        """Return the results of attention to all tokens, for some heads."""
        names = [dotted(node) for node in flat(call)]
        for place, name in enumerate(names):
            shape, how = self._shape(name), self.how[name]
            heads = how == How(self.ranks, 1, 1, shape[1] // self.ranks)
            whole = not how and place >= (4 if "backward" in packet else 3) and (len(shape) < 3 or shape[1] == 1)
            mask = len(shape) == 3 and "backward" not in packet  # one whose heads are along another dimension
            if mask or (not (heads and shape[1] % self.ranks == 0) and not whole):
                self._refuse(f"takes {name} otherwise than by heads")
        return self._results(self._whole(call), 1)

    def _results(self, whole: TermValue, dim: int, tokens: int = 0) -> list[TermValue]:
        """Return the results of attention, those of heads and tokens as parts along `dim`."""
        results, index = list[TermValue](), 0
        while (item := self.of._item(whole, index)).term in self.of.terms.shapes:
            shape = self.of.terms.shapes[item.term]
            length = shape[dim] if len(shape) > 2 else 0
            length = tokens if tokens and len(shape) == 3 else length  # logarithms of sums may be padded
            self.size = length // self.ranks
            results.append(self._as((dim, 1) if length else None, item))
            index += 1
        return results

    def _ring(self, packet: str, call: ast.Call) -> list[TermValue]:
        """Return parts of what a kernel gives; ranks give it the values of their tokens, in zig-zag order."""
        said = {str(word.arg): literal_or_none(word.value) for word in call.keywords}
        self.ranks, self.order = self._checked(said.get("size"), said.get("group")), "zigzag"
        first, masked = int("backward" in packet), "efficient" in packet or "cudnn" in packet
        logs = range(5, 7) if "efficient" in packet else range(4, 6)
        tokens = {at: dotted(call.args[at]) for at in (*range(3 + first), *(logs if first else ()))}
        lengths = {at: self._shape(tokens[first + (at - first in (1, 2))])[2] for at in tokens}
        for name in map(dotted, flat(call)):
            rows = [lengths[at] // self.ranks for at in tokens if tokens[at] == name]
            wanted = [How(self.ranks, 2, 1, own, self.order) for own in {*rows}]
            if self.how[name] != (wanted[0] if wanted else None) or len(wanted) > 1:
                self._refuse(f"takes {name} otherwise than by tokens in zig-zag order")
        flags = [*map(literal_or_none, call.args[5 if masked and not first else 4 :])]  # not whether it gives those
        if (True in flags and lengths[first] != lengths[first + 1]) or [True] * 4 in flags:
            self._refuse("is causal for fewer queries than keys, or gives the gradient of a mask")
        kernel = ast.parse(f"aten.{packet.removeprefix('ring')}.default", mode="eval").body
        words = [word for word in call.keywords if word.arg not in ("size", "group")]
        whole = self._whole(ast.copy_location(ast.Call(kernel, call.args, words), call))
        return self._results(whole, 2, lengths[first])

    def _checked(self, size: Any, group: Any) -> int:
        """Return the number of ranks, if they are those of the sequence axis."""
        if (size, group) != (self.of.ranks, self.of.group_of):
            self._refuse("divides a value over other ranks than those of the sequence axis")
        return int(size)

    def _changed(self, packet: str, call: ast.Call) -> Any:
        """Return a value that is divided otherwise."""
        (name,), (_, *args) = (dotted(node) for node in flat(call)), [literal_or_none(node) for node in call.args]
        how, whole = self.how[name], self.scope[name]
        ranks = self._checked(next((one for one in reversed(args) if type(one) is int), 0), args[-1])
        said = [(word.arg, literal_or_none(word.value)) for word in call.keywords]
        if not {*said} <= {("zigzag", True), ("zigzag", False)} or not all(type(flag) is bool for _, flag in said):
            self._refuse(f"{packet} is called with {said}")
        order, rows = "zigzag" if ("zigzag", True) in said else "", how.rows if how else 0
        match packet, args:
            case "shard", (int(dim), int(outer), *_) if how is None:
                length = self._shape(name)[dim]
                if length % (outer * ranks * (1 + bool(order))) == 0:
                    self.ranks, self.size, self.order = ranks, length // (outer * ranks), order
                    return self._as((dim, outer), whole)
            case "all_gather", (int(dim), int(outer), *_) if rows and how == How(ranks, dim, outer, rows, order):
                return whole
            case "all_reduce", _ if how == How(ranks):
                return whole
            case "all_to_all", (int(before), int(dim), *_) if rows and how == How(ranks, before, 1, rows):
                length = self._shape(name)[dim]
                if dim != before and length % ranks == 0:
                    self.size = length // ranks
                    return self._as((dim, 1), whole)
        return self._refuse(f"{packet} takes a value that is divided otherwise")
