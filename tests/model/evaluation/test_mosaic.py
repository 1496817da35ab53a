from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.evaluation.mosaic import counted_quarters, mosaic, mosaic_shares, quarter_share


def test_four_pictures_stand_in_reading_order_at_half_size() -> None:
    pictures = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 3, 4, 6).clone()
    pictures[3, :, 0, 0] += 4  # one of the four pixels that become one
    whole = mosaic(pictures)
    assert whole.shape == (3, 4, 6)
    assert whole[0].tolist() == [[0, 0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 4, 3, 3], [2, 2, 2, 3, 3, 3]]
    assert mosaic(torch.ones(4, 1, 5, 7)).eq(1).all()


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 1), (14, 14)])
@pytest.mark.parametrize("quarter", range(4))
def test_an_even_map_has_a_quarter_in_each_quarter(quarter: int, shape: tuple[int, int]) -> None:
    assert quarter_share(torch.full(shape, 0.3), quarter) == pytest.approx(0.25)


@pytest.mark.parametrize(("quarter", "place"), list(enumerate([(1, 2), (0, 3), (2, 1), (3, 5)])))
def test_a_map_inside_its_quarter_has_all_of_it_there_whatever_is_negative_elsewhere(
    quarter: int, place: tuple[int, int]
) -> None:
    relevance = torch.full((4, 6), -2.0)
    relevance[place] = 0.1
    assert [quarter_share(relevance, one) for one in range(4)] == [float(one == quarter) for one in range(4)]


def test_the_middle_of_an_odd_grid_counts_by_halves_and_a_map_without_relevance_as_an_even_one() -> None:
    relevance = torch.zeros(3, 4)
    relevance[1, 0] = 1
    assert [quarter_share(relevance, quarter) for quarter in range(4)] == [0.5, 0, 0.5, 0]
    assert quarter_share(torch.full((4, 4), -1.0), 2) == 0.25


def test_a_quarter_counts_if_its_class_is_alone_and_among_the_ten_best() -> None:
    scores = torch.arange(20.0)
    assert counted_quarters(scores, torch.tensor([19, 10, 9, 12])) == [0, 1, 3]
    assert counted_quarters(scores, torch.tensor([19, 10, 19, 12])) == [1, 3]
    assert counted_quarters(torch.arange(3.0), torch.tensor([0, 1, 2, 2])) == [0, 1]


def test_the_share_of_each_method_is_that_of_its_map_of_the_quarters_class() -> None:
    def score(pixels: Tensor) -> Tensor:
        return torch.arange(20.0).expand(len(pixels), -1)

    def perfect(pixels: Tensor, classes: Tensor) -> Tensor:
        """Return a map that lies in the quarter whose picture has the class as its grey."""
        cells = torch.nn.functional.avg_pool2d(pixels.mean(dim=1), 4)
        return (cells == classes.reshape(-1, 1, 1)).float()

    def even(pixels: Tensor, classes: Tensor) -> Tensor:
        return torch.ones(len(pixels), 2, 2)

    classes = torch.tensor([12, 3, 19, 15])
    pictures = classes.float().reshape(4, 1, 1, 1).expand(4, 3, 8, 8)
    found = mosaic_shares(score, {"perfect": perfect, "even": even}, pictures, classes)
    assert found == {quarter: {"perfect": 1.0, "even": 0.25} for quarter in (0, 2, 3)}
    assert mosaic_shares(score, {"even": even}, pictures, torch.tensor([3, 3, 12, 12])) == {}
