"""Object tables against plain dicts, with freezes taken, read late and released at any moment."""

import copy

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cutwater.state.objects import FrozenObjects, ObjectTable

KEYS = st.integers(0, 5).map(lambda n: (n,))


class Tables(RuleBasedStateMachine):
    """Lists that grow in place are where a freeze could be seen to change."""

    def __init__(self) -> None:
        super().__init__()
        self.table: ObjectTable[list[int]] = ObjectTable(list)
        self.model: dict[tuple[int, ...], list[int]] = {}
        self.frozen: list[tuple[FrozenObjects[list[int]], dict[tuple[int, ...], list[int]]]] = []

    @rule(key=KEYS, value=st.integers())
    def put(self, key: tuple[int, ...], value: int) -> None:
        self.table.put(key, [value])
        self.model[key] = [value]

    @rule(values=st.dictionaries(KEYS, st.integers()))
    def put_many(self, values: dict[tuple[int, ...], int]) -> None:
        self.table.put_many(values, [[value] for value in values.values()])
        self.model |= {key: [value] for key, value in values.items()}

    @rule(key=KEYS, value=st.integers())
    def change_in_place(self, key: tuple[int, ...], value: int) -> None:
        owned = self.table.own(key)
        assert owned == self.model.get(key)
        if owned is not None:
            owned.append(value)
            self.model[key].append(value)

    @rule(key=KEYS)
    def remove(self, key: tuple[int, ...]) -> None:
        self.table.remove(key)
        self.model.pop(key, None)

    @rule()
    def freeze(self) -> None:
        self.frozen.append((self.table.freeze(), copy.deepcopy(self.model)))

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        if which < len(self.frozen):
            self.frozen.pop(which)[0].release()

    @invariant()
    def the_table_is_the_dict(self) -> None:
        assert {key: self.table.get(key) for key in self.model} == self.model
        assert all(self.table.get((n,)) is None for n in range(6) if (n,) not in self.model)
        everything = [(n,) for n in range(6)]
        assert self.table.get_many(everything) == [self.model.get(key) for key in everything]
        assert len(self.table) == len(self.model)

    @invariant()
    def what_was_frozen_stays(self) -> None:
        for frozen, expected in self.frozen:
            assert dict(frozen.items()) == expected


TestObjectTable = Tables.TestCase
