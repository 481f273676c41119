from functools import partial

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from sparsesam.lab.data import DataError, load_dataset
from sparsesam.lab.data.image_folder import center_crop, random_box, random_resized_crop
from tests.lab.data.files import generator


def gradient(width, height):
    """Red grows to the right and green downwards, so that a pixel encodes its position."""
    red = Image.linear_gradient("L").rotate(90).resize((width, height))
    green = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", (red, green, Image.new("L", (width, height))))


@pytest.fixture
def root(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                gradient(300 + 10 * number, 260).save(tmp_path / part / name / f"{number}.jpeg")
    return tmp_path


def test_pairs_are_in_order_of_classes(root):
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    splits = load_dataset("imagenet", root)
    assert splits.classes == ("cat", "dog")
    assert (len(splits.train), len(splits.test), splits.image_size) == (6, 4, 224)
    images, labels = zip(*splits.train, strict=False)
    assert all(image.shape == (3, 224, 224) and image.dtype == torch.uint8 for image in images)
    assert torch.stack(labels).tolist() == [0, 0, 0, 1, 1, 1]


def test_epochs_have_different_views_and_workers_change_nothing(root):
    splits = load_dataset("imagenet", root)
    train, before = splits.train, splits.test[0][0]
    loader, views = DataLoader(train, batch_size=6, num_workers=1), []
    for train.epoch in (0, 1, 0):
        views.append(next(iter(loader))[0])
    assert torch.equal(views[0], views[2])
    assert not torch.equal(views[0], views[1])
    assert torch.equal(views[0], torch.stack([image for image, _ in train]))
    splits.test.epoch = 5
    assert torch.equal(before, splits.test[0][0])  # test images are always alike


@pytest.mark.parametrize("extent", [(500, 300), (300, 500), (256, 256), (100, 60)])
@pytest.mark.parametrize("square", [False, True])
def test_view_is_center_of_resized_image(extent, square):
    """A square view shows the same part of both sides, the other less of the longer side."""
    seen = center_crop(gradient(*extent), generator(), size=224, square=square)
    assert seen.size == (224, 224)
    assert seen.getpixel((112, 112))[:2] == pytest.approx((128, 128), abs=3)
    red, green, _ = seen.getpixel((0, 0))
    assert (red - green == pytest.approx(0, abs=1)) == (square or extent == (256, 256))


def test_boxes_have_allowed_areas_and_aspects():
    draws = generator()
    boxes = torch.tensor([random_box((400, 300), draws) for _ in range(500)], dtype=torch.float)
    left, top, right, bottom = boxes.T
    assert min(left.min(), top.min()) >= 0
    assert right.max() <= 400
    assert bottom.max() <= 300
    area, aspect = (right - left) * (bottom - top) / 120_000, (right - left) / (bottom - top)
    assert 0.075 < area.min() < 0.15
    assert area.max() > 0.8
    assert 0.74 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.35


def test_image_too_narrow_for_any_box_gives_its_center():
    assert random_box((1000, 10), generator()) == (493, 0, 506, 10)


def test_half_of_training_views_are_mirrored():
    view, draws = partial(random_resized_crop, size=8), generator()
    rising = [
        seen.getpixel((7, 4))[0] > seen.getpixel((0, 4))[0]
        for seen in (view(gradient(64, 64), draws) for _ in range(100))
    ]
    assert 30 < sum(rising) < 70


def truncate(path):
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: truncate(root / "val" / "dog" / "1.jpeg"), r"1\.jpeg: expected a complete image, found one that"),
        (
            lambda root: (root / "val" / "dog").rename(root / "val" / "dig"),
            "expected the 2 classes .* missing or unknown: dig, dog",
        ),
        (lambda root: (root / "train" / "ant").mkdir(), r"ant: expected images \(.jpeg, .*\), found none"),
        (lambda root: (root / "val").rename(root / "elsewhere"), "val: expected a folder with one subfolder of images"),
        (lambda root: (root / "train").rename(root / "other"), "train: expected a folder with one subfolder of images"),
    ],
)
def test_damaged_folder_names_file_or_folder(root, damage, message):
    damage(root)
    with pytest.raises(DataError, match=message):
        list(load_dataset("imagenet", root).test)


def test_any_folder_is_data_set_of_requested_size_with_first_frame_of_gif(root):
    for path in (root / "train" / "cat").iterdir():
        path.unlink()
    frames = [Image.new("RGB", (30, 30), color) for color in ("red", "blue")]
    frames[0].save(root / "train" / "cat" / "a.gif", save_all=True, append_images=frames[1:])
    splits = load_dataset("folder", root, image_size=8)
    image, _ = splits.train[0]
    assert (splits.name, splits.image_size, image.shape) == ("folder", 8, (3, 8, 8))
    assert image[:, 4, 4].tolist() == [255, 0, 0]
    (root / "train" / "cat" / "a.gif").rename(root / "train" / "cat" / "a.heic")
    with pytest.raises(DataError, match=r"cat: expected images \(.*\), found none"):
        load_dataset("folder", root)


def test_published_tiny_imagenet_is_read(tmp_path):
    for name in ("n01", "n02"):
        (tmp_path / "train" / name / "images").mkdir(parents=True)
        (tmp_path / "train" / name / f"{name}_boxes.txt").touch()
        Image.new("RGB", (64, 64)).save(tmp_path / "train" / name / "images" / f"{name}_0.JPEG")
    (tmp_path / "val" / "images").mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (64, 64), "white").save(tmp_path / "val" / "images" / f"val_{number}.JPEG")
    annotations = tmp_path / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t52\t55\t57\t59\n")
    splits = load_dataset("tiny-imagenet", tmp_path)
    assert (splits.image_size, len(splits.train), splits.test.labels.tolist()) == (64, 2, [1, 0])
    assert splits.test[0][0].shape == (3, 64, 64)
    annotations.write_text("val_0.JPEG\tn02\t0\t32\t44\t62\n")  # a part of the images
    assert load_dataset("tiny-imagenet", tmp_path).test.labels.tolist() == [1]
    for text, odd in (("val_0.JPEG\tn03\t0\t32\t44\t62\n", "n03"), ("", "n01, n02")):
        annotations.write_text(text)
        with pytest.raises(DataError, match=f"expected the 2 classes .* missing or unknown: {odd}$"):
            load_dataset("tiny-imagenet", tmp_path)
