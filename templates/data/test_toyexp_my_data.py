"""Run the conformance suite, and test that sums are right and no held-out sum is trained on."""

from toyexp_my_data import MyData

from toyexp.testing import DataSuite


class TestMyData(DataSuite):
    data = MyData()

    def test_the_sums_are_right_and_each_is_on_one_side(self):
        opened = MyData(digits=1).open(None)
        train, held_out = (opened.tokenizer.decode(ids).split() for ids in (opened.train, opened.held_out))
        assert len({*train, *held_out}) == len(train) + len(held_out) == 100
        for line in (*train, *held_out):
            left, result = line.split("=")
            assert sum(map(int, left.split("+"))) == int(result)
