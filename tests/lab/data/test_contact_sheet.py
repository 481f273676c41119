import pytest
import torch
from PIL import Image

from sparsesam.lab.data import contact_sheet


@pytest.mark.parametrize("channels", [1, 3])
def test_draws_each_image_enlarged_in_its_place(tmp_path, channels):
    images = torch.full((3, channels, 8, 8), 200, dtype=torch.uint8)
    images[1] = 50
    contact_sheet(images, ["a", "two\nlines", "c"], tmp_path / "sheet.png", columns=2)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.size == (2 * (96 + 8) + 8, 2 * (96 + 32 + 8) + 8)
        places = [(8 + 48, 8 + 48), (112 + 48, 8 + 48), (8 + 48, 144 + 48), (112 + 48, 144 + 48)]
        assert [sheet.getpixel(place) for place in places] == [(value,) * 3 for value in (200, 50, 200, 255)]


def test_large_images_are_not_enlarged_and_long_titles_shortened(tmp_path):
    contact_sheet(torch.zeros(1, 3, 100, 120, dtype=torch.uint8), ["long " * 50], tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (136, 132)
        assert all(sheet.getpixel((x, 115)) == (255, 255, 255) for x in range(129, 136))


@pytest.mark.parametrize(
    ("images", "titles", "message"),
    [
        (torch.zeros(1, 3, 4, 4), ["a"], "images must be uint8 .* got torch.float32"),
        (torch.zeros(1, 2, 4, 4, dtype=torch.uint8), ["a"], r"1 or 3, height, width\), got .*\(1, 2, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), ["a"], "titles must be one per image, 2, got 1"),
    ],
)
def test_refuses_what_cannot_be_drawn(tmp_path, images, titles, message):
    with pytest.raises(ValueError, match=message):
        contact_sheet(images, titles, tmp_path / "sheet.png")
